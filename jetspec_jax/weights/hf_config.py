"""Hugging Face config.json and generation_config.json to ModelConfig."""

from __future__ import annotations

import json
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
        if value != int(value):
            raise self.bad(key, "a whole number belongs here")
        return int(value)

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
    if kind not in _ROPE_NEEDS:
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
    theta = (
        rope.get("rope_theta")
        if rope.get("rope_theta") is not None
        else config.get("rope_theta", 10_000.0 if family == "llama" else None)
    )
    theta = _Fields({"rope_theta": theta}, config.path).number("rope_theta")
    options: dict[str, Any] = {}
    if kind in ("llama3", "yarn"):
        original = config.get(
            "original_max_position_embeddings", rope.get("original_max_position_embeddings")
        )
        options["original_max_position"] = original or config.integer("max_position_embeddings")
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
    act = config.get("hidden_act", "silu")
    if act != "silu":
        raise config.bad("hidden_act", "the MLP here is SwiGLU (silu); use another model")
    if config.get("quantization_config"):
        method = config.get("quantization_config").get("quant_method", "unknown")
        raise ModelFileError(
            f"{config.path}: quantization_config.quant_method={method!r} is not supported; use a "
            "bf16/fp16/fp32 checkpoint or a .gguf file"
        )
    layer_types = config.get("layer_types", [])
    unknown = next((kind for kind in layer_types if kind != "full_attention"), None)
    windowed = (
        config.get("use_sliding_window", False) and config.get("max_window_layers", 0) < layers
    )
    if unknown is not None or (windowed and config.get("sliding_window")):
        what = (
            f"layer_types holds {unknown!r}"
            if unknown is not None
            else f"sliding_window={config.get('sliding_window')} is enabled"
        )
        raise ModelFileError(
            f"{config.path}: {what}, which is not supported; set use_sliding_window to false or "
            "use a full-attention model"
        )


def _token_ids(value: Any) -> tuple[int, ...]:
    if value is None:
        return ()
    return tuple(int(v) for v in (value if isinstance(value, list) else [value]))


def eos_ids(directory: Path, config: Mapping[str, Any]) -> tuple[int, ...]:
    """Ids that end a generation, from generation_config.json if it has them, else config.json."""
    path = directory / "generation_config.json"
    generation = read_json(path) if path.is_file() else {}
    value = generation.get("eos_token_id")
    return _token_ids(config.get("eos_token_id") if value is None else value)


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
    if family not in FAMILIES:
        raise config.bad("model_type", f"supported are {', '.join(FAMILIES)}")
    layers, heads, hidden = (
        config.integer(k) for k in ("num_hidden_layers", "num_attention_heads", "hidden_size")
    )
    _refuse_unsupported(config, layers)
    moe = family == "qwen3_moe"
    bias = bool(config.get("attention_bias", False))
    dense: tuple[int, ...] = ()
    if moe:
        step, only = (
            config.integer("decoder_sparse_step", 1),
            set(config.get("mlp_only_layers", [])),
        )
        dense = tuple(i for i in range(layers) if i in only or (i + 1) % step)
    # Qwen3's head size is not hidden/heads, so a config without it cannot be read safely.
    derived = hidden // heads if family in ("llama", "qwen2") else None
    return ModelConfig(
        family=family,
        vocab_size=config.integer("vocab_size"),
        hidden_size=hidden,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=config.integer("num_key_value_heads", heads if family == "llama" else None),
        head_dim=config.integer("head_dim", derived),
        ffn_size=config.integer("intermediate_size"),
        max_context=config.integer("max_position_embeddings"),
        rms_eps=float(config.number("rms_norm_eps")),
        rope=_rope(config, family),
        tie_embeddings=bool(config.get("tie_word_embeddings", False)),
        qkv_bias=True if family == "qwen2" else bias,
        out_bias=False if family == "qwen2" else bias,
        mlp_bias=bool(config.get("mlp_bias", False)) if family == "llama" else False,
        qk_norm=family in ("qwen3", "qwen3_moe"),
        num_experts=config.integer("num_experts") if moe else 0,
        experts_per_token=config.integer("num_experts_per_tok") if moe else 0,
        moe_ffn_size=config.integer("moe_intermediate_size") if moe else 0,
        norm_topk_prob=bool(config.get("norm_topk_prob", False)) if moe else False,
        dense_layers=dense,
        eos_ids=eos_ids(path.parent, values),
        bos_id=next(iter(_token_ids(config.get("bos_token_id"))), None),
        pad_id=next(iter(_token_ids(config.get("pad_token_id"))), None),
        name=str(config.get("_name_or_path") or path.parent.name),
    )
