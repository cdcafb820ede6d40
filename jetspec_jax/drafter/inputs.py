"""Block inputs and slot conventions: the one place that training and serving share (algorithm.md
section 2)."""

from __future__ import annotations

import flax.struct
import jax
import jax.numpy as jnp

from jetspec_jax.config import DraftConfig
from jetspec_jax.typing import Array


@flax.struct.dataclass
class BlockInputs:
    """What one block feeds the drafter."""

    tokens: Array  # [..., bs] int32: the anchor, then mask tokens
    positions: Array  # [..., bs] int32, absolute


def block_inputs(cfg: DraftConfig, anchor_tokens: Array, anchor_positions: Array) -> BlockInputs:
    """Blocks [anchor, MASK x (bs - 1)] at the anchor's position and the bs - 1 after it.

    Args:
        cfg: the head.
        anchor_tokens: [...] int32, last committed tokens.
        anchor_positions: [...] int32, their absolute positions (C - 1 for C committed tokens).
    """
    offsets = jnp.arange(cfg.block_size, dtype=jnp.int32)
    offsets = offsets.reshape((1,) * anchor_tokens.ndim + (-1,))
    tokens = jnp.where(offsets == 0, anchor_tokens[..., None], cfg.mask_token_id)
    return BlockInputs(
        tokens.astype(jnp.int32), anchor_positions[..., None].astype(jnp.int32) + offsets
    )


def depth_slots(cfg: DraftConfig, x: Array) -> Array:
    """The slots that predict, in depth order: x [..., bs, H] -> [..., D, H].

    In-place convention: slot k predicts the token at its own position, slot 0 (the anchor) nothing.
    `draft_shift`: slot k predicts the next position, so slot 0 predicts depth 0. Depth d is
    position anchor + 1 + d either way.
    """
    return x if cfg.draft_shift else _drop_first(x)


@jax.custom_vjp
def _drop_first(x: Array) -> Array:
    return x[..., 1:, :]


# As in `projection.py`: the transposed slice would be a slow pad on CPU.
_drop_first.defvjp(
    lambda x: (_drop_first(x), None),
    lambda _, g: (jnp.concatenate([jnp.zeros_like(g[..., :1, :]), g], -2),),
)
