"""What the op means: masked softmax attention, dense, in XLA."""

import jax
import jax.numpy as jnp


def tree_attention(
    q: jax.Array,
    cache_k: jax.Array,
    cache_v: jax.Array,
    lengths: jax.Array,
    new_k: jax.Array,
    new_v: jax.Array,
    mask: jax.Array,
    *,
    scale: float,
) -> jax.Array:
    """Arguments and result as `api.tree_attention`; scores, softmax and sums in float32.

    Reads the whole cache, and its bits depend on all shapes: it is the meaning of the op, not its
    fast form.
    """
    batch, _, _, rows, _ = q.shape
    capacity = cache_k.shape[2]
    live = jnp.arange(capacity, dtype=jnp.int32)[None, :] < lengths[:, None]
    live = jnp.broadcast_to(live[:, None, :], (batch, rows, capacity))
    seen = jnp.concatenate([live, mask], axis=-1)  # [B, T, S + T]
    used = seen.any(axis=1)[:, None, :, None]  # a key that no row sees may hold anything

    def keys(cache: jax.Array, new: jax.Array) -> jax.Array:
        both = jnp.concatenate([cache, new], axis=2).astype(jnp.float32)
        return jnp.where(used, both, jnp.zeros((), jnp.float32))

    k, v = keys(cache_k, new_k), keys(cache_v, new_v)
    highest = jax.lax.Precision.HIGHEST
    scores = jnp.einsum("bkgth,bksh->bkgts", q.astype(jnp.float32), k, precision=highest) * scale
    visible = seen[:, None, None]
    scores = jnp.where(visible, scores, -jnp.inf)
    top = scores.max(axis=-1, keepdims=True)
    p = jnp.where(visible, jnp.exp(scores - top), jnp.zeros((), jnp.float32))
    out = jnp.einsum("bkgts,bksh->bkgth", p, v, precision=highest)
    out = out / p.sum(axis=-1, keepdims=True)
    return jnp.where(visible.any(axis=-1, keepdims=True), out, jnp.zeros((), jnp.float32)).astype(
        q.dtype
    )
