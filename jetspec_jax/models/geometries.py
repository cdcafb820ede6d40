"""Geometries of well-known models, for planning and for compiling without their weights.

The values are those of the models' published config.json.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from jetspec_jax.config import ModelConfig
from jetspec_jax.errors import ConfigError
from jetspec_jax.weights.hf_config import parse_config

GEOMETRIES: dict[str, dict[str, Any]] = {
    "qwen3-8b": {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "attention_bias": False,
        "bos_token_id": 151643,
        "eos_token_id": 151645,
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "max_position_embeddings": 40960,
        "num_attention_heads": 32,
        "num_hidden_layers": 36,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000,
        "tie_word_embeddings": False,
        "vocab_size": 151936,
    },
    "qwen3-30b-a3b": {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "attention_bias": False,
        "bos_token_id": 151643,
        "decoder_sparse_step": 1,
        "eos_token_id": 151645,
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "max_position_embeddings": 40960,
        "mlp_only_layers": [],
        "moe_intermediate_size": 768,
        "norm_topk_prob": True,
        "num_attention_heads": 32,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 48,
        "num_key_value_heads": 4,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000,
        "tie_word_embeddings": False,
        "vocab_size": 151936,
    },
}


def geometry(name: str) -> ModelConfig:
    """The named model.

    Raises:
        ConfigError: unknown name.
    """
    if name not in GEOMETRIES:
        raise ConfigError(
            f"geometry {name!r} is not known; choose one of {', '.join(sorted(GEOMETRIES))}"
        )
    return parse_config(GEOMETRIES[name], Path(name))
