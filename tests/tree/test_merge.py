"""Merging head trees with lookup chains, against a Python trie."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jetspec_jax.errors import ConfigError
from jetspec_jax.tree import (
    BOTH,
    HEAD,
    LOOKUP,
    Chains,
    lookup_tree,
    merge,
    oracle,
    prune,
    root_only,
)
from tests.tree.common import (
    as_candidates,
    assert_trees_equal,
    builder_program,
    check_shape_rules,
    random_table,
)

DEPTH, WIDTH, BRANCHES = 5, 3, 3


@functools.cache
def program(budget: int):
    return jax.jit(lambda tree, chains, depth: merge(tree, chains, budget, depth))


def random_chains(seed: int, tree, *, coarse: bool = False) -> Chains:
    """Chains that follow paths of the tree and each other for a while, then leave them."""
    rng = np.random.default_rng(seed)
    paths = oracle.paths_of(tree)
    rows: list[list[int]] = []
    for _ in range(BRANCHES):
        pool = paths + [tuple(row) for row in rows]
        path = list(pool[rng.integers(len(pool))])[: rng.integers(0, DEPTH + 1)]
        path += rng.integers(0, 12, DEPTH).tolist()
        rows.append(path[:DEPTH])
    lengths = rng.integers(0, DEPTH + 1, BRANCHES)
    valid = np.arange(DEPTH)[None] < lengths[:, None]
    score = -rng.integers(0, 3, valid.shape) if coarse else np.log(rng.uniform(0.1, 1, valid.shape))
    return Chains(
        token=jnp.asarray(np.where(valid, rows, 0), jnp.int32),
        score=jnp.asarray(np.where(valid, score, -np.inf), jnp.float32),
        valid=jnp.asarray(valid),
    )


def trie(tree, chains: Chains, max_depth: int) -> dict[tuple[int, ...], tuple[float, int]]:
    """Path -> (score, source) of every node either side offers."""
    scores = np.asarray(tree.score)[np.asarray(tree.valid)]
    head = dict(zip(oracle.paths_of(tree), scores.tolist(), strict=True))
    lookup: dict[tuple[int, ...], float] = {}
    for token, score, valid in zip(chains.token, chains.score, chains.valid, strict=True):
        total, path = 0.0, ()
        for level in range(DEPTH):
            if not bool(valid[level]) or level >= max_depth:
                break
            total += min(float(score[level]), 0.0)
            path = (*path, int(token[level]))
            lookup[path] = max(lookup.get(path, -np.inf), total)
    result = {}
    for path in head.keys() | lookup.keys():
        if path not in lookup:
            result[path] = (head[path], HEAD)
        elif path not in head:
            result[path] = (lookup[path], LOOKUP)
        else:
            p, q = np.exp(head[path]), np.exp(lookup[path])
            result[path] = (float(np.log(1 - (1 - p) * (1 - q))), BOTH)
    return result


@settings(max_examples=30)
@given(
    seed=st.integers(0, 2**31 - 1),
    budget=st.sampled_from((2, 12, 30)),
    max_depth=st.integers(0, DEPTH),
    builder=st.sampled_from(("exact", "accum_logp")),
    coarse=st.booleans(),
)
def test_merge_is_the_best_of_the_trie(seed, budget, max_depth, builder, coarse):
    tokens, logp = random_table(seed, DEPTH, WIDTH, coarse=coarse)
    tokens %= 12
    tree = builder_program(builder, 12)(as_candidates(tokens, logp), jnp.int32(max_depth))
    chains = random_chains(seed, tree, coarse=coarse)
    merged = program(budget)(tree, chains, jnp.int32(max_depth))
    check_shape_rules(merged)
    nodes = trie(tree, chains, max_depth)
    paths = oracle.paths_of(merged)
    assert len(paths) == min(budget, len(nodes))
    scores = np.asarray(merged.score)[np.asarray(merged.valid)]
    sources = np.asarray(merged.source)
    assert (np.diff(scores) <= 0).all()
    for slot, path in enumerate(paths):
        score, source = nodes[path]
        assert scores[slot] == pytest.approx(score, abs=1e-5)
        assert sources[slot] == (source if path else HEAD)
        assert (int(merged.rank[slot]) >= 0) == (bool(path) and source != LOOKUP)
    # The set is the best one: its total equals that of the best nodes of the trie.
    best = sorted((score for score, _ in nodes.values()), reverse=True)[: len(paths)]
    np.testing.assert_allclose(scores, best, atol=1e-5)
    ties = (np.diff(scores) == 0) & (np.diff(np.asarray(merged.depth)[: len(paths)]) < 0)
    assert not ties.any(), "equal scores must be ordered by depth"


def scripted():
    tree = oracle.tree_from_nodes(
        1, [(0, 10), (1, 20), (0, 11)], scores=list(np.log([0.6, 0.3, 0.2]))
    )
    rows = [[10, 20, 30], [10, 21, 0], [12, 0, 0]]
    valid = np.array([[1, 1, 1], [1, 1, 0], [1, 0, 0]], bool)
    score = np.where(valid, np.log(0.5), -np.inf)
    chains = Chains(
        token=jnp.asarray(rows, jnp.int32),
        score=jnp.asarray(score, jnp.float32),
        valid=jnp.asarray(valid),
    )
    return tree, chains


def test_duplicates_fold_and_agreement_raises_the_score():
    tree, chains = scripted()
    merged = program(10)(tree, chains, jnp.int32(3))
    check_shape_rules(merged)
    got = {
        path: (round(float(np.exp(merged.score[i])), 4), int(merged.source[i]))
        for i, path in enumerate(oracle.paths_of(merged))
    }
    assert got == {
        (): (1.0, HEAD),
        (10,): (0.8, BOTH),
        (12,): (0.5, LOOKUP),
        (10, 20): (0.475, BOTH),
        (10, 21): (0.25, LOOKUP),
        (11,): (0.2, HEAD),
        (10, 20, 30): (0.125, LOOKUP),
    }


def test_every_cut_is_the_smaller_merge():
    tree, chains = scripted()
    whole = program(10)(tree, chains, jnp.int32(3))
    for nodes in (1, 4):
        assert_trees_equal(prune(whole, nodes), program(nodes)(tree, chains, jnp.int32(3)))


def test_max_depth_drops_deep_lookup_nodes():
    tree, chains = scripted()
    deepest = [
        max(map(len, oracle.paths_of(program(10)(tree, chains, jnp.int32(bound)))))
        for bound in range(5)
    ]
    # The head's own nodes are cut by its builder, not here.
    assert deepest == [2, 2, 2, 3, 3]
    alone = root_only(jnp.int32(1))
    assert oracle.paths_of(program(10)(alone, chains, jnp.int32(0))) == [()]


def test_lookup_tree_is_the_trie_of_the_chains():
    _, chains = scripted()
    tree = jax.jit(lambda chains: lookup_tree(chains, jnp.int32(1), 10, 3))(chains)
    check_shape_rules(tree)
    assert oracle.paths_of(tree) == [(), (10,), (12,), (10, 20), (10, 21), (10, 20, 30)]
    assert int(tree.token[0]) == 1
    assert np.asarray(tree.source)[1:6].tolist() == [LOOKUP] * 5


def test_no_lookup_leaves_the_tree_as_it_was():
    tokens, logp = random_table(3, DEPTH, WIDTH)
    tree = builder_program("exact", 12)(as_candidates(tokens, logp), jnp.int32(DEPTH))
    nothing = Chains(
        token=jnp.zeros((2, DEPTH), jnp.int32),
        score=jnp.full((2, DEPTH), -jnp.inf),
        valid=jnp.zeros((2, DEPTH), bool),
    )
    assert_trees_equal(jax.jit(lambda t, c: merge(t, c, 12, DEPTH))(tree, nothing), tree)


def test_batch_by_vmap_equals_single():
    trees, rows = [], []
    for seed in range(3):
        tokens, logp = random_table(seed, DEPTH, WIDTH)
        trees.append(
            builder_program("exact", 12)(as_candidates(tokens % 12, logp), jnp.int32(DEPTH))
        )
        rows.append(random_chains(seed, trees[-1]))
    stack = lambda *leaves: jnp.stack(leaves)
    depths = jnp.asarray([5, 2, 0], jnp.int32)
    batch = jax.jit(jax.vmap(program(12)))(
        jax.tree.map(stack, *trees), jax.tree.map(stack, *rows), depths
    )
    for i in range(3):
        single = program(12)(trees[i], rows[i], depths[i])
        assert_trees_equal(jax.tree.map(lambda leaf, i=i: leaf[i], batch), single)


def test_budget_below_one_is_refused():
    with pytest.raises(ConfigError, match="budget 0"):
        merge(*scripted(), 0, 3)
