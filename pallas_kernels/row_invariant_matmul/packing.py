"""Packed weights: float and quantised matrices in the order in which the kernel reads them."""

import concurrent.futures
import ctypes
import dataclasses
import os
from typing import Literal

import flax.struct
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from pallas_kernels import dispatch, native
from pallas_kernels.memory import aligned_empty
from pallas_kernels.row_invariant_matmul import reference, specs

_SHARE = 4 << 20  # bytes from which packing is shared among threads
_FLOAT_FORMATS: dict[np.dtype, specs.Format] = {
    np.dtype(np.float32): "f32",
    np.dtype(ml_dtypes.bfloat16): "bf16",
}


@flax.struct.dataclass
class PackedWeight:
    """A weight [n, k] ready for `matmul`; build it with `pack` or `pack_gguf`.

    Attributes:
      data: layout "panels": [ceil(n / 32), k, 32] float32 or bfloat16, or [ceil(n / 32), blocks,
        bytes] uint8 for the quantised formats; outputs past n are zero. Layout "rows": [n, k]
        float32 or bfloat16 as stored (XLA only).
      n: outputs.
      k: inputs.
      format: how the values are stored; every format stands for exact float32 values.
      arithmetic: "float", sums of float32 products, or "integer", exact integer sums of blocks
        (integer.h; q8_0 and q4_1 in panels): faster for several rows, and other bits.
      layout: "panels" for the native kernel, "rows" where XLA runs.
    """

    data: jax.Array
    n: int = flax.struct.field(pytree_node=False)
    k: int = flax.struct.field(pytree_node=False)
    format: specs.Format = flax.struct.field(pytree_node=False, default="f32")
    layout: Literal["panels", "rows"] = flax.struct.field(pytree_node=False, default="panels")
    arithmetic: specs.Arithmetic = flax.struct.field(pytree_node=False, default="float")

    @property
    def panel_layout(self) -> str:
        """Layout of the panels, a key of the tables in `specs`."""
        return specs.layout(self.format, self.arithmetic)

    @property
    def shape(self) -> tuple[int, int]:
        """(n, k), the shape of the weight that was packed."""
        return self.n, self.k

    @property
    def nbytes(self) -> int:
        """Bytes in memory."""
        return self.data.nbytes


def pack(
    w: np.ndarray | jax.Array, implementation: dispatch.Implementation = "auto"
) -> PackedWeight:
    """Reorders a projection weight for the implementation that will run.

    Args:
      w: [n, k] float32 or bfloat16, outputs first as checkpoints store it.
      implementation: as in `matmul`; where it resolves to XLA the weight stays as it is.

    Returns:
      The packed weight, same values and dtype.

    Raises:
      native.KernelError: not a float32 or bfloat16 matrix, or `implementation="cpu"` is not
      available.
    """
    form = _FLOAT_FORMATS.get(np.dtype(w.dtype))
    if w.ndim != 2 or form is None:
        raise native.KernelError(
            f"cannot pack a weight of shape {tuple(w.shape)} and dtype {w.dtype}: "
            "need [n, k] float32 or bfloat16"
        )
    n, k = w.shape
    if resolve(implementation) == "xla":
        return PackedWeight(jnp.asarray(w), n, k, form, "rows")
    kind = "F32" if form == "f32" else "BF16"
    return PackedWeight(jax.device_put(pack_panels(np.asarray(w), kind)), n, k, form, "panels")


def integer_pays() -> bool:
    """Whether "integer" is the faster arithmetic here: native kernels, on a CPU with VNNI."""
    return resolve() == "cpu" and bool(native.library().handle.matmul_integer_pays())


def pack_gguf(
    blocks: np.ndarray,
    kind: str,
    implementation: dispatch.Implementation = "auto",
    *,
    arithmetic: specs.Arithmetic = "float",
) -> PackedWeight:
    """Packs a quantised GGUF tensor as it is: the kernel decodes to the exact dequantised values.

    Args:
      blocks: [n, bytes per row] uint8, the tensor's data as `gguf.GGUFReader` gives it.
      kind: "Q8_0", "Q4_0", "Q4_1", "Q4_K" or "Q6_K".
      implementation: as in `matmul`; where it resolves to XLA the weight is stored dequantised, as
        float32 rows.
      arithmetic: how the native kernel multiplies it; "integer" for Q8_0, Q4_0 and Q4_1 only.

    Returns:
      The packed weight; `unpack` gives the values of `gguf.dequantize`.

    Raises:
      native.KernelError: unknown kind, a row that is not a whole number of blocks, a kernel not
      available, or integer arithmetic where there is none.
    """
    if kind not in specs.GGUF_KINDS:
        raise native.KernelError(
            f"cannot pack GGUF kind {kind!r}: use one of {', '.join(specs.GGUF_KINDS)}"
        )
    form, size, _ = specs.GGUF_KINDS[kind]
    if blocks.ndim != 2 or blocks.dtype != np.uint8 or blocks.shape[1] % size:
        raise native.KernelError(
            f"cannot pack {kind} data of shape {blocks.shape} and dtype {blocks.dtype}: "
            f"need [n, multiple of {size}] uint8"
        )
    n, k = blocks.shape[0], blocks.shape[1] // size * specs.DEPTH[form]
    way = resolve(implementation)
    if arithmetic == "integer" and (way == "xla" or form not in specs.INTEGER_LAYOUTS):
        raise native.KernelError(
            f"no integer arithmetic for {kind} weights of implementation {way!r}: "
            "it needs native kernels and Q8_0, Q4_0 or Q4_1"
        )
    if way == "xla":
        data = jnp.asarray(reference.pack_gguf_array(blocks, kind))
        return PackedWeight(unpack(PackedWeight(data, n, k, form)), n, k, "f32", "rows")
    data = jax.device_put(pack_panels(blocks, kind, arithmetic=arithmetic))
    return PackedWeight(data, n, k, form, "panels", arithmetic)


def pack_panels(
    rows: np.ndarray,
    kind: str,
    out: np.ndarray | None = None,
    *,
    arithmetic: specs.Arithmetic = "float",
) -> np.ndarray:
    """Rows in panels, by the native library: `pack` and `pack_gguf` without the wrapping.

    Args:
      rows: [n, k] float32 or bfloat16, or [n, bytes] GGUF blocks; rows may be apart in memory.
      kind: "F32", "BF16" or a kind of `pack_gguf`.
      out: [ceil(n / 32), ...] panels to write, e.g. a slice of a larger array; by default a new
        array, aligned so that `jax.device_put` adopts it without a copy.
      arithmetic: the layout is that of this arithmetic.

    Returns:
      The panels: `PackedWeight.data` as numpy array.

    Raises:
      native.KernelError: values that have no exact packed form (Q4_0), an `out` that does not fit,
      or no native library.
    """
    form: specs.Format = specs.GGUF_KINDS[kind].format if kind in specs.GGUF_KINDS else "f32"
    form = "bf16" if kind == "BF16" else form
    shape, dtype, k = reference.panel_shape(rows, kind, form)
    if out is None:
        out = aligned_empty(shape, dtype)
    if out.shape != shape or out.dtype != dtype or not out.flags.c_contiguous:
        raise native.KernelError(
            f"cannot pack into {out.dtype} {out.shape}: need contiguous {dtype} {shape}"
        )
    if rows.strides[1] != rows.itemsize:
        rows = np.ascontiguousarray(rows)
    number = specs.GGUF_KINDS[kind].number if kind in specs.GGUF_KINDS else specs.LAYOUT_ID[form]
    call = native.library().handle.matmul_pack
    step = -(-len(out) // (os.cpu_count() or 1)) if out.nbytes > _SHARE else max(1, len(out))

    def work(panel: int) -> bool:
        part = rows[panel * specs.PANEL : (panel + step) * specs.PANEL]
        size = [ctypes.c_size_t(v) for v in (rows.strides[0], len(part), k)]
        return bool(
            call(number, arithmetic == "integer", _address(part), *size, _address(out[panel:]))
        )

    starts = range(0, len(out), step)
    if len(starts) > 1:  # the library lets go of the interpreter
        with concurrent.futures.ThreadPoolExecutor(len(starts)) as pool:
            good = all(list(pool.map(work, starts)))
    else:
        good = all(work(start) for start in starts)
    if not good:
        raise native.KernelError(reference.Q4_0_RANGE)
    return out


def _address(array: np.ndarray) -> ctypes.c_void_p:
    return ctypes.c_void_p(array.ctypes.data)


def unpack(packed: PackedWeight) -> jax.Array:
    """The weight [n, k], bit for bit: as packed, or the float32 values of a quantised format."""
    if packed.layout == "rows":
        return packed.data
    return reference.unpack_array(_panels(packed.data, packed.panel_layout), packed.n)


def take_rows_xla(packed: PackedWeight, ids: jax.Array) -> jax.Array:
    """The XLA form of `take_rows`."""
    if packed.layout == "rows":
        return packed.data[ids]
    panel, lane = ids // specs.PANEL, ids % specs.PANEL
    if packed.format in ("f32", "bf16"):
        return packed.data[panel, :, lane]
    blocks = reference.dequantize_panels(packed.data[panel], packed.panel_layout)  # [..., k, 32]
    return jnp.take_along_axis(blocks, lane[..., None, None], axis=-1)[..., 0]


def gather(packed: PackedWeight, ids: np.ndarray) -> PackedWeight:
    """Rows of a weight as a weight of the same format and layout, bit for bit.

    Args:
      packed: weight [n, k].
      ids: [count] int in [0, n), in any order, repeats allowed.

    Returns:
      The packed weight [count, k] whose row i is row `ids[i]`; nothing is expanded to float32.

    Raises:
      native.KernelError: ids that are not a list of row numbers of this weight.
    """
    ids = np.asarray(ids)
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        raise native.KernelError(
            f"cannot gather by ids of shape {ids.shape} and dtype {ids.dtype}: need [count] int"
        )
    if ids.size and (ids.min() < 0 or ids.max() >= packed.n):
        raise native.KernelError(
            f"cannot gather rows {ids.min()} to {ids.max()} of a weight with {packed.n} rows"
        )
    data = np.asarray(packed.data)
    if packed.layout == "rows":
        rows = data[ids]
    else:
        rows = reference.gather_array(data, packed.panel_layout, ids)
    return dataclasses.replace(packed, data=jax.device_put(rows), n=ids.size)


def _panels(data: jax.Array, form: str) -> jax.Array:
    return data if form in ("f32", "bf16") else reference.dequantize_panels(data, form)


def resolve(implementation: dispatch.Implementation = "auto") -> Literal["cpu", "xla"]:
    """What `implementation` means here; builds the native kernel if it may be used (once).

    Raises:
      native.KernelError: "cpu" where the kernel cannot be built.
    """
    backend = jax.default_backend()
    if backend != "cpu" and implementation != "xla":
        if implementation == "cpu":
            raise native.KernelError(
                f"{specs.OP}: implementation 'cpu' needs backend cpu, not {backend!r}: use 'xla'"
            )
        return dispatch.choose(specs.OP, "xla", native.library)
    return dispatch.choose(specs.OP, implementation, native.library)
