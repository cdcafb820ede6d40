"""Projections by weights as plain arrays, as GPUs take them: kernels for bfloat16, else XLA.

`api` serves packed weights, which are the CPU's, and comes here for those in layout "rows".
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import dispatch, gpu_forms
from pallas_kernels.row_invariant_matmul import gpu, reference, specs


def project(
    x: jax.Array, w: jax.Array, *, implementation: dispatch.Implementation = "auto"
) -> jax.Array:
    """x @ w.T with float32 sums.

    Args:
      x: [..., K].
      w: [N, K].
      implementation: "auto" takes "mosaic_gpu" or "triton" on a GPU that has it, where operands
        are bfloat16 and the weight is in multiples of 64, else XLA; a name insists.

    Returns:
      [..., N] float32. From the kernels a row's bits depend on that row and the weight only.

    Raises:
      KernelError: an implementation that is not available for this call.
    """
    rows = x.reshape(int(np.prod(x.shape[:-1])), x.shape[-1])
    n, k = w.shape
    module = gpu_forms.select(specs.OP, implementation, lambda: gpu.check(rows, w, n, k, None))
    multiply = reference.matmul_arrays if module is None else module.matmul
    return _build_project(multiply)(rows, w).reshape(*x.shape[:-1], n)


@functools.cache
def _build_project(multiply: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    """f(x [M, K], w [N, K]) -> [M, N] float32; under vmap more rows of the same weight."""

    @jax.custom_batching.custom_vmap
    def call(x: jax.Array, w: jax.Array) -> jax.Array:
        return multiply(x, w)

    @call.def_vmap
    def _batched(size: int, batched: list[bool], x: jax.Array, w: jax.Array):
        if batched[1]:  # one weight per entry: nothing to share
            x = x if batched[0] else jnp.broadcast_to(x, (size, *x.shape))
            return jax.lax.map(lambda operands: call(*operands), (x, w)), True
        y = call(x.reshape(size * x.shape[1], x.shape[2]), w)
        return y.reshape(size, x.shape[1], w.shape[0]), True

    return call


def project_grouped(
    x: jax.Array,
    w: jax.Array,
    experts: jax.Array,
    *,
    implementation: dispatch.Implementation = "auto",
) -> jax.Array:
    """Row i times the weight of its expert, with the promise of `project`.

    Args:
      x: [A, K], a row for every (token, chosen expert).
      w: [E, N, K].
      experts: [A] int32 in 0..E - 1.
      implementation: as in `project`.

    Returns:
      [A, N] float32.

    Raises:
      KernelError: an implementation that is not available for this call.
    """
    _, n, k = w.shape
    module = gpu_forms.select(specs.OP, implementation, lambda: gpu.check(x, w, n, k, None))
    if module is None:
        return reference.matmul_grouped(x, w, experts)
    return module.grouped_matmul(x, w, experts)
