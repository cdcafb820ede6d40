"""Operands of the GPU kernel and the joining of its blocks."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.draft_head_topk import specs
from pallas_kernels.native import KernelError
from pallas_kernels.row_invariant_matmul.specs import Tiling
from pallas_kernels.verify_head.specs import tiling as head_tiling


def check(hidden: jax.Array, head: jax.Array, width: int) -> Tiling:
    """Tiling of a head [Vd, H] under hidden [M, H].

    Raises:
      KernelError: shapes or dtypes that the kernel does not take.
    """
    tiling = head_tiling(*head.shape)
    bf16 = jnp.dtype(jnp.bfloat16)
    if tiling is None or hidden.shape[1:] != head.shape[1:] or {hidden.dtype, head.dtype} != {bf16}:
        raise KernelError(
            f"{specs.OP}: hidden {hidden.dtype}{list(hidden.shape)} and head "
            f"{head.dtype}{list(head.shape)}: the GPU kernel needs bfloat16 and multiples of 64"
        )
    if not 1 <= width <= specs.GPU_MAX_WIDTH:
        raise KernelError(
            f"{specs.OP}: width {width}: the GPU kernel takes 1 to {specs.GPU_MAX_WIDTH}"
        )
    return tiling


def join(values: jax.Array, ids: jax.Array, sums: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Best W of the blocks: values and ids [blocks, W, M], best first in a block, and sums [blocks,
    M] of exp(logit - the block's best) -> ids and log-probabilities [M, W]. Blocks hold rising ids,
    so that `top_k`, which takes the first among equals, takes the lowest id."""
    blocks, width, m = values.shape
    top = values[:, 0]
    peak = top.max(axis=0)
    log_z = peak + jnp.log((sums * jnp.exp(top - peak[None])).sum(axis=0))
    flat, at = lax.top_k(values.transpose(2, 0, 1).reshape(m, blocks * width), width)
    chosen = jnp.take_along_axis(ids.transpose(2, 0, 1).reshape(m, blocks * width), at, axis=1)
    return chosen, jnp.minimum(flat - log_z[:, None], 0.0)
