"""Choice of each row on Hopper: the LM head streams by once, and no logit reaches memory.

A block owns 128 tokens. It multiplies them with all rows as `row_invariant_matmul` does (so a row's
logits have the bits of that op, whatever M is), and keeps of every 64 the largest, its id and the
second largest. XLA then compares these of each row: maxima and comparisons only, exact in any
order. Where a row samples, Gumbel noise of (position, token) is made in registers.

The final norm stays with XLA: it is one small kernel, while here each of the 1,187 blocks of
Qwen3's head would repeat it.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels import mosaic
from pallas_kernels.gumbel_noise.on_chip import gumbel
from pallas_kernels.row_invariant_matmul import mosaic_gpu as matmul
from pallas_kernels.row_invariant_matmul import specs as matmul_specs
from pallas_kernels.verify_head.gpu import Sampling, check, combine, row_fields

_BLOCK = matmul_specs.ROW_BLOCK
_TOKENS = 64  # of one part of a block, for which its best two are kept
_NEVER = np.iinfo(np.int32).max


def verify_head(
    hidden: jax.Array,
    head: jax.Array,
    *,
    sampling: Sampling | None = None,
    interpret: Any = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Token of each row, its logit, and the margin over the second best.

    Args:
      hidden: [M, H] bfloat16 after the final norm, any M.
      head: [V, H] bfloat16, V and H multiples of 64.
      sampling: None: greedy. With it logits are the perturbed ones, also in what is returned.
      interpret: `mosaic.interpret_params()` on a machine without a GPU.

    Returns:
      ids [M] int32 (the lowest among equals, the first NaN where there is one), logit [M] and
      margin [M] float32.

    Raises:
      KernelError: shapes or dtypes that the kernel does not take.
    """
    m, tiling = hidden.shape[0], check(hidden, head)
    if m == 0:
        empty = jnp.zeros((0,), jnp.float32)
        return empty.astype(jnp.int32), empty, empty
    best, ids, second = _launch(hidden, head, sampling, tiling, interpret)
    return combine(best[:, :m], ids[:, :m], second[:, :m])


def _launch(
    hidden: jax.Array,
    head: jax.Array,
    sampling: Sampling | None,
    tiling: matmul_specs.Tiling,
    interpret: Any,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Best, id and second of each part and row: [V / 64, M rounded up] each."""
    m, vocab, block_n = hidden.shape[0], head.shape[0], tiling.block_n
    parts = block_n // _TOKENS
    # noise takes the registers of the second 64 rows
    rows = _BLOCK if sampling is not None else matmul.rows_of_block(m)
    padded = mosaic.rounded_up(m, rows)
    layout = mosaic.Layout.WGMMA
    of_row = layout.reduce(1)
    extras: tuple[jax.Array, ...] = ()
    if sampling is not None:
        extras = tuple(jnp.pad(x, (0, padded - m)) for x in row_fields(sampling))

    def verify_head_blocks(*refs: Any) -> None:
        x_ref, w_ref, *rest = refs
        *row_refs, best_ref, id_ref, second_ref, best_smem, id_smem, second_smem = rest
        column, block = lax.axis_index("column"), lax.axis_index("block")

        def finish(i: int, sums: jax.Array) -> None:
            for c in range(block_n // _TOKENS):  # a part at a time: registers
                rank(i, sums[:, c * _TOKENS : (c + 1) * _TOKENS], column * parts + c)

        def rank(i: int, logits: jax.Array, part: jax.Array) -> None:
            here = mosaic.ds(block * rows + i * _BLOCK, _BLOCK)
            local = mosaic.broadcasted_iota(jnp.int32, logits.shape, 1, layout=layout)
            ids = local + part * _TOKENS

            def wide(x: jax.Array) -> jax.Array:
                return lax.broadcast_in_dim(x, logits.shape, (0,))

            if row_refs:
                low, high, scale, warm = (
                    mosaic.load(ref.at[here], layout=of_row, optimized=False) for ref in row_refs
                )
                noise = gumbel(ids, (wide(low), wide(high)))
                logits = logits * wide(scale) + jnp.where(wide(warm) > 0, noise, 0.0)
            best, first, second = top_two(logits, ids, wide)
            mosaic.wait_smem_to_gmem(0, wait_read_only=True)
            best_smem[...], id_smem[...], second_smem[...] = best, first, second
            mosaic.commit_smem()
            for smem, ref in ((best_smem, best_ref), (id_smem, id_ref), (second_smem, second_ref)):
                mosaic.copy_smem_to_gmem(smem, ref.at[part, here])

        matmul.stream(x_ref, w_ref, finish, rows, block, column, 0, tiling)
        mosaic.wait_smem_to_gmem(0)

    blocks = vocab // _TOKENS
    kernel = mosaic.kernel(
        verify_head_blocks,
        out_type=[
            jax.ShapeDtypeStruct((blocks, padded), t) for t in (jnp.float32, jnp.int32, jnp.float32)
        ],
        scratch_types=[mosaic.SMEM((_BLOCK,), t) for t in (jnp.float32, jnp.int32, jnp.float32)],
        grid=(vocab // block_n, padded // rows),
        grid_names=("column", "block"),
        interpret=interpret,
    )
    best, ids, second = kernel(matmul.whole_tiles(hidden), head, *extras)
    return best, ids, second


def top_two(logits: jax.Array, ids: jax.Array, wide: Any) -> tuple[jax.Array, ...]:
    """Largest of each row, its id and the second largest, inside of a kernel.

    Args:
      logits: [64, tokens] float32.
      ids: [64, tokens] int32, rising.
      wide: spreads a value a row over its logits.
    """
    wrong = logits != logits
    first_wrong = jnp.min(jnp.where(wrong, ids, _NEVER), axis=1)
    # the hardware's maximum skips NaN; here they take no part
    clean = jnp.where(wrong, -jnp.inf, logits)
    best = jnp.max(clean, axis=1)
    first = jnp.min(jnp.where(clean == wide(best), ids, _NEVER), axis=1)
    second = jnp.max(jnp.where(ids == wide(first), -jnp.inf, clean), axis=1)
    broken = first_wrong < _NEVER
    return jnp.where(broken, jnp.nan, best), jnp.where(broken, first_wrong, first), second
