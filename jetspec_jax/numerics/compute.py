"""Products in a chosen dtype, forward and backward: training, and features of the target in large
batches."""

from __future__ import annotations

from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
from jax import lax

from jetspec_jax.typing import Array


def dot(x: Array, w: Array, dtype: Any) -> Array:
    """x [..., in] times w [out, in] transposed, operands and result in `dtype` (accumulated in
    float32)."""
    rows = x.astype(dtype).reshape(-1, x.shape[-1])
    y = lax.dot_general(
        rows, w.astype(dtype), (((1,), (1,)), ((), ())), preferred_element_type=dtype
    )
    return y.reshape(*x.shape[:-1], w.shape[0])


def trainable_dot(x: Array, w: Array, dtype: Any) -> Array:
    """`dot` whose backward products run in `dtype` too (gradient of w summed in float32).

    The transpose of a dot with float32 accumulation would multiply float32 by bfloat16, which no
    matmul unit does.
    """
    return _trainable_dot(x, w, dtype)


def _plain(x: Array, w: Array, dtype: Any) -> Array:
    return dot(x, w, dtype)


_trainable_dot: Any = jax.custom_vjp(_plain, nondiff_argnums=(2,))


def _forward(x: Array, w: Array, dtype: Any) -> tuple[Array, tuple[Array, Array, Array, Array]]:
    # The empty arrays carry the operands' dtypes to the backward pass (a dtype is no jax value).
    kept = (x.astype(dtype), w.astype(dtype), jnp.zeros((0,), x.dtype), jnp.zeros((0,), w.dtype))
    return dot(x, w, dtype), kept


def _backward(dtype: Any, kept: tuple[Array, Array, Array, Array], g: Array) -> tuple[Array, Array]:
    a, b, like_x, like_w = kept
    rows, grad = a.reshape(-1, a.shape[-1]), g.astype(dtype).reshape(-1, g.shape[-1])
    dx = lax.dot_general(grad, b, (((1,), (0,)), ((), ())), preferred_element_type=dtype)
    dw = lax.dot_general(grad, rows, (((0,), (0,)), ((), ())), preferred_element_type=jnp.float32)
    return dx.reshape(a.shape).astype(like_x.dtype), dw.astype(like_w.dtype)


_trainable_dot.defvjp(_forward, _backward)


@flax.struct.dataclass
class ComputeWeight:
    """A master weight [out, in] whose products run in `dtype`, forward and backward."""

    w: Array
    dtype: Any = flax.struct.field(pytree_node=False)
