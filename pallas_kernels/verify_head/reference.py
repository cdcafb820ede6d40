"""What the op means: the XLA form, which stores the logits."""

import jax
import jax.numpy as jnp


def choose(logits: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """logits [..., V] float32 -> (id, largest, margin over the second); lowest id wins a tie."""
    ids = jnp.argmax(logits, -1).astype(jnp.int32)
    best = jnp.take_along_axis(logits, ids[..., None], -1)[..., 0]
    vocabulary = jax.lax.broadcasted_iota(jnp.int32, logits.shape, logits.ndim - 1)
    others = jnp.where(vocabulary == ids[..., None], -jnp.inf, logits)
    return ids, best, best - others.max(-1)
