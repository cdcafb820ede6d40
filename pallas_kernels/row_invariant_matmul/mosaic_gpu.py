"""Projection on Hopper: the weight streams through shared memory once, rows stand by (wgmma, TMA).

A block owns `block_n` outputs and one part of K. Rows lie on wgmma's M, 64 at a time, whatever M
is: rows that are not there are zeros that the bulk copy fills in, and rows past 64 are further
wgmmas of the same shape on the same weight tile. So each row meets the same instructions, m64 x
block_n x 16, in the same order of k, and its bits cannot depend on M. The other way round (outputs
on M, rows on N of 8 to 256) would multiply less padding, but its instruction changes with M; and
padding costs no time here: at 64 rows a Hopper multiplies 64 times a weight's elements in a quarter
of the time in which they arrive (`roofline`).

Parts of K are kept apart in memory and added from left to right by XLA, which fuses that into
whatever follows. What is left to the hardware, that a wgmma treats its 64 rows alike, is what
the tests with marker `gpu` look at.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import mosaic
from pallas_kernels.row_invariant_matmul import specs
from pallas_kernels.row_invariant_matmul.gpu import add_parts, check, group_rows

_WIDE = 128  # most rows of a block: two accumulators of 64 x 128 are half of the registers
_STORE = 64  # outputs of a store


def matmul(
    x: jax.Array,
    w: jax.Array,
    *,
    inputs_first: bool = False,
    tiling: specs.Tiling | None = None,
    interpret: Any = None,
) -> jax.Array:
    """x @ w.T with float32 sums; the bits of a row depend on that row and the weight alone.

    Args:
      x: [M, K] bfloat16, any M.
      w: [N, K] bfloat16, N and K multiples of 64; [K, N] where `inputs_first`.
      inputs_first: how the weight is stored.
      tiling: None: `specs.tiling`.
      interpret: `mosaic.interpret_params()` on a machine without a GPU.

    Returns:
      [M, N] float32.

    Raises:
      KernelError: shapes or dtypes that the kernel does not take.
    """
    n, k = w.shape[::-1] if inputs_first else w.shape
    tiling = check(x, w, n, k, tiling)
    if x.shape[0] == 0:
        return jnp.zeros((0, n), jnp.float32)
    rows = rows_of_block(x.shape[0])
    parts = _launch(whole_tiles(x), w, None, n, rows, inputs_first, tiling, interpret)
    return add_parts(parts[:, : x.shape[0]])


def grouped_matmul(
    x: jax.Array,
    w: jax.Array,
    experts: jax.Array,
    *,
    tiling: specs.Tiling | None = None,
    interpret: Any = None,
) -> jax.Array:
    """Row i times the weight of its expert, with the promise of `matmul`.

    Rows are sorted into blocks of 64 of one expert each; the weights of experts that no row wants
    are not read.

    Args:
      x: [A, K] bfloat16, a row for every (token, chosen expert).
      w: [E, N, K] bfloat16.
      experts: [A] int32 in 0..E - 1.
      tiling, interpret: as in `matmul`.

    Returns:
      [A, N] float32.

    Raises:
      KernelError: shapes or dtypes that the kernel does not take.
    """
    count, n, k = w.shape
    tiling = check(x, w, n, k, tiling or specs.tiling(n, k, split=False))
    if x.shape[0] == 0:
        return jnp.zeros((0, n), jnp.float32)
    place, expert_of_block = group_rows(experts, count)
    size = expert_of_block.shape[0] * specs.ROW_BLOCK
    sorted_rows = jnp.zeros((size, k), x.dtype).at[place].set(x)
    parts = _launch(sorted_rows, w, expert_of_block, n, specs.ROW_BLOCK, False, tiling, interpret)
    return add_parts(parts[:, place])


def _launch(
    x: jax.Array,
    w: jax.Array,
    expert_of_block: jax.Array | None,
    n: int,
    rows: int,
    inputs_first: bool,
    tiling: specs.Tiling,
    interpret: Any,
) -> jax.Array:
    """Sums of each part of K: [splits, M, n] float32. Blocks of an expert -1 are left unwritten."""
    block_n, _, splits, _ = tiling

    def row_invariant_matmul(*refs: Any) -> None:
        *expert_ref, x_ref, w_ref, out_ref, staging = refs
        column, part, block = (lax.axis_index(name) for name in ("column", "part", "block"))

        def store(w_ref: Any) -> None:
            def finish(i: int, sums: jax.Array) -> None:
                first = block * rows + i * specs.ROW_BLOCK
                for c in range(0, block_n, _STORE):
                    mosaic.wait_smem_to_gmem(0, wait_read_only=True)
                    staging[...] = sums[:, c : c + _STORE]
                    mosaic.commit_smem()
                    to = out_ref.at[
                        part,
                        mosaic.ds(first, specs.ROW_BLOCK),
                        mosaic.ds(column * block_n + c, _STORE),
                    ]
                    mosaic.copy_smem_to_gmem(staging, to)

            stream(x_ref, w_ref, finish, rows, block, column, part, tiling, inputs_first)
            mosaic.wait_smem_to_gmem(0)

        if not expert_ref:
            store(w_ref)
            return
        expert = expert_ref[0][block]
        mosaic.when(expert >= 0)(lambda: store(w_ref.at[expert]))

    kernel = mosaic.kernel(
        row_invariant_matmul,
        out_type=jax.ShapeDtypeStruct((splits, x.shape[0], n), jnp.float32),
        scratch_types=[
            # one, so that two blocks fit a multiprocessor
            mosaic.SMEM(
                (specs.ROW_BLOCK, _STORE), jnp.float32, transforms=mosaic.swizzled(jnp.float32)
            )
        ],
        # the last axis runs fastest: blocks of rows that share a weight tile follow each other
        grid=(n // block_n, splits, -(-x.shape[0] // rows)),
        grid_names=("column", "part", "block"),
        interpret=interpret,
    )
    return kernel(x, w) if expert_of_block is None else kernel(expert_of_block, x, w)


def whole_tiles(x: jax.Array) -> jax.Array:
    """Rows as the bulk copy takes them: up to 8, or a multiple of 8. Zeros are added."""
    more = -x.shape[0] % 8
    return x if x.shape[0] <= 8 or not more else jnp.pad(x, ((0, more), (0, 0)))


def rows_of_block(count: int) -> int:
    """Rows of one block of a kernel over `count` rows: a function of the grid, not of the bits."""
    return specs.ROW_BLOCK if count <= specs.ROW_BLOCK else _WIDE


def stream(
    x_ref: Any,
    w_ref: Any,
    finish: Callable[[int, jax.Array], None],
    rows: int,
    block: Any,
    column: Any,
    part: Any,
    tiling: specs.Tiling,
    inputs_first: bool = False,
) -> None:
    """Sums of `rows` rows with the weight tile of one block, inside of a kernel.

    Args:
      x_ref: [M, K] bfloat16 in device memory, from `whole_tiles`; rows past M are zeros.
      w_ref: [N, K], or [K, N] where `inputs_first`.
      finish: called for each 64 rows with their number and [64, block_n] float32 sums.
      rows: 64 or 128 rows of this block.
      block, column, part: which rows, outputs and part of K.
      tiling: of the weight.
      inputs_first: how the weight is stored.
    """
    block_n, block_k, splits, stages = tiling
    steps = x_ref.shape[1] // block_k // splits
    operand = mosaic.swizzled(jnp.bfloat16)

    def tile(step: Any) -> tuple[Any, Any]:
        at = part * steps + step
        return (at, column) if inputs_first else (column, at)

    def run(*accumulators: Any) -> None:
        def multiply(_: Any, x_tile: Any, w_tile: Any) -> None:
            w_tile = w_tile if inputs_first else mosaic.transposed(w_tile)
            for i, acc in enumerate(accumulators):  # one shape of wgmma, whatever M is
                own = x_tile.at[i * specs.ROW_BLOCK : (i + 1) * specs.ROW_BLOCK]
                mosaic.wgmma(acc, own, w_tile)
            mosaic.wgmma_wait(len(accumulators))  # those of the step before are done

        mosaic.emit_pipeline(
            multiply,
            grid=(steps,),
            in_specs=[
                mosaic.BlockSpec(
                    (rows, block_k),
                    lambda step: (block, part * steps + step),
                    transforms=operand,
                    delay_release=1,
                ),
                mosaic.BlockSpec(
                    (block_k, block_n) if inputs_first else (block_n, block_k),
                    tile,
                    transforms=operand,
                    delay_release=1,
                ),
            ],
            max_concurrent_steps=stages,
        )(x_ref, w_ref)
        for i, acc in enumerate(accumulators):
            finish(i, acc[...])

    accumulators = [mosaic.ACC((specs.ROW_BLOCK, block_n), jnp.float32)]
    mosaic.run_scoped(run, *accumulators * (rows // specs.ROW_BLOCK))
