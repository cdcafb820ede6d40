"""The vectorised walk against a plain one; paths that do not lie first in memory."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jetspec_jax.tree import accept, oracle
from tests.tree.common import accept_program, as_candidates, builder_program, random_table

DEPTH, WIDTH = 5, 4


@settings(max_examples=30)
@given(
    seed=st.integers(0, 2**31 - 1),
    budget=st.sampled_from((2, 16, 40)),
    holes=st.booleans(),
    follow=st.floats(0, 1),
)
def test_walk_equals_the_plain_walk(seed, budget, holes, follow):
    rng = np.random.default_rng(seed)
    tokens, logp = random_table(seed, DEPTH, WIDTH, holes=holes)
    tree = builder_program("exact", budget)(as_candidates(tokens, logp), jnp.int32(DEPTH))
    token, parent, valid = (np.asarray(x) for x in (tree.token, tree.parent, tree.valid))
    # The target follows one of each node's children with the given chance.
    choice = rng.integers(0, 3, budget).astype(np.int32)
    for slot in range(1, budget):
        if valid[slot] and rng.random() < follow:
            choice[parent[slot]] = token[slot]
    expected = oracle.walk(token.tolist(), parent.tolist(), valid.tolist(), choice.tolist())
    for bound in (DEPTH, None):
        result = accept_program(bound)(tree, jnp.asarray(choice))
        size = (budget - 1 if bound is None else bound) + 1
        assert int(result.accepted) == len(expected) - 1
        padded = (expected + [expected[-1]] * size)[:size]
        np.testing.assert_array_equal(np.asarray(result.path), padded)
        assert int(result.bonus) == choice[expected[-1]]
        levels = np.asarray(tree.depth)[valid]
        np.testing.assert_array_equal(
            np.asarray(result.had_node), [level in levels for level in range(1, size)]
        )


def test_second_sibling_then_third():
    """Case 5: the accepted path is not first in memory."""
    tree = oracle.tree_from_paths(1, [[10, 20], [11, 21], [11, 22], [11, 23, 30], [12]], budget=12)
    choice = np.zeros(12, np.int32)
    paths = oracle.paths_of(tree)
    for slot, path in enumerate(paths):
        choice[slot] = {(): 11, (11,): 23, (11, 23): 30, (11, 23, 30): 77, (10,): 20}.get(path, 99)
    result = accept_program(4)(tree, jnp.asarray(choice))
    expected = [paths.index(p) for p in ((), (11,), (11, 23), (11, 23, 30))]
    assert expected != [0, 1, 2, 3]
    np.testing.assert_array_equal(np.asarray(result.path), [*expected, expected[-1]])
    assert int(result.accepted) == 3 and int(result.bonus) == 77
    np.testing.assert_array_equal(np.asarray(result.had_node), [True, True, True, False])


def test_a_match_under_a_rejected_parent_does_not_count():
    tree = oracle.tree_from_paths(1, [[10, 20, 30]])
    result = accept(tree, jnp.asarray([99, 20, 30, 0], jnp.int32))
    assert int(result.accepted) == 0 and int(result.bonus) == 99
    np.testing.assert_array_equal(np.asarray(result.path), [0, 0, 0, 0])


def test_batch_accepting_none_two_and_all():
    tree = oracle.tree_from_paths(1, [[10, 20, 30], [11, 21, 31]], budget=8)
    trees = jax.tree.map(lambda leaf: jnp.stack([leaf] * 3), tree)
    paths = oracle.paths_of(tree)
    wish = [[99], [11, 21, 98], [11, 21, 31, 97]]
    choice = np.zeros((3, 8), np.int32)
    for row, said in enumerate(wish):
        for slot, path in enumerate(paths):
            if list(path) == said[: len(path)] and len(path) < len(said):
                choice[row, slot] = said[len(path)]
    batch = jax.jit(jax.vmap(lambda t, c: accept(t, c, depth=3)))(trees, jnp.asarray(choice))
    np.testing.assert_array_equal(np.asarray(batch.accepted), [0, 2, 3])
    np.testing.assert_array_equal(np.asarray(batch.bonus), [99, 98, 97])
    for row in range(3):
        single = accept_program(3)(tree, jnp.asarray(choice[row]))
        np.testing.assert_array_equal(np.asarray(batch.path[row]), np.asarray(single.path))


def test_invalid_slots_are_never_accepted_even_when_the_target_says_zero():
    tree = oracle.tree_from_paths(1, [[5]], budget=6)
    # Token 0 and parent 0 in every invalid slot: to the eye of the walk a match.
    result = accept(tree, jnp.asarray([0, 1, 2, 3, 4, 5], jnp.int32))
    assert int(result.accepted) == 0
    assert int(result.bonus) == 0
    np.testing.assert_array_equal(np.asarray(result.path), [0] * 6)


@pytest.mark.parametrize("slots", [1, 2])
def test_smallest_trees(slots):
    tree = oracle.tree_from_nodes(3, [(0, 4)][: slots - 1])
    result = accept(tree, jnp.asarray([4, 6][:slots], jnp.int32))
    assert result.path.shape == (slots,) and int(result.accepted) == slots - 1
    assert int(result.bonus) == (4 if slots == 1 else 6)
