"""Projections of the draft head: the target's `numerics.linear` when serving, a differentiable form
when training."""

from __future__ import annotations

from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
from jax import lax

from jetspec_jax import numerics
from jetspec_jax.models.rope import apply_rope
from jetspec_jax.typing import Array, PyTree


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


def linear(x: Array, w: PyTree) -> Array:
    """x [..., in] times w [out, in] transposed: training weights here, everything else through
    `numerics.linear`."""
    if isinstance(w, ComputeWeight):
        return trainable_dot(x, w.w, w.dtype)
    return numerics.linear(x, w)


# The backward passes below are written out because XLA's own (a slice becomes pad and add) is ten
# times slower on CPU: 0.135 against 0.010 s for silu(gate) * up of 1,536 x 1,536, measured
# 2026-11-30.


@jax.custom_vjp
def halves(x: Array) -> tuple[Array, Array]:
    """First and second half of the last axis."""
    a, b = jnp.split(x, 2, -1)
    return a, b


halves.defvjp(lambda x: (halves(x), None), lambda _, g: (jnp.concatenate(g, -1),))


@jax.custom_vjp
def gated(x: Array) -> Array:
    """silu(first half) * second half of the last axis, computed in float32."""
    a, b = (t.astype(jnp.float32) for t in jnp.split(x, 2, -1))
    return (jax.nn.silu(a) * b).astype(x.dtype)


def _gated_backward(x: Array, g: Array) -> tuple[Array]:
    a, b = (t.astype(jnp.float32) for t in jnp.split(x, 2, -1))
    s, g = jax.nn.sigmoid(a), g.astype(jnp.float32)
    parts = g * b * s * (1.0 + a * (1.0 - s)), g * a * s
    return (jnp.concatenate([t.astype(x.dtype) for t in parts], -1),)


gated.defvjp(lambda x: (gated(x), x), _gated_backward)


@jax.custom_vjp
def rotate(x: Array, cos: Array, sin: Array) -> Array:
    """`apply_rope`; its transpose is the rotation by the negative angle. No gradient of cos and
    sin."""
    return apply_rope(x, cos, sin)


rotate.defvjp(
    lambda x, cos, sin: (apply_rope(x, cos, sin), (cos, sin)),
    lambda kept, g: (
        apply_rope(g, kept[0], -kept[1]),
        jnp.zeros_like(kept[0]),
        jnp.zeros_like(kept[1]),
    ),
)


def swiglu(x: Array, gate_up: PyTree, down: PyTree) -> Array:
    """down(silu(gate(x)) * up(x)); gate and up are one fused projection."""
    return linear(gated(linear(x, gate_up)), down)
