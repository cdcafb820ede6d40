"""From draft logits to tree candidates: the W best tokens of each depth and their conditional
log-probabilities."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jetspec_jax.config import DraftConfig
from jetspec_jax.drafter.path import parent_features
from jetspec_jax.errors import ConfigError
from jetspec_jax.numerics import linear, take_rows
from jetspec_jax.tree.topology import Candidates
from jetspec_jax.typing import Array, Params

NORMALISERS = ("exact", "tail")


def candidates(
    params: Params,
    cfg: DraftConfig,
    logits: Array,
    anchor_token: Array,
    id_map: Array | None,
    width: int,
    *,
    temperature: Array | None = None,
    noise: Array | None = None,
    gate: Array | None = None,
    normaliser: str = "tail",
) -> Candidates:
    """The `width` best tokens of each depth and the table of their scores given each parent. One
    sequence.

    Without a path head the rows of a depth's table are equal: log-softmax of its logits (the
    published behaviour). With a path head, depth d is ranked under the expected correction of
    depth d-1's candidates, then scored under every
    one of them: log p(b | a) = U(b) + w2[b].w1[a] - log Z(a), w1[a] gated in the pairwise head.

    Z(a) runs over the whole draft vocabulary: "exact" computes it for every parent (D * W * Vd * r
    multiply-adds and as many exponentials as D * W * Vd). "tail" computes it for the expected
    correction only and lets the mass outside the candidates be the same for all parents, adding
    what the candidates themselves hold under `a`: its cost does not grow with W, and its scores are
    at most 0 too. See `__init__` of this package's tests for what is measured.

    Args:
        params, cfg: the head.
        logits: [D, Vd] float32 from `draft_scores`.
        anchor_token: scalar int32, the root.
        id_map: [Vd] int32, target id of each draft id; None where the vocabularies are the same.
        width: W, static.
        temperature: scalar; where above 0, logits are divided by it before ranking.
        noise: [D, Vd] float32, the target's Gumbel noise of positions anchor + 1 + d at the draft
            vocabulary's ids. The target chooses argmax(warped logits + noise); ranking with the
            same noise keeps acceptance high at T > 0.
        gate: [D, r] from `path_gate`, where the head has one.
        normaliser: "exact" or "tail" (with a path head only).

    Returns:
        Candidates of D depths, in target ids.

    Raises:
        ConfigError: `width` outside 1..Vd or an unknown normaliser.
    """
    depth, vocab = logits.shape
    if not 1 <= width <= vocab:
        raise ConfigError(
            f"width={width} does not fit a draft vocabulary of {vocab}; give 1 to {vocab}"
        )
    if normaliser not in NORMALISERS:
        raise ConfigError(
            f"normaliser={normaliser!r} is not known; choose one of {', '.join(NORMALISERS)}"
        )
    scale = jnp.ones((), jnp.float32)
    if temperature is not None:
        scale = jnp.where(temperature > 0, 1.0 / jnp.maximum(temperature, 1e-3), 1.0).astype(
            jnp.float32
        )
    base = logits.astype(jnp.float32) * scale
    if noise is not None:
        base = base + noise
    if cfg.path_head == "none":
        logp, chosen = _top_k(base, width)
        logp = jnp.minimum(logp - jax.nn.logsumexp(base, -1, keepdims=True), 0.0)
        table = jnp.broadcast_to(logp[:, None, :], (depth, width, width))
        return Candidates(_to_target(chosen, id_map), table)
    return _conditional(params, cfg, base, scale, anchor_token, id_map, width, normaliser, gate)


def _top_k(x: Array, width: int) -> tuple[Array, Array]:
    """`lax.top_k` whose result is only read whole.

    XLA's CPU compiler replaces it by a full sort (2.7 ms instead of 0.06 for 12,288 logits,
    measured) as soon as a consumer's slice, such as best[0], is merged into it; the barrier keeps
    them apart.
    """
    values, index = jax.lax.optimization_barrier(jax.lax.top_k(x, width))
    return values, index


def _to_target(chosen: Array, id_map: Array | None) -> Array:
    return chosen.astype(jnp.int32) if id_map is None else id_map[chosen].astype(jnp.int32)


def _conditional(
    params: Params,
    cfg: DraftConfig,
    base: Array,
    scale: Array,
    anchor: Array,
    id_map: Array | None,
    width: int,
    normaliser: str,
    gate: Array | None,
) -> Candidates:
    w2 = params["path"]["w2"]
    parents = jnp.asarray(anchor, jnp.int32).reshape(1)  # target ids of the depth above
    belief = jnp.ones(
        (1,), jnp.float32
    )  # their probability given that the target follows a candidate
    tokens, tables = [], []
    for level in range(base.shape[0]):
        factors = None if gate is None else gate[level][None]
        features = parent_features(params, cfg, parents, factors) * scale  # [P, r]
        expected = belief[None] @ features
        if normaliser == "exact":
            rows = base[level][None] + linear(features, w2).astype(jnp.float32)  # [P, Vd]
            log_z = jax.nn.logsumexp(rows, -1)
            ranking = jax.nn.logsumexp(rows - log_z[:, None] + jnp.log(belief)[:, None], 0)
            _, chosen = _top_k(ranking, width)
            logp = rows[:, chosen] - log_z[:, None]
        else:
            mixed = base[level] + linear(expected, w2)[0].astype(jnp.float32)
            best, chosen = _top_k(mixed, width)
            # mass outside the candidates, in units of exp(best[0]): the same for all parents
            total = jnp.exp(mixed - best[0]).sum()
            tail = jnp.maximum(total - jnp.exp(best - best[0]).sum(), 1e-6 * total)
            rows = base[level][chosen][None] + (
                features @ take_rows(w2, chosen).astype(jnp.float32).T
            )  # [P, W]
            log_z = jnp.logaddexp(jax.nn.logsumexp(rows, -1), best[0] + jnp.log(tail))
            logp = rows - log_z[:, None]
        logp = jnp.minimum(logp, 0.0)
        tokens.append(_to_target(chosen, id_map))
        tables.append(jnp.broadcast_to(logp, (width, width)) if level == 0 else logp)
        belief = jax.nn.softmax(jax.nn.logsumexp(logp + jnp.log(belief)[:, None], 0))
        parents = tokens[-1]
    return Candidates(jnp.stack(tokens), jnp.stack(tables))
