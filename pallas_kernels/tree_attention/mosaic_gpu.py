"""Tree attention for Hopper (wgmma, TMA) in an order that is a function of the row alone.

Every row folds the keys that it sees in the order of their *logical positions*: chunks of 64
positions, cut at multiples of 64, and segments of whole chunks, cut at multiples of `segment`,
whose results a second kernel folds in the order of the segments. A new row that is the k-th that a
row sees stands at position `length + k`, where the cache holds it once it is committed. Chunks
that lie in the cache are read once for all rows of a tile. A chunk that holds new rows is put
together in shared memory once per path of the tile (`plan`): committed keys from the cache, new
ones by a product with a 0/1 matrix, which copies exactly. All chunks go through the same
instructions, in one loop, and for a row that is not on the path of a chunk the step is an identity:
its maximum stays, its factor is exp2(0) = 1, its probabilities are 0.

Nothing in a block depends on N, on the batch or on how much of a path is cached except how often
the loop runs, so a row's bits do not depend on them if the tensor core keeps two promises, which
the test marked `gpu` checks on the device and which the interpreter cannot:

1. An element of a product depends on its row of A and its column of B only, not on its place in the
   64 x n tile, nor on other rows and columns.
2. Adding products that are exactly zero does not change an accumulated sum.

(`segment` is part of the arithmetic: it comes from the device's tuned table, never from a shape.)
"""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import mosaic
from pallas_kernels.tree_attention.plan import make_plan, pack_rows, unpack_rows

CHUNK = 64  # logical positions that share one maximum; also rows of a block of new keys
ROWS = 64  # rows of a tile: M of wgmma
STAGES = 4  # chunks of the cache in flight; later blocks of new rows, so N <= STAGES * CHUNK
MAX_ROWS = STAGES * CHUNK
_CACHED, _TILE = STAGES, STAGES + 1  # slots: the chunk that the cache ends in, the built chunk
_NEVER = -1e30  # maximum of a row that has seen nothing: finite, so that differences are
_HALF = 64  # columns of a chunk that are built at once: registers


def _fold_segments(
    q: Any, k: Any, v: Any, new_k: Any, new_v: Any, rank: Any, lengths: Any, row_path: Any,
    row_end: Any, paths: Any, counts: Any, extent: Any, pages: Any, block_count: Any,
    sums_out: Any, top_out: Any, total_out: Any,
    q_smem: Any, k_smem: Any, v_smem: Any, p_smem: Any, q_ready: Any, ready: Any,
    *, dim: int, segment: int, scale: float, page: int,
) -> None:  # fmt: skip
    """One block: a tile of rows of one key head over one segment of logical positions."""
    b, h, t, s = (lax.axis_index(name) for name in ("b", "h", "t", "s"))
    layout = mosaic.Layout.WGMMA
    of_row, of_column = layout.reduce(1), layout.reduce(0)
    capacity = _chunks_of_cache(k, pages, page)

    length = lengths[b]
    first_chunk = s * (segment // CHUNK)
    whole = lax.div(length, CHUNK)  # chunks that lie in the cache
    in_cache = jnp.clip(whole - first_chunk, 0, segment // CHUNK)
    own_first = jnp.maximum(whole, first_chunk)
    ends = lax.div(extent[b, t] + (CHUNK - 1), CHUNK)
    own = jnp.maximum(jnp.minimum(ends, first_chunk + segment // CHUNK) - own_first, 0)
    items = in_cache + own * counts[b, t]

    def copy(slot: Any, source_k: Any, source_v: Any, at: int, rows: int) -> None:
        target = mosaic.ds(at, rows)
        mosaic.copy_gmem_to_smem(source_k, k_smem.at[slot, target], ready.at[slot])
        mosaic.copy_gmem_to_smem(source_v, v_smem.at[slot, target], ready.at[slot])

    step = min(page, CHUNK) if page else CHUNK

    def fetch_cached(chunk: Any, slot: Any) -> None:
        for at in range(0, CHUNK, step):
            position = chunk * CHUNK + at
            if page:
                index, rows = pages[b, lax.div(position, page)], lax.rem(position, page)
            else:
                index, rows = b, position
            rows = mosaic.ds(rows, step)
            copy(slot, k.at[index, h, rows], v.at[index, h, rows], at, step)

    def fetch_new(block: Any) -> None:
        for at in range(0, CHUNK, step):
            rows = mosaic.ds(block * CHUNK + at, step)
            copy(block, new_k.at[b, h, rows], new_v.at[b, h, rows], at, step)

    blocks = block_count[0]  # read, not compiled in: the code is the same for every N

    def fetch_for_paths() -> None:
        mosaic.commit_smem()  # every warp is done with the slots
        fetch_cached(jnp.minimum(whole, capacity - 1), _CACHED)
        mosaic.barrier_wait(ready.at[_CACHED])

        def start(block: Any, _: None) -> None:
            fetch_new(block)

        def finish(block: Any, _: None) -> None:
            mosaic.barrier_wait(ready.at[block])

        lax.fori_loop(0, blocks, start, None)
        lax.fori_loop(0, blocks, finish, None)

    def build(chunk: Any, path: Any) -> None:
        """The chunk as the rows of `path` see it, in slot _TILE."""
        mosaic.commit_smem()  # every warp is done with the last one
        wide = (CHUNK, _HALF)
        place = mosaic.broadcasted_iota(jnp.int32, wide, 0, layout=layout) + (
            chunk * CHUNK - length
        )
        halves = [
            (smem, mosaic.ds(at, _HALF)) for smem in (k_smem, v_smem) for at in range(0, dim, _HALF)
        ]
        for smem, columns in halves:
            cached = mosaic.load(smem.at[_CACHED, :, columns], layout=layout)
            smem[_TILE, :, columns] = jnp.where(place < 0, cached, jnp.zeros((), smem.dtype))

        def add_new(block: Any, _: None) -> None:
            ranks = mosaic.load(
                rank.at[b, path, mosaic.ds(block * CHUNK, CHUNK)],
                layout=of_column,
                optimized=False,
            )
            chosen = lax.broadcast_in_dim(ranks, wide, (1,)) == place
            turn = lax.rem(block, 2)
            p_smem[turn] = jnp.where(chosen, 1.0, 0.0).astype(p_smem.dtype)
            mosaic.commit_smem()
            for smem, columns in halves:

                def product(acc: Any, smem: Any = smem, columns: Any = columns) -> Any:
                    mosaic.wgmma(acc, p_smem.at[turn], smem.at[block, :, columns])
                    return acc[...]

                fresh = mosaic.run_scoped(product, mosaic.ACC(wide, jnp.float32))
                so_far = mosaic.load(smem.at[_TILE, :, columns], layout=layout)
                # one of the two is zero
                smem[_TILE, :, columns] = so_far + fresh.astype(smem.dtype)

        lax.fori_loop(0, blocks, add_new, None)
        mosaic.commit_smem()

    def fold(i: Any, carry: tuple[Any, Any, Any]) -> tuple[Any, Any, Any]:
        sums, top, total = carry
        cached = i < in_cache
        extra = jnp.maximum(i - in_cache, 0)
        width = jnp.maximum(own, 1)
        chunk = jnp.where(cached, first_chunk + i, own_first + lax.rem(extra, width))
        path = paths[b, t, jnp.minimum(lax.div(extra, width), ROWS - 1)]
        slot = jnp.where(cached, lax.rem(i, STAGES), _TILE)
        mosaic.when(i == in_cache)(fetch_for_paths)
        mosaic.when(~cached)(lambda: build(chunk, path))
        mosaic.when(cached)(lambda: mosaic.barrier_wait(ready.at[slot]))

        def scores_of(acc: Any) -> Any:
            mosaic.wgmma(acc, q_smem, mosaic.transposed(k_smem.at[slot]))
            return acc[...]

        scores = mosaic.run_scoped(scores_of, mosaic.ACC((ROWS, CHUNK), jnp.float32))
        position = mosaic.broadcasted_iota(jnp.int32, (ROWS, CHUNK), 1, layout=layout)
        end = jnp.where((mine == path) | cached, until, 0) - chunk * CHUNK
        seen = position < lax.broadcast_in_dim(end, (ROWS, CHUNK), (0,))
        scores = jnp.where(seen, scores * (scale * math.log2(math.e)), _NEVER)
        new_top = jnp.maximum(top, scores.max(axis=1))
        p = jnp.where(
            seen, jnp.exp2(scores - lax.broadcast_in_dim(new_top, scores.shape, (0,))), 0.0
        )
        factor = jnp.exp2(top - new_top)
        turn = lax.rem(i, 2)  # the other buffer may still be read by a slower warp
        p_smem[turn] = p.astype(p_smem.dtype)
        mosaic.commit_smem()  # and every warp is done with the last item's slot
        ahead = i - 1 + STAGES

        @mosaic.when((i > 0) & (ahead < in_cache))
        def _() -> None:
            fetch_cached(first_chunk + ahead, lax.rem(ahead, STAGES))

        def weighted(acc: Any) -> Any:
            mosaic.wgmma(acc, p_smem.at[turn], v_smem.at[slot])
            return acc[...]

        fresh = mosaic.run_scoped(weighted, mosaic.ACC((ROWS, dim), jnp.float32))
        sums = sums * lax.broadcast_in_dim(factor, sums.shape, (0,)) + fresh
        return sums, new_top, total * factor + p.sum(axis=1)

    rows = mosaic.ds(t * ROWS, ROWS)
    mine = mosaic.load(row_path.at[b, rows], layout=of_row, optimized=False)
    until = mosaic.load(row_end.at[b, rows], layout=of_row, optimized=False)

    @mosaic.when(items > 0)
    def _() -> None:
        mosaic.copy_gmem_to_smem(q.at[b, h, rows], q_smem, q_ready)

        def start(i: Any, _: None) -> None:
            fetch_cached(first_chunk + i, i)

        lax.fori_loop(0, jnp.minimum(in_cache, STAGES), start, None)
        mosaic.barrier_wait(q_ready)
        zero = mosaic.layout_cast(jnp.zeros((ROWS, dim), jnp.float32), layout)
        never = mosaic.layout_cast(jnp.full((ROWS,), _NEVER, jnp.float32), of_row)
        none = mosaic.layout_cast(jnp.zeros((ROWS,), jnp.float32), of_row)
        sums, top, total = lax.fori_loop(0, items, fold, (zero, never, none))
        sums_out[b, h, s, rows] = sums
        top_out[b, h, s, rows] = top
        total_out[b, h, s, rows] = total


def _chunks_of_cache(k: Any, pages: Any, page: int) -> int:
    return pages.shape[1] * page // CHUNK if page else k.shape[2] // CHUNK


def _join_segments(
    sums: Any,
    top: Any,
    total: Any,
    extent: Any,
    out: Any,
    out_smem: Any,
    *,
    dim: int,
    segment: int,
) -> None:
    """One block: the segments of a tile of rows, folded in their order."""
    b, h, t = (lax.axis_index(name) for name in ("b", "h", "t"))
    layout = mosaic.Layout.WGMMA
    of_row = layout.reduce(1)
    rows = mosaic.ds(t * ROWS, ROWS)
    count = lax.div(extent[b, t] + (segment - 1), segment)

    def row_vector(ref: Any, s: Any) -> Any:
        return mosaic.load(ref.at[b, h, s, rows], layout=of_row, optimized=False)

    def highest(s: Any, so_far: Any) -> Any:
        return jnp.maximum(so_far, row_vector(top, s))

    never = mosaic.layout_cast(jnp.full((ROWS,), _NEVER, jnp.float32), of_row)
    overall = lax.fori_loop(0, count, highest, never)

    def add(s: Any, carry: tuple[Any, Any]) -> tuple[Any, Any]:
        values, norm = carry
        weight = jnp.exp2(row_vector(top, s) - overall)
        part = mosaic.load(sums.at[b, h, s, rows], layout=layout, optimized=False)
        values = values + part * lax.broadcast_in_dim(weight, part.shape, (0,))
        return values, norm + row_vector(total, s) * weight

    zero = mosaic.layout_cast(jnp.zeros((ROWS, dim), jnp.float32), layout)
    none = mosaic.layout_cast(jnp.zeros((ROWS,), jnp.float32), of_row)
    values, norm = lax.fori_loop(0, count, add, (zero, none))
    norm = jnp.where(norm > 0, norm, 1.0)  # a row that saw nothing has zero values
    out_smem[...] = (values / lax.broadcast_in_dim(norm, values.shape, (0,))).astype(out.dtype)
    mosaic.commit_smem()
    mosaic.copy_smem_to_gmem(out_smem, out.at[b, h, rows])
    mosaic.wait_smem_to_gmem(0)


def unsupported(
    q: jax.Array, cache_k: jax.Array, pages: jax.Array | None, *, segment: int
) -> str | None:
    """Why this kernel does not take such a call, or None where it does."""
    dim, rows = q.shape[4], q.shape[3]
    if q.dtype not in (jnp.bfloat16, jnp.float16):
        return f"{q.dtype} rows: wgmma multiplies bfloat16 and float16"
    if dim not in (64, 128):
        return f"head dimension {dim}: 64 and 128 are there"
    if rows > MAX_ROWS:
        return f"{rows} rows: at most {MAX_ROWS}"
    if segment % CHUNK:
        return f"segments of {segment} positions: a multiple of {CHUNK} is needed"
    if pages is None and cache_k.shape[2] % CHUNK:
        return f"a cache of {cache_k.shape[2]} slots: a multiple of {CHUNK} is needed"
    if pages is not None:
        page, capacity = cache_k.shape[2], cache_k.shape[2] * pages.shape[1]
        if (page % CHUNK and CHUNK % page) or page % 8 or capacity % CHUNK:
            return f"{pages.shape[1]} pages of {page}: 8 to 256, a power of two, {CHUNK} in all"
    return None


@functools.partial(jax.jit, static_argnames=("scale", "segment", "interpret"))
def tree_attention(
    q: jax.Array,
    cache_k: jax.Array,
    cache_v: jax.Array,
    lengths: jax.Array,
    new_k: jax.Array,
    new_v: jax.Array,
    mask: jax.Array,
    pages: jax.Array | None = None,
    *,
    scale: float,
    segment: int,
    interpret: Any = None,
) -> jax.Array:
    """Arguments and result as `api.tree_attention`; bfloat16 or float16, h of 64 or 128.

    Args:
      segment: logical positions that one block folds; a row's bits depend on it.
      interpret: `mosaic.interpret_params()` on a machine without a GPU.
    """
    batch, heads, group, rows, dim = q.shape
    page = cache_k.shape[2] if pages is not None else 0
    capacity = pages.shape[1] * page if pages is not None else cache_k.shape[2]
    plan = make_plan(mask, lengths, group=group, tile=ROWS)
    packed = pack_rows(q, plan)
    padded = mosaic.rounded_up(rows, CHUNK)
    # the product with a 0/1 matrix copies finite values only
    named = mask.any(axis=1)[:, None, :, None]

    def blocks_of(new: jax.Array) -> jax.Array:
        clean = jnp.where(named, new, jnp.zeros((), new.dtype))
        return jnp.pad(clean, ((0, 0), (0, 0), (0, padded - rows), (0, 0)))

    rank = jnp.pad(plan.rank, ((0, 0), (0, 0), (0, padded - rows)), constant_values=-(1 << 30))
    tiles = packed.shape[2] // ROWS
    segments = mosaic.cdiv(capacity + rows, segment)
    swizzled = mosaic.swizzled(q.dtype)

    def shared(*shape: int) -> Any:
        return mosaic.SMEM(shape, q.dtype, transforms=swizzled)

    def tree_attention_fold(*refs: Any) -> None:
        _fold_segments(*refs, dim=dim, segment=segment, scale=scale, page=page)

    def tree_attention_join(*refs: Any) -> None:
        _join_segments(*refs, dim=dim, segment=segment)

    part = (batch, heads, segments, tiles * ROWS)
    sums, top, total = mosaic.kernel(
        tree_attention_fold,
        out_type=(
            jax.ShapeDtypeStruct((*part, dim), jnp.float32),
            jax.ShapeDtypeStruct(part, jnp.float32),
            jax.ShapeDtypeStruct(part, jnp.float32),
        ),
        scratch_types=[
            shared(ROWS, dim),
            shared(STAGES + 2, CHUNK, dim),
            shared(STAGES + 2, CHUNK, dim),
            shared(2, ROWS, CHUNK),
            mosaic.Barrier(),
            mosaic.Barrier(
                num_arrivals=2 * (CHUNK // min(page or CHUNK, CHUNK)), num_barriers=STAGES + 1
            ),
        ],
        grid=(batch, heads, segments, tiles),
        grid_names=("b", "h", "s", "t"),
        compiler_params=mosaic.CompilerParams(approx_math=True),
        interpret=interpret,
    )(
        packed,
        cache_k,
        cache_v,
        blocks_of(new_k),
        blocks_of(new_v),
        rank,
        lengths,
        plan.row_path,
        plan.row_end,
        plan.paths,
        plan.counts,
        plan.extent,
        jnp.zeros((1, 1), jnp.int32) if pages is None else pages,
        jnp.full((1,), padded // CHUNK, jnp.int32),
    )
    out = mosaic.kernel(
        tree_attention_join,
        out_type=jax.ShapeDtypeStruct(packed.shape, q.dtype),
        scratch_types=[shared(ROWS, dim)],
        grid=(batch, heads, tiles),
        grid_names=("b", "h", "t"),
        compiler_params=mosaic.CompilerParams(approx_math=True),
        interpret=interpret,
    )(sums, top, total, plan.extent)
    return unpack_rows(out, plan, group)
