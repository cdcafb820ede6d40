"""Tree attention for NVIDIA GPUs without wgmma, in the same order as `mosaic_gpu`.

The fold is that of the Hopper kernel: chunks of 64 logical positions, segments of whole chunks,
a chunk with new rows once per path of the tile. Here a key is read where it lies (cache or new
rows), so a chunk needs no putting together; all chunks go through the same loop. The promises that
a device has to keep are the same, of mma.sync. Bits are a function of the row on one kind of
device; they are not those of the Hopper kernel.
"""

# Triton is an extra: pyright sees none of it.
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from pallas_kernels import triton_call
from pallas_kernels.tree_attention import specs
from pallas_kernels.tree_attention.plan import make_plan, pack_rows, unpack_rows

CHUNK = 64
ROWS = 64
_NEVER = tl.constexpr(-1e30)


@triton.jit
def _fold_segments(
    q, k, v, new_k, new_v, members, counts_of_path, lengths, row_path, row_end, paths, counts,
    extent, pages, sums_out, top_out, total_out,
    HEADS: tl.constexpr, SEGMENTS: tl.constexpr, TILES: tl.constexpr, T: tl.constexpr,
    CAPACITY: tl.constexpr, PAGE: tl.constexpr, PAGES: tl.constexpr, DIM: tl.constexpr,
    SEGMENT: tl.constexpr, SCALE: tl.constexpr, ROWS: tl.constexpr, CHUNK: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(0)
    s = tl.program_id(1)
    h = tl.program_id(2) % HEADS
    b = (tl.program_id(2) // HEADS).to(tl.int64)
    r = tl.arange(0, ROWS)
    c = tl.arange(0, CHUNK)
    d = tl.arange(0, DIM)

    length = tl.load(lengths + b)
    first_chunk = s * (SEGMENT // CHUNK)
    whole = length // CHUNK
    in_cache = tl.minimum(tl.maximum(whole - first_chunk, 0), SEGMENT // CHUNK)
    own_first = tl.maximum(whole, first_chunk)
    ends = (tl.load(extent + b * TILES + t) + CHUNK - 1) // CHUNK
    own = tl.maximum(tl.minimum(ends, first_chunk + SEGMENT // CHUNK) - own_first, 0)
    items = in_cache + own * tl.load(counts + b * TILES + t)
    width = tl.maximum(own, 1)

    row = (b * TILES + t) * ROWS + r
    mine = tl.load(row_path + row)
    until = tl.load(row_end + row)
    head_row = ((b * HEADS + h) * TILES + t) * ROWS + r
    queries = tl.load(q + head_row[:, None] * DIM + d[None, :])
    top = tl.full((ROWS,), _NEVER, tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    sums = tl.zeros((ROWS, DIM), tl.float32)
    for i in range(items):
        cached = i < in_cache
        extra = tl.maximum(i - in_cache, 0)
        chunk = tl.where(cached, first_chunk + i, own_first + extra % width)
        path = tl.load(paths + (b * TILES + t) * ROWS + tl.minimum(extra // width, ROWS - 1))
        path = tl.minimum(path, T - 1)
        position = chunk * CHUNK + c
        place = position - length
        is_new = (place >= 0) & (place < tl.load(counts_of_path + b * T + path))
        member = tl.load(members + (b * T + path) * T + place, mask=is_new, other=0)
        if PAGE > 0:
            on_page = tl.load(pages + b * PAGES + position // PAGE, mask=place < 0, other=0)
            slot = (on_page.to(tl.int64) * HEADS + h) * PAGE + position % PAGE
        else:
            slot = (b * HEADS + h) * CAPACITY + position
        new = (b * HEADS + h) * T + member
        held = (place < 0) | is_new
        where = tl.where(place < 0, k + slot * DIM, new_k + new * DIM)
        keys = tl.load(where[None, :] + d[:, None], mask=held[None, :], other=0.0)
        end = tl.where(cached | (mine == path), until, 0)
        seen = position[None, :] < end[:, None]
        scores = tl.dot(queries, keys, input_precision=PRECISION) * (SCALE * 1.4426950408889634)
        scores = tl.where(seen, scores, _NEVER)
        new_top = tl.maximum(top, tl.max(scores, 1))
        p = tl.where(seen, tl.exp2(scores - new_top[:, None]), 0.0)
        factor = tl.exp2(top - new_top)
        where = tl.where(place < 0, v + slot * DIM, new_v + new * DIM)
        values = tl.load(where[:, None] + d[None, :], mask=held[:, None], other=0.0)
        sums = sums * factor[:, None]
        sums += tl.dot(p.to(values.dtype), values, input_precision=PRECISION)
        total = total * factor + tl.sum(p, 1)
        top = new_top
    if items > 0:
        out = (((b * HEADS + h) * SEGMENTS + s) * TILES + t) * ROWS + r
        tl.store(sums_out + out[:, None] * DIM + d[None, :], sums)
        tl.store(top_out + out, top)
        tl.store(total_out + out, total)


@triton.jit
def _join_segments(
    sums, top, total, extent, out,
    HEADS: tl.constexpr, SEGMENTS: tl.constexpr, TILES: tl.constexpr, DIM: tl.constexpr,
    SEGMENT: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(0)
    h = tl.program_id(1) % HEADS
    b = (tl.program_id(1) // HEADS).to(tl.int64)
    r = tl.arange(0, ROWS)
    d = tl.arange(0, DIM)
    count = (tl.load(extent + b * TILES + t) + SEGMENT - 1) // SEGMENT
    first = ((b * HEADS + h) * SEGMENTS * TILES + t) * ROWS + r
    overall = tl.full((ROWS,), _NEVER, tl.float32)
    for s in range(count):
        overall = tl.maximum(overall, tl.load(top + first + s * TILES * ROWS))
    values = tl.zeros((ROWS, DIM), tl.float32)
    norm = tl.zeros((ROWS,), tl.float32)
    for s in range(count):
        at = first + s * TILES * ROWS
        weight = tl.exp2(tl.load(top + at) - overall)
        values += tl.load(sums + at[:, None] * DIM + d[None, :]) * weight[:, None]
        norm += tl.load(total + at) * weight
    norm = tl.where(norm > 0, norm, 1.0)
    row = ((b * HEADS + h) * TILES + t) * ROWS + r
    result = values / norm[:, None]
    tl.store(out + row[:, None] * DIM + d[None, :], result.to(out.dtype.element_ty))


def heuristics(dim: int) -> dict[str, int]:
    """Parameters for devices without a tuned table; of the model's shape only, never of N."""
    return specs.triton_heuristics(dim)


def unsupported(q: jax.Array, *, segment: int) -> str | None:
    """Why this kernel does not take such a call, or None where it does."""
    dim = q.shape[4]
    if q.dtype not in (jnp.bfloat16, jnp.float16, jnp.float32):
        return f"{q.dtype} rows: bfloat16, float16 and float32 are there"
    if dim not in (32, 64, 128):
        return f"head dimension {dim}: 32, 64 and 128 are there"
    if segment % CHUNK:
        return f"segments of {segment} positions: a multiple of {CHUNK} is needed"
    return None


@functools.partial(jax.jit, static_argnames=("scale", "segment", "num_warps", "num_stages"))
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
    num_warps: int,
    num_stages: int,
) -> jax.Array:
    """Arguments and result as `api.tree_attention`.

    Args:
      segment: logical positions that one block folds; a row's bits depend on it.
      num_warps: warps of a block; bits may depend on it.
      num_stages: chunks in flight.
    """
    batch, heads, group, rows, dim = q.shape
    page = cache_k.shape[2] if pages is not None else 0
    capacity = pages.shape[1] * page if pages is not None else cache_k.shape[2]
    plan = make_plan(mask, lengths, group=group, tile=ROWS)
    packed = pack_rows(q, plan)
    tiles = packed.shape[2] // ROWS
    segments = math.ceil((capacity + rows) / segment)
    part = (batch, heads, segments, tiles * ROWS)
    shape = {
        "HEADS": heads,
        "SEGMENTS": segments,
        "TILES": tiles,
        "DIM": dim,
        "SEGMENT": segment,
        "ROWS": ROWS,
    }
    sums, top, total = triton_call.call(
        _fold_segments,
        packed,
        cache_k,
        cache_v,
        new_k,
        new_v,
        plan.members,
        mask.sum(axis=-1, dtype=jnp.int32),
        lengths,
        plan.row_path,
        plan.row_end,
        plan.paths,
        plan.counts,
        plan.extent,
        jnp.zeros((1, 1), jnp.int32) if pages is None else pages,
        out_type=(
            jax.ShapeDtypeStruct((*part, dim), jnp.float32),
            jax.ShapeDtypeStruct(part, jnp.float32),
            jax.ShapeDtypeStruct(part, jnp.float32),
        ),
        grid=(tiles, segments, batch * heads),
        T=rows,
        CAPACITY=capacity,
        PAGE=page,
        PAGES=0 if pages is None else pages.shape[1],
        SCALE=scale,
        CHUNK=CHUNK,
        PRECISION="ieee",
        num_warps=num_warps,
        num_stages=num_stages,
        **shape,
    )
    out = triton_call.call(
        _join_segments,
        sums,
        top,
        total,
        plan.extent,
        out_type=jax.ShapeDtypeStruct(packed.shape, q.dtype),
        grid=(tiles, batch * heads, 1),
        num_warps=num_warps,
        **shape,
    )
    return unpack_rows(out, plan, group)
