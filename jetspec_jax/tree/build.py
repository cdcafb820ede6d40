"""Tree builders: which nodes of the candidates are worth verifying (algorithm.md section 4).

A node's score is the sum of log-probabilities along its path. Scores only fall with depth, hence
the B best-scoring prefixes are closed under taking parents and form the best tree of B nodes.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from jetspec_jax.config import BUILDERS, SpecConfig
from jetspec_jax.errors import ConfigError
from jetspec_jax.tree.topology import Candidates, Tree, pad, root_only, settle, take
from jetspec_jax.typing import Array
from pallas_kernels import build_tree as kernels

_NEVER = float("-inf")


def build_tree(
    cands: Candidates,
    root_token: Array,
    *,
    builder: str,
    budget: int,
    max_depth: Array | int,
    spec: SpecConfig,
) -> Tree:
    """Builds the tree to verify in this round.

    Ties go to the lower depth, then the lower parent index, then the lower rank; same input, same
    tree. Cutting the arrays to n slots gives the tree of budget n, for every builder. Scores never
    rise along the array except for `accum_logp`, whose slots are in the published order of addition
    (a cut of a sorted all-children tree would not be an all-children tree).

    Args:
        cands: candidates of one sequence, tokens `[D, W]`, logp `[D, W, W]`.
        root_token: scalar int32, the last committed token.
        builder: exact | chain | accum_logp | top2gap | depth_rank_histogram.
        budget: static number of slots N, root included.
        max_depth: traced scalar; deeper nodes are invalid (end of the context).
        spec: parameters of `top2gap` and `depth_rank_histogram`.

    Returns:
        A tree of `budget` slots.

    Raises:
        ConfigError: unknown builder, budget below 1, or an acceptance table that does not fit.
    """
    if budget < 1:
        raise ConfigError(f"tree budget {budget} has no room for the root; give at least 1")
    depth, width = cands.tokens.shape
    if budget == 1 or depth == 0 or width == 0:
        return pad(root_only(root_token), budget)
    table = conditional_table(cands, max_depth)
    if builder == "exact":
        return _exact(cands.tokens, table, root_token, budget)
    if builder == "chain":
        return _chain(cands.tokens, table, root_token, budget)
    if builder == "accum_logp":
        return _all_children(cands.tokens, table, root_token, budget)
    if builder == "top2gap":
        table = _cap(table, top2gap_cap(table, spec.top2gap_beta, spec.top2gap_g0))
        return _exact(cands.tokens, table, root_token, budget)
    if builder == "depth_rank_histogram":
        cap = histogram_cap(spec.histogram, spec.histogram_threshold, depth, width)
        return _exact(cands.tokens, _cap(table, cap), root_token, budget)
    raise ConfigError(f"unknown tree builder {builder!r}; choose one of {', '.join(BUILDERS)}")


def build_exact(cands: Candidates, root_token: Array, *, budget: int, max_depth: Array) -> Tree:
    """The trees of `build_tree` with builder "exact" for a whole batch, by the op that makes them
    in one launch on a GPU (`pallas_kernels.build_tree`; elsewhere its slower reference runs).

    Args:
        cands: tokens `[B, D, W]`, logp `[B, D, W, W]`.
        root_token: [B] int32.
        budget: slots N of each tree.
        max_depth: [B] int32.

    Returns:
        Trees, leaves `[B, N]`.
    """
    table = jax.vmap(conditional_table)(cands, max_depth)
    found = kernels.build_tree(cands.tokens, table, root_token, budget)
    return Tree(
        **found._asdict(),
        source=jnp.zeros_like(found.token),
        valid=found.score > _NEVER,
    )


def conditional_table(cands: Candidates, max_depth: Array | int) -> Array:
    """`cands.logp` with everything that must not become a node at -inf: `[D, W, W]` float32, <= 0.

    Removes: missing tokens, depths past `max_depth`, NaN (a head that blew up drafts nothing; the
    target still decides every token) and repeats of a token within a depth, for siblings must
    differ (see `accept`).
    """
    depth, width = cands.tokens.shape
    later = np.tril(np.ones((width, width), bool), -1)  # [b, a]: a ranks before b
    same = cands.tokens[:, :, None] == cands.tokens[:, None, :]
    usable = (cands.tokens >= 0) & ~jnp.any(same & later[None], axis=2)
    usable &= (np.arange(depth) < jnp.asarray(max_depth, jnp.int32))[:, None]
    logp = cands.logp.astype(jnp.float32)
    # Positive zero for 0 and -0: top_k orders by bits, where -0 < 0.
    logp = jnp.where(logp < 0, logp, jnp.where(logp >= 0, 0.0, _NEVER))
    return settle(jnp.where(usable[:, None, :], logp, _NEVER))


def top2gap_cap(table: Array, beta: float, g0: float) -> Array:
    """Children kept per parent, max(1, round(W sigmoid(-beta (gap - g0)))): `[D, W]` int32.

    `gap` is the distance in nats between the two best children. With repeated rows (no path head)
    this is the published cap per depth; with a path head every parent has its own.
    """
    width = table.shape[-1]
    best = jnp.max(table, axis=-1)
    first = jnp.argmax(table, axis=-1).astype(jnp.int32)
    rest = jnp.where(
        np.arange(width, dtype=np.int32)[None, None] == first[..., None], _NEVER, table
    )
    second = jnp.max(rest, axis=-1)
    gap = jnp.where(second > _NEVER, best - second, jnp.inf)  # one child only: cap 1
    return jnp.maximum(jnp.round(width * jax.nn.sigmoid(-beta * (gap - g0))), 1.0).astype(jnp.int32)


def histogram_cap(
    histogram: tuple[tuple[float, ...], ...] | None, threshold: float, depth: int, width: int
) -> np.ndarray:
    """Children kept per depth: up to the last rank that a recorded table puts at `threshold`.

    Args:
        histogram: depth x rank, share of rounds whose accepted node at that depth had that rank.
            Depths past the table use its last row.
        threshold: share below which a rank is not worth a node.
        depth: D.
        width: W.

    Returns:
        `[D, W]` int32 (equal along the parents), at least 1.

    Raises:
        ConfigError: no table, or ragged or empty rows.
    """
    if not histogram or len({len(row) for row in histogram}) != 1 or not histogram[0]:
        raise ConfigError(
            "SpecConfig.histogram is missing or ragged; give rows of equal length, one per depth"
        )
    rows = np.asarray(histogram, np.float64)[np.minimum(np.arange(depth), len(histogram) - 1)]
    last = np.where(rows >= threshold, np.arange(1, rows.shape[1] + 1), 1).max(axis=1)
    return np.broadcast_to(np.minimum(last, width)[:, None], (depth, width)).astype(np.int32)


def _cap(table: Array, cap: Array | np.ndarray) -> Array:
    """Drops the children past the `cap` best of each parent (ties: lower rank first)."""
    width = table.shape[-1]
    later = np.tril(np.ones((width, width), bool), -1)[None, None]
    mine, other = table[..., :, None], table[..., None, :]
    place = jnp.sum((other > mine) | ((other == mine) & later), axis=-1, dtype=jnp.int32)
    return settle(jnp.where(place < jnp.asarray(cap)[..., None], table, _NEVER))


def _frontiers(table: Array, nodes: int) -> tuple[Array, Array, Array, np.ndarray]:
    """The best nodes of each depth: enough of them to hold the `nodes` best below the root.

    A node at depth d brings d-1 ancestors along, so at most nodes-d+1 of that depth are ever
    chosen.

    Returns:
        score, rank, parent `[M]` over all depths, shallow first, best first within a depth (the
        order that makes a stable top-k break ties as documented); parent is an index into the same
        arrays, -1 below the root. And the depth of each, `[M]`, known at trace time.
    """
    depth, width, _ = table.shape
    scores, ranks, parents, depths = [], [], [], []
    score = table[0, 0]
    score, rank = jax.lax.top_k(score, min(width, nodes))
    parent = jnp.full(rank.shape, -1, jnp.int32)
    start = 0
    for level in range(min(depth, nodes)):
        if level:
            child = score[:, None] + take(table[level], rank)
            keep = min(child.size, nodes - level)
            score, index = jax.lax.top_k(child.reshape(-1), keep)
            parent, rank = start + index // width, index % width
            start += child.shape[0]
        scores.append(score)
        ranks.append(rank)
        parents.append(parent)
        depths.append(np.full(score.shape, level + 1, np.int32))
    return (
        jnp.concatenate(scores),
        jnp.concatenate(ranks),
        jnp.concatenate(parents),
        np.concatenate(depths),
    )


def _exact(tokens: Array, table: Array, root_token: Array, budget: int) -> Tree:
    """The `budget` best prefixes: top-k per depth, then top-k over depths."""
    all_score, all_rank, all_parent, all_depth = _frontiers(table, budget - 1)
    score, index = jax.lax.top_k(all_score, min(budget - 1, all_depth.size))
    rank = take(all_rank, index)
    depth = take(jnp.asarray(all_depth), index)
    wanted = take(all_parent, index)
    # Slot of the parent: the one chosen node whose index it is. One compare beats a scatter on CPU.
    slots = np.arange(1, index.shape[0] + 1, dtype=np.int32)
    parent = jnp.sum(
        jnp.where(wanted[:, None] == index[None, :], slots[None, :], 0), axis=1, dtype=jnp.int32
    )
    return _assemble(tokens, root_token, budget, score, rank, depth, parent)


def _chain(tokens: Array, table: Array, root_token: Array, budget: int) -> Tree:
    """One path: at each depth the best child of the node before, as a greedy chain drafter."""
    depth = min(tokens.shape[0], budget - 1)
    # The best child of every possible parent at once; then only the walk is sequential.
    best = jnp.max(table[:depth], axis=-1)
    child = jnp.argmax(table[:depth], axis=-1).astype(jnp.int32)
    ranks, scores = [child[0, 0]], [best[0, 0]]
    for level in range(1, depth):
        scores.append(scores[-1] + take(best[level], ranks[-1]))
        ranks.append(take(child[level], ranks[-1]))
    levels = jnp.arange(depth, dtype=jnp.int32)
    return _assemble(
        tokens, root_token, budget, jnp.stack(scores), jnp.stack(ranks), levels + 1, levels
    )


def _all_children(tokens: Array, table: Array, root_token: Array, budget: int) -> Tree:
    """The published builder: pop the best node, add all of its W children, until full.

    The nodes popped are, in order, the best prefixes that can have children: an exact tree one
    depth shallower. A last pop that does not fit adds its children of lowest rank. Assumes W
    candidates at every depth, as the published builder; missing candidates leave slots invalid at
    the end instead.
    """
    depth, width, _ = table.shape
    pops = -(-(budget - 1) // width)
    # Only nodes that can have children are popped to any effect.
    fertile = jnp.max(table[1:], axis=-1) > _NEVER
    shallow = jnp.where(fertile[:, None, :], table[:-1], _NEVER)
    if pops == 1 or depth == 1:
        popped = pad(root_only(root_token), pops)
    else:
        popped = _exact(tokens, shallow, root_token, pops)
    below = table.reshape(depth * width, width)
    child = popped.score[:, None] + take(below, popped.depth * width + jnp.maximum(popped.rank, 0))
    count = min(budget - 1, pops * width)
    score = child.reshape(-1)[:count]
    which = np.arange(count, dtype=np.int32)
    parent_at = which // width  # position among the popped nodes
    # A popped node is itself child number `rank` of an earlier popped node.
    slot = jnp.where(np.arange(pops) == 0, 0, popped.parent * width + popped.rank + 1)
    return _assemble(
        tokens,
        root_token,
        budget,
        score,
        jnp.asarray(which % width),
        take(popped.depth, parent_at) + 1,
        take(slot, parent_at),
    )


def _assemble(
    tokens: Array,
    root_token: Array,
    budget: int,
    score: Array,
    rank: Array,
    depth: Array,
    parent: Array,
) -> Tree:
    """Puts the root before the chosen nodes, blanks the invalid ones and pads to `budget` slots."""
    width = tokens.shape[1]
    valid = score > _NEVER
    token = take(tokens.reshape(-1), (depth - 1) * width + rank)
    root = root_only(root_token)

    def join(first: Array, rest: Array, blank: int | float) -> Array:
        rest = jnp.where(valid, rest, jnp.asarray(blank, rest.dtype))
        return jnp.concatenate([first, rest])

    tree = Tree(
        token=join(root.token, token.astype(jnp.int32), 0),
        parent=join(root.parent, parent.astype(jnp.int32), 0),
        depth=join(root.depth, depth.astype(jnp.int32), 0),
        score=join(root.score, score, _NEVER),
        rank=join(root.rank, rank.astype(jnp.int32), -1),
        source=jnp.zeros((score.shape[0] + 1,), jnp.int32),
        valid=jnp.concatenate([root.valid, valid]),
    )
    return pad(tree, budget)
