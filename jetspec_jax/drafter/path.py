"""Markov path head: scores that depend on the parent token, from the same backbone pass
(algorithm.md section 3).

logits_d(. | parent a) = U_d(.) + w2 @ w1[a], a first-order correction as in DSpark (arXiv
2607.05147).
"""

from __future__ import annotations

import jax.numpy as jnp

from jetspec_jax.config import DraftConfig
from jetspec_jax.numerics import linear, take_rows
from jetspec_jax.typing import Array, Params


def parent_features(params: Params, cfg: DraftConfig, parents: Array) -> Array:
    """w1 rows of parent tokens: [...] int32 ids of the target's vocabulary -> [..., r]."""
    return take_rows(params["path"]["w1"], jnp.clip(parents, 0, cfg.vocab_size - 1))


def path_correction(params: Params, cfg: DraftConfig, parents: Array) -> Array:
    """Correction of all draft-vocabulary logits: parents [...] -> [..., Vd] float32."""
    return linear(parent_features(params, cfg, parents), params["path"]["w2"]).astype(jnp.float32)


def conditional_logits(params: Params, cfg: DraftConfig, logits: Array, parents: Array) -> Array:
    """Training form: base logits [..., D, Vd] given the true parent of each depth [..., D] (teacher
    forcing)."""
    if cfg.path_head == "none":
        return logits
    return logits + path_correction(params, cfg, parents)
