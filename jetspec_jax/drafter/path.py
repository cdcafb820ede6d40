"""Path heads: scores that depend on the parent token, from the same backbone pass (algorithm.md
section 3).

"markov": logits_d(. | parent a) = U_d(.) + w2 @ w1[a], a first-order correction as in DSpark (arXiv
2607.05147). "pairwise": logits_d(. | parent a) = U_d(.) + w2 @ (w1[a] * (1 + gate @ h_d)), so that
what a parent says depends on the slot's hidden state h_d (the DFlash2 selector, over the whole
vocabulary); with a zero gate it is the Markov head.
"""

from __future__ import annotations

import jax.numpy as jnp

from jetspec_jax.config import DraftConfig
from jetspec_jax.numerics import linear, take_rows
from jetspec_jax.typing import Array, Params


def path_gate(params: Params, cfg: DraftConfig, hidden: Array) -> Array | None:
    """Factors of the parent's features: hidden [..., D, H] -> [..., D, r] float32; None where the
    head has no gate."""
    if cfg.path_head != "pairwise":
        return None
    return 1.0 + linear(hidden, params["path"]["gate"]).astype(jnp.float32)


def parent_features(
    params: Params, cfg: DraftConfig, parents: Array, gate: Array | None = None
) -> Array:
    """w1 rows of parent tokens, gated: [...] int32 ids of the target's vocabulary -> [..., r]."""
    rows = take_rows(params["path"]["w1"], jnp.clip(parents, 0, cfg.vocab_size - 1))
    return rows if gate is None else rows * gate


def path_correction(
    params: Params, cfg: DraftConfig, parents: Array, gate: Array | None = None
) -> Array:
    """Correction of all draft-vocabulary logits: parents [...] -> [..., Vd] float32."""
    features = parent_features(params, cfg, parents, gate)
    return linear(features, params["path"]["w2"]).astype(jnp.float32)


def conditional_logits(
    params: Params, cfg: DraftConfig, logits: Array, parents: Array, gate: Array | None = None
) -> Array:
    """Training form: base logits [..., D, Vd] given the true parent of each depth [..., D] (teacher
    forcing) and the `path_gate` of the block."""
    if cfg.path_head == "none":
        return logits
    return logits + path_correction(params, cfg, parents, gate)
