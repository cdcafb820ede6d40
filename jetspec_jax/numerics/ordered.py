"""Sums in an order that no number of rows can change."""

import jax.numpy as jnp

from jetspec_jax.typing import Array


def ordered_sum(x: Array) -> Array:
    """Sum over the last axis (kept, size 1) by repeated halving; an odd element is carried to the
    next level.

    Only elementwise additions: XLA may tile a reduction by the number of rows, but never reorders
    these.
    """
    while x.shape[-1] > 1:
        half = x.shape[-1] // 2
        rest = x[..., 2 * half :]
        x = x[..., :half] + x[..., half : 2 * half]
        if rest.shape[-1]:
            x = jnp.concatenate([x, rest], -1)
    return x
