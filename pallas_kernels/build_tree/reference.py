"""What the op means: best-first search, one node after the other, in XLA.

The builder of `jetspec_jax.tree.build` finds the same tree by ranking each depth; there the depths
are sequential, here the nodes.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax


class Nodes(NamedTuple):
    """Trees of N slots, slot 0 the root; slots past the last node have token, parent and depth 0,
    rank -1 and score -inf."""

    token: jax.Array  # [B, N] int32
    parent: jax.Array  # [B, N] int32, -1 at the root
    depth: jax.Array  # [B, N] int32
    score: jax.Array  # [B, N] float32, sum of log-probabilities along the path
    rank: jax.Array  # [B, N] int32, -1 at the root


def build_tree(tokens: jax.Array, table: jax.Array, root: jax.Array, nodes: int) -> Nodes:
    """The `nodes` best prefixes, best first; ties by depth, then parent, then rank.

    Args:
      tokens: [B, D, W] int32.
      table: [B, D, W, W] float32 log-probability of candidate w given candidate p of the depth
        above, at most 0, -inf where there is none (`jetspec_jax.tree.build.conditional_table`).
        Depth 0 uses row 0.
      root: [B] int32.
      nodes: N, root included.
    """
    return jax.vmap(lambda t, p, r: _one(t, p, r, nodes))(tokens, table, root)


def _one(tokens: jax.Array, table: jax.Array, root: jax.Array, nodes: int) -> Nodes:
    depth, width = tokens.shape
    entry = jnp.arange(nodes * width, dtype=jnp.int32)  # child `entry % W` of node `entry // W`
    never = jnp.float32(-jnp.inf)
    first = jnp.full((nodes,), 0, jnp.int32)
    out = Nodes(
        token=first.at[0].set(root),
        parent=first.at[0].set(-1),
        depth=first,
        score=jnp.full((nodes,), never).at[0].set(0.0),
        rank=first - 1,
    )
    score = jnp.full(entry.shape, never).at[:width].set(table[0, 0])
    level = jnp.ones_like(entry)

    def add(place: jax.Array, carry: tuple[jax.Array, jax.Array, Nodes]):
        score, level, out = carry
        best = score.max()
        live = best > never
        key = jnp.where(score == best, level * entry.size + entry, jnp.iinfo(jnp.int32).max)
        at, deep = key.min() % entry.size, key.min() // entry.size
        rank = at % width
        found = (tokens[deep - 1, rank], at // width, deep, best, rank)
        blank = (0, 0, 0, never, -1)
        out = Nodes(
            *(
                field.at[place].set(jnp.where(live, value, jnp.asarray(none, field.dtype)))
                for field, value, none in zip(out, found, blank, strict=True)
            )
        )
        children = best + table[jnp.minimum(deep, depth - 1), rank, entry % width]
        mine = (entry // width == place) & live & (deep < depth)
        score = jnp.where(mine, children, jnp.where((entry == at) & live, never, score))
        return score, jnp.where(mine, deep + 1, level), out

    return lax.fori_loop(1, nodes, add, (score, level, out))[2]
