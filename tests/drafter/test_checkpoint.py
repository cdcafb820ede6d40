"""Published layout: names, shapes and config keys, our extras beside them, and refusals in one
line."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

from jetspec_jax.config import DraftConfig, ModelConfig, RopeConfig
from jetspec_jax.drafter import (
    declare,
    default_layer_ids,
    load_draft,
    read_draft_config,
    save_draft,
)
from jetspec_jax.errors import ModelFileError
from jetspec_jax.models.spec import flatten, init_params

HEAD = DraftConfig(
    hidden_size=16,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=4,
    ffn_size=24,
    target_hidden_size=16,
    num_target_layers=4,
    target_layer_ids=(0, 2),
    vocab_size=32,
    mask_token_id=3,
    block_size=4,
    rope=RopeConfig(theta=5e5),
)
OURS = dataclasses.replace(HEAD, draft_vocab_size=20, path_head="markov", path_rank=4)
TARGET = ModelConfig(
    family="qwen3",
    vocab_size=32,
    hidden_size=16,
    num_layers=4,
    num_heads=4,
    num_kv_heads=2,
    head_dim=4,
    ffn_size=24,
    max_context=64,
    eos_ids=(2,),
    pad_id=0,
    qk_norm=True,
)
ID_MAP = np.arange(2, 22, dtype=np.int32)


def _save(folder: Path, cfg: DraftConfig = HEAD, **kwargs: Any) -> dict[str, np.ndarray]:
    params = init_params(declare(cfg), jax.random.key(0))
    save_draft(
        folder,
        cfg,
        params,
        ID_MAP if cfg.draft_vocab_size else None,
        target=TARGET,
        dtype=np.float32,
        **kwargs,
    )
    return {k: np.asarray(v) for k, v in flatten(params).items()}


def _edit(folder: Path, change: Any) -> None:
    path = folder / "config.json"
    values = json.loads(path.read_text())
    change(values)
    path.write_text(json.dumps(values))


def test_published_names_shapes_and_keys(tmp_path: Path) -> None:
    _save(tmp_path)
    tensors = safetensors.numpy.load_file(tmp_path / "model.safetensors")
    want = {"fc.weight": (16, 32), "hidden_norm.weight": (16,), "norm.weight": (16,)}
    for i in range(2):
        p = f"layers.{i}."
        want |= {
            p + "input_layernorm.weight": (16,),
            p + "post_attention_layernorm.weight": (16,),
            p + "self_attn.q_proj.weight": (16, 16),
            p + "self_attn.k_proj.weight": (8, 16),
            p + "self_attn.v_proj.weight": (8, 16),
            p + "self_attn.o_proj.weight": (16, 16),
            p + "self_attn.q_norm.weight": (4,),
            p + "self_attn.k_norm.weight": (4,),
            p + "mlp.gate_proj.weight": (24, 16),
            p + "mlp.up_proj.weight": (24, 16),
            p + "mlp.down_proj.weight": (16, 24),
        }
    assert {k: v.shape for k, v in tensors.items()} == want
    values = json.loads((tmp_path / "config.json").read_text())
    assert values["block_size"] == 4 and values["num_target_layers"] == 4
    inner = values["dflash_config"]
    assert inner["target_layer_ids"] == [0, 2] and inner["mask_token_id"] == 3
    assert inner["causal_head"] is True and inner["causal"] is True
    assert "jetspec_config" not in values
    for key in (
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "rms_norm_eps",
        "rope_theta",
        "vocab_size",
    ):
        assert key in values


@pytest.mark.parametrize("cfg", [HEAD, OURS], ids=["published", "with extras"])
def test_round_trip(tmp_path: Path, cfg: DraftConfig) -> None:
    flat = _save(tmp_path, cfg)
    head = load_draft(tmp_path, TARGET)
    assert head.config == cfg
    for name, value in flatten(head.params).items():
        np.testing.assert_array_equal(value, flat[name], err_msg=name)
    if cfg.draft_vocab_size:
        assert head.id_map is not None and head.id_map.dtype == np.int32
        np.testing.assert_array_equal(head.id_map, ID_MAP)
        assert {"path_head.w1.weight", "draft_id_map"} <= set(
            safetensors.numpy.load_file(tmp_path / "model.safetensors")
        )
    else:
        assert head.id_map is None


@pytest.mark.parametrize("kind", ["linear", "llama3", "yarn"])
def test_rope_scaling_round_trip(tmp_path: Path, kind: str) -> None:
    rope = RopeConfig(theta=1e4, kind=kind, factor=4.0, original_max_position=32)
    if kind == "linear":
        rope = RopeConfig(theta=1e4, kind=kind, factor=4.0)
    cfg = dataclasses.replace(HEAD, rope=rope, draft_shift=True, causal=False)
    _save(tmp_path, cfg)
    assert read_draft_config(tmp_path) == cfg


def test_bfloat16_export_rounds_and_nothing_else(tmp_path: Path) -> None:
    params = init_params(declare(HEAD), jax.random.key(0))
    save_draft(tmp_path, HEAD, params, target=TARGET)
    head = load_draft(tmp_path, TARGET)
    for name, value in flatten(params).items():
        want = np.asarray(value).astype(ml_dtypes.bfloat16).astype(np.float32)
        np.testing.assert_array_equal(flatten(head.params)[name], want)


@pytest.mark.parametrize("where", ["inner", "outer"])
@pytest.mark.parametrize("name", ["causal_head", "causal"])
@pytest.mark.parametrize("value", [True, False])
def test_either_causal_name_in_either_place(
    tmp_path: Path, where: str, name: str, value: bool
) -> None:
    _save(tmp_path)

    def change(values: dict[str, Any]) -> None:
        for key in ("causal_head", "causal"):
            del values["dflash_config"][key]
        (values["dflash_config"] if where == "inner" else values)[name] = value

    _edit(tmp_path, change)
    assert read_draft_config(tmp_path).causal is value


def test_no_causal_flag_warns_and_contradiction_is_refused(tmp_path: Path) -> None:
    _save(tmp_path)
    _edit(tmp_path, lambda v: v["dflash_config"].update(causal=False))
    with pytest.raises(ModelFileError, match="contradict"):
        read_draft_config(tmp_path)
    _edit(
        tmp_path,
        lambda v: (v["dflash_config"].pop("causal"), v["dflash_config"].pop("causal_head")),
    )
    with pytest.warns(UserWarning, match="neither causal_head nor causal"):
        assert read_draft_config(tmp_path).causal is False


def test_default_layer_ids_are_the_published_ones(tmp_path: Path) -> None:
    assert default_layer_ids(5, 36) == (1, 9, 17, 25, 33)
    assert default_layer_ids(5, 48) == (1, 12, 23, 34, 45)
    assert default_layer_ids(1, 36) == (18,)
    cfg = dataclasses.replace(HEAD, num_target_layers=8, target_layer_ids=(1, 5))
    _save(tmp_path, cfg)
    _edit(tmp_path, lambda v: v["dflash_config"].pop("target_layer_ids"))
    assert read_draft_config(tmp_path).target_layer_ids == (1, 5)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_size": 24}, r"hidden size 16 \(target: 24\)"),
        ({"vocab_size": 48}, r"vocabulary 32 \(target: 48\)"),
        ({"num_layers": 6}, r"num_target_layers 4 \(target: 6\)"),
        (
            {"num_layers": 2},
            r"num_target_layers 4 \(target: 2\); target_layer_ids \[2\] out of range",
        ),
        ({"eos_ids": (3,)}, "mask_token_id 3 is the target's pad or EOS"),
        ({"pad_id": 3}, "mask_token_id 3 is the target's pad or EOS"),
    ],
)
def test_head_of_another_target_is_refused(
    tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    _save(tmp_path)
    with pytest.raises(ModelFileError, match=message) as caught:
        load_draft(tmp_path, dataclasses.replace(TARGET, **change))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("key", "message"),
    [
        ("block_size", "field block_size is missing"),
        ("num_target_layers", "field num_target_layers is missing"),
        ("hidden_size", "hidden_size is missing"),
        ("dflash_config", "mask_token_id is missing"),
    ],
)
def test_missing_fields_are_named(tmp_path: Path, key: str, message: str) -> None:
    _save(tmp_path)
    _edit(tmp_path, lambda v: v.pop(key))
    with pytest.raises(ModelFileError, match=message):
        load_draft(tmp_path, TARGET)


def test_damaged_or_mismatched_files_are_named(tmp_path: Path) -> None:
    _save(tmp_path, OURS)
    path = tmp_path / "model.safetensors"
    whole = path.read_bytes()
    path.write_bytes(whole[:-100])
    with pytest.raises(ModelFileError, match="truncated"):
        load_draft(tmp_path, TARGET)
    path.write_bytes(whole)
    _edit(tmp_path, lambda v: v["jetspec_config"].pop("draft_vocab_size"))
    with pytest.raises(ModelFileError, match="no draft_vocab_size"):
        load_draft(tmp_path, TARGET)
    _edit(tmp_path, lambda v: v["jetspec_config"].update(draft_vocab_size=19))
    with pytest.raises(ModelFileError, match="19 distinct ids"):
        load_draft(tmp_path, TARGET)
    _edit(tmp_path, lambda v: v["jetspec_config"].update(draft_vocab_size=20, path_head="none"))
    with pytest.raises(ModelFileError, match=r"unexpected tensor.*path_head"):
        load_draft(tmp_path, TARGET)
    _save(tmp_path, HEAD)
    _edit(tmp_path, lambda v: v.update(jetspec_config={"draft_vocab_size": 20}))
    with pytest.raises(ModelFileError, match="'draft_id_map' is missing"):
        load_draft(tmp_path, TARGET)
    with pytest.raises(ModelFileError, match="cannot be read"):
        load_draft(tmp_path / "none", TARGET)
