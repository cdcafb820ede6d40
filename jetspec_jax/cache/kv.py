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

from jetspec_jax.typing import Array

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
    layers: int, batch: int, heads: int, allocated: int, head_dim: int, dtype: Any
) -> KVCache:
    """A cache of zeros; `allocated` counts slots (tokens) a sequence."""
    shape = (batch, heads, allocated, head_dim)
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


def append(
    cache: KVCache, new_k: tuple[Array, ...], new_v: tuple[Array, ...], start: Array
) -> KVCache:
    """Write T rows per layer ([B, K, T, h]) at slots start[b] (int32 [B]) and up.

    Callers keep T slots of slack above the last live key (`alloc` with capacity + slack): a start
    beyond allocated - T would be clamped by XLA and overwrite live keys.
    """
    return KVCache(
        tuple(_write(c, r, start) for c, r in zip(cache.k, new_k, strict=True)),
        tuple(_write(c, r, start) for c, r in zip(cache.v, new_v, strict=True)),
    )


def gather_rows(rows: tuple[Array, ...], path: Array) -> tuple[Array, ...]:
    """Rows `path` [B, P] of per-layer [B, K, N, h] -> per layer [B, K, P, h] (the accepted path's
    K/V).
    """
    index = path[:, None, :, None]
    return tuple(jnp.take_along_axis(r, index, axis=2) for r in rows)
