"""What the op means without a path head, from stored logits. With one it is
`jetspec_jax.drafter.candidates`.
"""

import jax
import jax.numpy as jnp


def topk(logits: jax.Array, width: int, scale: jax.Array | None = None):
    """logits [M, Vd] float32, scale [M] -> ids [M, W] int32, log-probabilities [M, W] float32."""
    if scale is not None:
        logits = logits * scale[:, None]
    best, ids = jax.lax.top_k(logits, width)
    logp = best - jax.nn.logsumexp(logits, axis=-1, keepdims=True)
    return ids.astype(jnp.int32), jnp.minimum(logp, 0.0)
