"""Where every key of a tree lies in the logical order of positions: shared by the GPU kernels.

A row of a tree attends over the committed prefix, then over the new rows that its mask names, in
their order. The k-th of those stands at logical position `length + k`, whether a later round finds
it in the cache or not. Rows that see the same list up to their own end share a *path*; rows are
sorted by path, so that a tile of rows has few.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

UNSEEN = -(1 << 30)  # rank of a new row that a path does not name


class Plan(NamedTuple):
    """Integers only; a pure function of mask and lengths, so XLA keeps one for all layers."""

    order: jax.Array  # [B, T] new rows sorted by path
    rank: jax.Array  # [B, T, T] place of row j in the list of path p, or UNSEEN
    members: jax.Array  # [B, T, T] row at place k in the list of path p; anything past its end
    row_path: jax.Array  # [B, R] path of each packed row, -1 for padding
    row_end: jax.Array  # [B, R] logical end of what the row sees, 0 for padding
    paths: jax.Array  # [B, R / tile, tile] paths in a tile of rows, the first `counts`
    counts: jax.Array  # [B, R / tile] paths in the tile
    extent: jax.Array  # [B, R / tile] logical end of what any row of the tile sees


def make_plan(mask: jax.Array, lengths: jax.Array, *, group: int, tile: int) -> Plan:
    """Plan of one call.

    Args:
      mask: [B, T, T] bool, any: row i sees new row j. Trees share paths; other masks do not, and
        are right all the same.
      lengths: [B] int32, committed positions.
      group: query heads that share a key head; packed row r is new row order[r // group].
      tile: packed rows of one block; R is the next multiple of it.
    """
    batch, rows, _ = mask.shape
    seen = mask.astype(jnp.int32)
    count = seen.sum(axis=-1, dtype=jnp.int32)
    place = jnp.cumsum(seen, axis=-1, dtype=jnp.int32) - 1
    rank = jnp.where(mask, place, UNSEEN)
    members = jnp.argsort(~mask, axis=-1, stable=True).astype(jnp.int32)

    own = jnp.broadcast_to(jnp.arange(rows, dtype=jnp.int32), (batch, rows))
    # the last row that sees row i, if its list begins with the whole list of row i
    last = jnp.where(mask, own[:, :, None], -1).max(axis=1)
    guess = jnp.where(last >= 0, last, own)
    theirs = jnp.take_along_axis(rank, guess[:, :, None], axis=1)
    begins = ((theirs >= 0) & (theirs < count[:, :, None])) == mask
    path = jnp.where(begins.all(axis=-1), guess, own)

    order = jnp.argsort(path, axis=-1, stable=True).astype(jnp.int32)
    packed = -(-rows * group // tile) * tile
    pad = ((0, 0), (0, packed - rows * group))
    sorted_path = jnp.take_along_axis(path, order, axis=1)
    sorted_end = jnp.take_along_axis(lengths[:, None] + count, order, axis=1)
    row_path = jnp.pad(jnp.repeat(sorted_path, group, axis=1), pad, constant_values=-1)
    row_end = jnp.pad(jnp.repeat(sorted_end, group, axis=1), pad)

    tiles = row_path.reshape(batch, packed // tile, tile)
    before = jnp.pad(tiles[:, :, :-1], ((0, 0), (0, 0), (1, 0)), constant_values=-1)
    first = (tiles >= 0) & (tiles != before)
    paths = jnp.sort(jnp.where(first, tiles, rows), axis=-1)
    return Plan(
        order=order,
        rank=rank,
        members=members,
        row_path=row_path,
        row_end=row_end,
        paths=paths,
        counts=first.sum(axis=-1, dtype=jnp.int32),
        extent=row_end.reshape(batch, packed // tile, tile).max(axis=-1),
    )


def pack_rows(q: jax.Array, plan: Plan) -> jax.Array:
    """[B, K, G, T, h] queries as [B, K, R, h] packed rows, zeros for padding."""
    batch, heads, group, rows, dim = q.shape
    sorted_rows = jnp.take_along_axis(q, plan.order[:, None, None, :, None], axis=3)
    flat = sorted_rows.swapaxes(2, 3).reshape(batch, heads, rows * group, dim)
    extra = plan.row_path.shape[1] - rows * group
    return jnp.pad(flat, ((0, 0), (0, 0), (0, extra), (0, 0)))


def unpack_rows(packed: jax.Array, plan: Plan, group: int) -> jax.Array:
    """[B, K, R, h] packed rows as [B, K, G, T, h]."""
    batch, heads, _, dim = packed.shape
    rows = plan.order.shape[1]
    sorted_rows = packed[:, :, : rows * group].reshape(batch, heads, rows, group, dim)
    back = jnp.argsort(plan.order, axis=-1)
    return jnp.take_along_axis(sorted_rows.swapaxes(2, 3), back[:, None, None, :, None], axis=3)
