"""What the GPU kernels of the projection share: checks, order of partial sums, grouping."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from pallas_kernels.native import KernelError
from pallas_kernels.row_invariant_matmul import specs


def check(x: jax.Array, w: jax.Array, n: int, k: int, tiling: specs.Tiling | None) -> specs.Tiling:
    """The tiling of a weight [n, k] that fits x [M, k]; None: `specs.tiling`.

    Raises:
      KernelError: shapes or dtypes that the kernels do not take.
    """
    tiling = tiling or specs.tiling(n, k)
    if x.ndim != 2 or x.shape[1] != k or x.dtype != jnp.bfloat16 or w.dtype != jnp.bfloat16:
        raise KernelError(
            f"{specs.OP}: x {x.dtype}{list(x.shape)} and w {w.dtype}{list(w.shape)} do not fit; "
            f"need bfloat16 [M, {k}] and bfloat16"
        )
    if tiling is None:
        raise KernelError(
            f"{specs.OP}: the GPU kernels take multiples of 64, not a weight [{n}, {k}]; use 'xla'"
        )
    if n % tiling.block_n or k % (tiling.block_k * tiling.splits):
        raise KernelError(f"{specs.OP}: {tiling} does not divide a weight [{n}, {k}]")
    return tiling


def group_rows(experts: jax.Array, count: int) -> tuple[jax.Array, jax.Array]:
    """Places of rows sorted by expert, each expert's rows from the beginning of a block of 64.

    Args:
      experts: [A] int32 in 0..count - 1, A at least 1.
      count: E.

    Returns:
      [A] int32, the place of each row, and [blocks] int32, the expert of each block, -1 past the
      last one in use.
    """
    block, total = specs.ROW_BLOCK, experts.shape[0]
    blocks = min(count, total) + total // block  # no split of `total` rows needs more
    ids = jnp.arange(count, dtype=jnp.int32)
    mine = (experts[:, None] == ids[None, :]).astype(jnp.int32)  # [A, E]
    before = jnp.cumsum(mine, axis=0) - mine
    rank = jnp.sum(before * mine, axis=1)
    needed = (mine.sum(axis=0) + (block - 1)) // block
    end = jnp.cumsum(needed)
    place = jnp.sum((end - needed)[None, :] * mine, axis=1) * block + rank
    at = jnp.arange(blocks, dtype=jnp.int32)
    owner = jnp.sum((end[None, :] <= at[:, None]).astype(jnp.int32), axis=1)
    return place, jnp.where(at < end[-1], owner, -1)


def add_parts(parts: jax.Array) -> jax.Array:
    """Sum over the first axis from left to right: XLA does not reorder additions."""
    return functools.reduce(jnp.add, [parts[s] for s in range(parts.shape[0])])
