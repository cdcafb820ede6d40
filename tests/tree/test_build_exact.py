"""The batched builder of the GPU path, in its reference form."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jetspec_jax.tree import Candidates, build_exact, build_tree
from tests.tree.common import SPEC, assert_trees_equal, check_shape_rules, random_table

_batched = jax.jit(build_exact, static_argnames="budget")


@functools.partial(jax.jit, static_argnames="budget")
def _each(cands: Candidates, roots: jax.Array, budget: int, max_depth: jax.Array):
    return jax.vmap(
        lambda c, r, m: build_tree(c, r, builder="exact", budget=budget, max_depth=m, spec=SPEC)
    )(cands, roots, max_depth)


@pytest.mark.parametrize("coarse", [False, True])
def test_it_builds_the_trees_of_the_builder(coarse: bool) -> None:
    """Also with holes, ties, a candidate that is NaN, and sequences that may not draft."""
    tables = [random_table(seed, 5, 3, coarse=coarse, holes=seed % 2 == 1) for seed in range(4)]
    tables[2][1][1, 0, 0] = np.nan
    cands = Candidates(*(jnp.asarray(np.stack(x)) for x in zip(*tables, strict=True)))
    roots = jnp.arange(4, dtype=jnp.int32)
    depths = jnp.asarray([5, 5, 3, 0], jnp.int32)
    found = _batched(cands, roots, budget=17, max_depth=depths)
    assert_trees_equal(found, _each(cands, roots, 17, depths))
    assert found.valid.sum(1)[3] == 1
    for b in range(4):
        check_shape_rules(jax.tree.map(lambda x, b=b: x[b], found))
