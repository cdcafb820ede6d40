"""Builders against the heap oracle; the rules every tree must satisfy; ties, cuts, batches,
edges."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jetspec_jax.config import BUILDERS, SpecConfig
from jetspec_jax.errors import ConfigError
from jetspec_jax.tree import build_tree, expected_commit, oracle, prune
from jetspec_jax.tree.build import conditional_table, histogram_cap, top2gap_cap
from tests.tree.common import (
    HISTOGRAM,
    ROOT,
    as_candidates,
    assert_trees_equal,
    builder_program,
    check_shape_rules,
    random_table,
)

DEPTH, WIDTH = 5, 4
BUDGETS = (2, 16, 40)
seeds = st.integers(0, 2**31 - 1)
fuzz = settings(max_examples=25)


def build(tokens, logp, builder="exact", budget=16, max_depth=DEPTH):
    return builder_program(builder, budget)(as_candidates(tokens, logp), jnp.int32(max_depth))


@fuzz
@given(
    seed=seeds,
    budget=st.sampled_from(BUDGETS),
    max_depth=st.integers(0, DEPTH),
    conditional=st.booleans(),
    coarse=st.booleans(),
    holes=st.booleans(),
)
def test_exact_is_the_heap_tree(seed, budget, max_depth, conditional, coarse, holes):
    tokens, logp = random_table(
        seed, DEPTH, WIDTH, conditional=conditional, coarse=coarse, holes=holes
    )
    tree = build(tokens, logp, budget=budget, max_depth=max_depth)
    check_shape_rules(tree)
    expected = oracle.best_prefixes(tokens, logp, budget, max_depth)
    # Same paths in the same slots, ties included.
    assert oracle.paths_of(tree, "rank") == [path for path, _ in expected]
    valid = np.asarray(tree.valid)
    np.testing.assert_array_equal(np.asarray(tree.score)[valid], [s for _, s in expected])
    tokens_of = [tuple(tokens[d, r] for d, r in enumerate(path)) for path, _ in expected]
    assert oracle.paths_of(tree) == tokens_of


@fuzz
@given(
    seed=seeds,
    budget=st.sampled_from(BUDGETS),
    max_depth=st.integers(0, DEPTH),
    coarse=st.booleans(),
)
def test_accum_logp_is_the_published_tree(seed, budget, max_depth, coarse):
    tokens, logp = random_table(seed, DEPTH, WIDTH, coarse=coarse)
    tree = build(tokens, logp, "accum_logp", budget, max_depth)
    check_shape_rules(tree)
    expected = oracle.all_children(tokens, logp, budget, max_depth)
    assert oracle.paths_of(tree, "rank") == [path for path, _ in expected]
    np.testing.assert_array_equal(
        np.asarray(tree.score)[np.asarray(tree.valid)], [s for _, s in expected]
    )


@fuzz
@given(seed=seeds, budget=st.sampled_from(BUDGETS), holes=st.booleans())
def test_exact_is_worth_at_least_every_other_builder(seed, budget, holes):
    tokens, logp = random_table(seed, DEPTH, WIDTH, holes=holes)
    best = float(expected_commit(build(tokens, logp, "exact", budget)))
    for builder in BUILDERS[1:]:
        tree = build(tokens, logp, builder, budget)
        check_shape_rules(tree)
        assert float(expected_commit(tree)) <= best * (1 + 1e-6), builder


@pytest.mark.parametrize("builder", BUILDERS)
@pytest.mark.parametrize("seed", [0, 1])
def test_every_cut_is_the_smaller_tree(builder, seed):
    tokens, logp = random_table(seed, DEPTH, WIDTH, coarse=bool(seed))
    whole = build(tokens, logp, builder, 40)
    if builder != "accum_logp":
        assert (np.diff(np.asarray(whole.score)[np.asarray(whole.valid)]) <= 0).all()
    for nodes in (1, 2, 16):
        assert_trees_equal(prune(whole, nodes), build(tokens, logp, builder, nodes))


def test_ties_go_to_lower_depth_then_parent_then_rank():
    tokens, _ = random_table(0, 2, 2)
    logp = np.zeros((2, 2, 2), np.float32)
    logp[0, 0] = [0.0, -0.0]  # -0 ties with 0
    tree = builder_program("exact", 16)(as_candidates(tokens, logp), jnp.int32(2))
    assert oracle.paths_of(tree, "rank") == [(), (0,), (1,), (0, 0), (0, 1), (1, 0), (1, 1)]


def test_one_depth_can_take_all_that_its_ancestors_leave():
    """The tightest case of the bound on nodes per depth: one node above, the rest below it."""
    tokens, _ = random_table(0, 2, WIDTH)
    logp = np.full((2, WIDTH, WIDTH), -1, np.float32)
    logp[0, 0] = [0, -9, -9, -9]
    tree = builder_program("exact", 6)(as_candidates(tokens, logp), jnp.int32(2))
    assert oracle.paths_of(tree, "rank") == [(), (0,), *((0, b) for b in range(WIDTH))]


def test_chain_follows_the_best_child_of_each_node():
    tokens, logp = random_table(3, DEPTH, WIDTH)
    tree = build(tokens, logp, "chain", 40)
    path, rank = [], 0
    for level in range(DEPTH):
        rank = int(np.argmax(logp[level, rank]))
        path.append(rank)
    assert oracle.paths_of(tree, "rank") == [tuple(path[:n]) for n in range(DEPTH + 1)]
    assert not np.asarray(tree.valid)[DEPTH + 1 :].any()


def test_max_depth_is_traced_and_clamps():
    tokens, logp = random_table(4, DEPTH, WIDTH)
    for builder in BUILDERS:
        program = builder_program(builder, 40)
        for bound in range(DEPTH + 1):
            tree = program(as_candidates(tokens, logp), jnp.int32(bound))
            depth = np.asarray(tree.depth)[np.asarray(tree.valid)]
            assert depth.max() == bound, builder
        assert program._cache_size() == 1


def test_missing_candidates_never_become_nodes():
    tokens, logp = random_table(5, DEPTH, WIDTH)
    tokens[0, 1], tokens[2] = -1, -1
    logp[1, :, 0] = -np.inf
    logp[0, 0, 2] = np.nan
    for builder in BUILDERS:
        paths = oracle.paths_of(build(tokens, logp, builder, 40), "rank")
        assert all(len(path) <= 2 for path in paths), builder
        assert all(path[:1] not in ((1,), (2,)) for path in paths), builder
        assert all(len(path) < 2 or path[1] != 0 for path in paths), builder


def test_repeated_tokens_of_a_depth_count_once():
    tokens, logp = random_table(6, DEPTH, WIDTH)
    tokens[1] = [9, 9, 3, 9]
    for builder in BUILDERS:
        check_shape_rules(build(tokens, logp, builder, 40))
    table = np.asarray(conditional_table(as_candidates(tokens, logp), DEPTH))
    np.testing.assert_array_equal(np.isfinite(table[1, 0]), [True, False, True, False])


def test_no_candidates_at_all_gives_the_root():
    tokens = np.full((DEPTH, WIDTH), -1, np.int32)
    logp = np.full((DEPTH, WIDTH, WIDTH), -np.inf, np.float32)
    for builder in BUILDERS:
        tree = build(tokens, logp, builder, 16)
        check_shape_rules(tree)
        np.testing.assert_array_equal(np.asarray(tree.valid), [True] + [False] * 15)
        assert int(tree.token[0]) == ROOT


@pytest.mark.parametrize("builder", BUILDERS)
@pytest.mark.parametrize(("depth", "width"), [(1, 1), (1, 4), (4, 1)])
def test_narrow_and_shallow_shapes(builder, depth, width):
    tokens, logp = random_table(8, depth, width)
    for budget in (1, 3, 12):
        tree = builder_program(builder, budget)(as_candidates(tokens, logp), jnp.int32(depth))
        check_shape_rules(tree)
        assert tree.token.shape == (budget,)
        full = {"chain": depth}.get(builder, depth if width == 1 else width)
        if builder in ("exact", "chain", "accum_logp"):
            assert int(np.sum(np.asarray(tree.valid))) == min(budget, full + 1)


@pytest.mark.parametrize("builder", BUILDERS)
def test_batch_by_vmap_equals_single(builder):
    tables = [random_table(seed, DEPTH, WIDTH, coarse=seed == 2) for seed in range(3)]
    batch = as_candidates(*(np.stack(part) for part in zip(*tables, strict=True)))
    depths = jnp.asarray([5, 3, 0], jnp.int32)
    program = builder_program(builder, 16)
    trees = jax.jit(jax.vmap(program))(batch, depths)
    for i, (tokens, logp) in enumerate(tables):
        single = program(as_candidates(tokens, logp), depths[i])
        assert_trees_equal(jax.tree.map(lambda leaf, i=i: leaf[i], trees), single)


def test_top2gap_cap_matches_its_formula():
    _, logp = random_table(9, DEPTH, WIDTH)
    cap = np.asarray(top2gap_cap(jnp.asarray(logp), 2.0, 1.0))
    top = -np.sort(-logp, axis=-1)
    gap = (top[..., 0] - top[..., 1]).astype(np.float64)
    expected = np.maximum(np.round(WIDTH / (1 + np.exp(2.0 * (gap - 1.0)))), 1)
    np.testing.assert_array_equal(cap, expected)
    assert len(np.unique(cap)) > 1


def test_top2gap_keeps_only_the_capped_children():
    logp = np.log(np.array([[0.97, 0.01, 0.01, 0.01], [0.4, 0.3, 0.2, 0.1]], np.float32))
    logp = np.repeat(logp[:, None], WIDTH, axis=1)
    tokens, _ = random_table(1, 2, WIDTH)
    tree = builder_program("top2gap", 40)(as_candidates(tokens, logp), jnp.int32(2))
    # gap 4.6 nats: cap 1; gap 0.29: round(4 sigmoid(1.42)) = 3.
    assert oracle.paths_of(tree, "rank") == [(), (0,), (0, 0), (0, 1), (0, 2)]


def test_histogram_cap_follows_the_table():
    cap = histogram_cap(HISTOGRAM, 0.02, 5, WIDTH)
    np.testing.assert_array_equal(cap[:, 0], [3, 2, 1, 1, 1])
    np.testing.assert_array_equal(histogram_cap(HISTOGRAM, 0.02, 5, 2)[:, 0], [2, 2, 1, 1, 1])
    tokens, logp = random_table(2, DEPTH, WIDTH, conditional=False)
    paths = oracle.paths_of(build(tokens, logp, "depth_rank_histogram", 40), "rank")
    for path in paths:
        assert all(rank < cap[level, 0] for level, rank in enumerate(path))
    assert len(paths) == 1 + 3 + 6 * 4


@pytest.mark.parametrize("table", [None, (), ((),), ((0.1, 0.2), (0.3,))])
def test_bad_histograms_are_refused(table):
    with pytest.raises(ConfigError, match="histogram"):
        histogram_cap(table, 0.02, 3, 4)


def test_bad_builder_and_budget_are_refused():
    tokens, logp = random_table(0, 2, 2)
    for keywords, text in (
        ({"builder": "best", "budget": 4}, "best"),
        ({"builder": "exact", "budget": 0}, "0"),
    ):
        with pytest.raises(ConfigError, match=text):
            build_tree(
                as_candidates(tokens, logp),
                jnp.int32(0),
                max_depth=2,
                spec=SpecConfig(),
                **keywords,
            )
