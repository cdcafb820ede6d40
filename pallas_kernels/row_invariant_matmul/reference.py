"""What the op means: XLA form, packed layouts, and a numpy oracle exact to the last bit."""

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.memory import aligned_empty
from pallas_kernels.native import KernelError
from pallas_kernels.row_invariant_matmul import specs

Q4_0_RANGE = "cannot pack Q4_0 data: a scale above 8188 (or not finite) has no exact offset"


def panel_shape(
    rows: np.ndarray, kind: str, form: specs.Format
) -> tuple[tuple[int, ...], np.dtype, int]:
    """Shape and dtype of the panels of these rows, and the number of inputs."""
    count, size = specs.panels(rows.shape[0]), rows.shape[1]
    if form in ("f32", "bf16"):
        return (count, size, specs.PANEL), rows.dtype, size
    blocks = size // specs.GGUF_KINDS[kind].size
    shape = (count, blocks, specs.block_bytes(form))
    return shape, np.dtype(np.uint8), blocks * specs.DEPTH[form]


def pack_array(w: np.ndarray) -> np.ndarray:
    """[N, K] -> [ceil(N / 32), K, 32], zero padded: the order in which the kernel reads."""
    n, k = w.shape
    packed = np.zeros((specs.panels(n) * specs.PANEL, k), w.dtype)
    packed[:n] = w
    return np.ascontiguousarray(packed.reshape(specs.panels(n), specs.PANEL, k).transpose(0, 2, 1))


def unpack_array(data: jax.Array, n: int) -> jax.Array:
    """[P, K, 32] -> [n, K]; inverse of `pack_array`, bit for bit."""
    count, k, lanes = data.shape
    return data.transpose(0, 2, 1).reshape(count * lanes, k)[:n]


def pack_gguf_array(
    blocks: np.ndarray, kind: str, arithmetic: specs.Arithmetic = "float"
) -> np.ndarray:
    """GGUF rows [N, bytes] uint8 -> [ceil(N / 32), blocks, bytes] uint8: layout of formats.h."""
    form, size, _ = specs.GGUF_KINDS[kind]
    form = specs.layout(form, arithmetic)
    n, per_row = blocks.shape[0], blocks.shape[1] // size
    rows = blocks.reshape(n, per_row, size)
    if kind == "Q4_0":
        d = np.ascontiguousarray(rows[..., 0:2]).view(np.float16).astype(np.float32)
        with np.errstate(over="ignore"):
            offset = (-8.0 * d).astype(np.float16)
        if not np.array_equal(offset.astype(np.float32), -8.0 * d):
            raise KernelError(Q4_0_RANGE)
        rows = np.concatenate([rows[..., 0:2], offset.view(np.uint8), rows[..., 2:]], axis=-1)
    count = specs.panels(n)
    padded = np.zeros((count * specs.PANEL, per_row, rows.shape[-1]), np.uint8)
    padded[:n] = rows
    tiles = padded.reshape(count, specs.PANEL, per_row, rows.shape[-1])
    # [panel, output, block, byte] -> [panel, block, output, byte]
    tiles = tiles.transpose(0, 2, 1, 3)

    def row(values: np.ndarray) -> np.ndarray:  # [..., output, w bytes] -> [..., 32 w]
        return values.reshape(*tiles.shape[:2], int(np.prod(values.shape[2:])))

    def nibbles(values: np.ndarray) -> np.ndarray:  # [..., output, 32 inputs] -> [..., 512]
        groups = values.reshape(*values.shape[:3], 4, 4, 2)
        pairs = groups[..., 0] | groups[..., 1] << 4
        return row(pairs.swapaxes(2, 3))  # [..., group, output, 4 bytes]

    if form == "q8_0":
        return np.concatenate([row(tiles[..., :2]), row(tiles[..., 2:].swapaxes(2, 3))], axis=-1)
    if form in ("q8_0i", "q4_1i"):
        start = 2 if form == "q8_0i" else 4  # words of four bytes as they are in the file
        words = tiles[..., start:].reshape(*tiles.shape[:3], (tiles.shape[-1] - start) // 4, 4)
        words = row(words.swapaxes(2, 3))
        if form == "q8_0i":
            return np.concatenate([row(tiles[..., :2]), words], axis=-1)
        return np.concatenate([words, row(tiles[..., 0:2]), row(tiles[..., 2:4])], axis=-1)
    if form == "q4_1":
        packed = tiles[..., 4:]
        # byte i of the file holds inputs i (low nibble) and i + 16 (high)
        values = np.concatenate([packed & 15, packed >> 4], axis=-1)
        parts = [nibbles(values), row(tiles[..., 0:2]), row(tiles[..., 2:4])]
        return np.concatenate(parts, axis=-1)
    if form == "q4_k":
        scales, bits = tiles[..., 4:16], tiles[..., 16:]
        low, high, rest = scales[..., 0:4], scales[..., 4:8], scales[..., 8:12]
        s = np.concatenate([low & 63, (rest & 15) | (low >> 6 << 4)], axis=-1)
        t = np.concatenate([high & 63, (rest >> 4) | (high >> 6 << 4)], axis=-1)
        parts = [row(tiles[..., 0:2]), row(tiles[..., 2:4])]
        for i in range(8):
            chunk = bits[..., i // 2 * 32 : i // 2 * 32 + 32]
            parts += [nibbles(chunk >> i % 2 * 4 & 15), row(s[..., i]), row(t[..., i])]
        return np.concatenate(parts, axis=-1)
    low, high, scales = tiles[..., :128], tiles[..., 128:192], tiles[..., 192:208]
    parts = [row(tiles[..., 208:210])]
    for i in range(8):
        half, part = i // 4, i % 4
        chunk = low[..., half * 64 + part % 2 * 32 :][..., :32] >> part // 2 * 4 & 15
        upper = high[..., half * 32 : half * 32 + 32] >> 2 * part & 3
        fours = upper.reshape(*upper.shape[:3], 4, 2, 4) << np.arange(0, 8, 2, dtype=np.uint8)
        shorts = np.bitwise_or.reduce(fours, axis=-1).swapaxes(2, 3)
        parts += [nibbles(chunk), row(shorts), row(scales[..., 2 * i : 2 * i + 2].swapaxes(2, 3))]
    return np.concatenate(parts, axis=-1)


def gather_array(data: np.ndarray, form: str, ids: np.ndarray) -> np.ndarray:
    """Outputs `ids` of packed panels as packed panels of the same format."""
    count = specs.panels(ids.size)
    to = aligned_empty((count, *data.shape[1:]), data.dtype)
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


def dequantize_panels(data: jax.Array, form: str) -> jax.Array:
    """[..., blocks, bytes] uint8 -> [..., K, 32] float32, the values the kernel uses."""
    at = 0

    def take(rows: int, dtype: jnp.dtype) -> jax.Array:
        """The next rows of 32 outputs: [..., blocks, rows, 32]."""
        nonlocal at
        width = jnp.dtype(dtype).itemsize
        size = rows * specs.PANEL * width
        raw = data[..., at : at + size].reshape(*data.shape[:-1], rows, specs.PANEL, width)
        at += size
        return jax.lax.bitcast_convert_type(raw[..., 0] if width == 1 else raw, dtype)

    def floats(rows: int, dtype: jnp.dtype) -> jax.Array:
        return take(rows, dtype).astype(jnp.float32)

    def fields(rows: int, dtype: jnp.dtype, bits: int) -> jax.Array:
        """Eight fields of `bits` bits in every number: [..., blocks, 8 rows, 32]."""
        numbers = take(rows, dtype)[..., None, :]
        shifts = jnp.arange(0, 8 * bits, bits, dtype=dtype).reshape(
            *(1,) * (numbers.ndim - 2), 8, 1
        )
        values = numbers >> shifts & jnp.asarray(2**bits - 1, dtype)
        return values.reshape(*data.shape[:-1], 8 * rows, specs.PANEL).astype(jnp.int32)

    def parts_of(rows: int, shifts: list[tuple[int, ...]], mask: int) -> jax.Array:
        """Fields of 32-bit words, shift by shift of one list, then row by row: [..., n, 32]."""
        words = take(rows, jnp.uint32)
        found = [
            jnp.stack([words >> jnp.uint32(by) & jnp.uint32(mask) for by in half], axis=-2)
            for half in shifts
        ]
        sizes = (rows * len(shifts[0]), specs.PANEL)
        flat = [fields.reshape(*data.shape[:-1], *sizes) for fields in found]
        return jnp.concatenate(flat, axis=-2)

    f16, u8, i8, u16, u32 = jnp.float16, jnp.uint8, jnp.int8, jnp.uint16, jnp.uint32
    if form == "q8_0":
        scale = floats(1, f16)
        values = floats(32, i8) * scale
    elif form == "q8_0i":
        scale = floats(1, f16)
        q = parts_of(8, [(0, 8, 16, 24)], 255).astype(u8).astype(i8)
        values = q.astype(jnp.float32) * scale
    elif form == "q4_1i":
        q = parts_of(4, [(0, 8, 16, 24), (4, 12, 20, 28)], 15)
        values = q.astype(jnp.float32) * floats(1, f16) + floats(1, f16)
    elif form == "q4_1":
        q = fields(4, u32, 4)
        values = q.astype(jnp.float32) * floats(1, f16) + floats(1, f16)
    elif form == "q4_k":
        d, m = floats(1, f16), floats(1, f16)
        parts = []
        for _ in range(8):
            q = fields(4, u32, 4)
            parts.append(q.astype(jnp.float32) * (d * floats(1, u8)) - m * floats(1, u8))
        values = jnp.concatenate(parts, axis=-2)
    else:
        d = floats(1, f16)
        parts = []
        for _ in range(8):
            q = fields(4, u32, 4) + (fields(4, u16, 2) << 4) - 32
            scale = jnp.repeat(d * floats(2, i8), 16, axis=-2)
            parts.append(q.astype(jnp.float32) * scale)
        values = jnp.concatenate(parts, axis=-2)
    depth = data.shape[-2] * specs.DEPTH[form]
    return values.reshape(*data.shape[:-2], depth, specs.PANEL)


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


def matmul_arrays(x: jax.Array, w: jax.Array) -> jax.Array:
    """XLA form on a weight in x's dtype: x [M, K], w [N, K] -> [M, N], summed in float32."""
    return jax.lax.dot_general(
        x,
        w,
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


def split_rows(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Rows as integers by block (integer.h): x [M, K] -> s [M, K / 32] and X [M, K / 32, 32].

    s is the smallest power of two, at least 2^-126, with max |x| / s < 127 * 2^16, or NaN where an
    input of the block is not finite; X is x / s rounded to int64, 0 where s is NaN.
    """
    shape = (x.shape[0], x.shape[1] // specs.BLOCK, specs.BLOCK)
    blocks = x.reshape(shape).astype(np.float64)
    top = np.abs(blocks).max(axis=-1)
    finite = np.isfinite(top)
    exponent = np.frexp(np.where(finite, top, 0.0) / (127 * 2.0**16))[1]  # top / s in [1/2, 1)
    scale = np.ldexp(1.0, np.where(top > 0, np.maximum(exponent, -126), -126))
    digits = np.rint(np.where(finite[..., None], blocks, 0.0) / scale[..., None]).astype(np.int64)
    return np.where(finite, scale, np.nan).astype(np.float32), digits


def matmul_integer(x: np.ndarray, rows: np.ndarray, kind: str) -> np.ndarray:
    """The exact result of integer block sums: x [M, K], GGUF rows [N, bytes] -> [M, N]."""
    form, size, _ = specs.GGUF_KINDS[kind]
    blocks = rows.reshape(len(rows), rows.shape[1] // size, size)

    def half(at: int) -> np.ndarray:  # [N, K / 32]
        return np.ascontiguousarray(blocks[..., at : at + 2]).view(np.float16)[..., 0]

    d = half(0).astype(np.float32)
    if form == "q8_0":
        q, m = blocks[..., 2:].view(np.int8).astype(np.int64), None
    else:
        packed = blocks[..., 4 if kind == "Q4_1" else 2 :]
        q = np.concatenate([packed & 15, packed >> 4], axis=-1).astype(np.int64)
        m = half(2).astype(np.float32) if kind == "Q4_1" else np.float32(-8) * d
    scale, whole = split_rows(x)
    high = (whole + 0x8080) >> 16  # so that the two digits below it are from -128 to 127
    low = whole - (high << 16)
    acc = np.zeros((len(x), len(rows)), np.float32)
    with np.errstate(all="ignore"):
        for b in range(q.shape[1]):
            s = scale[:, b, None]
            parts = [(part[:, b] @ q[:, b].T).astype(np.float32) for part in (low, high)]
            t = fma(np.full((), 2**16, np.float32), parts[1], parts[0])
            acc = fma(d[:, b] * s, t, acc)
            if m is not None:
                sums = whole[:, b].sum(axis=-1).astype(np.float32)[:, None]
                acc = fma(m[:, b], s * sums, acc)
    return acc


def matmul_grouped(x: jax.Array, w: jax.Array, experts: jax.Array) -> jax.Array:
    """Row i times the weight of its expert: x [A, K], w [E, N, K], experts [A] -> [A, N] float32.

    Gathers a weight a row: a specification, not for large A.
    """
    return jnp.einsum(
        "ak,ank->an",
        x.astype(jnp.float32),
        w.astype(jnp.float32)[experts],
        precision=jax.lax.Precision.HIGHEST,
        preferred_element_type=jnp.float32,
    )
