"""Slow, plain versions of the tree functions: what the fast ones are tested against.

Also the constructors of scripted trees (`tree_from_paths`, `tree_from_nodes`).
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np

from jetspec_jax.errors import ConfigError
from jetspec_jax.tree.topology import HEAD, Tree

Path = tuple[int, ...]  # ranks (or tokens) from depth 1 down


def best_prefixes(
    tokens: np.ndarray, logp: np.ndarray, budget: int, max_depth: int | None = None
) -> list[tuple[Path, float]]:
    """The best `budget` prefixes by a heap (pop the best, push its children), best first.

    Args:
        tokens: `[D, W]`, -1 is no candidate.
        logp: `[D, W, W]` conditional log-probabilities.
        budget: nodes, the root (empty path, score 0) included.
        max_depth: longest path; None: D.

    Returns:
        At most `budget` pairs; ties by depth, then by the place of the parent, then by rank.
    """
    depth, width = tokens.shape
    bound = depth if max_depth is None else min(depth, max_depth)
    heap: list[tuple[float, int, int, int, Path]] = [(0.0, 0, -1, -1, ())]
    chosen: list[tuple[Path, float]] = []
    while heap and len(chosen) < budget:
        negative, level, _, rank, path = heapq.heappop(heap)
        place = len(chosen)
        chosen.append((path, -negative))
        if level >= bound:
            continue
        row = logp[level, max(rank, 0)]
        for child in range(width):
            score = np.float32(-negative) + np.float32(row[child])
            if tokens[level, child] >= 0 and np.isfinite(score):
                heapq.heappush(heap, (-float(score), level + 1, place, child, (*path, child)))
    return chosen


def all_children(
    tokens: np.ndarray, logp: np.ndarray, budget: int, max_depth: int | None = None
) -> list[tuple[Path, float]]:
    """The published builder: pop the best node, add all of its children, until `budget` nodes.

    Same arguments as `best_prefixes`; nodes in order of addition.
    """
    depth, width = tokens.shape
    bound = depth if max_depth is None else min(depth, max_depth)
    nodes: list[tuple[Path, float]] = [((), 0.0)]
    heap: list[tuple[float, int, int]] = [(0.0, 0, 0)]
    while heap and len(nodes) < budget:
        negative, level, at = heapq.heappop(heap)
        path = nodes[at][0]
        if level >= bound:
            continue
        row = logp[level, path[-1] if path else 0]
        for child in range(width):
            if len(nodes) == budget:
                break
            score = np.float32(-negative) + np.float32(row[child])
            if tokens[level, child] >= 0 and np.isfinite(score):
                nodes.append(((*path, child), float(score)))
                heapq.heappush(heap, (-float(score), level + 1, len(nodes) - 1))
    return nodes


def expected_commit_length(nodes: Sequence[tuple[Path, float]]) -> float:
    """Tokens a round commits on average if the scores are true: sum of path probabilities, the
    root's 1 standing for the bonus token."""
    return float(sum(np.exp(score) for _, score in nodes))


def walk(
    token: Sequence[int], parent: Sequence[int], valid: Sequence[bool], choice: Sequence[int]
) -> list[int]:
    """Slots accepted by a plain walk from the root, root included."""
    path = [0]
    while True:
        below = [
            i
            for i in range(1, len(token))
            if valid[i] and parent[i] == path[-1] and token[i] == choice[path[-1]]
        ]
        if not below:
            return path
        path.append(below[0])


def tree_from_nodes(
    root_token: int,
    nodes: Sequence[tuple[int, int]],
    *,
    budget: int | None = None,
    scores: Sequence[float] | None = None,
) -> Tree:
    """A scripted tree with its slots in the order given (siblings may lie far apart in memory).

    Args:
        root_token: token of slot 0.
        nodes: (parent slot, token) of slots 1, 2, ...; parents come first.
        budget: slots of the tree; None: as many as nodes.
        scores: path scores of the nodes; None: minus the slot number.

    Returns:
        The tree, as device arrays.

    Raises:
        ConfigError: a parent that does not come before its child, repeated siblings, or too many
            nodes.
    """
    used = len(nodes) + 1
    slots = used if budget is None else budget
    if used > slots:
        raise ConfigError(f"{used} nodes do not fit a tree of {slots} slots; raise the budget")
    if len(set(nodes)) != len(nodes):
        raise ConfigError(f"scripted tree {list(nodes)} repeats a sibling; give distinct tokens")
    token, parent, depth = ([0] * slots for _ in range(3))
    score = [float("-inf")] * slots
    rank = [-1] * slots
    token[0], parent[0], score[0] = root_token, -1, 0.0
    children = [0] * slots
    for slot, (above, value) in enumerate(nodes, 1):
        if not 0 <= above < slot:
            raise ConfigError(
                f"node {slot} names parent {above}; parents must come before children"
            )
        token[slot], parent[slot], depth[slot] = value, above, depth[above] + 1
        score[slot] = -float(slot) if scores is None else float(scores[slot - 1])
        rank[slot] = children[above]
        children[above] += 1
    return Tree(
        token=jnp.asarray(token, jnp.int32),
        parent=jnp.asarray(parent, jnp.int32),
        depth=jnp.asarray(depth, jnp.int32),
        score=jnp.asarray(score, jnp.float32),
        rank=jnp.asarray(rank, jnp.int32),
        source=jnp.full((slots,), HEAD, jnp.int32),
        valid=jnp.asarray([i < used for i in range(slots)]),
    )


def tree_from_paths(
    root_token: int, paths: Sequence[Sequence[int]], *, budget: int | None = None
) -> Tree:
    """A scripted tree holding the given token paths, shared prefixes once, breadth first.

    Args:
        root_token: token of the root.
        paths: tokens from depth 1 down. Within a depth, nodes lie in order of first appearance.
        budget: slots of the tree; None: as many as nodes.
    """
    slot: dict[Path, int] = {(): 0}
    nodes: list[tuple[int, int]] = []
    for level in range(max((len(path) for path in paths), default=0)):
        for path in paths:
            prefix = tuple(path[: level + 1])
            if len(path) > level and prefix not in slot:
                slot[prefix] = len(nodes) + 1
                nodes.append((slot[prefix[:-1]], prefix[-1]))
    return tree_from_nodes(root_token, nodes, budget=budget)


def paths_of(tree: Tree, by: str = "token") -> list[Path]:
    """Path of every valid slot in slot order, as tokens or (`by="rank"`) ranks; the root is ()."""
    value, parent, valid = (np.asarray(x) for x in (getattr(tree, by), tree.parent, tree.valid))
    paths: dict[int, Path] = {0: ()}
    for slot in range(1, len(valid)):
        if valid[slot]:
            paths[slot] = (*paths[int(parent[slot])], int(value[slot]))
    return [paths[slot] for slot in sorted(paths)]
