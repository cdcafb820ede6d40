"""One tree from two drafters: the head's tree and the chains of prompt lookup under one budget."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from jetspec_jax.errors import ConfigError
from jetspec_jax.tree.lookup import Chains
from jetspec_jax.tree.topology import (
    BOTH,
    HEAD,
    LOOKUP,
    Tree,
    all_along_path,
    pad,
    root_only,
    settle,
    take,
)
from jetspec_jax.typing import Array

_NEVER = float("-inf")


def lookup_tree(chains: Chains, root_token: Array, budget: int, max_depth: Array | int) -> Tree:
    """The tree of the lookup chains alone; same guarantees as `merge`."""
    return merge(root_only(root_token), chains, budget, max_depth)


def merge(tree: Tree, chains: Chains, budget: int, max_depth: Array | int) -> Tree:
    """Merges lookup chains into a tree and keeps the `budget` best nodes.

    A path offered by both is one node (source BOTH) whose probability is that of "at least one is
    right", 1 - (1-p)(1-q): agreement is evidence. Paths shared by several chains are one node with
    the best of their scores. Scores never rise along a path, so the best nodes are closed under
    parents; they are sorted by score, then depth, then input order, so that every cut of the arrays
    is the best smaller tree.

    Args:
        tree: N slots, any builder, siblings distinct, scores falling along paths.
        chains: R chains of D tokens.
        budget: static slots of the result, root included.
        max_depth: traced scalar; deeper lookup nodes are dropped (the head's tree is already cut).

    Returns:
        A tree of `budget` slots with siblings distinct.

    Raises:
        ConfigError: budget below 1.
    """
    if budget < 1:
        raise ConfigError(f"tree budget {budget} has no room for the root; give at least 1")
    slots = tree.token.shape[0]
    branches, depth = chains.token.shape
    valid, path_score, owner = _chain_paths(chains, max_depth)
    home = _slots_on_chains(tree, chains.token, valid)  # [R, D], -1 where the tree lacks the path
    shared = home >= 0

    # Score of shared paths, then no higher than their parents' despite rounding.
    head = take(tree.score, jnp.maximum(home, 0))
    both = jnp.log(jnp.exp(head) + jnp.exp(path_score) - jnp.exp(head + path_score))
    both = jnp.maximum(jnp.maximum(head, path_score), both)
    score_rd = _running_min(jnp.where(shared, both, path_score))

    # All nodes in one list: the tree's slots, then every chain token. Each path is alive once.
    here = np.arange(slots, dtype=np.int32)
    lies_on = (home.reshape(-1)[None, :] == here[:, None]) & valid.reshape(-1)[None, :]
    boosted = jnp.max(jnp.where(lies_on, score_rd.reshape(-1)[None, :], _NEVER), axis=1)
    touched = boosted > _NEVER
    mine = np.arange(branches, dtype=np.int32)[:, None]
    alone = valid & ~shared & (owner == mine)
    node_id = jnp.where(
        shared, home, slots + owner * depth + np.arange(depth, dtype=np.int32)[None, :]
    )
    above = jnp.concatenate([jnp.zeros((branches, 1), jnp.int32), node_id[:, :-1]], axis=1)

    score = jnp.concatenate(
        [
            jnp.where(tree.valid, jnp.maximum(tree.score, boosted), _NEVER),
            jnp.where(alone, score_rd, _NEVER).reshape(-1),
        ]
    )
    levels = np.broadcast_to(np.arange(1, depth + 1, dtype=np.int32), (branches, depth))
    depths = jnp.concatenate([tree.depth, jnp.asarray(levels.reshape(-1))])
    parents = jnp.concatenate([jnp.maximum(tree.parent, 0), above.reshape(-1)])
    tokens = jnp.concatenate([tree.token, chains.token.reshape(-1)])
    blank = np.full((branches * depth,), -1, np.int32)
    ranks = jnp.concatenate([tree.rank, jnp.asarray(blank)])
    met = touched & (here > 0)
    merged_source = jnp.where(met & (tree.source == HEAD), BOTH, tree.source)
    sources = jnp.concatenate([merged_source, jnp.asarray(np.full_like(blank, LOOKUP))])

    # Place of every node in the result by counting who goes before: one fused compare instead of a
    # sort.
    score = settle(score)
    total = score.shape[0]
    index = np.arange(total, dtype=np.int32)
    tie = depths * total + index
    ahead = (score[None, :] > score[:, None]) | (
        (score[None, :] == score[:, None]) & (tie[None, :] < tie[:, None])
    )
    place = settle(jnp.sum(ahead, axis=1, dtype=jnp.int32))
    keep = min(budget, total)
    order = jnp.sum(
        jnp.where(place[None, :] == index[:keep, None], index[None, :], 0), axis=1, dtype=jnp.int32
    )
    kept_score = take(score, order)
    alive = kept_score > _NEVER
    result = Tree(
        token=jnp.where(alive, take(tokens, order), 0),
        parent=jnp.where(alive, take(place, take(parents, order)), 0) - np.int32(index[:keep] == 0),
        depth=jnp.where(alive, take(depths, order), 0),
        score=kept_score,
        rank=jnp.where(alive, take(ranks, order), -1),
        source=jnp.where(alive, take(sources, order), 0),
        valid=alive,
    )
    return pad(result, budget)


def _chain_paths(chains: Chains, max_depth: Array | int) -> tuple[Array, Array, Array]:
    """Validity, path score and owner (first chain with the same path): `[R, D]` each."""
    branches, depth = chains.token.shape
    upto = np.tril(np.ones((depth, depth), bool))  # [d, e]: e is on the path to d
    deep = np.arange(depth, dtype=np.int32) >= jnp.asarray(max_depth, jnp.int32)
    broken = ~chains.valid | deep[None, :]
    valid = ~jnp.any(broken[:, None, :] & upto[None], axis=2)
    usable = jnp.where(valid, jnp.minimum(chains.score, 0.0), 0.0)
    total = jnp.sum(jnp.where(upto[None], usable[:, None, :], 0.0), axis=2)
    differ = chains.token[:, None, :] != chains.token[None, :, :]
    same = ~jnp.any(differ[:, :, None, :] & upto[None, None], axis=3)  # [r, s, d]
    same = same & valid[:, None, :] & valid[None, :, :]
    score = jnp.max(jnp.where(same, total[None, :, :], _NEVER), axis=1)
    number = np.arange(branches, dtype=np.int32)
    owner = jnp.min(jnp.where(same, number[None, :, None], branches), axis=1)
    owner = jnp.minimum(owner, number[:, None])  # invalid tokens: themselves
    return valid, _running_min(score), owner


def _slots_on_chains(tree: Tree, token: Array, valid: Array) -> Array:
    """Slot of the tree that holds the path of each chain token, else -1: `[R, D]` int32."""
    slots = tree.token.shape[0]
    depth = token.shape[1]
    here = np.arange(slots, dtype=np.int32)
    at = jnp.clip(tree.depth - 1, 0, depth - 1)
    inside = tree.valid & (tree.depth <= depth)

    def lies_on(row: Array, ok: Array) -> Array:
        match = inside & (take(row, at) == tree.token) & take(ok, at)
        return all_along_path(match | (here == 0), tree.parent, min(depth, slots - 1))

    on_chain = jax.vmap(lies_on)(token, valid)  # [R, N]
    level = np.arange(1, depth + 1, dtype=np.int32)
    hit = on_chain[:, None, :] & (tree.depth[None, None, :] == level[None, :, None])
    return jnp.max(jnp.where(hit, here[None, None, :], -1), axis=2)


def _running_min(values: Array) -> Array:
    """Minimum so far along the last axis; exact in any order, unlike a sum."""
    depth = values.shape[-1]
    upto = np.tril(np.ones((depth, depth), bool))[None]
    return jnp.min(jnp.where(upto, values[:, None, :], jnp.inf), axis=2)
