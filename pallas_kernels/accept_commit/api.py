"""Commit of an accepted path: its keys and values go to the tail of every layer's cache, in place.

As XLA ops that is a gather and an update per layer, for keys and for values, always of D + 1 rows;
the native kernel (`cpu.cc`) is one call and writes the accepted rows only. On a GPU it stays XLA: a
scatter per layer, for keys and for values, compiles to one kernel each that works in place on
donated caches and touches the accepted rows only, so that a kernel of ours could save launches and
no memory traffic (`python -m pallas_kernels.gpu_compile --match accept_commit` counts them).
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from pallas_kernels import dispatch, native
from pallas_kernels.accept_commit import reference, specs


def unwritten(shapes: Sequence[jax.ShapeDtypeStruct]) -> list[jax.Array]:
    """Arrays that hold anything, for caches whose live slots alone are read; native CPU only.

    A cache then takes as much memory as it has live slots, not as it has room for: the system maps
    a page when it is first written.

    Args:
      shapes: of the arrays.

    Raises:
      native.KernelError: no native kernel here.
    """
    target = native.library().target("Unwritten")
    return jax.jit(lambda: jax.ffi.ffi_call(target, list(shapes))())()


def accept_commit(
    cache_k: Sequence[jax.Array],
    cache_v: Sequence[jax.Array],
    new_k: jax.Array,
    new_v: jax.Array,
    path: jax.Array,
    start: jax.Array,
    counts: jax.Array,
    *,
    implementation: dispatch.Implementation = "auto",
) -> tuple[tuple[jax.Array, ...], tuple[jax.Array, ...]]:
    """Slot start[b] + i of sequence b gets row path[b, i], for i < counts[b].

    Args:
      cache_k: per layer [B, K, S, h], on a CPU float32; donate them to the enclosing jit, or XLA
        copies.
      cache_v: per layer [B, K, S, h].
      new_k: [L, B, K, T, h] rows of this round (`decoder_stack`).
      new_v: [L, B, K, T, h].
      path: [B, P] int32 rows in 0..T - 1, the accepted path from the root.
      start: [B] int32 first slot to write; start + counts <= S (checked when it runs).
      counts: [B] int32 rows to write, 0..P.
      implementation: "auto" runs the native kernel on a CPU where it can be built, else XLA; "cpu"
        and "xla" insist.

    Returns:
      The caches' keys and values, per layer.

    Raises:
      native.KernelError: shapes that do not fit, or an implementation that is not available.
      jax.errors.JaxRuntimeError: when it runs (outside of jit a ValueError),
        a slot or a row out of its range (native kernel).
    """
    caches = (*cache_k, *cache_v)
    layers, batch, heads, _, dim = new_k.shape
    if (
        len(cache_k) != layers
        or len(cache_v) != layers
        or path.shape[0] != batch
        or any(c.shape[:2] != (batch, heads) or c.shape[3] != dim for c in caches)
    ):
        raise native.KernelError(
            f"{specs.OP}: {len(caches)} caches {list(caches[0].shape)} and path {list(path.shape)} "
            f"do not fit rows {list(new_k.shape)}"
        )
    if dispatch.device().platform == "gpu":
        dispatch.select(specs.OP, implementation, {})
        return (
            reference.accept_commit_by_scatter(cache_k, new_k, path, start, counts),
            reference.accept_commit_by_scatter(cache_v, new_v, path, start, counts),
        )
    if dispatch.choose(specs.OP, implementation, native.library) == "xla":
        return (
            reference.accept_commit(cache_k, new_k, path, start, counts),
            reference.accept_commit(cache_v, new_v, path, start, counts),
        )
    call = jax.ffi.ffi_call(
        native.library().target("AcceptCommit"),
        [jax.ShapeDtypeStruct(c.shape, jnp.float32) for c in caches],
        input_output_aliases={5 + i: i for i in range(len(caches))},
    )
    out = call(new_k, new_v, path, start, counts, *caches)
    return tuple(out[:layers]), tuple(out[layers:])
