"""Held-out evaluation by simulation: rounds at given anchors of answers the target wrote itself.

    python -m train.evaluate --draft runs/x/best --data .cache/regen/smollm2 --out report/

At an anchor the target's choices are the tokens that follow, so the accepted length of a chain or
tree is known without running the target. Only whole blocks count (the text reaches past every
depth): rounds near the end are cut by it.

Two means are reported. `tree_tau` is over anchors spread evenly: cheap, what training watches.
`walk_tau` follows the rounds that decoding would make, each starting where the last one ended: it
is the tau of the serving path with the same head, builder and budget (tests compare them).
"""

from __future__ import annotations

import argparse
import functools
import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from jetspec_jax.config import DraftConfig, SpecConfig
from jetspec_jax.drafter import candidates, conditional_logits, load_draft, path_gate
from jetspec_jax.errors import ConfigError
from jetspec_jax.models import decoder
from jetspec_jax.numerics import dot
from jetspec_jax.tree import accept, build_tree, prune
from jetspec_jax.tree.topology import Tree
from jetspec_jax.typing import Array, Params
from jetspec_jax.weights import bundled_model_path, load_params, open_source
from train.cli import make_folder, run_command
from train.config import DataConfig
from train.data import Sample, assemble, held_out_batches, load_dataset
from train.features import feature_function
from train.head_setup import frozen_of
from train.losses import LossConfig, LossParts, block_loss, finish
from train.step import Batch, Frozen, block_hidden, slot_targets

BUDGETS = (4, 8, 12, 16, 64)
WIDTH = 8
BINS = 10  # of the predicted probability that a node is accepted


@flax.struct.dataclass
class Rounds:
    """What one drafted round at each of N anchors would give.

    Attributes:
        accepted: [N, budgets] int32 accepted tokens.
        rank: [N, D] int32, rank among its depth's candidates of the accepted node of the largest
            tree, -1 where none was accepted.
        predicted, hit, count: [N, BINS] float32 over the nodes of the largest tree: sum of the
            predicted probability exp(score), nodes accepted, nodes.
        whole: [N] bool, the text reaches past every depth.
    """

    accepted: Array
    rank: Array
    predicted: Array
    hit: Array
    count: Array
    whole: Array


def simulate_round(
    params: Params,
    cfg: DraftConfig,
    logits: Array,
    anchor: Array,
    labels: Array,
    id_map: Array | None,
    gate: Array | None,
    budgets: tuple[int, ...] = BUDGETS,
    *,
    width: int = WIDTH,
    builder: str = "exact",
    normaliser: str = "tail",
) -> dict[str, Array]:
    """One round: fields of `Rounds` without N and `whole`.

    Args:
        logits: [D, Vd] float32, without path conditioning.
        anchor: scalar int32; labels: [D] int32, the target's following tokens (target ids), -1
            where unknown.
        gate: [D, r] from `path_gate`, or None.
        budgets: ascending tree sizes, root included.
    """
    cands = candidates(params, cfg, logits, anchor, id_map, width, gate=gate, normaliser=normaliser)
    after = jnp.concatenate([labels, jnp.full((1,), -2, jnp.int32)])

    def grow(budget: int) -> Tree:
        return build_tree(
            cands,
            anchor,
            builder=builder,
            budget=budget,
            max_depth=cfg.depth,
            spec=SpecConfig(width=width),
        )

    tree = grow(budgets[-1])
    out = []
    for budget in budgets[:-1]:
        # only the exact tree holds all smaller ones as its first nodes
        cut = prune(tree, budget) if builder == "exact" else grow(budget)
        out.append(accept(cut, after[cut.depth], depth=cfg.depth).accepted)
    walk = accept(tree, after[tree.depth], depth=cfg.depth)
    out.append(walk.accepted)
    level = jnp.arange(1, cfg.depth + 1, dtype=jnp.int32)
    on_path = jnp.zeros(tree.token.shape, bool).at[walk.path].set(True)
    drafted = tree.valid & (tree.depth > 0)
    chance = jnp.where(drafted, jnp.exp(tree.score), 0.0)
    bins = jnp.clip((chance * BINS).astype(jnp.int32), 0, BINS - 1)
    member = (bins[:, None] == jnp.arange(BINS, dtype=jnp.int32)[None]) & drafted[:, None]
    return {
        "accepted": jnp.stack(out),
        "rank": jnp.where(level <= walk.accepted, tree.rank[walk.path[1:]], -1),
        "predicted": jnp.where(member, chance[:, None], 0.0).sum(0),
        "hit": (member & on_path[:, None]).astype(jnp.float32).sum(0),
        "count": member.astype(jnp.float32).sum(0),
    }


def _evaluate_batch(
    params: Params,
    batch: Batch,
    frozen: Frozen,
    id_map: Array | None,
    *,
    cfg: DraftConfig,
    dtype: Any,
    builder: str,
) -> tuple[LossParts, Rounds]:
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

    def one(args: tuple[Array, ...]) -> tuple[LossParts, dict[str, Array]]:
        h, lab, ins, par, root, follow = args
        base = dot(h, frozen.head, dtype).astype(jnp.float32)
        gate = path_gate(params, cfg, h.astype(jnp.float32))
        logits = conditional_logits(params, cfg, base, par, gate)
        parts = block_loss(logits[None], lab[None], ins[None], LossConfig(ce=1.0, kl=0.0))
        return parts, simulate_round(params, cfg, base, root, follow, id_map, gate, builder=builder)

    parts, rounds = jax.lax.map(one, (hidden, label, inside, parent, anchor, following))
    return jax.tree.map(lambda x: x.sum(0), parts), Rounds(whole=inside.all(1), **rounds)


def make_evaluator(cfg: DraftConfig, dtype: Any, builder: str = "exact") -> Any:
    """Jitted batch evaluation: (params, batch, frozen, id_map) -> summed parts and `Rounds`."""
    return jax.jit(functools.partial(_evaluate_batch, cfg=cfg, dtype=dtype, builder=builder))


def _pick(x: Array, mask: np.ndarray) -> np.ndarray:
    return np.asarray(x)[mask]


def _tau_table(accepted: np.ndarray) -> dict[str, float]:
    """Mean accepted tokens + 1 by budget."""
    means = accepted.mean(0) if len(accepted) else np.zeros(len(BUDGETS))
    return {str(b): round(1 + float(n), 4) for b, n in zip(BUDGETS, means, strict=True)}


def evaluate(
    evaluator: Any,
    params: Params,
    batches: Iterable[Batch],
    frozen: Frozen,
    id_map: np.ndarray | None,
) -> dict[str, Any]:
    """Metrics over batches of anchors.

    Returns:
        ce, agreement (per depth, given the right path above), chain_tau, tree_tau per budget,
        blocks, acceptance (per depth, largest budget), rank_histogram (depth x rank, share of
        rounds; what the builder `depth_rank_histogram` takes), calibration (mean predicted
        probability, share accepted and nodes per bin) and ece (expected calibration error).
    """
    ids = None if id_map is None else jnp.asarray(id_map)
    parts, found = None, []
    for batch in batches:
        new, rounds = evaluator(params, batch, frozen, ids)
        parts = new if parts is None else jax.tree.map(jnp.add, parts, new)
        whole = np.asarray(rounds.whole)
        found.append(jax.tree.map(functools.partial(_pick, mask=whole), rounds))
    if parts is None or not sum(len(r.whole) for r in found):
        return {"blocks": 0}
    rounds = jax.tree.map(lambda *xs: np.concatenate(xs), *found)
    done = finish(parts)
    blocks = len(rounds.whole)
    histogram = np.stack([(rounds.rank == w).mean(0) for w in range(WIDTH)], 1)
    count = rounds.count.sum(0)
    used = np.maximum(count, 1)
    predicted, hit = rounds.predicted.sum(0) / used, rounds.hit.sum(0) / used
    return {
        "blocks": blocks,
        "ce": float(done["loss"]),
        "agreement": [round(float(x), 4) for x in done["agreement"]],
        "chain_tau": round(float(done["chain_tau"]), 4),
        "tree_tau": _tau_table(rounds.accepted),
        "acceptance": [round(float(x), 4) for x in (rounds.rank >= 0).mean(0)],
        "rank_histogram": [[round(float(x), 4) for x in row] for row in histogram],
        "calibration": [
            [round(float(p), 4), round(float(h), 4), int(n)]
            for p, h, n in zip(predicted, hit, count, strict=True)
        ],
        "ece": round(float((np.abs(predicted - hit) * count).sum() / max(count.sum(), 1)), 4),
    }


def walk(accepted: np.ndarray, whole: np.ndarray) -> tuple[int, int]:
    """Tokens and rounds of decoding: from the first anchor, each round commits accepted + 1.

    Args:
        accepted: [P] accepted tokens of the round at each of the following positions.
        whole: [P] bool; the walk ends at the first round that the text cuts.
    """
    at = tokens = rounds = 0
    while at < len(accepted) and whole[at]:
        step = int(accepted[at]) + 1
        at, tokens, rounds = at + step, tokens + step, rounds + 1
    return tokens, rounds


def walk_tau(
    evaluator: Any,
    params: Params,
    samples: Sequence[Sample],
    to_batch: Any,
    frozen: Frozen,
    id_map: np.ndarray | None,
    anchors: int = 64,
) -> dict[str, float]:
    """Tau of decoding each sample's answers, pooled over rounds, by budget."""
    ids = None if id_map is None else jnp.asarray(id_map)
    totals = np.zeros((len(BUDGETS), 2))
    for sample, (first, stop) in ((s, span) for s in samples for span in s.spans):
        where = np.arange(first - 1, stop - 1, dtype=np.int32)
        accepted, whole = [], []
        for start in range(0, len(where), anchors):
            part = where[start : start + anchors]
            valid = np.arange(anchors) < len(part)
            arrays = assemble([sample], [(np.resize(part, anchors), valid)], 128)
            _, rounds = evaluator(params, to_batch(arrays), frozen, ids)
            accepted.append(np.asarray(rounds.accepted)[: len(part)])
            whole.append(np.asarray(rounds.whole)[: len(part)])
        every, complete = np.concatenate(accepted), np.concatenate(whole)
        totals += [walk(every[:, i], complete) for i in range(len(BUDGETS))]
    return {
        str(b): round(float(t / max(r, 1)), 4) for b, (t, r) in zip(BUDGETS, totals, strict=True)
    }


def plot_calibration(result: dict[str, Any], path: Path) -> None:
    """Reliability of the path probabilities: predicted against accepted, size by nodes."""
    from matplotlib.figure import Figure

    rows = [r for r in result["calibration"] if r[2]]
    figure = Figure(figsize=(4.6, 4.2), layout="constrained")
    axes = figure.subplots()
    axes.plot([0, 1], [0, 1], color="#9ca3af", linewidth=1)
    sizes = [12 + 120 * n / max(r[2] for r in rows) for _, _, n in rows]
    axes.scatter([r[0] for r in rows], [r[1] for r in rows], s=sizes, color="#2563eb")
    axes.set_xlabel("probability of the path, by the draft head")
    axes.set_ylabel("share of nodes accepted")
    axes.set_title(f"{result['blocks']} rounds, calibration error {result['ece']:.3f}", fontsize=10)
    figure.savefig(path)


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Evaluates a head on a data folder."""
    for name in ("limit", "anchors", "sequences"):
        if getattr(args, name) < 1:
            raise ConfigError(f"--{name} {getattr(args, name)} is too small; give at least 1")
    if not 0 < args.held_out < 1:
        raise ConfigError(f"--held-out {args.held_out} is no share; give a number between 0 and 1")
    source = open_source(args.model or bundled_model_path())
    target = source.config()
    head = load_draft(args.draft, target)
    share = 1.0 - 1e-9 if args.part == "all" else args.held_out
    cfg = DataConfig(path=args.data, held_out=share, sequences=args.sequences)
    data = load_dataset(cfg, allow_empty=True)
    ids = data.target_layer_ids
    if ids is not None and tuple(ids) != tuple(head.config.target_layer_ids):
        raise ConfigError(
            f"{args.data} holds layers {list(ids)}, the head reads "
            f"{list(head.config.target_layer_ids)}; regenerate the data with --taps"
        )
    target_params = load_params(source, decoder.declare(target))
    dtype = jnp.dtype(args.precision)
    frozen = frozen_of(target_params, target.vocab_size, head.id_map, dtype)
    features = feature_function(target_params, target, head.config.target_layer_ids)

    def to_batch(arrays: dict[str, np.ndarray]) -> Batch:
        if not {"taps", "final"} <= arrays.keys():
            taps, final = features(arrays["tokens"])
            return Batch(**{**arrays, "taps": taps, "final": final})
        return Batch(**{k: jnp.asarray(v) for k, v in arrays.items()})

    evaluator = make_evaluator(head.config, dtype, args.builder)
    batches = held_out_batches(data, cfg, args.limit, args.anchors)
    result = evaluate(evaluator, head.params, map(to_batch, batches), frozen, head.id_map)
    if not result["blocks"]:
        raise ConfigError(
            f"{args.data}: no whole block in its {args.part} part; give more data or --part all"
        )
    if args.walk:
        chosen = data.held_out[: args.walk]
        result["walk_tau"] = walk_tau(evaluator, head.params, chosen, to_batch, frozen, head.id_map)
    result |= {"draft": str(args.draft), "data": str(args.data), "builder": args.builder}
    if args.out:
        out = Path(args.out)
        make_folder(out, "--out")
        (out / "evaluation.json").write_text(json.dumps(result, indent=1) + "\n")
        plot_calibration(result, out / "calibration.svg")
    return result


def main(argv: list[str] | None = None) -> int:
    """Command line; the last line of stdout is JSON."""
    p = argparse.ArgumentParser(
        prog="python -m train.evaluate", description=(__doc__ or "").splitlines()[0]
    )
    p.add_argument("--draft", required=True, help="head directory")
    p.add_argument("--data", required=True, help="data folder (train.regenerate)")
    p.add_argument("--model", help="target (default: bundled)")
    p.add_argument("--part", choices=("held-out", "all"), default="held-out")
    p.add_argument("--held-out", type=float, default=0.03, help="share, as in training")
    p.add_argument("--limit", type=int, default=64, help="sequences")
    p.add_argument("--anchors", type=int, default=16, help="rounds per sequence")
    p.add_argument("--sequences", type=int, default=4, help="per batch")
    p.add_argument("--walk", type=int, default=0, help="sequences to decode round by round")
    p.add_argument("--builder", default="exact", choices=("exact", "chain", "accum_logp"))
    p.add_argument("--precision", choices=("float32", "bfloat16"), default="bfloat16")
    p.add_argument("--out", help="folder for evaluation.json and calibration.svg")
    args = p.parse_intermixed_args(argv)
    return run_command(run, args)


if __name__ == "__main__":
    sys.exit(main())
