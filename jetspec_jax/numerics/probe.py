"""Measures on the device in use whether a row's bits depend on the rows beside it (algorithm.md
section 6).
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from jetspec_jax.cache import KVCache, after, alloc, commit
from jetspec_jax.models.decoder import forward_block, head_logits
from jetspec_jax.plan import RoundPlan
from jetspec_jax.typing import Array, Params, PyTree
from pallas_kernels import parameters

_PREFIX = 37  # keys in the cache before the tree: not a multiple of any chunk


@dataclasses.dataclass(frozen=True)
class ProbeReport:
    """Per number of verified nodes: how many node logits differ in any bit from plain decoding, and
    by how much.
    """

    rows: dict[int, int]  # nodes -> rows that differ
    max_abs: float

    @property
    def invariant(self) -> bool:
        return not any(self.rows.values())

    def __str__(self) -> str:
        if self.invariant:
            return (
                "bitwise: all node logits equal plain decoding's, for"
                f" {', '.join(map(str, self.rows))} nodes"
            )
        worst = ", ".join(f"{bad} of {n}" for n, bad in self.rows.items() if bad)
        return (
            f"not bitwise on this device: {worst} node logits differ from plain decoding's, by up"
            f" to {self.max_abs:.1e}"
        )


def _forward(
    plan: RoundPlan,
    params: Params,
    cache: KVCache,
    length: Array,
    tokens: Array,
    positions: Array,
    mask: Array,
) -> tuple[Array, KVCache]:
    """Logits [N, V] and the cache with the rows written behind it; padded as rounds pad."""
    nodes = tokens.shape[1]
    rows = max(nodes, plan.pad_rows)
    more = rows - nodes
    wide = jnp.eye(rows, dtype=bool).at[:nodes, :nodes].set(mask[0])[None]
    out = forward_block(
        params,
        plan.model,
        jnp.pad(tokens, ((0, 0), (0, more))),
        jnp.pad(positions, ((0, 0), (0, more))),
        cache.k,
        cache.v,
        length,
        wide,
        numerics=plan.numerics,
    )
    kept = commit(cache, out.new_k, out.new_v, after(length, out.hidden))
    return head_logits(params, out.hidden)[0, :nodes], kept


def _random_tree(rng: np.random.Generator, nodes: int, depth: int) -> np.ndarray:
    """Parents of a random tree in topological order, no path longer than `depth`."""
    parent, level = np.full(nodes, -1), np.zeros(nodes, int)
    for i in range(1, nodes):
        open_nodes = np.flatnonzero(level[:i] < depth)
        parent[i] = rng.choice(open_nodes)
        level[i] = level[parent[i]] + 1
    return parent


def probe(plan: RoundPlan, params: Params, *, dtype: jnp.dtype, seed: int = 0) -> ProbeReport:
    """Compares every node of a random tree with plain decoding along the node's path, bit for bit.

    Args:
        plan: its budgets, padding and numerics are what is measured.
        params: target parameters.
        dtype: of the cache.
        seed: of tokens and tree.
    """
    cfg, rng = plan.model, np.random.default_rng(seed)
    size = (
        -(-(_PREFIX + plan.budgets[-1] + 64) // plan.numerics.attention_chunk)
        * plan.numerics.attention_chunk
    )
    # The cache is donated nowhere: each path starts from the same prefix.
    compiled = jax.jit(functools.partial(_forward, plan))

    def step(*args: PyTree) -> tuple[Array, KVCache]:
        with parameters.using(plan.numerics.kernel_params):  # it is traced at its first calls
            return compiled(*args)

    cache = alloc(cfg.num_layers, 1, cfg.num_kv_heads, size, cfg.head_dim, dtype)
    prefix = rng.integers(0, cfg.vocab_size, _PREFIX)
    one = jnp.ones((1, 1, 1), bool)

    def plain(cache: KVCache, at: int, token: int) -> tuple[Array, KVCache]:
        where = jnp.asarray([at], jnp.int32)
        return step(params, cache, where, jnp.asarray([[token]], jnp.int32), where[:, None], one)

    for i, token in enumerate(prefix):
        _, cache = plain(cache, i, int(token))
    differing, worst = {}, 0.0
    for nodes in plan.budgets:
        parent = _random_tree(rng, nodes, max(plan.depth, 1))
        token = rng.integers(0, cfg.vocab_size, nodes)
        mask = np.eye(nodes, dtype=bool)
        for i in range(1, nodes):
            mask[i] |= mask[parent[i]]
        positions = _PREFIX + mask.sum(1) - 1
        got, _ = step(
            params,
            cache,
            jnp.asarray([_PREFIX], jnp.int32),
            jnp.asarray(token[None], jnp.int32),
            jnp.asarray(positions[None], jnp.int32),
            jnp.asarray(mask[None]),
        )
        bad, caches = 0, {-1: cache}
        for i in range(nodes):
            above = int(parent[i])
            row, caches[i] = plain(caches[above], int(positions[i]), int(token[i]))
            a, b = np.asarray(got[i]), np.asarray(row[0])
            bad += not np.array_equal(a.view(np.uint32), b.view(np.uint32))
            worst = max(worst, float(np.abs(a - b).max()))
        differing[nodes] = bad
    return ProbeReport(differing, worst)
