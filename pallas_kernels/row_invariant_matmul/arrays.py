"""Projections by weights as plain arrays, as GPUs take them: kernels for bfloat16, else XLA.

(`api` serves packed weights, which are the CPU's.)
"""

from __future__ import annotations

import jax
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
    y = reference.matmul_rows(rows, w) if module is None else module.matmul(rows, w)
    return y.reshape(*x.shape[:-1], n)


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
