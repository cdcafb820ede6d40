"""Attention of tree rows over a committed prefix (in the cache) and the rows themselves (not yet in
the cache).

Both forms read only the live part of the cache: the loop over key chunks has a dynamic trip count,
so a step costs the same whatever the capacity. Rows' own keys and values are a separate operand, so
the cache is read-only during a round and written once, at commit.

* `online_attention`: chunked softmax with running maximum (FlashAttention, arXiv 2205.14135). Fast
form. * `fold_attention`: a left fold over keys in storage order in which a masked key is an exact
identity
  (algorithm.md section 6.2). Tree rows are in topological order, so a row's ancestors are folded in
  the order in which plain decoding would fold them from the cache: the bits agree wherever an
  ancestor lies.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax

from jetspec_jax.numerics.ordered import ordered_sum
from jetspec_jax.typing import Array

_FOLD_STEP = (
    8  # keys folded per loop turn: amortises the loop's overhead, does not change the order
)


def _scores(q: Array, k: Array, scale: float) -> Array:
    """q [B, K, R, h], k [B, K, C, h] -> float32 [B, K, R, C]."""
    dims = (((3,), (3,)), ((0, 1), (0, 1)))
    return lax.dot_general(q, k, dims, preferred_element_type=jnp.float32) * scale


def _weighted(p: Array, v: Array) -> Array:
    """p [B, K, R, C] float32, v [B, K, C, h] -> float32 [B, K, R, h]."""
    dims = (((3,), (2,)), ((0, 1), (0, 1)))
    return lax.dot_general(p.astype(v.dtype), v, dims, preferred_element_type=jnp.float32)


def _chunk(cache: Array, start: Array, size: int) -> Array:
    batch, heads, _, dim = cache.shape
    return lax.dynamic_slice(cache, (0, 0, start, 0), (batch, heads, size, dim))


def online_attention(
    q: Array,
    cache_k: Array,
    cache_v: Array,
    lengths: Array,
    new_k: Array,
    new_v: Array,
    mask: Array,
    *,
    scale: float,
    chunk: int,
) -> Array:
    """Attention of R = G * T packed rows.

    Args:
        q: [B, K, G, T, h].
        cache_k, cache_v: [B, K, S, h], S a multiple of `chunk`; slots >= lengths are never used.
        lengths: [B] int32, live keys per sequence.
        new_k, new_v: [B, K, T, h], keys and values of the rows themselves.
        mask: [B, T, T] bool, mask[b, i, j]: row i sees row j. Every row must see itself.
        scale: of the scores.
        chunk: keys per loop turn.

    Returns:
        [B, K, G, T, h] in q.dtype.
    """
    batch, heads, group, rows, dim = q.shape
    packed = q.reshape(batch, heads, group * rows, dim)
    visible = jnp.broadcast_to(mask[:, None, None], (batch, 1, group, rows, rows))
    visible = visible.reshape(batch, 1, group * rows, rows)
    own = jnp.where(visible, _scores(packed, new_k, scale), -jnp.inf)
    top = own.max(-1, keepdims=True)
    p = jnp.exp(own - top)
    carry = (top, p.sum(-1, keepdims=True), _weighted(p, new_v))

    def step(i: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        top, total, acc = carry
        start = i * chunk
        live = (start + lax.iota(jnp.int32, chunk))[None, :] < lengths[:, None]
        s = _scores(packed, _chunk(cache_k, start, chunk), scale)
        s = jnp.where(live[:, None, None, :], s, -jnp.inf)
        # 0 * NaN would let a poisoned unused slot through the product with v
        v = _chunk(cache_v, start, chunk)
        v = jnp.where(live[:, None, :, None], v, jnp.zeros((), v.dtype))
        new_top = jnp.maximum(top, s.max(-1, keepdims=True))
        shrink = jnp.exp(top - new_top)
        p = jnp.exp(s - new_top)
        return new_top, total * shrink + p.sum(-1, keepdims=True), acc * shrink + _weighted(p, v)

    turns = (jnp.max(lengths) + (chunk - 1)) // chunk
    _, total, acc = lax.fori_loop(0, turns, step, carry)
    return (acc / total).astype(q.dtype).reshape(q.shape)


def fold_attention(
    q: Array,
    cache_k: Array,
    cache_v: Array,
    lengths: Array,
    new_k: Array,
    new_v: Array,
    mask: Array,
    *,
    scale: float,
    chunk: int,
) -> Array:
    """Order-true attention; arguments and result as `online_attention`.

    Three passes: scores chunk by chunk, the maximum (exact in any order), and a left fold of exp(s
    - max) and its product with v, one key after the other. The rows' own keys are folded last, in
    row order.
    """
    batch, heads, group, rows, dim = q.shape
    size = cache_k.shape[2]
    packed = q.reshape(batch, heads, group * rows, dim)
    visible = jnp.broadcast_to(mask[:, None, None], (batch, 1, group, rows, rows))
    visible = visible.reshape(batch, 1, group * rows, rows)
    own = jnp.where(visible, _scores_rowwise(packed, new_k, scale), -jnp.inf)

    def score_step(i: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
        scores, top = carry
        start = i * chunk
        live = (start + lax.iota(jnp.int32, chunk))[None, :] < lengths[:, None]
        s = jnp.where(
            live[:, None, None, :],
            _scores_rowwise(packed, _chunk(cache_k, start, chunk), scale),
            -jnp.inf,
        )
        return lax.dynamic_update_slice(scores, s, (0, 0, 0, start)), jnp.maximum(
            top, s.max(-1, keepdims=True)
        )

    turns = (jnp.max(lengths) + (chunk - 1)) // chunk
    scores = jnp.full((batch, heads, group * rows, size), -jnp.inf, jnp.float32)
    scores, top = lax.fori_loop(0, turns, score_step, (scores, own.max(-1, keepdims=True)))

    def fold(carry: tuple[Array, Array], s: Array, v: Array) -> tuple[Array, Array]:
        total, acc = carry
        for j in range(s.shape[-1]):
            p = jnp.exp(s[..., j : j + 1] - top)
            value = v[:, :, j : j + 1, :].astype(jnp.float32)
            # the select makes a masked key an exact identity, also where an unused slot holds NaN
            total = total + p
            acc = jnp.where(p > 0, acc + p * value, acc)
        return total, acc

    def fold_step(i: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
        start = i * _FOLD_STEP
        s = lax.dynamic_slice(scores, (0, 0, 0, start), (batch, heads, group * rows, _FOLD_STEP))
        return fold(carry, s, _chunk(cache_v, start, _FOLD_STEP))

    zero = jnp.zeros((batch, heads, group * rows, 1), jnp.float32)
    carry = (zero, jnp.zeros(packed.shape, jnp.float32))
    carry = lax.fori_loop(0, (jnp.max(lengths) + (_FOLD_STEP - 1)) // _FOLD_STEP, fold_step, carry)
    own, new_v = _pad_to(own, 3, _FOLD_STEP, -jnp.inf), _pad_to(new_v, 2, _FOLD_STEP, 0)
    own_steps = own.shape[-1] // _FOLD_STEP

    def own_step(i: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
        start = i * _FOLD_STEP
        s = lax.dynamic_slice(own, (0, 0, 0, start), (batch, heads, group * rows, _FOLD_STEP))
        return fold(carry, s, _chunk(new_v, start, _FOLD_STEP))

    total, acc = lax.fori_loop(0, own_steps, own_step, carry)
    return (acc / total).astype(q.dtype).reshape(q.shape)


def _pad_to(x: Array, axis: int, multiple: int, value: float) -> Array:
    pad = -x.shape[axis] % multiple
    widths = [(0, pad if a == axis else 0, 0) for a in range(x.ndim)]
    return lax.pad(x, jnp.asarray(value, x.dtype), widths)


def _scores_rowwise(q: Array, k: Array, scale: float) -> Array:
    """Scores whose bits do not depend on where a key lies or on how many there are.

    The products over h are summed by halving: elementwise adds, an order that no matmul tiling can
    change.
    """
    prod = q[:, :, :, None, :].astype(jnp.float32) * k[:, :, None, :, :].astype(jnp.float32)
    return ordered_sum(prod)[..., 0] * scale
