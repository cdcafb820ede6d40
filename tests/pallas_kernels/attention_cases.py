"""Inputs and bounds shared by the tests of the GPU forms of tree attention."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.tree_attention import reference


class Call(NamedTuple):
    """Arguments of `tree_attention`, without the scale."""

    q: jax.Array
    cache_k: jax.Array
    cache_v: jax.Array
    lengths: jax.Array
    new_k: jax.Array
    new_v: jax.Array
    mask: jax.Array


def tree_mask(parents: list[int]) -> np.ndarray:
    """[T, T] ancestor-or-self of a tree in topological order; parent -1 for roots."""
    mask = np.eye(len(parents), dtype=bool)
    for row, parent in enumerate(parents):
        if parent >= 0:
            mask[row] |= mask[parent]
    return mask


def random_parents(rng: np.random.Generator, rows: int) -> list[int]:
    return [-1] + [int(rng.integers(0, row)) for row in range(1, rows)]


def random_call(
    seed: int,
    *,
    lengths: list[int],
    rows: int,
    capacity: int,
    heads: int = 1,
    group: int = 2,
    dim: int = 64,
    dtype: Any = jnp.bfloat16,
) -> Call:
    """A tree for every sequence."""
    rng = np.random.default_rng(seed)
    batch = len(lengths)

    def normal(*shape: int) -> jax.Array:
        return jnp.asarray(rng.standard_normal(shape), dtype)

    masks = [tree_mask(random_parents(rng, rows)) for _ in lengths]
    return Call(
        q=normal(batch, heads, group, rows, dim),
        cache_k=normal(batch, heads, capacity, dim),
        cache_v=normal(batch, heads, capacity, dim),
        lengths=jnp.asarray(lengths, jnp.int32),
        new_k=normal(batch, heads, rows, dim),
        new_v=normal(batch, heads, rows, dim),
        mask=jnp.asarray(np.stack(masks)),
    )


def poisoned(call: Call) -> Call:
    """NaN in every slot and row that nothing sees."""
    slots = np.arange(call.cache_k.shape[2])[None] >= np.asarray(call.lengths)[:, None]
    unseen = ~np.asarray(call.mask).any(axis=1)

    def fill(x: jax.Array, where: np.ndarray) -> jax.Array:
        return jnp.where(where[:, None, :, None], jnp.asarray(jnp.nan, x.dtype), x)

    return call._replace(
        cache_k=fill(call.cache_k, slots),
        cache_v=fill(call.cache_v, slots),
        new_k=fill(call.new_k, unseen),
        new_v=fill(call.new_v, unseen),
    )


def plain_step(call: Call, sequence: int, row: int) -> Call:
    """The step of plain decoding that computes this row of the tree: its path is in the cache."""
    b = slice(sequence, sequence + 1)
    path = np.flatnonzero(np.asarray(call.mask)[sequence, row])
    assert path[-1] == row
    length = int(call.lengths[sequence])

    def extended(cache: jax.Array, new: jax.Array) -> jax.Array:
        out = np.array(cache[b])
        out[:, :, length : length + len(path) - 1] = np.asarray(new[b])[:, :, path[:-1]]
        return jnp.asarray(out)

    return Call(
        q=call.q[b, :, :, row : row + 1],
        cache_k=extended(call.cache_k, call.new_k),
        cache_v=extended(call.cache_v, call.new_v),
        lengths=jnp.asarray([length + len(path) - 1], jnp.int32),
        new_k=call.new_k[b, :, row : row + 1],
        new_v=call.new_v[b, :, row : row + 1],
        mask=jnp.ones((1, 1, 1), jnp.bool_),
    )


def wide(x: Any) -> np.ndarray:
    return np.asarray(jnp.asarray(x).astype(jnp.float32))


def bits(x: Any) -> np.ndarray:
    """Bit patterns: NaN equals NaN, and 0 is not -0."""
    array = np.asarray(x)
    return array.view(f"u{array.itemsize}")


def exceeds_bound(out: jax.Array, call: Call, scale: float) -> np.ndarray:
    """Where `out` is further from the float32 reference than the rounding of a kernel explains.

    With unit roundoff u = 2^-9 of bfloat16: probabilities are rounded before they multiply the
    values, but not in their sum, so the quotient is off by at most u A, where A is the average of
    |v| under the softmax; rounding the result adds u |out|. Scores are exact products summed in
    float32: h 2^-24 max_s scale |q|.|k_s| relative in each probability, and the approximate exp2
    (2^-22) and the sums of a few chunks come with 2^-16.
    """
    u = 2.0**-9
    call32 = Call(*(x.astype(jnp.float32) if x.dtype == call.q.dtype else x for x in call))
    exact = np.asarray(reference.tree_attention(*call32, scale=scale))
    seen = call32._replace(cache_v=jnp.abs(call32.cache_v), new_v=jnp.abs(call32.new_v))
    average = np.asarray(reference.tree_attention(*seen, scale=scale))
    dim = call.q.shape[-1]
    finite_k = [np.nan_to_num(wide(k)) for k in (call.cache_k, call.new_k)]
    largest = max(np.abs(k).max() for k in finite_k) * np.abs(wide(call.q)).max() * dim * scale
    slack = 2 * dim * 2.0**-24 * largest + 2.0**-16
    bound = (u + slack) * average + u * (np.abs(exact) + u * average) + 2.0**-120
    return ~(np.abs(wide(out) - exact) <= bound)
