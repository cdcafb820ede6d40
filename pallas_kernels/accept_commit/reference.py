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
