"""One dense decoder for Llama, Qwen2, Qwen3 and Qwen3-MoE targets, as pure functions over declared
weights.

The native CPU kernels take all dense layers as one op (`pallas_kernels.decoder_stack`). In XLA
layers are unrolled: `lax.scan` over stacked weights copies every layer on CPU (2 to 3.5 times
slower, measured).
"""

from __future__ import annotations

import dataclasses
import functools

import flax.struct
import jax
import jax.numpy as jnp

from jetspec_jax.config import ModelConfig
from jetspec_jax.models.layers import moe, rms_norm, swiglu
from jetspec_jax.models.rope import apply_rope, inverse_frequencies, rope_tables
from jetspec_jax.models.spec import Declaration, WeightSpec
from jetspec_jax.numerics import (
    KernelWeight,
    fold_attention,
    linear,
    online_attention,
    take_rows,
)
from jetspec_jax.typing import Array, Params, PyTree
from pallas_kernels import decoder_stack as stack
from pallas_kernels import parameters
from pallas_kernels import row_invariant_matmul as rim
from pallas_kernels.row_invariant_matmul.arrays import project
from pallas_kernels.tree_attention import tree_attention


@dataclasses.dataclass(frozen=True)
class Numerics:
    """How rows are computed.

    Attributes:
        bitwise: order-true attention and norms (algorithm.md section 6, level 2).
        gpu: attention by the kernels of the GPU at hand (`pallas_kernels.dispatch`), which are
            order-true. Weights marked by `numerics.for_kernels` go through kernels in any case.
        native: attention by the native CPU kernel, which is order-true in any case.
        stack: all layers by the native CPU kernel, where it takes them (`takes_stack`); rows are
            then ragged: a forward costs what its `counts` say.
        head: the draft head by the native CPU kernels (`drafter.native`).
        attention_chunk: keys per loop turn of the XLA forms; cache capacities are multiples of it.
        kernel_params: in force where programs are traced (`pallas_kernels.parameters`). They are
            here because what is traced is kept under these numerics.
    """

    bitwise: bool = False
    gpu: bool = False
    native: bool = False
    stack: bool = False
    head: bool = False
    attention_chunk: int = 256
    kernel_params: parameters.Values = ()

    def attend(self, *operands: Array, scale: float) -> Array:
        """`numerics.online_attention` or another implementation of the same function."""
        if self.gpu:
            return tree_attention(*operands, scale=scale)
        if self.native:
            return tree_attention(*operands, scale=scale, implementation="cpu")
        form = fold_attention if self.bitwise else online_attention
        return form(*operands, scale=scale, chunk=self.attention_chunk)


FAST = Numerics()


@flax.struct.dataclass
class BlockOut:
    """Result of `forward_block` for T rows a sequence."""

    hidden: Array  # [B, T, H], after the final norm
    new_k: PyTree  # per layer [B, K, T, h], after RoPE; native stack: one array [L, B, K, T, h]
    new_v: PyTree
    taps: Array | None  # [B, T, n, H], outputs of the tapped layers, before the final norm


@flax.struct.dataclass
class FullOut:
    """Result of `forward_full`."""

    logits: Array  # [B, T, V] float32
    hidden: Array  # [B, T, H], after the final norm
    taps: Array | None  # [B, T, n, H]


def declare(cfg: ModelConfig) -> Declaration:
    """Every weight of a target: shape, logical axes, and its tensors in a Hugging Face
    checkpoint.
    """
    width, decl = cfg.hidden_size, {}

    def matrix(
        name: str,
        rows: int,
        cols: int,
        axes: tuple[str | None, str | None],
        *sources: str,
        bias: bool,
    ) -> None:
        weights = tuple(f"{s}.weight" for s in sources)
        decl[name] = WeightSpec((rows, cols), axes, weights, linear=True)
        if bias:
            biases = tuple(f"{s}.bias" for s in sources)
            decl[f"{name}_bias"] = WeightSpec((rows,), (axes[0],), biases, init="zeros")

    def norm(name: str, size: int, source: str) -> None:
        decl[name] = WeightSpec((size,), (None,), (f"{source}.weight",), init="ones")

    decl["embed"] = WeightSpec(
        (cfg.vocab_size, width), ("vocab", None), ("model.embed_tokens.weight",), linear=True
    )
    if not cfg.tie_embeddings:
        matrix("lm_head", cfg.vocab_size, width, ("vocab", None), "lm_head", bias=False)
    norm("final_norm", width, "model.norm")
    for i in range(cfg.num_layers):
        here, hf = f"layers.{i}", f"model.layers.{i}"
        attn = f"{hf}.self_attn"
        norm(f"{here}.attn_norm", width, f"{hf}.input_layernorm")
        norm(f"{here}.mlp_norm", width, f"{hf}.post_attention_layernorm")
        matrix(
            f"{here}.qkv",
            cfg.q_width + 2 * cfg.kv_width,
            width,
            ("heads", None),
            f"{attn}.q_proj",
            f"{attn}.k_proj",
            f"{attn}.v_proj",
            bias=cfg.qkv_bias,
        )
        matrix(
            f"{here}.o", width, cfg.q_width, (None, "heads"), f"{attn}.o_proj", bias=cfg.out_bias
        )
        if cfg.qk_norm:
            norm(f"{here}.q_norm", cfg.head_dim, f"{attn}.q_norm")
            norm(f"{here}.k_norm", cfg.head_dim, f"{attn}.k_norm")
        mlp = f"{hf}.mlp"
        if not cfg.is_moe_layer(i):
            matrix(
                f"{here}.gate_up",
                2 * cfg.ffn_size,
                width,
                ("ffn", None),
                f"{mlp}.gate_proj",
                f"{mlp}.up_proj",
                bias=cfg.mlp_bias,
            )
            matrix(
                f"{here}.down",
                width,
                cfg.ffn_size,
                (None, "ffn"),
                f"{mlp}.down_proj",
                bias=cfg.mlp_bias,
            )
            continue
        experts, moe_width = range(cfg.num_experts), cfg.moe_ffn_size
        decl[f"{here}.router"] = WeightSpec(
            (cfg.num_experts, width), (None, None), (f"{mlp}.gate.weight",)
        )
        decl[f"{here}.experts_gate_up"] = WeightSpec(
            (cfg.num_experts, 2 * moe_width, width),
            ("expert", "ffn", None),
            tuple(
                (f"{mlp}.experts.{e}.gate_proj.weight", f"{mlp}.experts.{e}.up_proj.weight")
                for e in experts
            ),
            stack=True,
        )
        decl[f"{here}.experts_down"] = WeightSpec(
            (cfg.num_experts, width, moe_width),
            ("expert", None, "ffn"),
            tuple(f"{mlp}.experts.{e}.down_proj.weight" for e in experts),
            stack=True,
        )
    return decl


def embed_tokens(params: Params, ids: Array) -> Array:
    """Rows of the embedding table: ids [...] int32 -> [..., H]."""
    return take_rows(params["embed"], ids)


def lm_head_weight(params: Params) -> PyTree:
    """The [V, H] output projection; the embedding table itself where the target ties them."""
    return params.get("lm_head", params["embed"])


def head_logits(params: Params, hidden: Array) -> Array:
    """hidden [..., H] (after the final norm) -> logits [..., V] float32."""
    weight = lm_head_weight(params)
    if isinstance(weight, KernelWeight):
        return project(hidden, weight.w)  # float32 sums as they are, as `verify_head` compares them
    return linear(hidden, weight).astype(jnp.float32)


def _split_heads(x: Array, heads: int) -> Array:
    """[B, T, heads * h] -> [B, heads, T, h]."""
    batch, rows, _ = x.shape
    return x.reshape(batch, rows, heads, -1).transpose(0, 2, 1, 3)


def forward_block(
    params: Params,
    cfg: ModelConfig,
    tokens: Array,
    positions: Array,
    cache_k: tuple[Array, ...],
    cache_v: tuple[Array, ...],
    lengths: Array,
    mask: Array,
    *,
    counts: Array | None = None,
    taps: tuple[int, ...] = (),
    numerics: Numerics = FAST,
) -> BlockOut:
    """One forward over T rows a sequence: a prompt chunk, one token, or all nodes of a tree.

    Args:
        params: target parameters (`declare`).
        cfg: geometry.
        tokens, positions: [B, T] int32.
        cache_k, cache_v: per layer [B, K, S, h]; read only.
        lengths: [B] int32, live keys per sequence; every row sees all of them.
        mask: [B, T, T] bool, which rows a row sees (itself always; for trees: its ancestors).
        counts: [B] int32, rows of each sequence that are needed; None: all. The native stack
            computes no others (they are zero), XLA computes all.
        taps: layer indices whose output is returned.
        numerics: fast or bitwise form.
    """
    x = embed_tokens(params, tokens)
    if numerics.stack:
        inv_freq, rope_scale = inverse_frequencies(cfg.rope, cfg.head_dim)
        out = stack.decoder_stack(
            [_stack_layer(layer) for layer in params["layers"]],
            stack.Geometry(
                heads=cfg.num_heads,
                kv_heads=cfg.num_kv_heads,
                dim=cfg.head_dim,
                eps=cfg.rms_eps,
                scale=cfg.head_dim**-0.5,
                rope_scale=rope_scale,
            ),
            x,
            positions,
            jnp.asarray(inv_freq),
            cache_k,
            cache_v,
            lengths,
            jnp.full(lengths.shape, tokens.shape[1], jnp.int32) if counts is None else counts,
            mask,
            final_norm=params["final_norm"],
            taps=taps,
            implementation="cpu",
        )
        return BlockOut(out.hidden, out.new_k, out.new_v, out.taps if taps else None)
    cos, sin = (t[:, None] for t in rope_tables(cfg.rope, cfg.head_dim, positions))
    new_k, new_v, tapped = [], [], {}
    for i, layer in enumerate(params["layers"]):
        x, k, v = _layer(
            cfg,
            numerics,
            cfg.is_moe_layer(i),
            layer,
            x,
            cos,
            sin,
            cache_k[i],
            cache_v[i],
            lengths,
            mask,
        )
        new_k.append(k)
        new_v.append(v)
        if i in taps:
            tapped[i] = x
    hidden = rms_norm(x, params["final_norm"], cfg.rms_eps, ordered=numerics.bitwise)
    stacked = jnp.stack([tapped[i] for i in taps], 2) if taps else None
    return BlockOut(hidden, tuple(new_k), tuple(new_v), stacked)


def takes_stack(params: Params, cfg: ModelConfig) -> bool:
    """Whether the native kernel runs all layers of these parameters as one op."""
    dense = not any(cfg.is_moe_layer(i) for i in range(cfg.num_layers))
    return dense and all(
        isinstance(layer["qkv"], rim.PackedWeight) and stack.supported(_stack_layer(layer))
        for layer in params["layers"]
    )


def _stack_layer(p: PyTree) -> stack.StackLayer:
    bias = p.get("qkv_bias")
    return stack.StackLayer(
        attn_norm=p["attn_norm"],
        mlp_norm=p["mlp_norm"],
        qkv=(p["qkv"],),
        o=p["o"],
        gate_up=p["gate_up"],
        down=p["down"],
        q_norm=p.get("q_norm"),
        k_norm=p.get("k_norm"),
        qkv_bias=None if bias is None else (bias,),
        o_bias=p.get("o_bias"),
        gate_up_bias=p.get("gate_up_bias"),
        down_bias=p.get("down_bias"),
    )


# Under jit so that a program traces and lowers one layer, not all of them; XLA inlines the calls.
@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _layer(
    cfg: ModelConfig,
    numerics: Numerics,
    is_moe: bool,
    p: PyTree,
    x: Array,
    cos: Array,
    sin: Array,
    cache_k: Array,
    cache_v: Array,
    lengths: Array,
    mask: Array,
) -> tuple[Array, Array, Array]:
    """One decoder layer over x [B, T, H] -> (x, keys [B, K, T, h], values)."""
    batch, rows, _ = x.shape

    def norm(x: Array, weight: Array) -> Array:
        return rms_norm(x, weight, cfg.rms_eps, ordered=numerics.bitwise)

    h = norm(x, p["attn_norm"])
    qkv = linear(h, p["qkv"], p.get("qkv_bias"))
    q, k, v = jnp.split(qkv, [cfg.q_width, cfg.q_width + cfg.kv_width], -1)
    q, k, v = (
        _split_heads(t, n)
        for t, n in ((q, cfg.num_heads), (k, cfg.num_kv_heads), (v, cfg.num_kv_heads))
    )
    if cfg.qk_norm:
        q, k = norm(q, p["q_norm"]), norm(k, p["k_norm"])
    q, k = apply_rope(q, cos, sin), apply_rope(k, cos, sin)
    q = q.reshape(batch, cfg.num_kv_heads, cfg.num_heads // cfg.num_kv_heads, rows, cfg.head_dim)
    out = numerics.attend(q, cache_k, cache_v, lengths, k, v, mask, scale=cfg.head_dim**-0.5)
    out = out.reshape(batch, cfg.num_heads, rows, cfg.head_dim).transpose(0, 2, 1, 3)
    x = x + linear(out.reshape(batch, rows, cfg.q_width), p["o"], p.get("o_bias"))
    h = norm(x, p["mlp_norm"])
    if is_moe:
        x = x + moe(
            h,
            p["router"],
            p["experts_gate_up"],
            p["experts_down"],
            top_k=cfg.experts_per_token,
            normalise=cfg.norm_topk_prob,
        )
    else:
        x = x + swiglu(h, p["gate_up"], p["down"], p.get("gate_up_bias"), p.get("down_bias"))
    return x, k, v


def forward_full(
    params: Params,
    cfg: ModelConfig,
    tokens: Array,
    *,
    taps: tuple[int, ...] = (),
    numerics: Numerics = FAST,
) -> FullOut:
    """Causal forward over whole sequences without a cache: tokens [B, T] int32 -> logits, hidden
    states, taps.
    """
    batch, rows = tokens.shape
    positions = jnp.broadcast_to(jnp.arange(rows, dtype=jnp.int32)[None], tokens.shape)
    mask = jnp.broadcast_to(jnp.tril(jnp.ones((rows, rows), bool))[None], (batch, rows, rows))
    chunk = numerics.attention_chunk
    empty = jnp.zeros(
        (batch, cfg.num_kv_heads, chunk, cfg.head_dim), embed_tokens(params, tokens[:1, :1]).dtype
    )
    out = forward_block(
        params,
        cfg,
        tokens,
        positions,
        (empty,) * cfg.num_layers,
        (empty,) * cfg.num_layers,
        jnp.zeros((batch,), jnp.int32),
        mask,
        taps=taps,
        numerics=numerics,
    )
    return FullOut(head_logits(params, out.hidden), out.hidden, out.taps)
