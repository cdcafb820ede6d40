"""Candidates of each depth on Hopper: draft LM head, log-softmax, top-W; no logits in memory.

A block owns 128 tokens, multiplies them with all rows as `row_invariant_matmul` does, and keeps of
each row its W best logits with their ids, and the sum of exponentials. XLA joins the blocks of a
row: W of 1,187 x W for Qwen3's vocabulary, where all logits would be 151,936. What it drafts can
change no token of the output.

For heads without a path head (the published ones). A path head ranks depth d under the candidates
of depth d - 1, so it needs all logits of a depth again after those of the depth above are known;
it stays with XLA.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels import mosaic
from pallas_kernels.draft_head_topk.gpu import check, join
from pallas_kernels.row_invariant_matmul import mosaic_gpu as matmul
from pallas_kernels.row_invariant_matmul import specs as matmul_specs

_BLOCK = matmul_specs.ROW_BLOCK
_NEVER = np.iinfo(np.int32).max


def topk(
    hidden: jax.Array,
    head: jax.Array,
    width: int,
    *,
    scale: jax.Array | None = None,
    interpret: Any = None,
) -> tuple[jax.Array, jax.Array]:
    """The `width` most likely tokens of each row, the lowest ids first among equals.

    Args:
      hidden: [M, H] bfloat16, rows of all depths and sequences, after the draft head's final norm.
      head: [Vd, H] bfloat16, multiples of 64.
      width: W, 1 to `specs.GPU_MAX_WIDTH`.
      scale: [M] float32 factors above 0 of a row's logits (1 / temperature); None: 1.
      interpret: `mosaic.interpret_params()` on a machine without a GPU.

    Returns:
      Draft ids [M, W] int32, best first, and their log-probabilities [M, W] float32, at most 0. A
      row with a logit that is not a number has NaN for all of them: it drafts nothing.

    Raises:
      KernelError: shapes or dtypes that the kernel does not take.
    """
    m, tiling = hidden.shape[0], check(hidden, head, width)
    if m == 0:
        return jnp.zeros((0, width), jnp.int32), jnp.zeros((0, width), jnp.float32)
    if scale is None:
        scale = jnp.ones((m,), jnp.float32)
    values, ids, sums = _launch(hidden, head, scale, width, tiling, interpret)
    return join(values[..., :m], ids[..., :m], sums[:, :m])


def _launch(
    hidden: jax.Array,
    head: jax.Array,
    scale: jax.Array,
    width: int,
    tiling: matmul_specs.Tiling,
    interpret: Any,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    m, vocab, block_n = hidden.shape[0], head.shape[0], tiling.block_n
    # a second 64 rows would not fit the registers beside the ranking
    rows, blocks = _BLOCK, vocab // block_n
    padded = mosaic.rounded_up(m, rows)
    layout = mosaic.Layout.WGMMA
    scale = jnp.pad(scale, (0, padded - m))

    def draft_head_topk(*refs: Any) -> None:
        x_ref, w_ref, scale_ref, value_ref, id_ref, sum_ref, value_smem, id_smem, sum_smem = refs
        column, block = lax.axis_index("column"), lax.axis_index("block")
        here = mosaic.ds(block * rows, _BLOCK)

        def finish(_: int, logits: jax.Array) -> None:
            def wide(x: jax.Array) -> jax.Array:
                return lax.broadcast_in_dim(x, logits.shape, (0,))

            factor = mosaic.load(scale_ref.at[here], layout=layout.reduce(1), optimized=False)
            logits = logits * wide(factor)
            ids = mosaic.broadcasted_iota(jnp.int32, logits.shape, 1, layout=layout)
            ids = ids + column * block_n
            wrong = logits != logits
            broken = jnp.max(jnp.where(wrong, 1, 0), axis=1) > 0
            rest = jnp.where(wrong, -jnp.inf, logits)
            peak = jnp.max(rest, axis=1)
            # a block of -inf only: nothing to add (its own difference would be NaN)
            base = jnp.where(peak == -jnp.inf, 0.0, peak)
            total = jnp.sum(jnp.exp(rest - wide(base)), axis=1)
            sum_smem[...] = jnp.where(broken, jnp.nan, total)

            def take(rank: Any, rest: jax.Array) -> jax.Array:
                best = jnp.max(rest, axis=1)
                first = jnp.min(jnp.where(rest == wide(best), ids, _NEVER), axis=1)
                value_smem[rank], id_smem[rank] = best, first
                # -inf comes twice only where nothing else is left, and such a token is no node
                return jnp.where(ids == wide(first), -jnp.inf, rest)

            lax.fori_loop(0, width, take, rest)
            mosaic.commit_smem()
            mosaic.copy_smem_to_gmem(value_smem, value_ref.at[column, :, here])
            mosaic.copy_smem_to_gmem(id_smem, id_ref.at[column, :, here])
            mosaic.copy_smem_to_gmem(sum_smem, sum_ref.at[column, here])

        matmul.stream(x_ref, w_ref, finish, rows, block, column, 0, tiling)
        mosaic.wait_smem_to_gmem(0)

    kernel = mosaic.kernel(
        draft_head_topk,
        out_type=[
            jax.ShapeDtypeStruct((blocks, width, padded), jnp.float32),
            jax.ShapeDtypeStruct((blocks, width, padded), jnp.int32),
            jax.ShapeDtypeStruct((blocks, padded), jnp.float32),
        ],
        scratch_types=[
            mosaic.SMEM((width, _BLOCK), jnp.float32),
            mosaic.SMEM((width, _BLOCK), jnp.int32),
            mosaic.SMEM((_BLOCK,), jnp.float32),
        ],
        grid=(blocks, padded // rows),
        grid_names=("column", "block"),
        interpret=interpret,
    )
    values, ids, sums = kernel(matmul.whole_tiles(hidden), head, scale)
    return values, ids, sums
