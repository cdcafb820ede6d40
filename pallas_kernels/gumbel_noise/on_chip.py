"""Gumbel noise of (position, token id) computed where it is used, inside of a GPU kernel.

The same integers as `jetspec_jax.sampling.token_noise`, hence the same uniform number for a key and
an id; the two logarithms are the compiler's, so the noise agrees within `ERROR` and a sampled token
differs only where two perturbed logits lie closer than that.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

ERROR = 4e-6  # of the noise, absolute, plus as much relative: two logarithms of 2 ulp each


def _mix(h: jax.Array) -> jax.Array:
    h = (h ^ (h >> np.uint32(16))) * np.uint32(0x7FEB352D)
    h = (h ^ (h >> np.uint32(15))) * np.uint32(0x846CA68B)
    return h ^ (h >> np.uint32(16))


def gumbel(ids: jax.Array, key: tuple[jax.Array, jax.Array]) -> jax.Array:
    """Standard Gumbel noise: ids int32 and the two words of each key uint32, all of one shape."""
    bits = _mix(_mix(ids.astype(jnp.uint32) + key[0]) ^ key[1])
    uniform = bits.astype(jnp.float32) * np.float32(2.0**-32) + np.float32(2.0**-33)
    uniform = jnp.minimum(uniform, np.float32(1.0 - 2.0**-24))
    # log1p(-u) = -u log(w) / (w - 1) with w = 1 - u rounded (Kahan): its error cancels
    rest = np.float32(1.0) - uniform
    lost = np.float32(1.0) - rest
    small = lost == 0
    exact = jnp.log(rest) * (uniform / jnp.where(small, np.float32(1.0), lost))
    return -jnp.log(jnp.where(small, uniform, -exact))
