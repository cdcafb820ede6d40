"""Choice of each row for GPUs without wgmma, in Triton: as `mosaic_gpu`, block for block."""

# Triton is an extra: pyright sees none of it.
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
from __future__ import annotations

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from pallas_kernels import triton_call
from pallas_kernels.row_invariant_matmul import specs as matmul_specs
from pallas_kernels.row_invariant_matmul.triton import STAGES, WARPS, product
from pallas_kernels.verify_head.gpu import Sampling, check, combine, row_fields

_NEVER = tl.constexpr(2**31 - 1)


@triton.jit
def mix(h):
    """`gumbel_noise.on_chip`'s mixer."""
    h = (h ^ (h >> 16)) * 0x7FEB352D
    h = (h ^ (h >> 15)) * 0x846CA68B
    return h ^ (h >> 16)


@triton.jit
def gumbel(ids, low, high):
    """`gumbel_noise.on_chip.gumbel`."""
    bits = mix(mix(ids.to(tl.uint32) + low) ^ high)
    # 2^-32, 2^-33, 1 - 2^-24
    uniform = bits.to(tl.float32) * 2.3283064365386963e-10 + 1.1641532182693481e-10
    uniform = tl.minimum(uniform, 0.999999940395355224609375)
    rest = 1.0 - uniform
    lost = 1.0 - rest
    exact = tl.log(rest) * (uniform / tl.where(lost == 0, 1.0, lost))
    return -tl.log(tl.where(lost == 0, uniform, -exact))


@triton.jit
def verify_kernel(
    x_ptr,
    w_ptr,
    m_ptr,
    low_ptr,
    high_ptr,
    scale_ptr,
    warm_ptr,
    best_ptr,
    id_ptr,
    second_ptr,
    K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STEPS: tl.constexpr,
    SAMPLED: tl.constexpr,
):
    """best, id, second [blocks, M]: of BLOCK_N tokens and 64 rows."""
    block, column = tl.program_id(0), tl.program_id(1)
    M = tl.load(m_ptr)
    rows = block * BLOCK_M + tl.arange(0, BLOCK_M)
    ids = column * BLOCK_N + tl.arange(0, BLOCK_N)
    there = rows < M
    sums = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    logits = product(x_ptr, w_ptr, rows, there, ids, 0, K, STEPS, BLOCK_K, False, 0, sums)
    ids = ids[None, :] + tl.zeros((BLOCK_M, BLOCK_N), tl.int32)
    if SAMPLED:
        low = tl.load(low_ptr + rows, mask=there, other=0)[:, None]
        high = tl.load(high_ptr + rows, mask=there, other=0)[:, None]
        scale = tl.load(scale_ptr + rows, mask=there, other=1.0)[:, None]
        warm = tl.load(warm_ptr + rows, mask=there, other=0.0)[:, None]
        logits = logits * scale + tl.where(warm > 0, gumbel(ids, low, high), 0.0)
    wrong = logits != logits
    first_wrong = tl.min(tl.where(wrong, ids, _NEVER), axis=1)
    clean = tl.where(wrong, -float("inf"), logits)
    best = tl.max(clean, axis=1)
    first = tl.min(tl.where(clean == best[:, None], ids, _NEVER), axis=1)
    second = tl.max(tl.where(ids == first[:, None], -float("inf"), clean), axis=1)
    broken = first_wrong < _NEVER
    to = column * M + rows
    tl.store(best_ptr + to, tl.where(broken, float("nan"), best), mask=there)
    tl.store(id_ptr + to, tl.where(broken, first_wrong, first), mask=there)
    tl.store(second_ptr + to, second, mask=there)


def verify_head(
    hidden: jax.Array, head: jax.Array, *, sampling: Sampling | None = None
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """As `mosaic_gpu.verify_head`."""
    tiling = check(hidden, head)
    m, k = hidden.shape
    if m == 0:
        empty = jnp.zeros((0,), jnp.float32)
        return empty.astype(jnp.int32), empty, empty
    blocks = head.shape[0] // tiling.block_n
    none = jnp.zeros((1,), jnp.float32)
    fields = row_fields(sampling) if sampling is not None else (none,) * 4
    kinds = (jnp.float32, jnp.int32, jnp.float32)
    found = triton_call.call(
        verify_kernel,
        hidden,
        head,
        jnp.full((1,), m, jnp.int32),
        *fields,
        out_type=tuple(jax.ShapeDtypeStruct((blocks, m), t) for t in kinds),
        grid=(-(-m // matmul_specs.ROW_BLOCK), blocks),
        num_warps=WARPS if sampling is None else 2 * WARPS,  # registers for the noise
        num_stages=STAGES,
        K=k,
        BLOCK_M=matmul_specs.ROW_BLOCK,
        BLOCK_N=tiling.block_n,
        BLOCK_K=tiling.block_k,
        STEPS=k // tiling.block_k,
        SAMPLED=sampling is not None,
    )
    return combine(*found)
