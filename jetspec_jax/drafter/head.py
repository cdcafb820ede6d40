"""The draft head: context fusion, per-layer context K/V, and the block forward (algorithm.md
sections 2 and 3).

Serving and training call the same functions: serving with one anchor a sequence and context rows
added as they are committed, training with many anchors a sequence over one projection of the whole
context.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jetspec_jax.config import DraftConfig
from jetspec_jax.drafter.inputs import depth_slots
from jetspec_jax.drafter.projection import halves, rotate, swiglu
from jetspec_jax.models.layers import rms_norm
from jetspec_jax.models.rope import rope_tables
from jetspec_jax.models.spec import Declaration, WeightSpec
from jetspec_jax.numerics import linear, online_attention
from jetspec_jax.typing import Array, Params, PyTree
from pallas_kernels.tree_attention import tree_attention

LayerKV = tuple[Array, Array]  # k, v, each [B, K, S, h]; k normed and rotated


def declare(cfg: DraftConfig) -> Declaration:
    """Every weight of a draft head, with its tensors in the published checkpoint layout.

    Embedding and LM head belong to the target and are not part of the head.
    """
    width, q_width, kv_width = (
        cfg.hidden_size,
        cfg.num_heads * cfg.head_dim,
        cfg.num_kv_heads * cfg.head_dim,
    )
    decl: Declaration = {}

    def matrix(
        name: str, rows: int, cols: int, axes: tuple[str | None, str | None], *sources: str
    ) -> None:
        decl[name] = WeightSpec(
            (rows, cols), axes, tuple(f"{s}.weight" for s in sources), linear=True
        )

    def norm(name: str, size: int, source: str) -> None:
        decl[name] = WeightSpec((size,), (None,), (f"{source}.weight",), init="ones")

    matrix("fc", width, len(cfg.target_layer_ids) * cfg.target_hidden_size, (None, None), "fc")
    norm("hidden_norm", width, "hidden_norm")
    norm("norm", width, "norm")
    for i in range(cfg.num_layers):
        here, attn, mlp = f"layers.{i}", f"layers.{i}.self_attn", f"layers.{i}.mlp"
        norm(f"{here}.input_norm", width, f"{here}.input_layernorm")
        norm(f"{here}.post_norm", width, f"{here}.post_attention_layernorm")
        matrix(f"{here}.q", q_width, width, ("heads", None), f"{attn}.q_proj")
        matrix(
            f"{here}.kv", 2 * kv_width, width, ("heads", None), f"{attn}.k_proj", f"{attn}.v_proj"
        )
        matrix(f"{here}.o", width, q_width, (None, "heads"), f"{attn}.o_proj")
        norm(f"{here}.q_norm", cfg.head_dim, f"{attn}.q_norm")
        norm(f"{here}.k_norm", cfg.head_dim, f"{attn}.k_norm")
        matrix(
            f"{here}.gate_up",
            2 * cfg.ffn_size,
            width,
            ("ffn", None),
            f"{mlp}.gate_proj",
            f"{mlp}.up_proj",
        )
        matrix(f"{here}.down", width, cfg.ffn_size, (None, "ffn"), f"{mlp}.down_proj")
    if cfg.path_head != "none":
        decl["path.w1"] = WeightSpec(
            (cfg.vocab_size, cfg.path_rank), ("vocab", None), ("path_head.w1.weight",)
        )
        # Zero at the start of training: the correction begins as none and does not disturb the
        # backbone.
        shape = (cfg.head_vocab_size, cfg.path_rank)
        decl["path.w2"] = WeightSpec(
            shape, ("vocab", None), ("path_head.w2.weight",), init="zeros", linear=True
        )
    if cfg.path_head == "pairwise":
        decl["path.gate"] = WeightSpec(
            (cfg.path_rank, width),
            (None, None),
            ("path_head.gate.weight",),
            init="zeros",
            linear=True,
        )
    return decl


def fuse(params: Params, cfg: DraftConfig, taps: Array) -> Array:
    """Tapped target states [..., n, Ht] -> context features [..., H] (concatenate, project,
    norm)."""
    flat = taps.reshape(*taps.shape[:-2], taps.shape[-2] * taps.shape[-1])
    return rms_norm(linear(flat, params["fc"]), params["hidden_norm"], cfg.rms_eps)


def context_kv(
    params: Params, cfg: DraftConfig, ctx: Array, positions: Array
) -> tuple[LayerKV, ...]:
    """Each layer's keys (normed, rotated) and values of context rows.

    Args:
        ctx: [B, T, H] from `fuse`. Every layer projects the same tensor; no layer's norm is applied
            to it.
        positions: [B, T] int32, absolute.

    Returns:
        Per layer (k [B, K, T, h], v [B, K, T, h]).
    """
    cos, sin = rope_tables(cfg.rope, cfg.head_dim, positions)
    out = []
    for p in params["layers"]:
        k, v = _keys_values(p, cfg, ctx, cos[:, :, None], sin[:, :, None])  # [B, T, K, h]
        out.append((k.transpose(0, 2, 1, 3), v.transpose(0, 2, 1, 3)))
    return tuple(out)


def _keys_values(p: PyTree, cfg: DraftConfig, x: Array, cos: Array, sin: Array) -> LayerKV:
    """x [..., H] -> k, v [..., K, h]; cos and sin [..., 1, h/2]."""
    k, v = halves(linear(x, p["kv"]))
    k, v = (t.reshape(*t.shape[:-1], cfg.num_kv_heads, cfg.head_dim) for t in (k, v))
    return rotate(rms_norm(k, p["k_norm"], cfg.rms_eps), cos, sin), v


def draft_block(
    params: Params,
    cfg: DraftConfig,
    block_embeds: Array,
    positions: Array,
    ctx_k: tuple[Array, ...],
    ctx_v: tuple[Array, ...],
    ctx_visible: Array,
    *,
    chunk: int = 256,
    remat: bool = False,
    gpu: bool = False,
) -> Array:
    """Forward of A blocks a sequence, each blind to the others.

    Args:
        params, cfg: the head.
        block_embeds: [B, A, bs, H], target embeddings of `block_inputs(...).tokens`.
        positions: [B, A, bs] int32 from `block_inputs`.
        ctx_k, ctx_v: per layer [B, K, S, h] (`context_kv`), row s holding position s.
        ctx_visible: what a block sees of the context: [B, A, S] bool, or, when that is a prefix,
            int32 lengths [B, A] (rows strictly before the anchor = the anchor's position). With one
            anchor a sequence and lengths, only the live part of the cache is read (S must then be a
            multiple of `chunk`).
        chunk: context rows per loop turn of that form.
        gpu: attention of that form by the kernels of the GPU at hand (`tree_attention`); the XLA
            form is a loop, and XLA reads a loop's predicate on the host at every turn.
        remat: recompute each layer in the backward pass instead of keeping its activations.

    Returns:
        [B, A, D, H] after the final norm: the predicting slots in depth order. Depth d predicts the
        token at position anchor + 1 + d in both slot conventions.
    """
    batch, anchors, slots, _ = block_embeds.shape
    cos, sin = (t[..., None, :] for t in rope_tables(cfg.rope, cfg.head_dim, positions))
    triangle = (
        jnp.tril(jnp.ones((slots, slots), bool)) if cfg.causal else jnp.ones((slots, slots), bool)
    )
    lengths = ctx_visible.ndim == 2
    streaming = lengths and anchors == 1
    if lengths and not streaming:
        rows = jnp.arange(ctx_k[0].shape[2], dtype=jnp.int32)
        ctx_visible = rows[None, None] < ctx_visible[..., None]

    def layer(p: PyTree, x: Array, past_k: Array, past_v: Array) -> Array:
        h = rms_norm(x, p["input_norm"], cfg.rms_eps)
        q = linear(h, p["q"]).reshape(batch, anchors, slots, cfg.num_heads, cfg.head_dim)
        q = rotate(rms_norm(q, p["q_norm"], cfg.rms_eps), cos, sin)
        k, v = _keys_values(p, cfg, h, cos, sin)  # [B, A, bs, K, h]
        if streaming:
            out = _stream(q, past_k, past_v, ctx_visible[:, 0], k, v, triangle, cfg, chunk, gpu)
        else:
            out = _dense(q, past_k, past_v, ctx_visible, k, v, triangle, cfg)
        x = x + linear(out.astype(x.dtype), p["o"])
        h = rms_norm(x, p["post_norm"], cfg.rms_eps)
        return x + swiglu(h, p["gate_up"], p["down"])

    step = jax.checkpoint(layer) if remat else layer
    x = block_embeds
    for i, p in enumerate(params["layers"]):
        x = step(p, x, ctx_k[i], ctx_v[i])
    return depth_slots(cfg, rms_norm(x, params["norm"], cfg.rms_eps))


def _stream(
    q: Array,
    ctx_k: Array,
    ctx_v: Array,
    lengths: Array,
    k: Array,
    v: Array,
    triangle: Array,
    cfg: DraftConfig,
    chunk: int,
    gpu: bool,
) -> Array:
    """One block a sequence over the live part of the cache -> [B, 1, bs, Q * h]."""
    batch, _, slots, heads, dim = q.shape
    group = heads // cfg.num_kv_heads
    grouped = q[:, 0].reshape(batch, slots, cfg.num_kv_heads, group, dim).transpose(0, 2, 3, 1, 4)
    mask = jnp.broadcast_to(triangle[None], (batch, slots, slots))
    own_k, own_v = (x[:, 0].transpose(0, 2, 1, 3) for x in (k, v))
    operands = (grouped, ctx_k, ctx_v, lengths, own_k, own_v, mask)
    if gpu:
        out = tree_attention(*operands, scale=dim**-0.5)
    else:
        out = online_attention(*operands, scale=dim**-0.5, chunk=min(chunk, ctx_k.shape[2]))
    return out.transpose(0, 3, 1, 2, 4).reshape(batch, 1, slots, heads * dim)


def _dense(
    q: Array,
    ctx_k: Array,
    ctx_v: Array,
    visible: Array,
    k: Array,
    v: Array,
    triangle: Array,
    cfg: DraftConfig,
) -> Array:
    """Many blocks a sequence over all context rows -> [B, A, bs, Q * h]; softmax in float32."""
    batch, anchors, slots, heads, dim = q.shape
    group = heads // cfg.num_kv_heads
    grouped = q.reshape(batch, anchors, slots, cfg.num_kv_heads, group, dim) * jnp.asarray(
        dim**-0.5, q.dtype
    )
    rows = grouped.transpose(0, 3, 4, 1, 2, 5)  # [B, K, G, A, bs, h]
    packed = rows.reshape(batch, cfg.num_kv_heads, group * anchors * slots, dim)
    past = jnp.einsum("bkrh,bksh->bkrs", packed, ctx_k).astype(jnp.float32)
    past = past.reshape(*rows.shape[:-1], -1)
    own = jnp.einsum("bkgaqh,batkh->bkgaqt", rows, k).astype(jnp.float32)
    seen = visible[:, None, None, :, None, :]
    past = jnp.where(seen, past, -jnp.inf)
    own = jnp.where(triangle.reshape(1, 1, 1, 1, slots, slots), own, -jnp.inf)
    # A slot always sees itself, so the maximum is finite also where a block sees no context.
    top = jax.lax.stop_gradient(
        jnp.maximum(past.max(-1, keepdims=True), own.max(-1, keepdims=True))
    )
    p_past, p_own = jnp.exp(past - top), jnp.exp(own - top)
    total = p_past.sum(-1, keepdims=True) + p_own.sum(-1, keepdims=True)
    # Rows that no block may see can hold anything (unused cache slots): 0 * NaN must not come
    # through the product.
    used = visible.any(1)[:, None, :, None]
    weights = p_past.astype(q.dtype).reshape(batch, cfg.num_kv_heads, group * anchors * slots, -1)
    mixed = jnp.einsum(
        "bkrs,bksh->bkrh", weights, jnp.where(used, ctx_v, jnp.zeros((), ctx_v.dtype))
    )
    mixed = mixed.reshape(rows.shape) + jnp.einsum("bkgaqt,batkh->bkgaqh", p_own.astype(q.dtype), v)
    out = (mixed.astype(jnp.float32) / total).astype(q.dtype)
    return out.transpose(0, 3, 4, 1, 2, 5).reshape(batch, anchors, slots, heads * dim)


def draft_scores(params: Params, cfg: DraftConfig, head_weight: PyTree, hidden: Array) -> Array:
    """Logits of the draft vocabulary before path conditioning (`path.py` adds it).

    Args:
        params, cfg: the head (unused today; a head with its own output projection would need them).
        head_weight: [Vd, H], rows of the target's LM head in the order of the head's id map.
        hidden: [..., D, H] from `draft_block`.

    Returns:
        [..., D, Vd] float32.
    """
    del params, cfg
    return linear(hidden, head_weight).astype(jnp.float32)
