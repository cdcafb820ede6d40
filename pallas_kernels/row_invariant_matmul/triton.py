"""Projection for GPUs without wgmma (Ampere, Ada, Blackwell workstation cards), in Triton.

As `mosaic_gpu`: blocks of 64 rows whatever M is, K in one order, split by the weight's tiling
alone. M enters only as the mask of loads and stores, so the program is the same for every M. Rows
past 64 are further blocks, which run side by side and find the weight tile in the level-2 cache.
"""

# Triton is an extra: pyright sees none of it.
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
from __future__ import annotations

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from pallas_kernels import triton_call
from pallas_kernels.row_invariant_matmul import specs
from pallas_kernels.row_invariant_matmul.gpu import add_parts, check, group_rows

WARPS, STAGES = 4, 3  # three stages of 24 KB fit the 99 KB of a block on sm_86, sm_89 and sm_120


@triton.jit
def product(x_ptr, w_ptr, rows, there, columns, first, K, STEPS, BLOCK_K, INPUTS_FIRST, N, sums):
    """Adds x[rows] @ w[columns].T over `STEPS` steps from input `first` on to `sums`."""
    for step in range(STEPS):
        k = first + step * BLOCK_K + tl.arange(0, BLOCK_K)
        x = tl.load(x_ptr + rows[:, None] * K + k[None, :], mask=there[:, None], other=0.0)
        if INPUTS_FIRST:
            w = tl.load(w_ptr + k[:, None] * N + columns[None, :])
        else:
            w = tl.load(w_ptr + columns[None, :] * K + k[:, None])
        sums = tl.dot(x, w, sums)
    return sums


@triton.jit
def matmul_kernel(
    x_ptr,
    w_ptr,
    expert_ptr,
    m_ptr,
    out_ptr,
    N: tl.constexpr,
    K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STEPS: tl.constexpr,
    INPUTS_FIRST: tl.constexpr,
    GROUPED: tl.constexpr,
):
    """out [splits, M, N] float32: sums of one part of K for 64 rows and BLOCK_N outputs."""
    block, column, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    if GROUPED:
        expert = tl.load(expert_ptr + block).to(tl.int64)
        if expert < 0:
            return
        w_ptr += expert * N * K
    M = tl.load(m_ptr)  # not an argument: Triton would compile 1 and multiples of 16 apart
    rows = block * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = column * BLOCK_N + tl.arange(0, BLOCK_N)
    there = rows < M
    sums = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    first = part * STEPS * BLOCK_K
    sums = product(
        x_ptr, w_ptr, rows, there, columns, first, K, STEPS, BLOCK_K, INPUTS_FIRST, N, sums
    )
    to = (part.to(tl.int64) * M + rows[:, None]) * N + columns[None, :]
    tl.store(out_ptr + to, sums, mask=there[:, None])


def matmul(
    x: jax.Array,
    w: jax.Array,
    *,
    inputs_first: bool = False,
    tiling: specs.Tiling | None = None,
) -> jax.Array:
    """As `mosaic_gpu.matmul`."""
    n, k = w.shape[::-1] if inputs_first else w.shape
    tiling = check(x, w, n, k, tiling)
    if x.shape[0] == 0:
        return jnp.zeros((0, n), jnp.float32)
    none = jnp.zeros((1,), jnp.int32)
    return add_parts(_launch(x, w, none, n, tiling, inputs_first, False))


def grouped_matmul(
    x: jax.Array, w: jax.Array, experts: jax.Array, *, tiling: specs.Tiling | None = None
) -> jax.Array:
    """As `mosaic_gpu.grouped_matmul`."""
    count, n, k = w.shape
    tiling = check(x, w, n, k, tiling or specs.tiling(n, k, split=False))
    if x.shape[0] == 0:
        return jnp.zeros((0, n), jnp.float32)
    place, owner = group_rows(experts, count)
    rows = jnp.zeros((owner.shape[0] * specs.ROW_BLOCK, k), x.dtype).at[place].set(x)
    return add_parts(_launch(rows, w, owner, n, tiling, False, True)[:, place])


def _launch(
    x: jax.Array,
    w: jax.Array,
    owner: jax.Array,
    n: int,
    tiling: specs.Tiling,
    inputs_first: bool,
    grouped: bool,
) -> jax.Array:
    m, k = x.shape
    block_n, block_k, splits, _ = tiling
    return triton_call.call(
        matmul_kernel,
        x,
        w,
        owner,
        jnp.full((1,), m, jnp.int32),
        out_type=jax.ShapeDtypeStruct((splits, m, n), jnp.float32),
        grid=(-(-m // specs.ROW_BLOCK), n // block_n, splits),
        num_warps=WARPS,
        num_stages=STAGES,
        N=n,
        K=k,
        BLOCK_M=specs.ROW_BLOCK,
        BLOCK_N=block_n,
        BLOCK_K=block_k,
        STEPS=k // block_k // splits,
        INPUTS_FIRST=inputs_first,
        GROUPED=grouped,
    )
