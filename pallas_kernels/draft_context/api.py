"""Drafter context of newly committed rows, written to every draft layer's cache in place.

The native kernel (`cpu.cc`) is the serving form of `jetspec_jax.drafter.fuse` and `context_kv` (the
XLA form and the reference): one call, for the committed rows only.
"""

from collections.abc import Sequence

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import native
from pallas_kernels import row_invariant_matmul as rim
from pallas_kernels.draft_context import specs
from pallas_kernels.row_invariant_matmul import specs as matmul_specs


@flax.struct.dataclass
class ContextLayer:
    """Weights of a draft layer's context.

    Attributes:
      kv: packed [2 K h, H], key rows first.
      k_norm: [h] float32, RMSNorm of every key head.
    """

    kv: rim.PackedWeight
    k_norm: jax.Array


def supported(fc: rim.PackedWeight, layers: Sequence[ContextLayer]) -> bool:
    """Whether the native kernel takes these weights."""
    return fc.layout == "panels" and all(layer.kv.layout == "panels" for layer in layers)


def draft_context(
    fc: rim.PackedWeight,
    hidden_norm: jax.Array,
    layers: Sequence[ContextLayer],
    taps: jax.Array,
    path: jax.Array,
    start: jax.Array,
    counts: jax.Array,
    inv_freq: jax.Array,
    cache_k: Sequence[jax.Array],
    cache_v: Sequence[jax.Array],
    *,
    eps: float,
    rope_scale: float = 1.0,
    threads: int = 0,
) -> tuple[tuple[jax.Array, ...], tuple[jax.Array, ...]]:
    """Fuses, projects and commits rows; native CPU only.

    Args:
      fc: packed [H, n * Ht], fusion of the tapped states.
      hidden_norm: [H] RMSNorm of the fused rows.
      layers: of the draft head.
      taps: [B, T, n, Ht] float32, tapped states of all verified nodes.
      path: [B, P] int32, nodes of the accepted path in order.
      start: [B] int32, slot and position of its first row; start + counts <= S (checked when it
        runs).
      counts: [B] int32 rows to write, 0..P.
      inv_freq: [h / 2] float32.
      cache_k: per layer [B, K, S, h] float32; donate them to the enclosing jit, or XLA copies.
      cache_v: per layer [B, K, S, h] float32.
      eps: of the RMSNorms.
      rope_scale: factor of cos and sin.
      threads: most threads; 0: all there are.

    Returns:
      The caches' keys and values, per layer.

    Raises:
      native.KernelError: shapes or weights that do not fit, or no native kernel here.
      jax.errors.JaxRuntimeError: when it runs (outside of jit a ValueError),
        a slot or a node out of its range.
    """
    caches = (*cache_k, *cache_v)
    _, heads, capacity, dim = cache_k[0].shape
    flat = taps.shape[2] * taps.shape[3]
    if (
        not supported(fc, layers)
        or len(caches) != 2 * len(layers)
        or fc.k != flat
        or any(layer.kv.shape != (2 * heads * dim, fc.n) for layer in layers)
    ):
        raise native.KernelError(
            f"{specs.OP}: taps {list(taps.shape)}, fc [{fc.n}, {fc.k}] and {len(caches)} caches "
            f"{list(cache_k[0].shape)} do not fit, or the weights are not in panels"
        )
    weights = [w for layer in layers for w in (layer.kv.data, layer.k_norm)]
    first = 7 + len(weights)
    projections = [fc, *(layer.kv for layer in layers)]
    call = jax.ffi.ffi_call(
        native.library().target("DraftContext"),
        [jax.ShapeDtypeStruct(c.shape, jnp.float32) for c in caches],
        input_output_aliases={first + i: i for i in range(len(caches))},
    )
    out = call(
        taps,
        path,
        start,
        counts,
        inv_freq,
        fc.data,
        hidden_norm,
        *weights,
        *caches,
        layers=np.int64(len(layers)),
        kv_heads=np.int64(heads),
        dim=np.int64(dim),
        capacity=np.int64(capacity),
        eps=np.float32(eps),
        rope_scale=np.float32(rope_scale),
        formats=np.asarray([matmul_specs.LAYOUT_ID[w.panel_layout] for w in projections], np.int64),
        threads=np.int64(threads),
    )
    return tuple(out[: len(layers)]), tuple(out[len(layers) :])
