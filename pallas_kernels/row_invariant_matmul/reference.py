"""What the op means: XLA form, packed layouts, and a numpy oracle exact to the last bit."""

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.native import KernelError
from pallas_kernels.row_invariant_matmul import specs


def pack_array(w: np.ndarray) -> np.ndarray:
    """[N, K] -> [ceil(N / 32), K, 32], zero padded: the order in which the kernel reads."""
    n, k = w.shape
    count, whole = specs.panels(n), n // specs.PANEL
    packed = _aligned_empty((count, k, specs.PANEL), w.dtype)
    packed[:whole] = w[: whole * specs.PANEL].reshape(whole, specs.PANEL, k).transpose(0, 2, 1)
    if whole < count:
        packed[whole] = 0
        packed[whole, :, : n - whole * specs.PANEL] = w[whole * specs.PANEL :].T
    return packed


def _aligned_empty(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Uninitialised array at a 64-byte boundary: `jax.device_put` adopts such a buffer without a
    copy on CPU.
    """
    size = int(np.prod(shape)) * dtype.itemsize
    buffer = np.empty(size + 64, np.uint8)
    start = -buffer.ctypes.data % 64
    return buffer[start : start + size].view(dtype).reshape(shape)


def unpack_array(data: jax.Array, n: int) -> jax.Array:
    """[P, K, 32] -> [n, K]; inverse of `pack_array`, bit for bit."""
    count, k, lanes = data.shape
    return data.transpose(0, 2, 1).reshape(count * lanes, k)[:n]


def pack_gguf_array(blocks: np.ndarray, kind: str) -> np.ndarray:
    """GGUF rows [N, bytes] uint8 -> [ceil(N / 32), K / 32, bytes] uint8, laid out as in cpu.cc."""
    form, size = specs.GGUF_KINDS[kind]
    n, per_row = blocks.shape[0], blocks.shape[1] // size
    padded = np.zeros((specs.panels(n) * specs.PANEL, per_row, size), np.uint8)
    padded[:n] = blocks.reshape(n, per_row, size)
    # [panel, output, block, byte] -> [panel, block, output, byte]
    tiles = padded.reshape(-1, specs.PANEL, per_row, size).transpose(0, 2, 1, 3)
    count = tiles.shape[0]
    scale = tiles[..., 0:2].reshape(count, per_row, -1)
    if form == "q8_0":
        quants = tiles[..., 2:].transpose(0, 1, 3, 2).reshape(count, per_row, -1)
        return np.concatenate([scale, quants], axis=-1)
    if kind == "Q4_1":
        minimum, packed = tiles[..., 2:4], tiles[..., 4:]
    else:
        d = np.ascontiguousarray(tiles[..., 0:2]).view(np.float16).astype(np.float32)
        offset = (-8.0 * d).astype(np.float16)
        if not np.array_equal(offset.astype(np.float32), -8.0 * d):
            raise KernelError(
                "cannot pack Q4_0 data: a scale above 8188 (or not finite) has no exact offset"
            )
        minimum, packed = offset.view(np.uint8), tiles[..., 2:]
    # GGUF: byte i holds inputs i (low nibble) and i + 16 (high). Here byte p holds inputs 2 p and 2
    # p + 1.
    values = np.concatenate([packed & 15, packed >> 4], axis=-1)
    pairs = values[..., 0::2] | (values[..., 1::2] << 4)
    quants = pairs.transpose(0, 1, 3, 2).reshape(count, per_row, -1)
    return np.concatenate([scale, minimum.reshape(count, per_row, -1), quants], axis=-1)


def gather_array(data: np.ndarray, form: str, ids: np.ndarray) -> np.ndarray:
    """Outputs `ids` of packed panels as packed panels of the same format."""
    count = specs.panels(ids.size)
    to = _aligned_empty((count, *data.shape[1:]), data.dtype)
    if ids.size % specs.PANEL:
        to[-1] = 0
    start = 0
    source, target = (_bytes(a, form) for a in (data, to))
    for rows, width in specs.ROWS[form]:  # a block: rows of 32 outputs, `width` bytes each
        size = rows * specs.PANEL * width
        shape = (*source.shape[1:2], rows, specs.PANEL, width)
        a = source[..., start : start + size].reshape(-1, *shape)
        b = target[..., start : start + size].reshape(-1, *shape)
        for panel in range(count):
            chosen = ids[panel * specs.PANEL : (panel + 1) * specs.PANEL]
            values = a[chosen // specs.PANEL, :, :, chosen % specs.PANEL]  # [chosen, block, ...]
            b[panel, :, :, : chosen.size] = np.moveaxis(values, 0, 2)
        start += size
    return to


def _bytes(data: np.ndarray, form: str) -> np.ndarray:
    """The panels as bytes: [P, blocks, bytes of a block]."""
    size = specs.block_bytes(form)
    blocks = int(np.prod(data.shape[1:])) * data.itemsize // size
    return data.reshape(-1).view(np.uint8).reshape(data.shape[0], blocks, size)


def _halves(data: jax.Array, start: int) -> jax.Array:
    """32 float16 values at byte `start` of each block, as float32: [..., 32]."""
    raw = data[..., start : start + 2 * specs.PANEL].reshape(*data.shape[:-1], specs.PANEL, 2)
    return jax.lax.bitcast_convert_type(raw, jnp.float16).astype(jnp.float32)


def dequantize_panels(data: jax.Array, form: str) -> jax.Array:
    """[..., K / 32, bytes] uint8 -> [..., K, 32] float32, the values the kernel uses."""
    lead, blocks = data.shape[:-2], data.shape[-2]
    scale = _halves(data, 0)[..., None, :]
    if form == "q8_0":
        q = jax.lax.bitcast_convert_type(data[..., 64:], jnp.int8)
        values = q.reshape(*lead, blocks, specs.BLOCK, specs.PANEL).astype(jnp.float32) * scale
    else:
        minimum = _halves(data, 64)[..., None, :]
        packed = data[..., 128:].reshape(*lead, blocks, specs.BLOCK // 2, 1, specs.PANEL)
        q = jnp.concatenate([packed & 15, packed >> 4], axis=-2)
        q = q.reshape(*lead, blocks, specs.BLOCK, specs.PANEL)
        values = q.astype(jnp.float32) * scale + minimum
    return values.reshape(*lead, blocks * specs.BLOCK, specs.PANEL)


def matmul_panels(x: jax.Array, data: jax.Array, n: int) -> jax.Array:
    """XLA form on packed weights: x [M, K] float32, data [P, K, 32] -> [M, n] float32.

    The same sums in an order of XLA's choosing: equal to the kernel within rounding, and without
    its promise that a row's bits do not depend on the other rows.
    """
    y = jnp.einsum(
        "mk,pkn->mpn",
        x,
        data.astype(jnp.float32),
        precision=jax.lax.Precision.HIGHEST,
        preferred_element_type=jnp.float32,
    )
    return y.reshape(x.shape[0], data.shape[0] * specs.PANEL)[:, :n]


def matmul_rows(x: jax.Array, w: jax.Array) -> jax.Array:
    """XLA form on weights as stored: x [M, K] float32, w [N, K] -> [M, N] float32."""
    return jax.lax.dot_general(
        x,
        w.astype(jnp.float32),
        (((1,), (1,)), ((), ())),
        precision=jax.lax.Precision.HIGHEST,
        preferred_element_type=jnp.float32,
    )


def fma(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """float32 a * b + c rounded once, as the hardware instruction does.

    The product is exact in float64. The sum is rounded to odd there (its last bit is set when
    anything was lost), which makes the second rounding, to float32, correct (Boldo & Melquiond
    2008, "Emulation of FMA and correctly rounded
    sums: proved algorithms using rounding to odd").
    """
    with np.errstate(all="ignore"):
        p, q = np.broadcast_arrays(
            np.asarray(a, np.float64) * np.asarray(b, np.float64), np.asarray(c, np.float64)
        )
        s = p + q
        v = s - p
        lost = (p - (s - v)) + (q - v)  # two-sum: s + lost is the exact sum
        bits = s.view(np.int64)
        inexact = np.isfinite(s) & (lost != 0) & ((bits & 1) == 0)
        # Towards the exact value: away from zero if the loss has the sign of s, to zero if not.
        step = np.where((lost > 0) == (s > 0), 1, -1)
        return np.where(inexact, bits + step, bits).view(np.float64).astype(np.float32)


def matmul_sequential(x: np.ndarray, w: np.ndarray) -> np.ndarray:
    """The kernel's exact result, summed from k = 0 upwards: x [M, K], w [N, K] -> [M, N]."""
    acc = np.zeros((x.shape[0], w.shape[0]), np.float32)
    for k in range(x.shape[1]):
        acc = fma(x[:, k, None], w[None, :, k], acc)
    return acc
