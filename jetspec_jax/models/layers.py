"""Pieces shared by the targets and the draft head."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from jetspec_jax.numerics import KernelWeight, linear, ordered_sum
from jetspec_jax.typing import Array, PyTree
from pallas_kernels.row_invariant_matmul.arrays import project_grouped


def rms_norm(x: Array, weight: Array, eps: float, *, ordered: bool = False) -> Array:
    """RMSNorm over the last axis, statistics in float32; x [..., H], weight [H] -> x.dtype.

    `ordered` sums the squares by halving, elementwise: an order that does not depend on the number
    of rows (XLA's reduction does, algorithm.md section 6).
    """
    wide = x.astype(jnp.float32)
    mean = (
        ordered_sum(wide * wide) / x.shape[-1]
        if ordered
        else jnp.mean(wide * wide, -1, keepdims=True)
    )
    normed = (wide * jax.lax.rsqrt(mean + eps)).astype(x.dtype)
    return normed * weight.astype(x.dtype).reshape((1,) * (x.ndim - 1) + (-1,))


def swiglu(
    x: Array, gate_up: PyTree, down: PyTree, gate_up_bias: Array | None, down_bias: Array | None
) -> Array:
    """SwiGLU feed-forward: down(silu(gate(x)) * up(x)); gate and up are one fused projection."""
    gate, up = jnp.split(linear(x, gate_up, gate_up_bias), 2, -1)
    return linear(jax.nn.silu(gate) * up, down, down_bias)


def moe(
    x: Array, router: Array, gate_up: PyTree, down: PyTree, *, top_k: int, normalise: bool
) -> Array:
    """Mixture of experts as Qwen3-MoE: softmax over all experts, the best `top_k`, optionally
    renormalised.

    x [..., H], router [E, H], gate_up [E, 2F, H], down [E, H, F]. A row's result is a sum over its
    own experts in expert order, so its routing and its bits do not depend on the other rows (case
    20). Experts marked for the GPU's kernels go through its grouped product, each read once.
    """
    rows = x.reshape(-1, x.shape[-1])
    probs = jax.nn.softmax(linear(rows, router).astype(jnp.float32), -1)
    weights, chosen = jax.lax.top_k(probs, top_k)
    if normalise:
        weights = weights / weights.sum(-1, keepdims=True)
    weights = weights.astype(x.dtype)
    if isinstance(gate_up, KernelWeight) and isinstance(down, KernelWeight):
        return _grouped_experts(rows, weights, chosen, gate_up, down).reshape(x.shape)

    def add_expert(acc: Array, expert: tuple[Array, Array, Array]) -> tuple[Array, None]:
        index, w_in, w_out = expert
        hit = chosen == index
        share = jnp.where(hit, weights, jnp.zeros((), x.dtype)).sum(-1, keepdims=True)
        out = jax.lax.cond(
            hit.any(),
            lambda: swiglu(rows, w_in, w_out, None, None),
            lambda: jnp.zeros_like(rows),  # an expert nobody asked for is not read
        )
        return jnp.where(share > 0, acc + share * out, acc), None

    experts: Any = (jnp.arange(router.shape[0], dtype=jnp.int32), gate_up, down)
    acc, _ = jax.lax.scan(add_expert, jnp.zeros_like(rows), experts)
    return acc.reshape(x.shape)


def _grouped_experts(
    rows: Array, weights: Array, chosen: Array, gate_up: KernelWeight, down: KernelWeight
) -> Array:
    """Weighted sum of the chosen experts: rows [M, H], weights and chosen [M, k] -> [M, H]."""
    count, top_k = chosen.shape
    order = jnp.argsort(chosen, axis=1)
    weights = jnp.take_along_axis(weights, order, axis=1)
    experts = jnp.take_along_axis(chosen, order, axis=1).astype(jnp.int32).reshape(-1)
    inputs = jnp.repeat(rows, top_k, axis=0)
    gate, up = jnp.split(project_grouped(inputs, gate_up.w, experts).astype(rows.dtype), 2, -1)
    outputs = project_grouped(jax.nn.silu(gate) * up, down.w, experts).astype(rows.dtype)
    outputs = outputs.reshape(count, top_k, -1)
    total = jnp.zeros_like(rows)
    for i in range(top_k):
        total = total + weights[:, i : i + 1] * outputs[:, i]
    return total
