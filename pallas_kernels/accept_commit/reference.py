"""What the op means, in XLA."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp


def accept_commit(
    caches: Sequence[jax.Array],
    rows: jax.Array,
    path: jax.Array,
    start: jax.Array,
    counts: jax.Array,
) -> tuple[jax.Array, ...]:
    """Per layer, cache [B, K, S, h] with rows [L, B, K, T, h] written; see `api.accept_commit`."""

    def one(cache: jax.Array, new: jax.Array) -> jax.Array:
        slots = jnp.arange(cache.shape[2])[None, :] - start[:, None]  # [B, S]: step of the path
        written = (slots >= 0) & (slots < counts[:, None])
        step = jnp.clip(slots, 0, path.shape[1] - 1)
        index = jnp.take_along_axis(path, step, axis=1)[:, None, :, None]
        return jnp.where(written[:, None, :, None], jnp.take_along_axis(new, index, axis=2), cache)

    return tuple(one(cache, new) for cache, new in zip(caches, rows, strict=True))


def accept_commit_by_scatter(
    caches: Sequence[jax.Array],
    rows: jax.Array,
    path: jax.Array,
    start: jax.Array,
    counts: jax.Array,
) -> tuple[jax.Array, ...]:
    """The same as a scatter a cache, which XLA's GPU compiler does in place on donated caches.

    It touches the accepted rows only, in one kernel a cache; the dense form above reads, writes and
    copies every cache whole there.
    """
    step = jnp.arange(path.shape[1], dtype=jnp.int32)[None]
    batch = jnp.arange(path.shape[0], dtype=jnp.int32)[:, None]

    def one(cache: jax.Array, new: jax.Array) -> jax.Array:
        past_the_end = cache.shape[2]
        slot = jnp.where(step < counts[:, None], start[:, None] + step, past_the_end)
        taken = jnp.take_along_axis(new, path[:, None, :, None], axis=2).swapaxes(1, 2)
        return cache.at[batch, :, slot].set(taken, mode="drop")

    return tuple(one(cache, new) for cache, new in zip(caches, rows, strict=True))
