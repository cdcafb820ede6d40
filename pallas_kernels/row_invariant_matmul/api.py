"""Projection with few rows whose row bits do not depend on the number of rows.

On CPU, XLA's matmul changes a row's bits with the number of rows M and its cost doubles from M = 1 to M = 8. The
native kernel (`cpu.cc`) reads the weights once for all rows at memory speed and sums every output from k = 0 upwards
with fused multiply-adds, so verifying a tree gives exactly the logits of plain decoding.
"""

from pathlib import Path
from typing import Literal

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import dispatch, native
from pallas_kernels.row_invariant_matmul import reference, specs

_SOURCE = Path(__file__).with_name("cpu.cc")
_SYMBOLS = ("MatmulF32",)


@flax.struct.dataclass
class PackedWeight:
    """A weight [n, k] ready for `matmul`; build it with `pack`.

    Attributes:
      data: "panels": [ceil(n / 32), k, 32], outputs past n are zero; "rows": [n, k] as stored (no native kernel).
      n: outputs.
      k: inputs.
      layout: which of the two.
    """

    data: jax.Array
    n: int = flax.struct.field(pytree_node=False)
    k: int = flax.struct.field(pytree_node=False)
    layout: Literal["panels", "rows"] = flax.struct.field(pytree_node=False, default="panels")

    @property
    def shape(self) -> tuple[int, int]:
        """(n, k), the shape of the weight that was packed."""
        return self.n, self.k

    @property
    def dtype(self) -> np.dtype:
        return self.data.dtype


def _library() -> native.NativeLibrary:
    return native.load(_SOURCE, _SYMBOLS)


def resolve(implementation: dispatch.Implementation = "auto") -> Literal["cpu", "xla"]:
    """What `implementation` means on this machine; builds the native kernel if it may be used (a few seconds, once).

    Raises:
      native.KernelError: "cpu" where the kernel cannot be built.
    """
    if jax.default_backend() != "cpu":
        if implementation == "cpu":
            raise native.KernelError(
                f"{specs.OP}: implementation 'cpu' needs JAX's cpu backend, not {jax.default_backend()!r}"
            )
        return dispatch.choose(specs.OP, "xla", _library)
    return dispatch.choose(specs.OP, implementation, _library)


def pack(
    w: np.ndarray | jax.Array, implementation: dispatch.Implementation = "auto"
) -> PackedWeight:
    """Reorders a projection weight [n, k] for the implementation that will run.

    Args:
      w: [n, k] float32, outputs first as checkpoints store it.
      implementation: as in `matmul`; where it resolves to XLA the weight stays as it is.

    Returns:
      The packed weight, same values and dtype.

    Raises:
      native.KernelError: not a float32 matrix, or `implementation="cpu"` is not available.
    """
    if w.ndim != 2 or w.dtype not in (np.float32,):
        raise native.KernelError(
            f"cannot pack a weight of shape {tuple(w.shape)} and dtype {w.dtype}: need [n, k] float32"
        )
    n, k = w.shape
    if resolve(implementation) == "xla":
        return PackedWeight(jnp.asarray(w), n, k, "rows")
    return PackedWeight(jnp.asarray(reference.pack_array(np.asarray(w))), n, k, "panels")


def unpack(packed: PackedWeight) -> jax.Array:
    """The weight [n, k] that was packed, bit for bit."""
    return packed.data if packed.layout == "rows" else reference.unpack_array(packed.data, packed.n)


def take_rows(packed: PackedWeight, ids: jax.Array) -> jax.Array:
    """Rows of the weight, e.g. token embeddings of a tied LM head: ids [...] int in [0, n) -> [..., k]."""
    if packed.layout == "rows":
        return packed.data[ids]
    return packed.data[ids // specs.PANEL, :, ids % specs.PANEL]


def matmul(
    x: jax.Array,
    packed: PackedWeight,
    *,
    implementation: dispatch.Implementation = "auto",
    threads: int = 0,
) -> jax.Array:
    """x @ w.T with float32 accumulation.

    Args:
      x: [..., k]; computed in float32.
      packed: weight [n, k] from `pack`.
      implementation: "auto" runs the native kernel if the weight is in panels and the kernel can be built, else XLA;
        "cpu" or "xla" insist.
      threads: upper limit for the native kernel (0: all that XLA's pool and the CPU affinity allow). The bits do not
        depend on it.

    Returns:
      [..., n] float32. From the native kernel each row's bits depend on that row and the weight only.

    Raises:
      native.KernelError: shapes that do not fit, or an implementation that is not available.
    """
    if x.ndim == 0 or x.shape[-1] != packed.k:
        raise native.KernelError(
            f"{specs.OP}: x of shape {x.shape} does not fit a weight [{packed.n}, {packed.k}]"
        )
    rows = x.reshape(-1, packed.k).astype(jnp.float32)
    if packed.layout == "rows":
        if implementation == "cpu":
            raise native.KernelError(
                f"{specs.OP}: implementation 'cpu' needs a weight packed in panels: use pack(w, 'cpu')"
            )
        y = reference.matmul_rows(rows, packed.data)
    elif resolve(implementation) == "cpu":
        y = _native(rows, packed, threads)
    else:
        y = reference.matmul_panels(rows, packed.data, packed.n)
    return y.reshape(*x.shape[:-1], packed.n)


def _native(rows: jax.Array, packed: PackedWeight, threads: int) -> jax.Array:
    @jax.custom_batching.custom_vmap
    def call(x: jax.Array, data: jax.Array) -> jax.Array:
        return jax.ffi.ffi_call(
            _library().targets["MatmulF32"],
            jax.ShapeDtypeStruct((x.shape[0], packed.n), jnp.float32),
        )(x, data, threads=np.int64(threads))

    @call.def_vmap
    def _batched(
        size: int, batched: list[bool], x: jax.Array, data: jax.Array
    ) -> tuple[jax.Array, bool]:
        if batched[1]:  # one weight per batch entry: no reuse to gain
            xs = x if batched[0] else jnp.broadcast_to(x, (size, *x.shape))
            return jax.lax.map(lambda pair: call(*pair), (xs, data)), True
        # More rows of the same weight: one call, and the same bits for every row.
        return call(x.reshape(-1, packed.k), data).reshape(size, -1, packed.n), True

    return call(rows, packed.data)
