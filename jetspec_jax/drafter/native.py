"""The draft head on the native CPU kernels: block forward, candidates and context as one op each.

Same functions as `head.py` and `candidates.py`, which remain the reference, the training form and
the form of every other device.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from jetspec_jax.cache import KVCache
from jetspec_jax.config import DraftConfig
from jetspec_jax.drafter.inputs import depth_slots
from jetspec_jax.drafter.path import path_gate
from jetspec_jax.models.rope import inverse_frequencies
from jetspec_jax.tree.topology import Candidates
from jetspec_jax.typing import Array, Params, PyTree
from pallas_kernels import decoder_stack as stack
from pallas_kernels import draft_context as context
from pallas_kernels import draft_head_topk as topk
from pallas_kernels import row_invariant_matmul as rim


def takes_native(params: Params, cfg: DraftConfig, lm_rows: PyTree) -> bool:
    """Whether all of the draft head runs on the native kernels."""
    weights = (params["fc"], lm_rows, *(p["q"] for p in params["layers"]))
    if not all(isinstance(w, rim.PackedWeight) for w in weights):
        return False
    return (
        all(stack.supported(_layer(p)) for p in params["layers"])
        and context.supported(params["fc"], [_context(p) for p in params["layers"]])
        and topk.supported(lm_rows, _path(params, cfg), 1)
    )


def _layer(p: PyTree) -> stack.StackLayer:
    return stack.StackLayer(
        attn_norm=p["input_norm"],
        mlp_norm=p["post_norm"],
        qkv=(p["q"], p["kv"]),
        o=p["o"],
        gate_up=p["gate_up"],
        down=p["down"],
        q_norm=p["q_norm"],
        k_norm=p["k_norm"],
    )


def _context(p: PyTree) -> context.ContextLayer:
    return context.ContextLayer(p["kv"], p["k_norm"])


def _path(params: Params, cfg: DraftConfig, gate: Array | None = None) -> topk.PathHead | None:
    if cfg.path_head == "none":
        return None
    return topk.PathHead(params["path"]["w1"], params["path"]["w2"], gate)


def block_candidates(
    params: Params,
    cfg: DraftConfig,
    lm_rows: rim.PackedWeight,
    ids: Array | None,
    embeds: Array,
    positions: Array,
    anchor: Array,
    ctx: KVCache,
    lengths: Array,
    active: Array,
    *,
    depth: int,
    width: int,
    temperature: Array | None = None,
    noise: Any = None,
) -> Candidates:
    """One causal parallel forward and its candidates: leaves [B, D, W] and [B, D, W, W].

    Args:
        params, cfg: the head.
        lm_rows: packed [Vd, H] rows of the target's LM head, `ids` [Vd] their target ids.
        embeds, positions: [B, bs, H] and [B, bs] int32, the block.
        anchor: [B] int32.
        ctx: context keys and values; lengths: [B] int32 live rows.
        active: [B] bool, sequences that draft; the others get zeros.
        depth, width: candidates wanted.
        temperature: [B] or None, noise: [B, depth, Vd] or None, as in `candidates`.
    """
    batch, slots, _ = embeds.shape
    # a causal head's slots past the last wanted depth change nothing before them
    used = depth + (0 if cfg.draft_shift else 1) if cfg.causal else slots
    counts = jnp.where(active, min(used, slots), 0).astype(jnp.int32)
    square = jnp.ones((slots, slots), bool)
    mask = jnp.tril(square) if cfg.causal else square
    inv_freq, rope_scale = inverse_frequencies(cfg.rope, cfg.head_dim)
    out = stack.decoder_stack(
        [_layer(p) for p in params["layers"]],
        stack.Geometry(
            heads=cfg.num_heads,
            kv_heads=cfg.num_kv_heads,
            dim=cfg.head_dim,
            eps=cfg.rms_eps,
            scale=cfg.head_dim**-0.5,
            rope_scale=rope_scale,
        ),
        embeds,
        positions,
        jnp.asarray(inv_freq),
        ctx.k,
        ctx.v,
        lengths,
        counts,
        jnp.broadcast_to(mask[None], (batch, slots, slots)),
        final_norm=params["norm"],
        implementation="cpu",
    )
    scale = None
    if temperature is not None:
        scale = jnp.where(temperature > 0, 1.0 / jnp.maximum(temperature, 1e-3), 1.0)
    hidden = depth_slots(cfg, out.hidden)[:, :depth]
    tokens, table = topk.draft_head_topk(
        hidden,
        lm_rows,
        width,
        anchor=anchor,
        counts=counts,
        ids=ids,
        path=_path(params, cfg, path_gate(params, cfg, hidden)),
        scale=scale,
        noise=noise,
    )
    return Candidates(tokens, table)


def extend(
    params: Params,
    cfg: DraftConfig,
    ctx: KVCache,
    taps: Array,
    path: Array,
    start: Array,
    counts: Array,
) -> KVCache:
    """Context with the first counts[b] rows of path [B, P] written: taps [B, T, n, H] of all nodes,
    slots and positions from start [B]."""
    inv_freq, rope_scale = inverse_frequencies(cfg.rope, cfg.head_dim)
    return KVCache(
        *context.draft_context(
            params["fc"],
            params["hidden_norm"],
            [_context(p) for p in params["layers"]],
            taps,
            path,
            start,
            counts,
            jnp.asarray(inv_freq),
            ctx.k,
            ctx.v,
            eps=cfg.rms_eps,
            rope_scale=rope_scale,
        )
    )
