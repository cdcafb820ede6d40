"""What the op means: XLA form, and a numpy oracle exact to the last bit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import row_invariant_matmul as rim
from pallas_kernels.row_invariant_matmul.reference import fma, matmul_sequential
from pallas_kernels.tree_attention import reference as attention

if TYPE_CHECKING:
    from pallas_kernels.decoder_stack.api import Geometry, StackLayer, StackOut


def _norm(x: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
    weight = jnp.broadcast_to(weight, x.shape)
    return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + eps) * weight


def _rotate(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    a, b = jnp.split(x, 2, -1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1)


def _linear(x: jax.Array, w: rim.PackedWeight, bias: jax.Array | None) -> jax.Array:
    return rim.matmul(x, w, bias=bias, implementation="xla")


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
    final_norm: jax.Array | None,
    taps: tuple[int, ...],
) -> StackOut:
    """XLA form of `api.decoder_stack`; equal to the kernel within rounding."""
    from pallas_kernels.decoder_stack.api import StackOut

    batch, rows, _ = x.shape
    there = jnp.arange(rows)[None, :] < counts[:, None]  # [B, T]
    mask = mask & there[:, :, None] & there[:, None, :]
    angle = positions.astype(jnp.float32)[..., None] * inv_freq[None, None]
    cos, sin = (f(angle)[:, :, None] * geometry.rope_scale for f in (jnp.cos, jnp.sin))
    groups = geometry.heads // geometry.kv_heads
    x = jnp.where(there[..., None], x, 0.0)
    ks, vs, outputs = [], [], []
    for layer, past_k, past_v in zip(layers, cache_k, cache_v, strict=True):
        h = _norm(x, layer.attn_norm, geometry.eps)
        biases = layer.qkv_bias or (None,) * len(layer.qkv)
        qkv = jnp.concatenate(
            [_linear(h, w, b) for w, b in zip(layer.qkv, biases, strict=True)], -1
        ).reshape(batch, rows, -1, geometry.dim)
        q, k, v = jnp.split(qkv, [geometry.heads, geometry.heads + geometry.kv_heads], 2)
        if layer.q_norm is not None and layer.k_norm is not None:
            q = _norm(q, layer.q_norm, geometry.eps)
            k = _norm(k, layer.k_norm, geometry.eps)
        q, k = _rotate(q, cos, sin), _rotate(k, cos, sin)
        q, k, v = (t.transpose(0, 2, 1, 3) for t in (q, k, v))  # [B, heads, T, h]
        grouped = q.reshape(batch, geometry.kv_heads, groups, rows, geometry.dim)
        out = attention.tree_attention(
            grouped, past_k, past_v, lengths, k, v, mask, scale=geometry.scale
        )
        out = out.reshape(batch, geometry.heads, rows, -1).transpose(0, 2, 1, 3)
        x = x + _linear(out.reshape(batch, rows, -1), layer.o, layer.o_bias)
        h = _norm(x, layer.mlp_norm, geometry.eps)
        gate, up = jnp.split(_linear(h, layer.gate_up, layer.gate_up_bias), 2, -1)
        x = x + _linear(jax.nn.silu(gate) * up, layer.down, layer.down_bias)
        ks.append(k)
        vs.append(v)
        outputs.append(x)
    hidden = x if final_norm is None else _norm(x, final_norm, geometry.eps)

    def clear(t: jax.Array, axis: int) -> jax.Array:
        shape = [1] * t.ndim
        shape[axis - 1 if axis == 1 else 1], shape[axis] = batch, rows
        return jnp.where(there.reshape(shape), t, 0.0)

    tapped = [outputs[i] for i in taps]
    return StackOut(
        hidden=clear(hidden, 1),
        new_k=clear(jnp.stack(ks), 3),
        new_v=clear(jnp.stack(vs), 3),
        taps=clear(jnp.stack(tapped, 2), 1) if taps else jnp.zeros((batch, rows, 0, x.shape[-1])),
    )


# --- exact oracle ---------------------------------------------------------------------------------


def _fold(lanes: np.ndarray) -> np.ndarray:
    """[..., 16] -> [...], by halves 8, 4, 2, 1."""
    while lanes.shape[-1] > 1:
        half = lanes.shape[-1] // 2
        lanes = lanes[..., :half] + lanes[..., half:]
    return lanes[..., 0]


def lane_dot(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Sum over the last axis as the kernels do: lane = index mod 16 with FMA, folded by halves."""
    a, b = np.broadcast_arrays(a, b)
    lanes = np.zeros((*a.shape[:-1], 16), np.float32)
    for i in range(a.shape[-1]):
        lanes[..., i % 16] = fma(a[..., i], b[..., i], lanes[..., i % 16])
    return _fold(lanes)


def norm_exact(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    """RMSNorm over the last axis with the kernel's bits; float32."""
    n = np.float32(x.shape[-1])
    r = np.float32(1) / np.sqrt(lane_dot(x, x) / n + np.float32(eps))
    return x * r[..., None] * weight


def silu_exact(gate: np.ndarray) -> np.ndarray:
    """gate * sigmoid(gate) with the bits of the matmul's gate (its `exp_negative`); float32."""

    def const(value: float) -> np.ndarray:
        return np.full(gate.shape, value, np.float32)

    x = np.maximum(-np.abs(gate), const(-104))
    shifted = fma(x, const(1.44269504), const(12582912))
    n = shifted - const(12582912)
    r = fma(n, const(-0.693145752), x)
    r = fma(n, const(-1.42860677e-6), r)
    p = const(1.98412698e-4)
    for c in (1.38888889e-3, 8.33333333e-3, 4.16666667e-2, 1.66666667e-1, 0.5, 1.0, 1.0):
        p = fma(p, r, const(c))
    half = np.trunc(n / 2)  # both powers are normal; their product need not be
    e = np.ldexp(np.ldexp(p, half.astype(np.int32)), (n - half).astype(np.int32))
    return gate * (np.where(gate < 0, e, const(1)) / (const(1) + e))


def row_exact(
    layer: StackLayer,
    geometry: Geometry,
    weights: dict[str, np.ndarray],
    x: np.ndarray,
    position: int,
    inv_freq: np.ndarray,
    past: list[tuple[np.ndarray, np.ndarray]],
    silu: Callable[[np.ndarray], np.ndarray],
    exp: Callable[[np.ndarray], np.ndarray],
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """One row through one layer, sequentially.

    Args:
      layer, geometry: as in `api`.
      weights: dense float32 qkv, o, gate_up, down.
      x: [H]; position: of the row; inv_freq: [h / 2].
      past: keys and values [K, h] that the row sees, in logical order.
      silu, exp: the kernel's own elementwise functions on float32 arrays.

    Returns:
      (x, k [K, h], v [K, h]).
    """

    def linear(h: np.ndarray, name: str, bias: object) -> np.ndarray:
        y = matmul_sequential(h[None], weights[name])[0]
        return y if bias is None else y + np.asarray(bias)

    h = norm_exact(x, np.asarray(layer.attn_norm), geometry.eps)
    qkv_bias = None if layer.qkv_bias is None else np.concatenate(layer.qkv_bias)
    qkv = linear(h, "qkv", qkv_bias).reshape(-1, geometry.dim)
    q, k, v = np.split(qkv, [geometry.heads, geometry.heads + geometry.kv_heads])
    if layer.q_norm is not None:
        q = norm_exact(q, np.asarray(layer.q_norm), geometry.eps)
        k = norm_exact(k, np.asarray(layer.k_norm), geometry.eps)
    angle = (np.float32(position) * inv_freq).astype(np.float64)
    cos, sin = (
        f(angle).astype(np.float32) * np.float32(geometry.rope_scale) for f in (np.cos, np.sin)
    )

    def rotate(t: np.ndarray) -> np.ndarray:
        a, b = np.split(t, 2, -1)
        return np.concatenate([a * cos - b * sin, b * cos + a * sin], -1)

    q, k = rotate(q), rotate(k)
    keys = np.stack([key for key, _ in past] + [k])  # [n, K, h]
    values = np.stack([value for _, value in past] + [v])
    attended = np.zeros((geometry.heads, geometry.dim), np.float32)
    for head in range(geometry.heads):
        own = head // (geometry.heads // geometry.kv_heads)
        score = lane_dot(q[head], keys[:, own]) * np.float32(geometry.scale)
        p = exp(score - score.max())
        lanes = np.zeros(16, np.float32)
        for i, value in enumerate(p):
            lanes[i % 16] += value
        acc = np.zeros(geometry.dim, np.float32)
        for i, value in enumerate(p):
            acc = fma(value, values[i, own], acc)
        attended[head] = acc / _fold(lanes)
    x = linear(attended.reshape(-1), "o", layer.o_bias) + x
    h = norm_exact(x, np.asarray(layer.mlp_norm), geometry.eps)
    gate, up = np.split(linear(h, "gate_up", layer.gate_up_bias), 2)
    x = linear(silu(gate) * up, "down", layer.down_bias) + x
    return x, k, v
