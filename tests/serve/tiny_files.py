"""A tiny random target and draft head as files, in the published layouts."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import safetensors.numpy

from jetspec_jax import testing
from jetspec_jax.config import EngineConfig, ModelConfig
from jetspec_jax.drafter.checkpoint import save_draft
from jetspec_jax.models import decoder
from jetspec_jax.models.spec import flatten

XLA = EngineConfig(kernels="xla")  # weights as they are, not packed for a native kernel


def write_target(folder: Path, config: ModelConfig | None = None) -> Path:
    """A Hugging Face directory: config.json, model.safetensors, tokenizer.json, chat template."""
    config = config or testing.tiny_config("llama")
    target = testing.tiny_target(config, engine=XLA)
    flat = flatten(target.params)
    parts = {
        "qkv": (config.q_width, config.kv_width, config.kv_width),
        "gate_up": (config.ffn_size, config.ffn_size),
    }
    tensors: dict[str, np.ndarray] = {}
    for name, spec in decoder.declare(config).items():
        array = np.asarray(flat[name])
        sizes = parts.get(name.rsplit(".", 1)[-1], (len(array),))
        pieces = np.split(array, np.cumsum(sizes)[:-1])
        for source, piece in zip(spec.sources, pieces, strict=True):
            tensors[str(source)] = np.ascontiguousarray(piece)
    folder.mkdir(parents=True)
    safetensors.numpy.save_file(tensors, folder / "model.safetensors")
    values = {
        "model_type": config.family,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "intermediate_size": config.ffn_size,
        "max_position_embeddings": config.max_context,
        "rms_norm_eps": config.rms_eps,
        "rope_theta": config.rope.theta,
        "tie_word_embeddings": config.tie_embeddings,
        "eos_token_id": list(config.eos_ids),
    }
    (folder / "config.json").write_text(json.dumps(values))
    tokenizer = testing.byte_tokenizer()
    tokenizer._backend.inner.save(str(folder / "tokenizer.json"))  # type: ignore[attr-defined]
    settings = {"eos_token": "<eos>", "chat_template": tokenizer.chat_template}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def write_head(folder: Path, config: ModelConfig | None = None) -> Path:
    """A random draft head for `write_target(config)`."""
    target = testing.tiny_target(config or testing.tiny_config("llama"), engine=XLA)
    head = testing.tiny_head(target, engine=XLA)
    return save_draft(folder, head.config, head.params, target=target.config, dtype=np.float32)
