"""Contiguous KV cache: one slot per sequence of a batch, one array per layer so that updates stay
in place.

The number of live keys is not stored here: it is `committed - 1` of the decode state (algorithm.md
section 1), a single counter for the target's cache and the drafter's context, so the two cannot
disagree.
"""

from __future__ import annotations

from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
from jax import lax

from jetspec_jax.typing import Array, PyTree
from pallas_kernels.accept_commit import accept_commit, unwritten

# Up to this batch, a dynamic_update_slice per sequence; beyond it a vmapped one (XLA's scatter loop
# on CPU).
_UNROLLED_BATCH = 8


@flax.struct.dataclass
class KVCache:
    """Keys after RoPE and values, per layer [B, K, S, h]; S = `allocated` slots a sequence."""

    k: tuple[Array, ...]
    v: tuple[Array, ...]

    @property
    def allocated(self) -> int:
        return self.k[0].shape[2]

    @property
    def nbytes(self) -> int:
        return sum(x.nbytes for x in (*self.k, *self.v))


def alloc(
    layers: int,
    batch: int,
    heads: int,
    allocated: int,
    head_dim: int,
    dtype: Any,
    *,
    native: bool = False,
) -> KVCache:
    """A cache of zeros; `allocated` counts slots (tokens) a sequence.

    `native`: for the native kernels, which never read a slot that was not written. The cache then
    holds anything, and takes memory only as it fills.
    """
    shape = (batch, heads, allocated, head_dim)
    if native:
        arrays = unwritten([jax.ShapeDtypeStruct(shape, dtype)] * (2 * layers))
        return KVCache(tuple(arrays[:layers]), tuple(arrays[layers:]))
    return KVCache(
        tuple(jnp.zeros(shape, dtype) for _ in range(layers)),
        tuple(jnp.zeros(shape, dtype) for _ in range(layers)),
    )


def _write(buffer: Array, rows: Array, start: Array) -> Array:
    """buffer [B, K, S, h], rows [B, K, T, h] -> rows written at slots start[b] .. start[b] + T -
    1.
    """
    rows = rows.astype(buffer.dtype)
    zero = jnp.zeros((), jnp.int32)
    if buffer.shape[0] <= _UNROLLED_BATCH:
        for b in range(buffer.shape[0]):
            at = (jnp.asarray(b, jnp.int32), zero, start[b], zero)
            buffer = lax.dynamic_update_slice(buffer, rows[b : b + 1], at)
        return buffer
    return jax.vmap(lambda x, r, s: lax.dynamic_update_slice(x, r, (zero, s, zero)))(
        buffer, rows, start
    )


def after(start: Array, result: Array) -> Array:
    """`start`, but known to XLA only once `result` is: orders a write behind the reads that made
    the result.

    The cache is read by every layer and written once. Without a data dependency from the last read
    to the write, XLA keeps a copy of the whole cache for each read (measured: two copies per layer
    and step). An optimization barrier does not help: XLA's CPU pipeline removes it before it
    decides on copies. So `start` gets a term that is always zero (a start is never negative) but
    that no simplifier can know.
    """
    probe = result[(0,) * result.ndim].astype(jnp.float32)
    return start + ((start < 0) & (probe > 0)).astype(start.dtype)


def commit(
    cache: KVCache,
    new_k: PyTree,
    new_v: PyTree,
    start: Array,
    *,
    path: Array | None = None,
    counts: Array | None = None,
) -> KVCache:
    """The cache with rows of `new_k` and `new_v` written at slots start[b] (int32 [B]) and up.

    Args:
        cache: donated by the caller's program; updated in place.
        new_k, new_v: rows of all layers: a tuple of [B, K, T, h] (XLA), or one [L, B, K, T, h] from
            the native decoder stack.
        start: see `after`.
        path: [B, P] int32, which rows, in order; None: all T as they are.
        counts: [B] int32, how many of them. The native form writes no more; XLA writes all P rows,
            of which those past the count must lie above the live keys. Callers keep P slots of
            slack above the last live key: XLA clamps a start beyond allocated - P, which would
            overwrite live keys.
    """
    if isinstance(new_k, tuple):
        if path is not None:
            new_k, new_v = gather_rows(new_k, path), gather_rows(new_v, path)
        return KVCache(
            tuple(_write(c, r, start) for c, r in zip(cache.k, new_k, strict=True)),
            tuple(_write(c, r, start) for c, r in zip(cache.v, new_v, strict=True)),
        )
    _, batch, _, rows, _ = new_k.shape
    if path is None:
        path = jnp.broadcast_to(lax.iota(jnp.int32, rows)[None], (batch, rows))
    if counts is None:
        counts = jnp.full((batch,), path.shape[1], jnp.int32)
    return KVCache(*accept_commit(cache.k, cache.v, new_k, new_v, path, start, counts))


def gather_rows(rows: tuple[Array, ...], path: Array) -> tuple[Array, ...]:
    """Rows `path` [B, P] of per-layer [B, K, N, h] -> per layer [B, K, P, h]."""
    index = path[:, None, :, None]
    return tuple(jnp.take_along_axis(r, index, axis=2) for r in rows)
