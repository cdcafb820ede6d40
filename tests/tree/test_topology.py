"""Ancestor masks, cutting, scripted trees."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jetspec_jax.errors import ConfigError
from jetspec_jax.tree import ancestor_mask, depth_counts, expected_commit, oracle, prune, root_only
from jetspec_jax.tree.topology import padded_root
from tests.tree.common import check_shape_rules

mask_program = jax.jit(ancestor_mask, static_argnums=1)


@settings(max_examples=25)
@given(seed=st.integers(0, 2**31 - 1), nodes=st.sampled_from((1, 2, 16, 33)), long=st.booleans())
def test_mask_is_ancestors_and_self(seed, nodes, long):
    rng = np.random.default_rng(seed)
    parent = np.array([-1] + [(i - 1 if long else rng.integers(0, i)) for i in range(1, nodes)])
    expected = np.zeros((nodes, nodes), bool)
    depth = np.zeros(nodes, int)
    for i in range(nodes):
        j = i
        while j >= 0:
            expected[i, j] = True
            depth[i] += j > 0
            j = parent[j]
    parent = jnp.asarray(parent, jnp.int32)
    np.testing.assert_array_equal(np.asarray(mask_program(parent, None)), expected)
    np.testing.assert_array_equal(np.asarray(ancestor_mask(parent, int(depth.max()))), expected)


def test_invalid_slots_see_the_root_and_themselves():
    tree = oracle.tree_from_paths(1, [[2, 3]], budget=5)
    mask = np.asarray(ancestor_mask(tree.parent))
    for slot in (3, 4):
        np.testing.assert_array_equal(np.flatnonzero(mask[slot]), [0, slot])
    assert not mask[:3, 3:].any()


def test_scripted_tree_shares_prefixes_and_keeps_memory_order():
    tree = oracle.tree_from_paths(1, [[2, 3], [4, 5], [2, 6]], budget=8)
    assert oracle.paths_of(tree) == [(), (2,), (4,), (2, 3), (4, 5), (2, 6)]
    np.testing.assert_array_equal(np.asarray(depth_counts(tree, 3)), [2, 3, 0])
    scattered = oracle.tree_from_nodes(1, [(0, 4), (0, 2), (2, 3), (1, 5), (2, 6)])
    assert oracle.paths_of(scattered) == [(), (4,), (2,), (2, 3), (4, 5), (2, 6)]


def test_scripted_trees_that_make_no_sense_are_refused():
    with pytest.raises(ConfigError, match="come before"):
        oracle.tree_from_nodes(1, [(2, 3), (0, 4)])
    with pytest.raises(ConfigError, match="repeats a sibling"):
        oracle.tree_from_nodes(1, [(0, 3), (0, 3)])
    with pytest.raises(ConfigError, match="do not fit"):
        oracle.tree_from_paths(1, [[2, 3, 4]], budget=3)


def test_prune_cuts_and_checks():
    tree = oracle.tree_from_paths(1, [[2, 3, 4]], budget=6)
    assert oracle.paths_of(prune(tree, 3)) == [(), (2,), (2, 3)]
    batch = jax.tree.map(lambda leaf: jnp.stack([leaf, leaf]), tree)
    assert prune(batch, 2).token.shape == (2, 2)
    for nodes in (0, 7):
        with pytest.raises(ConfigError, match="6 slots"):
            prune(tree, nodes)


def test_expected_commit_counts_the_bonus_and_ignores_invalid_slots():
    assert float(expected_commit(root_only(jnp.int32(4)))) == 1.0
    tree = oracle.tree_from_nodes(1, [(0, 2), (1, 3)], budget=5, scores=list(np.log([0.5, 0.25])))
    assert float(expected_commit(tree)) == pytest.approx(1.75)


def test_padded_root_is_plain_decoding_in_a_tree_of_any_size():
    tree = padded_root(jnp.int32(4), 5)
    check_shape_rules(tree)
    assert oracle.paths_of(tree) == [()]
    assert int(tree.token[0]) == 4
    assert tree.token.shape == (5,)
