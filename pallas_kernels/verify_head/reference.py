"""What the op means: the XLA form, which stores the logits."""

import jax
import jax.numpy as jnp


def choose(logits: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """logits [..., V] float32 -> (id, largest, margin over the second); lowest id wins a tie."""
    ids = jnp.argmax(logits, -1).astype(jnp.int32)
    best = jnp.take_along_axis(logits, ids[..., None], -1)[..., 0]
    others = jnp.where(jnp.arange(logits.shape[-1]) == ids[..., None], -jnp.inf, logits)
    return ids, best, best - others.max(-1)
