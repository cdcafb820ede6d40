"""Hugging Face directories: config parsing and lazy reading."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from jetspec_jax.config import ModelConfig, RopeConfig
from jetspec_jax.weights import open_source
from jetspec_jax.weights.hf_config import parse_config
from tests.weights.files import FAMILIES, hf_config, one_line, write_hf

TARGETS = Path(__file__).parent.parent / "golden" / "targets"


def parse(tmp_path: Path, family: str = "llama", **more: Any) -> ModelConfig:
    return parse_config(hf_config(family, **more), tmp_path / "config.json")


@pytest.mark.parametrize("family", FAMILIES)
def test_geometry(tmp_path: Path, family: str) -> None:
    config = parse(tmp_path, family)
    assert (config.family, config.vocab_size, config.hidden_size) == (family, 100, 64)
    assert (config.num_layers, config.num_heads, config.num_kv_heads, config.head_dim) == (
        2,
        4,
        2,
        16,
    )
    assert (config.ffn_size, config.max_context, config.rms_eps) == (96, 512, 1e-5)
    assert config.rope == RopeConfig(theta=5e5)
    assert config.tie_embeddings
    assert (config.qkv_bias, config.out_bias) == (family == "qwen2", False)
    assert config.qk_norm == family.startswith("qwen3")
    assert (config.eos_ids, config.bos_id, config.pad_id) == ((7,), 1, None)
    moe = (config.num_experts, config.experts_per_token, config.moe_ffn_size, config.dense_layers)
    assert moe == ((3, 2, 32, (1,)) if family == "qwen3_moe" else (0, 0, 0, ()))


@pytest.mark.parametrize("name", sorted(p.name for p in TARGETS.iterdir()))
def test_configs_written_by_transformers_agree_with_its_own_reading(name: str) -> None:
    """Every golden directory was saved by transformers; its config class is the second opinion."""
    from transformers import AutoConfig

    theirs = AutoConfig.from_pretrained(TARGETS / name)
    ours = open_source(TARGETS / name).config()
    rope = theirs.rope_parameters
    assert ours.family == theirs.model_type
    assert ours.hidden_size == theirs.hidden_size
    assert ours.num_kv_heads == theirs.num_key_value_heads
    assert ours.head_dim == getattr(theirs, "head_dim", ours.hidden_size // ours.num_heads)
    assert ours.rms_eps == theirs.rms_norm_eps
    assert ours.max_context == theirs.max_position_embeddings
    assert ours.tie_embeddings == theirs.tie_word_embeddings
    assert ours.rope.kind == rope["rope_type"]
    assert ours.rope.theta == rope["rope_theta"]
    assert ours.rope.factor == rope.get("factor", 1.0)
    if ours.rope.kind in ("yarn", "llama3"):
        assert ours.rope.original_max_position == rope["original_max_position_embeddings"]
        assert ours.rope.attention_factor == rope.get("attention_factor")
    if ours.num_experts:
        assert ours.num_experts == theirs.num_experts
        assert ours.norm_topk_prob == theirs.norm_topk_prob


def test_biases_and_derived_sizes(tmp_path: Path) -> None:
    config = parse(tmp_path, "llama", attention_bias=True, mlp_bias=True, head_dim=None)
    assert (config.qkv_bias, config.out_bias, config.mlp_bias) == (True, True, True)
    assert config.head_dim == 16
    assert parse(tmp_path, "llama", num_key_value_heads=None).num_kv_heads == 4
    assert parse(tmp_path, "qwen3", attention_bias=True).out_bias


@pytest.mark.parametrize("step,only,dense", [(1, [], ()), (2, [], (0, 2)), (1, [0, 3], (0, 3))])
def test_dense_layers_of_a_mixture(tmp_path: Path, step: int, only: list, dense: tuple) -> None:
    config = parse(
        tmp_path, "qwen3_moe", num_hidden_layers=4, decoder_sparse_step=step, mlp_only_layers=only
    )
    assert config.dense_layers == dense


@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
@pytest.mark.parametrize(
    "values,wanted",
    [
        ({"rope_type": "default"}, RopeConfig(theta=5e5)),
        ({"type": "linear", "factor": 2}, RopeConfig(theta=5e5, kind="linear", factor=2.0)),
        (
            {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 2.0,
                "original_max_position_embeddings": 64,
            },
            RopeConfig(5e5, "llama3", 8.0, 1.0, 2.0, 64),
        ),
        (
            {"rope_type": "yarn", "factor": 4.0, "beta_fast": 16, "attention_factor": 1.5},
            RopeConfig(
                5e5, "yarn", 4.0, original_max_position=512, beta_fast=16.0, attention_factor=1.5
            ),
        ),
    ],
)
def test_rope(tmp_path: Path, key: str, values: dict, wanted: RopeConfig) -> None:
    """The old key beside rope_theta, and the new one that may hold it."""
    assert parse(tmp_path, **{key: values}).rope == wanted
    inside = {key: values | {"rope_theta": 5e5}, "rope_theta": None}
    assert parse(tmp_path, **inside).rope == wanted


def test_old_llama_configs_leave_the_rope_base_out(tmp_path: Path) -> None:
    assert parse(tmp_path, "llama", rope_theta=None).rope.theta == 10_000.0
    path = tmp_path / "config.json"
    one_line(path, lambda: parse(tmp_path, "qwen2", rope_theta=None), "rope_theta is missing")


@pytest.mark.parametrize(
    "more,fragment",
    [
        ({"model_type": "mamba"}, "model_type='mamba'"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2}}, "rope_type='dynamic'"),
        ({"rope_scaling": {"rope_type": "yarn"}}, "rope_scaling.factor is missing"),
        ({"rope_parameters": {"full": {"rope_theta": 1.0}}}, "differ between layers"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5"),
        (
            {"sliding_window": 64, "use_sliding_window": True, "max_window_layers": 1},
            "sliding_window=64",
        ),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "sliding_attention"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu'"),
        ({"quantization_config": {"quant_method": "awq"}}, "awq"),
        ({"num_key_value_heads": 3}, "num_key_value_heads"),
        ({"eos_token_id": "</s>"}, "eos_token_id"),
    ],
)
def test_unsupported_is_refused_by_name(tmp_path: Path, more: dict, fragment: str) -> None:
    where = "" if "num_key_value_heads" in more else tmp_path / "config.json"
    one_line(where, lambda: parse(tmp_path, "qwen2", **more), fragment)


def test_a_switched_off_window_is_no_window(tmp_path: Path) -> None:
    parse(tmp_path, "qwen2", sliding_window=64, use_sliding_window=False)
    parse(tmp_path, "qwen2", sliding_window=64, use_sliding_window=True, max_window_layers=2)
    parse(tmp_path, "qwen3", layer_types=["full_attention"] * 2, sliding_window=None)


def test_generation_config_decides_about_end_ids(tmp_path: Path) -> None:
    write_hf(tmp_path)
    assert open_source(tmp_path).config().eos_ids == (7,)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [3, 9]}))
    assert open_source(tmp_path).config().eos_ids == (3, 9)
    (tmp_path / "generation_config.json").write_text(json.dumps({"temperature": 0.6}))
    assert open_source(tmp_path).config().eos_ids == (7,)


@pytest.mark.parametrize("shards", [1, 3])
def test_tensors_whole_and_sharded(tmp_path: Path, shards: int) -> None:
    tensors = write_hf(tmp_path, "qwen3", shards=shards)
    source = open_source(tmp_path)
    assert sorted(source.names()) == sorted(tensors)
    for name, value in tensors.items():
        assert source.shape(name) == value.shape
        assert source.dtype(name) == np.float32
        np.testing.assert_array_equal(source.read(name), value)


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float64, np.int64, np.bool_])
def test_stored_types(tmp_path: Path, dtype: Any) -> None:
    """The file is laid out by hand: the reference writer does not know every type."""
    names = {"float16": "F16", "bfloat16": "BF16", "float64": "F64", "int64": "I64", "bool": "BOOL"}
    value = (np.arange(6).reshape(2, 3) - 2).astype(dtype)
    entry = {"dtype": names[value.dtype.name], "shape": [2, 3], "data_offsets": [0, value.nbytes]}
    header = json.dumps({"x": entry, "__metadata__": {"format": "pt"}}).encode()
    file = len(header).to_bytes(8, "little") + header + value.tobytes()
    (tmp_path / "model.safetensors").write_bytes(file)
    source = open_source(tmp_path)
    assert source.dtype("x") == value.dtype
    np.testing.assert_array_equal(source.read("x"), value)
    out = np.zeros((2, 3), np.float32)
    np.testing.assert_array_equal(source.read("x", out), value.astype(np.float32))


def test_derived_buffers_and_a_stored_copy_of_a_tied_head_are_not_weights(tmp_path: Path) -> None:
    from safetensors.numpy import save_file

    tensors = write_hf(tmp_path)
    more = {
        "model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(8, np.float32),
        "lm_head.weight": tensors["model.embed_tokens.weight"],
    }
    save_file(tensors | more, tmp_path / "model.safetensors")
    assert sorted(open_source(tmp_path).names()) == sorted(tensors)
    more["lm_head.weight"] = tensors["model.embed_tokens.weight"] + 1
    save_file(tensors | more, tmp_path / "model.safetensors")
    one_line(
        tmp_path, lambda: open_source(tmp_path).names(), "lm_head.weight", "tie_word_embeddings"
    )
