"""What the GPU kernels of the head share: operands, and the choice among their blocks."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.native import KernelError
from pallas_kernels.row_invariant_matmul.specs import Tiling
from pallas_kernels.verify_head import specs


class Sampling(NamedTuple):
    """Per row, for argmax(logits / temperature + noise(key, id))."""

    keys: jax.Array  # [M, 2] uint32 of (seed, position): `jetspec_jax.sampling.position_key`
    temperature: jax.Array  # [M] float32, 0: greedy, without noise


def row_fields(sampling: Sampling) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Both key words, 1 / temperature (1 where greedy) and 1.0 where a row samples: [M] each."""
    warm = sampling.temperature > 0
    scale = jnp.where(warm, 1.0 / jnp.where(warm, sampling.temperature, 1.0), 1.0)
    low, high = sampling.keys.T
    return low, high, scale.astype(jnp.float32), warm.astype(jnp.float32)


def check(hidden: jax.Array, head: jax.Array) -> Tiling:
    """Tiling of a head [V, H] under hidden [M, H].

    Raises:
      KernelError: shapes or dtypes that the kernels do not take.
    """
    tiling = specs.tiling(*head.shape)
    bf16 = jnp.dtype(jnp.bfloat16)
    if tiling is None or hidden.shape[1:] != head.shape[1:] or {hidden.dtype, head.dtype} != {bf16}:
        raise KernelError(
            f"{specs.OP}: hidden {hidden.dtype}{list(hidden.shape)} and head "
            f"{head.dtype}{list(head.shape)}: the GPU kernels need bfloat16 and multiples of 64"
        )
    return tiling


def combine(
    best: jax.Array, ids: jax.Array, second: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Best of the blocks: [blocks, M] each -> id, logit and margin [M]. Blocks hold rising ids, so
    the first block among equals holds the lowest."""
    block = jnp.argmax(best, axis=0)

    def at_block(x: jax.Array) -> jax.Array:
        return jnp.take_along_axis(x, block[None], axis=0)[0]

    others = jnp.where(
        lax.broadcasted_iota(block.dtype, best.shape, 0) == block[None], -jnp.inf, best
    )
    value = at_block(best)
    margin = value - jnp.maximum(at_block(second), others.max(axis=0))
    return at_block(ids), value, margin
