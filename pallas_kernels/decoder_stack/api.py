"""All layers of a decoder over the rows of each sequence's tree, in one call.

Between the matmuls of a small model, starting and ending ops costs as much as the matmuls
themselves: 30 layers of separate ops were 300 dispatches a step. The native kernel (`cpu.cc`) runs
the whole stack with its threads held together, on the rows that exist (ragged), with the arithmetic
of `row_invariant_matmul` and `tree_attention`: the bits of a row depend on that row, the keys it
sees and the weights alone.

Not differentiable: it serves decoding.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import dispatch, native
from pallas_kernels.decoder_stack import reference, specs
from pallas_kernels.row_invariant_matmul import PackedWeight
from pallas_kernels.row_invariant_matmul import specs as matmul_specs


@flax.struct.dataclass
class StackLayer:
    """Weights of one layer (norms and biases float32).

    Attributes:
      attn_norm: [H] weight of the RMSNorm before attention.
      mlp_norm: [H] weight of the RMSNorm before the feed-forward.
      qkv: one to three packed weights [n, H] whose outputs, one after the other, are q, k and v.
      o: packed [H, heads * h].
      gate_up: packed [2 F, H], gate rows first.
      down: packed [H, F].
      q_norm: [h] RMSNorm of every query head, or None.
      k_norm: [h] RMSNorm of every key head, or None.
      qkv_bias: per weight of `qkv` a bias [n], or None.
      o_bias: [H] or None.
      gate_up_bias: [2 F] or None.
      down_bias: [H] or None.
    """

    attn_norm: jax.Array
    mlp_norm: jax.Array
    qkv: tuple[PackedWeight, ...]
    o: PackedWeight
    gate_up: PackedWeight
    down: PackedWeight
    q_norm: jax.Array | None = None
    k_norm: jax.Array | None = None
    qkv_bias: tuple[jax.Array, ...] | None = None
    o_bias: jax.Array | None = None
    gate_up_bias: jax.Array | None = None
    down_bias: jax.Array | None = None


@dataclasses.dataclass(frozen=True)
class Geometry:
    """What the weights' shapes do not say.

    Attributes:
      heads: query heads.
      kv_heads: key and value heads.
      dim: h, elements of a head, even.
      eps: of every RMSNorm.
      scale: factor of the attention scores.
      rope_scale: factor of cos and sin.
    """

    heads: int
    kv_heads: int
    dim: int
    eps: float
    scale: float
    rope_scale: float = 1.0


@flax.struct.dataclass
class StackOut:
    """Result of `decoder_stack`; rows past a sequence's count are zero."""

    hidden: jax.Array  # [B, T, H] after the last layer, and the final norm where there is one
    new_k: jax.Array  # [L, B, K, T, h], after RoPE
    new_v: jax.Array
    taps: jax.Array  # [B, T, n, H], outputs of the tapped layers


def supported(layer: StackLayer) -> bool:
    """Whether the native kernel takes this layer: weights in panels, a gate of whole panels."""
    weights = (*layer.qkv, layer.o, layer.gate_up, layer.down)
    whole = layer.gate_up.n % (2 * matmul_specs.PANEL) == 0
    return whole and all(w.layout == "panels" for w in weights)


def decoder_stack(
    layers: Sequence[StackLayer],
    geometry: Geometry,
    x: jax.Array,
    positions: jax.Array,
    inv_freq: jax.Array,
    cache_k: Sequence[jax.Array],
    cache_v: Sequence[jax.Array],
    lengths: jax.Array,
    counts: jax.Array,
    mask: jax.Array,
    *,
    final_norm: jax.Array | None = None,
    taps: tuple[int, ...] = (),
    implementation: dispatch.Implementation = "auto",
    threads: int = 0,
) -> StackOut:
    """Runs the layers over T rows a sequence, of which counts[b] are there.

    Args:
      layers: L layers of equal shapes.
      geometry: heads, norm and score constants.
      x: [B, T, H] float32, embedded rows.
      positions: [B, T] int32.
      inv_freq: [h / 2] float32 inverse frequencies of RoPE.
      cache_k: per layer [B, K, S, h] float32; slots at or past lengths[b] are not read.
      cache_v: per layer [B, K, S, h] float32.
      lengths: [B] int32 live slots, 0..S (checked when it runs).
      counts: [B] int32 rows of each sequence, 0..T (checked when it runs).
      mask: [B, T, T] bool, which rows a row sees, itself included; no row past the count.
      final_norm: [H] weight of an RMSNorm of the result.
      taps: layers whose output is returned, in this order.
      implementation: "auto" runs the native kernel where it can be built and takes the weights,
        else XLA; "cpu" and "xla" insist.
      threads: most threads of the native kernel; 0: all that XLA's pool and the CPU affinity allow,
        but one for a small problem. The bits do not depend on it.

    Returns:
      Hidden states, the rows' keys and values, and the tapped outputs.

    Raises:
      native.KernelError: shapes that do not fit, or an implementation that is not available.
      jax.errors.JaxRuntimeError: when it runs (outside of jit a ValueError),
        a length or a count out of its range (native
        kernel).
    """
    _check(layers, geometry, x, positions, cache_k, cache_v, taps)
    takes = all(supported(layer) for layer in layers)
    if implementation == "cpu" and not takes:
        raise native.KernelError(
            f"{specs.OP}: implementation 'cpu' needs packed weights with a feed-forward width "
            f"that is a multiple of {matmul_specs.PANEL}; use 'xla'"
        )
    if not takes or dispatch.choose(specs.OP, implementation, native.library) == "xla":
        return reference.decoder_stack(
            layers,
            geometry,
            x,
            positions,
            inv_freq,
            cache_k,
            cache_v,
            lengths,
            counts,
            mask,
            final_norm=final_norm,
            taps=taps,
        )
    first = layers[0]
    operands: list[jax.Array] = [] if final_norm is None else [final_norm]
    formats: list[int] = []
    for layer, k, v in zip(layers, cache_k, cache_v, strict=True):
        operands += [layer.attn_norm, layer.mlp_norm]
        if first.q_norm is not None:
            operands += [jnp.asarray(layer.q_norm), jnp.asarray(layer.k_norm)]
        biases = layer.qkv_bias or (None,) * len(layer.qkv)
        pairs = [*zip(layer.qkv, biases, strict=True), (layer.o, layer.o_bias)]
        pairs += [(layer.gate_up, layer.gate_up_bias), (layer.down, layer.down_bias)]
        for weight, bias in pairs:
            operands += [weight.data] if bias is None else [weight.data, bias]
            formats.append(matmul_specs.LAYOUT_ID[weight.panel_layout])
        operands += [k, v]
    batch, rows, width = x.shape
    kv = (len(layers), batch, geometry.kv_heads, rows, geometry.dim)
    shapes = [(batch, rows, width), kv, kv, (batch, rows, len(taps), width)]
    call = jax.ffi.ffi_call(
        native.library().target("DecoderStack"),
        [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes],
    )
    out = call(
        x,
        positions,
        inv_freq,
        lengths,
        counts,
        mask,
        *operands,
        layers=np.int64(len(layers)),
        heads=np.int64(geometry.heads),
        kv_heads=np.int64(geometry.kv_heads),
        dim=np.int64(geometry.dim),
        ffn=np.int64(first.gate_up.n // 2),
        capacity=np.int64(cache_k[0].shape[2]),
        eps=np.float32(geometry.eps),
        scale=np.float32(geometry.scale),
        rope_scale=np.float32(geometry.rope_scale),
        final_norm=final_norm is not None,
        qk_norm=first.q_norm is not None,
        qkv_bias=first.qkv_bias is not None,
        o_bias=first.o_bias is not None,
        gate_up_bias=first.gate_up_bias is not None,
        down_bias=first.down_bias is not None,
        segments=np.asarray([w.n for w in first.qkv], np.int64),
        formats=np.asarray(formats, np.int64),
        taps=np.asarray(taps, np.int64),
        threads=np.int64(threads),
    )
    return StackOut(*out)


def _check(
    layers: Sequence[StackLayer],
    geometry: Geometry,
    x: jax.Array,
    positions: jax.Array,
    cache_k: Sequence[jax.Array],
    cache_v: Sequence[jax.Array],
    taps: tuple[int, ...],
) -> None:
    def bad(what: str) -> native.KernelError:
        return native.KernelError(f"{specs.OP}: {what}")

    if not layers or len(cache_k) != len(layers) or len(cache_v) != len(layers):
        raise bad(f"{len(layers)} layers with {len(cache_k)} and {len(cache_v)} caches")
    if x.ndim != 3 or x.dtype != jnp.float32 or positions.shape != x.shape[:2]:
        raise bad(f"x {x.dtype}{list(x.shape)} and positions {list(positions.shape)} do not fit")
    first = layers[0]
    outputs = sum(w.n for w in first.qkv)
    wanted = (geometry.heads + 2 * geometry.kv_heads) * geometry.dim
    if outputs != wanted:
        raise bad(f"q, k and v have {outputs} outputs, but the heads need {wanted}")
    if any(_shapes(layer) != _shapes(first) for layer in layers):
        raise bad("layers of different shapes, or with different biases and norms")
    wrong = [t for t in taps if not 0 <= t < len(layers)]
    if wrong:
        raise bad(f"taps {wrong} are no layers of {len(layers)}")


def _shapes(layer: StackLayer) -> list[Any]:
    weights = (*layer.qkv, layer.o, layer.gate_up, layer.down)
    vectors = (
        *(layer.attn_norm, layer.mlp_norm, layer.q_norm, layer.k_norm),
        *(layer.qkv_bias or ()),
        *(layer.o_bias, layer.gate_up_bias, layer.down_bias),
    )
    return [w.shape for w in weights] + [None if v is None else v.shape for v in vectors]
