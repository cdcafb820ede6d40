"""The published draft head in plain torch, transcribed from algorithm.md section 2.

Written without sight of `jetspec_jax/drafter`, as slowly and plainly as possible: one sequence, no
caches, the whole context projected again in every round, attention as an explicit matrix with an
explicit mask. Used by make_goldens.py only.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor


@dataclasses.dataclass
class Round:
    """One round: `ctx` [C-1, H], `hidden` [D, H] after the final norm, `logits` [D, V]."""

    ctx: Tensor
    hidden: Tensor
    logits: Tensor


def random_state(config: dict[str, Any], seed: int) -> dict[str, Tensor]:
    """Random tensors under the published names; norms around 1."""
    gen = torch.Generator().manual_seed(seed)
    size, ffn, h = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    q, k = config["num_attention_heads"] * h, config["num_key_value_heads"] * h
    taps = len(config["dflash_config"]["target_layer_ids"])
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (size, taps * size),
        "hidden_norm.weight": (size,),
        "norm.weight": (size,),
    }
    for i in range(config["num_hidden_layers"]):
        shapes |= {
            f"layers.{i}.input_layernorm.weight": (size,),
            f"layers.{i}.post_attention_layernorm.weight": (size,),
            f"layers.{i}.self_attn.q_proj.weight": (q, size),
            f"layers.{i}.self_attn.k_proj.weight": (k, size),
            f"layers.{i}.self_attn.v_proj.weight": (k, size),
            f"layers.{i}.self_attn.o_proj.weight": (size, q),
            f"layers.{i}.self_attn.q_norm.weight": (h,),
            f"layers.{i}.self_attn.k_norm.weight": (h,),
            f"layers.{i}.mlp.gate_proj.weight": (ffn, size),
            f"layers.{i}.mlp.up_proj.weight": (ffn, size),
            f"layers.{i}.mlp.down_proj.weight": (size, ffn),
        }
    out = {}
    for name, shape in shapes.items():
        noise = torch.randn(shape, generator=gen)
        out[name] = 1.0 + 0.2 * noise if "norm" in name else 0.2 * noise
    return out


def rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return weight * (x / torch.sqrt((x * x).mean(dim=-1, keepdim=True) + eps))


def rotate(x: Tensor, positions: Tensor, theta: float) -> Tensor:
    """Rotary embedding of x [T, heads, h] at absolute positions [T]; pairs are (i, i + h/2)."""
    h = x.shape[-1]
    freq = theta ** (-torch.arange(0, h, 2, dtype=torch.float64) / h)
    angle = positions[:, None].to(torch.float64) * freq[None, :]
    cos, sin = angle.cos().float()[:, None, :], angle.sin().float()[:, None, :]
    first, second = x[..., : h // 2], x[..., h // 2 :]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


class DraftHead:
    """Section 2 as functions over named tensors."""

    def __init__(
        self, config: dict[str, Any], state: dict[str, Tensor], causal: bool, shift: bool
    ) -> None:
        self.config, self.state, self.causal, self.shift = config, state, causal, shift
        self.eps = config["rms_norm_eps"]

    def fuse(self, taps: Tensor) -> Tensor:
        """Taps [T, n, H] -> ctx [T, H]: tapped layers side by side, fc, hidden_norm."""
        joined = torch.cat([taps[:, i] for i in range(taps.shape[1])], dim=-1)
        return rms(joined @ self.state["fc.weight"].T, self.state["hidden_norm.weight"], self.eps)

    def layer(
        self, index: int, hidden: Tensor, ctx: Tensor, ctx_pos: Tensor, block_pos: Tensor
    ) -> Tensor:
        c, eps = self.config, self.eps
        prefix = f"layers.{index}."
        w = {k.removeprefix(prefix): v for k, v in self.state.items() if k.startswith(prefix)}
        heads, groups, h = c["num_attention_heads"], c["num_key_value_heads"], c["head_dim"]
        n_ctx, n_block = ctx.shape[0], hidden.shape[0]

        x = rms(hidden, w["input_layernorm.weight"], eps)
        q = (x @ w["self_attn.q_proj.weight"].T).reshape(n_block, heads, h)
        source = torch.cat([ctx, x], dim=0)  # ctx as it is: not normed here
        k = (source @ w["self_attn.k_proj.weight"].T).reshape(n_ctx + n_block, groups, h)
        v = (source @ w["self_attn.v_proj.weight"].T).reshape(n_ctx + n_block, groups, h)
        theta = c["rope_theta"]
        q = rotate(rms(q, w["self_attn.q_norm.weight"], eps), block_pos, theta)
        k = rotate(
            rms(k, w["self_attn.k_norm.weight"], eps), torch.cat([ctx_pos, block_pos]), theta
        )

        visible = torch.ones(n_block, n_ctx + n_block, dtype=torch.bool)
        if self.causal:
            for slot in range(n_block):
                visible[slot, n_ctx + slot + 1 :] = False
        mixed = torch.zeros(n_block, heads, h)
        for head in range(heads):
            group = head // (heads // groups)
            score = q[:, head] @ k[:, group].T / h**0.5
            weight = torch.softmax(score.masked_fill(~visible, float("-inf")), dim=-1)
            mixed[:, head] = weight @ v[:, group]
        hidden = hidden + mixed.reshape(n_block, heads * h) @ w["self_attn.o_proj.weight"].T

        x = rms(hidden, w["post_attention_layernorm.weight"], eps)
        gate, up = x @ w["mlp.gate_proj.weight"].T, x @ w["mlp.up_proj.weight"].T
        return hidden + (gate * torch.sigmoid(gate) * up) @ w["mlp.down_proj.weight"].T

    def block(self, embeds: Tensor, ctx: Tensor, anchor_position: int) -> Tensor:
        """Final-norm states [D, H] of the predicting slots; embeds [bs, H], ctx [C-1, H]."""
        ctx_pos = torch.arange(ctx.shape[0])
        block_pos = anchor_position + torch.arange(embeds.shape[0])
        hidden = embeds
        for i in range(self.config["num_hidden_layers"]):
            hidden = self.layer(i, hidden, ctx, ctx_pos, block_pos)
        hidden = rms(hidden, self.state["norm.weight"], self.eps)
        # In place: slot k predicts the token at its own position; the anchor's is known.
        # Shifted: slot k predicts the token after it, so every slot predicts.
        return hidden if self.shift else hidden[1:]


def draft_round(
    head: DraftHead, embed: Tensor, lm_head: Tensor, tokens: Tensor, taps: Tensor, committed: int
) -> Round:
    """One round for a sequence of which the first `committed` (C) tokens are known.

    The context is the taps of positions 0 .. C-2; the anchor is token C-1, at position C-1,
    followed by masks.
    """
    config = head.config
    ctx = head.fuse(taps[: committed - 1])
    masks = [config["dflash_config"]["mask_token_id"]] * (config["block_size"] - 1)
    block = torch.tensor([int(tokens[committed - 1]), *masks])
    hidden = head.block(embed[block], ctx, committed - 1)
    return Round(ctx, hidden, hidden @ lm_head.T)
