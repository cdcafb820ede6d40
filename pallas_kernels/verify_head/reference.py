"""What the op means: the XLA form, which stores the logits."""

import jax
import jax.numpy as jnp

from pallas_kernels.gumbel_noise.on_chip import gumbel


def choose(logits: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """logits [..., V] float32 -> (id, largest, margin over the second); lowest id wins a tie."""
    ids = jnp.argmax(logits, -1).astype(jnp.int32)
    best = jnp.take_along_axis(logits, ids[..., None], -1)[..., 0]
    vocabulary = jax.lax.broadcasted_iota(jnp.int32, logits.shape, logits.ndim - 1)
    others = jnp.where(vocabulary == ids[..., None], -jnp.inf, logits)
    return ids, best, best - others.max(-1)


def perturb(logits: jax.Array, keys: jax.Array, temperature: jax.Array) -> jax.Array:
    """logits [M, V] / temperature + noise where temperature [M] > 0; keys [M, 2] uint32."""
    ids = jax.lax.broadcasted_iota(jnp.int32, logits.shape, 1)
    low, high = (jnp.broadcast_to(keys[:, i, None], logits.shape) for i in range(2))
    warm = (temperature > 0)[:, None]
    scale = jnp.where(warm, 1.0 / jnp.where(warm, temperature[:, None], 1.0), 1.0)
    return logits * scale + jnp.where(warm, gumbel(ids, (low, high)), 0.0)
