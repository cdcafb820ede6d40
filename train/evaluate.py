"""Held-out evaluation by simulation: rounds at given anchors of answers the target wrote itself.

At an anchor the target's choices are the tokens that follow, so the accepted length of a chain or
tree is known without running the target. Only whole blocks count (the text reaches past every
depth): rounds near the end are cut by it.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jetspec_jax.config import DraftConfig, SpecConfig
from jetspec_jax.drafter import candidates, conditional_logits
from jetspec_jax.numerics import dot
from jetspec_jax.tree import accept, build_tree, prune
from jetspec_jax.typing import Array, Params
from train.losses import LossConfig, LossParts, block_loss, finish
from train.step import Batch, Frozen, block_hidden, slot_targets

BUDGETS = (4, 8, 16)
WIDTH = 8


def tree_lengths(
    params: Params,
    cfg: DraftConfig,
    logits: Array,
    anchor: Array,
    labels: Array,
    id_map: Array | None,
    budgets: tuple[int, ...] = BUDGETS,
    *,
    width: int = WIDTH,
    builder: str = "exact",
    normaliser: str = "tail",
) -> Array:
    """Accepted tokens of one round for each budget, [len(budgets)] int32.

    Args:
        logits: [D, Vd] float32, without path conditioning.
        anchor: scalar int32; labels: [D] int32, the target's following tokens (target ids), -1
            where unknown.
        budgets: ascending tree sizes, root included.
    """
    cands = candidates(params, cfg, logits, anchor, id_map, width, normaliser=normaliser)
    tree = build_tree(
        cands,
        anchor,
        builder=builder,
        budget=budgets[-1],
        max_depth=cfg.depth,
        spec=SpecConfig(width=width),
    )
    after = jnp.concatenate([labels, jnp.full((1,), -2, jnp.int32)])
    out = []
    for budget in budgets:
        cut = prune(tree, budget)
        out.append(accept(cut, after[cut.depth], depth=cfg.depth).accepted)
    return jnp.stack(out)


def _evaluate_batch(
    params: Params,
    batch: Batch,
    frozen: Frozen,
    id_map: Array | None,
    *,
    cfg: DraftConfig,
    loss: LossConfig,
    dtype: Any,
) -> tuple[LossParts, Array]:
    hidden = block_hidden(params, cfg, frozen, batch, dtype)
    label, inside, parent, _ = slot_targets(cfg, frozen, batch)
    blocks = hidden.shape[0] * hidden.shape[1]
    hidden, label, inside, parent = (
        x.reshape(blocks, *x.shape[2:]) for x in (hidden, label, inside, parent)
    )
    anchor = jnp.take_along_axis(batch.tokens, batch.anchors, 1).reshape(-1)
    last = batch.tokens.shape[1] - 1
    where = jnp.clip(
        batch.anchors[..., None] + 1 + jnp.arange(cfg.depth, dtype=jnp.int32)[None, None], 0, last
    )
    following = jnp.take_along_axis(batch.tokens, where.reshape(where.shape[0], -1), 1).reshape(
        blocks, -1
    )
    following = jnp.where(inside, following, -1)

    def one(args: tuple[Array, ...]) -> tuple[LossParts, Array]:
        h, lab, ins, par, root, follow = args
        base = dot(h, frozen.head, dtype).astype(jnp.float32)
        logits = conditional_logits(params, cfg, base, par)
        parts = block_loss(logits[None], lab[None], ins[None], LossConfig(ce=1.0, kl=0.0))
        return parts, tree_lengths(params, cfg, base, root, follow, id_map)

    parts, lengths = jax.lax.map(one, (hidden, label, inside, parent, anchor, following))
    whole = inside.all(1)
    total = jnp.where(whole[:, None], lengths, 0).sum(0)
    return jax.tree.map(lambda x: x.sum(0), parts), total


def make_evaluator(cfg: DraftConfig, loss: LossConfig, dtype: Any) -> Any:
    """Jitted batch evaluation: (params, batch, frozen, id_map) -> summed parts and accepted tokens
    per budget."""
    return jax.jit(functools.partial(_evaluate_batch, cfg=cfg, loss=loss, dtype=dtype))


def evaluate(
    evaluator: Any,
    params: Params,
    batches: Iterable[Batch],
    frozen: Frozen,
    id_map: np.ndarray | None,
) -> dict[str, Any]:
    """Metrics over held-out batches: ce, agreement per depth, chain_tau, tree_tau per budget,
    blocks."""
    ids = None if id_map is None else jnp.asarray(id_map)
    parts, lengths = None, np.zeros(len(BUDGETS))
    for batch in batches:
        new, total = evaluator(params, batch, frozen, ids)
        parts = new if parts is None else jax.tree.map(jnp.add, parts, new)
        lengths += np.asarray(total)
    if parts is None:
        return {"blocks": 0}
    done = finish(parts)
    blocks = float(parts.blocks)
    return {
        "blocks": int(blocks),
        "ce": float(done["loss"]),
        "agreement": [round(float(x), 4) for x in done["agreement"]],
        "chain_tau": round(float(done["chain_tau"]), 4),
        "tree_tau": {
            str(b): round(1 + float(n) / max(blocks, 1), 4)
            for b, n in zip(BUDGETS, lengths, strict=True)
        },
    }
