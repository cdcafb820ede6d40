"""The one-launch tree builder: its reference and its Triton kernel against the heap."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jetspec_jax.tree.build import build_tree, conditional_table
from jetspec_jax.tree.oracle import best_prefixes
from pallas_kernels import triton_call
from pallas_kernels.build_tree import reference
from pallas_kernels.build_tree.reference import Nodes
from pallas_kernels.native import KernelError
from tests.pallas_kernels.triton_interpreter import interpreted
from tests.tree.common import ROOT, SPEC, as_candidates, random_table

pytest.importorskip("triton")


def kernel() -> Any:
    return interpreted("build_tree")


def operands(batch: list[tuple[np.ndarray, np.ndarray]], depth: int) -> tuple[jax.Array, ...]:
    """Tokens, cleaned tables and roots of a batch of candidates."""
    tables = [conditional_table(as_candidates(*c), depth) for c in batch]
    tokens = jnp.stack([jnp.asarray(t) for t, _ in batch])
    return tokens, jnp.stack(tables), jnp.full((len(batch),), ROOT, jnp.int32)


def check(found: Nodes, batch: list[tuple[np.ndarray, np.ndarray]], nodes: int, depth: int) -> None:
    """Every tree is the heap's: same paths and scores in the same order, the rest blank."""
    token, parent, level, score, rank = (np.asarray(x) for x in found)
    for b, (tokens, logp) in enumerate(batch):
        wanted = best_prefixes(tokens, logp, nodes, depth)
        paths: list[tuple[int, ...]] = [()]
        for i in range(1, len(wanted)):
            paths.append((*paths[parent[b, i]], int(rank[b, i])))
            assert level[b, i] == len(paths[-1])
            assert token[b, i] == tokens[level[b, i] - 1, rank[b, i]]
        assert paths == [path for path, _ in wanted]
        np.testing.assert_array_equal(score[b, : len(wanted)], [s for _, s in wanted])
        assert (token[b, 0], parent[b, 0], level[b, 0], rank[b, 0]) == (ROOT, -1, 0, -1)
        rest = slice(len(wanted), None)
        assert not token[b, rest].any() and not parent[b, rest].any() and not level[b, rest].any()
        assert (rank[b, rest] == -1).all() and (score[b, rest] == -np.inf).all()


_reference = jax.jit(reference.build_tree, static_argnums=3)


@settings(max_examples=12)
@given(
    seeds=st.lists(st.integers(0, 10**6), min_size=2, max_size=2),
    coarse=st.booleans(),
    holes=st.booleans(),
    depth=st.integers(0, 5),
)
def test_trees_are_those_of_the_heap(
    seeds: list[int], coarse: bool, holes: bool, depth: int
) -> None:
    batch = [random_table(seed, 5, 3, coarse=coarse, holes=holes) for seed in seeds]
    inputs = operands(batch, depth)
    found = kernel().build_tree(*inputs, 20)
    check(found, batch, 20, depth)
    for a, b in zip(found, _reference(*inputs, 20), strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


def test_the_builder_of_the_decoder_finds_the_same_tree() -> None:
    tokens, logp = random_table(1, 7, 4)
    inputs = operands([(tokens, logp)], 7)
    found = kernel().build_tree(*inputs, 33)
    wanted = build_tree(
        as_candidates(tokens, logp),
        jnp.int32(ROOT),
        builder="exact",
        budget=33,
        max_depth=7,
        spec=SPEC,
    )
    for name in Nodes._fields:
        np.testing.assert_array_equal(
            np.asarray(getattr(found, name)[0]), np.asarray(getattr(wanted, name)), name
        )


def test_one_node_is_the_root() -> None:
    batch = [random_table(2, 3, 2)]
    check(kernel().build_tree(*operands(batch, 3), 1), batch, 1, 3)


def test_slots_of_no_candidate_are_not_read() -> None:
    """NaN in what a tree of this depth cannot reach."""
    tokens, logp = random_table(3, 5, 3)
    cleaned, table, root = operands([(tokens, logp)], 5)
    poisoned = table.at[:, 0, 1:].set(jnp.nan)  # depth 0 has one parent, the root
    check(kernel().build_tree(cleaned, poisoned, root, 12), [(tokens, logp)], 12, 5)


def test_a_tree_that_does_not_fit_is_refused() -> None:
    big = [(np.zeros((2, 64), np.int32), np.zeros((2, 64, 64), np.float32))]
    with pytest.raises(KernelError, match="256 nodes of width 64"):
        kernel().build_tree(*operands(big, 2), 256)


def test_a_tie_resolved_the_wrong_way_is_found() -> None:
    """A planted fault: children of one depth offered in another order than by rank."""
    tokens, logp = random_table(4, 4, 3, coarse=True)
    cleaned, table, root = operands([(tokens, logp)], 4)
    turned = table[..., ::-1]
    with pytest.raises(AssertionError):
        check(kernel().build_tree(cleaned, turned, root, 16), [(tokens, logp)], 16, 4)


@pytest.mark.gpu
@pytest.mark.parametrize("nodes", [1, 16, 64, 256])
def test_on_a_gpu(nodes: int) -> None:
    batch = [random_table(seed, 15, 8, coarse=seed % 2 == 0, holes=seed > 4) for seed in range(8)]
    module = triton_call.load("build_tree")
    found = jax.jit(module.build_tree, static_argnums=3)(*operands(batch, 15), nodes)
    check(found, batch, nodes, 15)
