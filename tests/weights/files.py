"""Tiny checkpoints of every family, written with the reference libraries, and the error check."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from safetensors.numpy import save_file

from jetspec_jax.errors import ConfigError, ModelFileError

FAMILIES = ("llama", "qwen2", "qwen3", "qwen3_moe")
ARCHITECTURE = {"llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "qwen3_moe": "qwen3moe"}
WIDTH, HEADS, KV, HEAD, FFN, VOCAB, LAYERS, EXPERTS, MOE_FFN = 64, 4, 2, 16, 96, 100, 2, 3, 32

_GGUF_LAYER = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp",
}


def one_line(path: Any, action: Callable[[], Any], *fragments: str) -> str:
    """Run a failing action: its error is typed, one line, names the file and the fragments."""
    with pytest.raises((ModelFileError, ConfigError)) as caught:
        action()
    text = str(caught.value)
    assert "\n" not in text
    for fragment in (str(path), *fragments):
        assert fragment in text, (fragment, text)
    assert any(mark in text for mark in (";", ": ")), text
    return text


def hf_config(family: str, *, tied: bool = True, **more: Any) -> dict[str, Any]:
    """config.json of the tiny model."""
    config = {
        "model_type": family,
        "vocab_size": VOCAB,
        "hidden_size": WIDTH,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV,
        "head_dim": HEAD,
        "intermediate_size": FFN,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5,
        "rope_theta": 5e5,
        "tie_word_embeddings": tied,
        "eos_token_id": 7,
        "bos_token_id": 1,
    }
    if family == "qwen3_moe":
        config |= {
            "num_experts": EXPERTS,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": MOE_FFN,
            "norm_topk_prob": True,
            "mlp_only_layers": [1],
            "decoder_sparse_step": 1,
        }
    return config | more


def hf_tensors(family: str, *, tied: bool = True, seed: int = 0) -> dict[str, np.ndarray]:
    """Random float32 weights under Hugging Face names."""
    rng = np.random.default_rng(seed)
    tensors: dict[str, np.ndarray] = {}

    def add(name: str, *shape: int) -> None:
        tensors[name] = rng.normal(size=shape).astype(np.float32)

    add("model.embed_tokens.weight", VOCAB, WIDTH)
    add("model.norm.weight", WIDTH)
    if not tied:
        add("lm_head.weight", VOCAB, WIDTH)
    for i in range(LAYERS):
        here = f"model.layers.{i}"
        add(f"{here}.input_layernorm.weight", WIDTH)
        add(f"{here}.post_attention_layernorm.weight", WIDTH)
        for part, rows in (("q", HEADS * HEAD), ("k", KV * HEAD), ("v", KV * HEAD)):
            add(f"{here}.self_attn.{part}_proj.weight", rows, WIDTH)
            if family == "qwen2":
                add(f"{here}.self_attn.{part}_proj.bias", rows)
            if family.startswith("qwen3") and part != "v":
                add(f"{here}.self_attn.{part}_norm.weight", HEAD)
        add(f"{here}.self_attn.o_proj.weight", WIDTH, HEADS * HEAD)
        if family == "qwen3_moe" and i == 0:
            add(f"{here}.mlp.gate.weight", EXPERTS, WIDTH)
            for e in range(EXPERTS):
                _mlp(add, f"{here}.mlp.experts.{e}", MOE_FFN)
        else:
            _mlp(add, f"{here}.mlp", FFN)
    return tensors


def _mlp(add: Callable[..., None], prefix: str, width: int) -> None:
    add(f"{prefix}.gate_proj.weight", width, WIDTH)
    add(f"{prefix}.up_proj.weight", width, WIDTH)
    add(f"{prefix}.down_proj.weight", WIDTH, width)


def write_hf(
    path: Path,
    family: str = "llama",
    *,
    tied: bool = True,
    shards: int = 1,
    dtype: Any = np.float32,
    **more: Any,
) -> dict[str, np.ndarray]:
    """A Hugging Face directory at `path`; returns its tensors."""
    path.mkdir(parents=True, exist_ok=True)
    tensors = {k: v.astype(dtype) for k, v in hf_tensors(family, tied=tied).items()}
    (path / "config.json").write_text(json.dumps(hf_config(family, tied=tied, **more)))
    if shards == 1:
        save_file(tensors, path / "model.safetensors")
        return tensors
    placed = {}
    for shard in range(shards):
        file = f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"
        part = dict(list(tensors.items())[shard::shards])
        save_file(part, path / file)
        placed |= dict.fromkeys(part, file)
    index = {"metadata": {}, "weight_map": placed}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    return tensors


def interleave(rows: np.ndarray, heads: int) -> np.ndarray:
    """llama.cpp's conversion of q and k rows (convert_hf_to_gguf.py, `permute`)."""
    shape = (heads, 2, rows.shape[0] // heads // 2, *rows.shape[1:])
    return rows.reshape(shape).swapaxes(1, 2).reshape(rows.shape)


def write_gguf(
    path: Path,
    family: str = "llama",
    *,
    tied: bool = True,
    kind: str = "F32",
    kinds: dict[str, str] | None = None,
    metadata: Callable[[gguf.GGUFWriter, str], None] | None = None,
    extra: dict[str, np.ndarray] | None = None,
) -> dict[str, np.ndarray]:
    """A GGUF of the same tiny model; returns the tensors under their Hugging Face names.

    `kinds` gives tensors whose GGUF name holds the key another kind.
    """
    arch = ARCHITECTURE[family]
    writer = gguf.GGUFWriter(path, arch)
    writer.add_block_count(LAYERS)
    writer.add_context_length(512)
    writer.add_embedding_length(WIDTH)
    writer.add_feed_forward_length(FFN)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV)
    writer.add_key_length(HEAD)
    writer.add_value_length(HEAD)
    writer.add_rope_freq_base(5e5)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_eos_token_id(7)
    writer.add_bos_token_id(1)
    if family == "qwen3_moe":
        writer.add_expert_count(EXPERTS)
        writer.add_expert_used_count(2)
        writer.add_expert_feed_forward_length(MOE_FFN)
    if metadata is not None:
        metadata(writer, arch)
    tensors = hf_tensors(family, tied=tied)
    for name, value in (to_gguf(family, tensors) | (extra or {})).items():
        here = next((k for part, k in (kinds or {}).items() if part in name), kind)
        if value.ndim == 1 or here == "F32":
            writer.add_tensor(name, value)
        else:
            dtype = gguf.GGMLQuantizationType[here]
            writer.add_tensor(name, gguf.quants.quantize(value, dtype), raw_dtype=dtype)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return tensors


def to_gguf(family: str, tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Hugging Face names and row order to GGUF's."""
    top = {
        "model.embed_tokens.weight": "token_embd.weight",
        "model.norm.weight": "output_norm.weight",
        "lm_head.weight": "output.weight",
    }
    out: dict[str, np.ndarray] = {}
    experts: dict[str, list[np.ndarray]] = {}
    for name, value in tensors.items():
        if name in top:
            out[top[name]] = value
            continue
        _, _, layer, *middle, kind = name.split(".")
        part = ".".join(middle)
        if "experts" in middle:
            role = middle[-1].removesuffix("_proj")
            experts.setdefault(f"blk.{layer}.ffn_{role}_exps.weight", []).append(value)
            continue
        if family == "llama" and part in ("self_attn.q_proj", "self_attn.k_proj"):
            value = interleave(value, HEADS if "q_proj" in part else KV)
        out[f"blk.{layer}.{_GGUF_LAYER[part]}.{kind}"] = value
    return out | {name: np.stack(values) for name, values in experts.items()}


def gguf_entry(data: bytes | bytearray, name: str) -> int:
    """Byte of a tensor's type in the directory (uint32); its offset (uint64) follows."""
    key = struct.pack("<Q", len(name)) + name.encode()
    rank_at = data.index(key) + len(key)
    (rank,) = struct.unpack_from("<I", data, rank_at)
    return rank_at + 4 + 8 * rank
