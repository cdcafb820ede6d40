"""Rotary position embedding: default, linear, llama3 and yarn scaling (Hugging Face `rope_scaling`
semantics).
"""

from __future__ import annotations

import math

import jax.numpy as jnp
import numpy as np

from jetspec_jax.config import RopeConfig
from jetspec_jax.typing import Array


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> tuple[np.ndarray, float]:
    """Inverse frequencies [h/2] float32 and the factor that scales cos and sin (1.0 except for
    yarn).

    Sources: RoFormer (arXiv 2104.09864) for the base form, Llama 3.1 for llama3, arXiv 2309.00071
    for yarn.
    """
    exponent = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
    base = (np.float32(1.0) / np.float32(rope.theta) ** exponent).astype(np.float32)
    if rope.kind == "default":
        return base, 1.0
    if rope.kind == "linear":
        return base / np.float32(rope.factor), 1.0
    if rope.kind == "llama3":
        return _llama3(rope, base), 1.0
    return _yarn(rope, base, head_dim)


def _llama3(rope: RopeConfig, base: np.ndarray) -> np.ndarray:
    wavelength = 2 * math.pi / base
    longest = rope.original_max_position / rope.low_freq_factor
    shortest = rope.original_max_position / rope.high_freq_factor
    smooth = (rope.original_max_position / wavelength - rope.low_freq_factor) / (
        rope.high_freq_factor - rope.low_freq_factor
    )
    blended = (1 - smooth) * base / rope.factor + smooth * base
    scaled = np.where(wavelength > longest, base / rope.factor, base)
    medium = (wavelength >= shortest) & (wavelength <= longest)
    return np.where(medium, blended, scaled).astype(np.float32)


def _yarn(rope: RopeConfig, base: np.ndarray, head_dim: int) -> tuple[np.ndarray, float]:
    def mscale(factor: float, scale: float = 1.0) -> float:
        return 0.1 * scale * math.log(factor) + 1.0 if factor > 1 else 1.0

    def correction_dim(rotations: float) -> float:
        span = rope.original_max_position / (rotations * 2 * math.pi)
        return head_dim * math.log(span) / (2 * math.log(rope.theta))

    low, high = correction_dim(rope.beta_fast), correction_dim(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001  # as the reference: avoids a division by zero
    ramp = np.clip((np.arange(head_dim // 2, dtype=np.float32) - low) / (high - low), 0, 1)
    inv = (base / rope.factor * ramp + base * (1 - ramp)).astype(np.float32)
    if rope.attention_factor is not None:
        return inv, rope.attention_factor
    if rope.mscale and rope.mscale_all_dim:
        return inv, mscale(rope.factor, rope.mscale) / mscale(rope.factor, rope.mscale_all_dim)
    return inv, mscale(rope.factor)


def rope_tables(rope: RopeConfig, head_dim: int, positions: Array) -> tuple[Array, Array]:
    """cos and sin, float32 [..., h/2], for int32 absolute `positions` [...]."""
    inv, scale = inverse_frequencies(rope, head_dim)
    angle = jnp.expand_dims(positions.astype(jnp.float32), -1) * inv.reshape(
        (1,) * positions.ndim + (-1,)
    )
    return jnp.cos(angle) * scale, jnp.sin(angle) * scale


def apply_rope(x: Array, cos: Array, sin: Array) -> Array:
    """Rotate the halves of x [..., h]; cos and sin [..., h/2] broadcast against x's leading axes
    (same rank).
    """
    half = x.shape[-1] // 2
    a, b = x[..., :half].astype(jnp.float32), x[..., half:].astype(jnp.float32)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1).astype(x.dtype)
