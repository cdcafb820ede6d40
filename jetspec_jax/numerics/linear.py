"""One entry for every projection: packed weights and those marked for the GPU go to their kernels,
weights with a compute dtype through a differentiable product, plain [out, in] arrays through XLA.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax

from jetspec_jax.numerics.compute import ComputeWeight, trainable_dot
from jetspec_jax.numerics.kernel_weight import KernelWeight
from jetspec_jax.typing import Array, PyTree
from pallas_kernels import row_invariant_matmul as rim
from pallas_kernels.row_invariant_matmul.arrays import project

# Up to this many rows XLA's CPU matmul is 10 to 20% faster with the weight as its left operand
# (NOTES.md, 2026-11-30).
_WEIGHT_FIRST_ROWS = 64


def linear(x: Array, w: PyTree, bias: Array | None = None) -> Array:
    """x [..., in] times w [out, in] transposed -> [..., out] in x.dtype, accumulated in float32."""
    if isinstance(w, rim.PackedWeight):
        y = rim.matmul(x, w).astype(x.dtype)
    elif isinstance(w, KernelWeight):
        y = project(x, w.w).astype(x.dtype)
    elif isinstance(w, ComputeWeight):
        if x.dtype == w.dtype:
            y = trainable_dot(x, w.w, w.dtype)
        else:  # a float32 residual stream: operands in the compute dtype, nothing else is rounded
            contract = (((x.ndim - 1,), (1,)), ((), ()))
            y = lax.dot_general(
                x.astype(w.dtype), w.w.astype(w.dtype), contract, preferred_element_type=x.dtype
            )
    else:
        rows = x.reshape(-1, x.shape[-1])
        w = w.astype(x.dtype)
        contract = (((1,), (1,)), ((), ()))
        if rows.shape[0] <= _WEIGHT_FIRST_ROWS:
            y = lax.dot_general(w, rows, contract, preferred_element_type=jnp.float32).T
        else:
            y = lax.dot_general(rows, w, contract, preferred_element_type=jnp.float32)
        y = y.astype(x.dtype).reshape(*x.shape[:-1], w.shape[0])
    if bias is None:
        return y
    return y + bias.astype(x.dtype).reshape((1,) * (y.ndim - 1) + (-1,))


def take_rows(w: PyTree, ids: Array) -> Array:
    """Rows `ids` [...] of a [V, H] table -> [..., H].

    Packed weights serve float32 activations: their rows are float32, whatever the format.
    """
    if isinstance(w, rim.PackedWeight):
        return rim.take_rows(w, ids).astype(jnp.float32)
    if isinstance(w, KernelWeight):
        return w.w[ids]
    return w[ids]
