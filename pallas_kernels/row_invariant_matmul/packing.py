"""Packed weights: float and quantised matrices in the order in which the kernel reads them."""

from typing import Any, Literal

import flax.struct
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from pallas_kernels import dispatch, native
from pallas_kernels.row_invariant_matmul import reference, specs

_FLOAT_FORMATS: dict[np.dtype, specs.Format] = {
    np.dtype(np.float32): "f32",
    np.dtype(ml_dtypes.bfloat16): "bf16",
}


@flax.struct.dataclass
class PackedWeight:
    """A weight [n, k] ready for `matmul`; build it with `pack` or `pack_gguf`.

    Attributes:
      data: layout "panels": [ceil(n / 32), k, 32] float32 or bfloat16, or [ceil(n / 32), k / 32,
        bytes] uint8 for the quantised formats; outputs past n are zero. Layout "rows": [n, k]
        float32 or bfloat16 as stored (XLA only).
      n: outputs.
      k: inputs.
      format: how the values are stored; every format stands for exact float32 values.
      layout: "panels" for the native kernel, "rows" where XLA runs.
    """

    data: jax.Array
    n: int = flax.struct.field(pytree_node=False)
    k: int = flax.struct.field(pytree_node=False)
    format: specs.Format = flax.struct.field(pytree_node=False, default="f32")
    layout: Literal["panels", "rows"] = flax.struct.field(pytree_node=False, default="panels")

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
    return PackedWeight(jax.device_put(reference.pack_array(np.asarray(w))), n, k, form, "panels")


def pack_gguf(
    blocks: np.ndarray, kind: str, implementation: dispatch.Implementation = "auto"
) -> PackedWeight:
    """Packs a quantised GGUF tensor as it is: the kernel decodes to the exact dequantised values.

    Args:
      blocks: [n, bytes per row] uint8, the tensor's data as `gguf.GGUFReader` gives it.
      kind: "Q8_0", "Q4_0" or "Q4_1".
      implementation: as in `matmul`; where it resolves to XLA the weight is stored dequantised, as
        float32 rows.

    Returns:
      The packed weight; `unpack` gives the values of `gguf.dequantize`.

    Raises:
      native.KernelError: unknown kind, a row that is not a whole number of blocks, or a kernel not
      available.
    """
    if kind not in specs.GGUF_KINDS:
        raise native.KernelError(
            f"cannot pack GGUF kind {kind!r}: use one of {', '.join(specs.GGUF_KINDS)}"
        )
    form: Any
    form, size = specs.GGUF_KINDS[kind]
    if blocks.ndim != 2 or blocks.dtype != np.uint8 or blocks.shape[1] % size:
        raise native.KernelError(
            f"cannot pack {kind} data of shape {blocks.shape} and dtype {blocks.dtype}: "
            f"need [n, multiple of {size}] uint8"
        )
    n, k = blocks.shape[0], blocks.shape[1] // size * specs.BLOCK
    data = jnp.asarray(reference.pack_gguf_array(blocks, kind))
    packed = PackedWeight(data, n, k, form, "panels")
    if resolve(implementation) == "xla":
        return PackedWeight(unpack(packed), n, k, "f32", "rows")
    return packed


def unpack(packed: PackedWeight) -> jax.Array:
    """The weight [n, k], bit for bit: as packed, or the float32 values of a quantised format."""
    if packed.layout == "rows":
        return packed.data
    return reference.unpack_array(_panels(packed.data, packed.format), packed.n)


def take_rows(packed: PackedWeight, ids: jax.Array) -> jax.Array:
    """Rows of the weight, e.g. token embeddings of a tied LM head, read from the packed form.

    Args:
      packed: weight [n, k].
      ids: [...] int in [0, n).

    Returns:
      [..., k] in the weight's float dtype (float32 for the quantised formats).
    """
    if packed.layout == "rows":
        return packed.data[ids]
    panel, lane = ids // specs.PANEL, ids % specs.PANEL
    if packed.format in ("f32", "bf16"):
        return packed.data[panel, :, lane]
    blocks = reference.dequantize_panels(packed.data[panel], packed.format)  # [..., k, 32]
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
        rows = reference.gather_array(data, packed.format, ids)
    return packed.replace(data=jax.device_put(rows), n=ids.size)


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
