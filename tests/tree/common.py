"""Random candidates and jitted programs shared by the tree tests (one compilation per shape)."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np

from jetspec_jax.config import SpecConfig
from jetspec_jax.tree import Candidates, Tree, accept, build_tree

HISTOGRAM = ((0.6, 0.2, 0.05, 0.01), (0.4, 0.03, 0.01, 0.0), (0.3, 0.01, 0.0, 0.0))
SPEC = SpecConfig(histogram=HISTOGRAM)
ROOT = 7


@functools.cache
def builder_program(builder: str, budget: int):
    """build_tree jitted for one builder and budget; max_depth stays traced."""
    return jax.jit(
        lambda cands, depth: build_tree(
            cands, jnp.int32(ROOT), builder=builder, budget=budget, max_depth=depth, spec=SPEC
        )
    )


@functools.cache
def accept_program(depth: int | None):
    return jax.jit(functools.partial(accept, depth=depth))


def random_table(
    seed: int,
    depth: int,
    width: int,
    *,
    conditional: bool = True,
    coarse: bool = False,
    holes: bool = False,
) -> tuple[np.ndarray, np.ndarray]:
    """Tokens `[D, W]` and logp `[D, W, W]`. `coarse` makes exact score ties frequent (sums of -1
    and -2 are exact in float32); `holes` removes candidates both ways (token -1, logp -inf)."""
    rng = np.random.default_rng(seed)
    tokens = np.stack([rng.permutation(width * 4)[:width] for _ in range(depth)]).astype(np.int32)
    if coarse:
        logp = -rng.integers(1, 4, (depth, width, width)).astype(np.float32)
    else:
        logp = np.log(rng.dirichlet(np.full(width, 0.4), (depth, width)) + 1e-6).astype(np.float32)
        logp = np.minimum(logp, 0)
    if not conditional:
        logp = np.repeat(-np.sort(-logp[:, :1], axis=-1), width, axis=1)
    if holes:
        tokens[rng.random(tokens.shape) < 0.2] = -1
        logp[rng.random(logp.shape) < 0.2] = -np.inf
    return tokens, logp


def as_candidates(tokens: np.ndarray, logp: np.ndarray) -> Candidates:
    return Candidates(tokens=jnp.asarray(tokens), logp=jnp.asarray(logp))


def check_shape_rules(tree: Tree) -> None:
    """What every tree must satisfy, whoever built it."""
    token, parent, depth, score, valid = (
        np.asarray(x) for x in (tree.token, tree.parent, tree.depth, tree.score, tree.valid)
    )
    assert parent[0] == -1 and depth[0] == 0 and score[0] == 0 and valid[0]
    siblings = set()
    for i in range(1, len(token)):
        if not valid[i]:
            assert (token[i], parent[i], depth[i]) == (0, 0, 0) and score[i] == -np.inf
            continue
        assert 0 <= parent[i] < i and valid[parent[i]]
        assert depth[i] == depth[parent[i]] + 1
        assert score[i] <= score[parent[i]]
        assert token[i] >= 0
        siblings.add((int(parent[i]), int(token[i])))
    assert len(siblings) == valid.sum() - 1, "two siblings hold the same token"


def assert_trees_equal(first: Tree, second: Tree) -> None:
    for name, leaf in vars(first).items():
        np.testing.assert_array_equal(np.asarray(leaf), np.asarray(getattr(second, name)), name)
