"""Hugging Face config.json and generation_config.json to ModelConfig."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jetspec_jax.config import FAMILIES, ModelConfig, RopeConfig
from jetspec_jax.errors import ModelFileError

_ROPE_NEEDS = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": ("factor",),
}


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file.

    Raises:
        ModelFileError: missing, unreadable, or not a JSON object.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as err:
        raise ModelFileError(
            f"{path}: file is missing; give a complete Hugging Face model directory"
        ) from err
    except OSError as err:
        raise ModelFileError(
            f"{path}: cannot be read ({err.strerror or err}); check the path and permissions"
        ) from err
    except ValueError as err:
        raise ModelFileError(
            f"{path}: not valid JSON ({str(err)[:80]}); download it again"
        ) from err
    if not isinstance(value, dict):
        raise ModelFileError(
            f"{path}: holds a {type(value).__name__} where a JSON object belongs; download it again"
        )
    return value


class _Fields:
    """Typed access to one JSON object; every complaint names file, key, value and remedy."""

    def __init__(self, values: Mapping[str, Any], path: Path, where: str = "") -> None:
        self.values, self.path, self.where = values, path, where

    def get(self, key: str, default: Any = None) -> Any:
        value = self.values.get(key)
        return default if value is None else value

    def number(self, key: str, default: float | None = None) -> float:
        value = self.get(key, default)
        if value is None:
            raise ModelFileError(
                f"{self.path}: field {self.where}{key} is missing; use the config.json published "
                "with the weights"
            )
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise self.bad(key, "a number belongs here")
        return value

    def integer(self, key: str, default: int | None = None) -> int:
        value = self.number(key, default)
        if not math.isfinite(value) or value != int(value):
            raise self.bad(key, "a whole number belongs here")
        return int(value)

    def size(self, key: str, default: int | None = None) -> int:
        value = self.integer(key, default)
        if value < 1:
            raise self.bad(key, "a number from 1 belongs here")
        return value

    def bad(self, key: str, why: str) -> ModelFileError:
        return ModelFileError(
            f"{self.path}: {self.where}{key}={self.values.get(key)!r} is not supported: {why}"
        )


def _rope(config: _Fields, family: str) -> RopeConfig:
    params = config.get("rope_parameters") or config.get("rope_scaling") or {}
    where = "rope_parameters." if config.get("rope_parameters") else "rope_scaling."
    if not isinstance(params, dict):
        raise config.bad(where[:-1], "a JSON object belongs here")
    rope = _Fields(params, config.path, where)
    kind = rope.get("rope_type", rope.get("type", "default"))
    if not isinstance(kind, str) or kind not in _ROPE_NEEDS:
        key = "rope_type" if "rope_type" in params else "type"
        raise rope.bad(key, f"use a model with {', '.join(_ROPE_NEEDS)}")
    if any(isinstance(value, dict) for value in params.values()):
        raise config.bad(
            where[:-1], "rotary embeddings that differ between layers; use a model with one kind"
        )
    for fields in (rope, config):
        if fields.number("partial_rotary_factor", 1.0) != 1.0:
            raise fields.bad(
                "partial_rotary_factor", "only full rotary embeddings are known; use another model"
            )
    for key in _ROPE_NEEDS[kind]:
        rope.number(key)
    # Only old llama configs leave the base out; it meant 10000.
    default = 10_000.0 if family == "llama" else None
    theta = (rope if rope.get("rope_theta") is not None else config).number("rope_theta", default)
    options: dict[str, Any] = {}
    if kind in ("llama3", "yarn"):
        key = "original_max_position_embeddings"
        owner = config if config.get(key) is not None else rope
        options["original_max_position"] = owner.size(key, config.size("max_position_embeddings"))
    if kind == "llama3":
        options |= {key: float(rope.number(key)) for key in ("low_freq_factor", "high_freq_factor")}
    if kind == "yarn":
        options |= {
            key: float(rope.number(key))
            for key in ("beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim")
            if rope.get(key)
        }
        options["truncate"] = bool(rope.get("truncate", True))
    return RopeConfig(
        theta=float(theta), kind=kind, factor=float(rope.number("factor", 1.0)), **options
    )


def _refuse_unsupported(config: _Fields, layers: int) -> None:
    if config.get("hidden_act", "silu") != "silu":
        raise config.bad("hidden_act", "the MLP here is SwiGLU (silu); use another model")
    if config.get("quantization_config"):
        raise config.bad(
            "quantization_config", "use a bf16, fp16 or fp32 checkpoint, or a .gguf file"
        )
    layer_types = config.get("layer_types", [])
    if not isinstance(layer_types, list) or set(map(str, layer_types)) - {"full_attention"}:
        raise config.bad("layer_types", "use a model with full attention in every layer")
    windowed = config.get("use_sliding_window", False) and config.get("sliding_window")
    # Layers from max_window_layers on have the window.
    if windowed and config.integer("max_window_layers", 0) < layers:
        raise config.bad(
            "sliding_window", "set use_sliding_window to false or use a full-attention model"
        )


def _token_ids(values: Mapping[str, Any], key: str, path: Path) -> tuple[int, ...]:
    value = values.get(key)
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if any(isinstance(i, bool) or not isinstance(i, int) for i in ids):
        raise ModelFileError(f"{path}: {key}={value!r} is not a token id or a list of token ids")
    return tuple(ids)


def eos_ids(directory: Path, config: Mapping[str, Any]) -> tuple[int, ...]:
    """Ids that end a generation, from generation_config.json if it has them, else config.json."""
    path = directory / "generation_config.json"
    generation = read_json(path) if path.is_file() else {}
    found = _token_ids(generation, "eos_token_id", path)
    return found or _token_ids(config, "eos_token_id", directory / "config.json")


def parse_config(values: Mapping[str, Any], path: Path) -> ModelConfig:
    """ModelConfig from the parsed config.json at `path`.

    Raises:
        ModelFileError: a missing field, an unknown model_type or rope type, or a feature that is
            not supported (sliding window, quantised checkpoint, partial rotary embedding).
    """
    config = _Fields(values, path)
    family = config.get("model_type")
    if family is None:
        raise ModelFileError(
            f"{path}: field model_type is missing; use the config.json published with the weights"
        )
    if not isinstance(family, str) or family not in FAMILIES:
        raise config.bad("model_type", f"supported are {', '.join(FAMILIES)}")
    layers, heads, hidden = (
        config.size(k) for k in ("num_hidden_layers", "num_attention_heads", "hidden_size")
    )
    _refuse_unsupported(config, layers)
    moe = family == "qwen3_moe"
    bias = bool(config.get("attention_bias", False))
    dense: tuple[int, ...] = ()
    # transformers 5 writes num_local_experts where the published configs have num_experts.
    experts = "num_local_experts" if "num_local_experts" in values else "num_experts"
    if moe:
        step, only = config.size("decoder_sparse_step", 1), config.get("mlp_only_layers", [])
        if not isinstance(only, list):
            raise config.bad("mlp_only_layers", "a list of layer numbers belongs here")
        dense = tuple(i for i in range(layers) if i in only or (i + 1) % step)
    # Qwen3's head size is not hidden/heads, so a config without it cannot be read safely.
    derived = hidden // heads if family in ("llama", "qwen2") else None
    return ModelConfig(
        family=family,
        vocab_size=config.size("vocab_size"),
        hidden_size=hidden,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=config.size("num_key_value_heads", heads if family == "llama" else None),
        head_dim=config.size("head_dim", derived),
        ffn_size=config.size("intermediate_size"),
        max_context=config.size("max_position_embeddings"),
        rms_eps=float(config.number("rms_norm_eps")),
        rope=_rope(config, family),
        tie_embeddings=bool(config.get("tie_word_embeddings", False)),
        qkv_bias=True if family == "qwen2" else bias,
        out_bias=False if family == "qwen2" else bias,
        mlp_bias=bool(config.get("mlp_bias", False)) if family == "llama" else False,
        qk_norm=family in ("qwen3", "qwen3_moe"),
        num_experts=config.size(experts) if moe else 0,
        experts_per_token=config.size("num_experts_per_tok") if moe else 0,
        moe_ffn_size=config.size("moe_intermediate_size") if moe else 0,
        norm_topk_prob=bool(config.get("norm_topk_prob", False)) if moe else False,
        dense_layers=dense,
        eos_ids=eos_ids(path.parent, values),
        bos_id=next(iter(_token_ids(values, "bos_token_id", path)), None),
        pad_id=next(iter(_token_ids(values, "pad_token_id", path)), None),
        name=str(config.get("_name_or_path") or path.parent.name),
    )
