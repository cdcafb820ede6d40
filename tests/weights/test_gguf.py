"""GGUF: container, dequantisation, names, row order and config."""

from __future__ import annotations

import dataclasses
import math
import struct
from pathlib import Path

import gguf
import numpy as np
import pytest

from jetspec_jax.config import RopeConfig
from jetspec_jax.errors import ModelFileError
from jetspec_jax.weights import GGUFSource, bundled_model_path, open_source
from jetspec_jax.weights.dequant import SUPPORTED, dequantize
from jetspec_jax.weights.gguf import llama3_divisors
from jetspec_jax.weights.gguf_file import BLOCKS, GGUFFile
from tests.weights.files import (
    FAMILIES,
    HEAD,
    gguf_entry,
    one_line,
    write_gguf,
)


def random_blocks(kind: str, rows: int, seed: int) -> np.ndarray:
    """Random bytes; the scales among them kept finite by clearing one exponent bit."""
    per_block, block_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    rng = np.random.default_rng(seed)
    blocks = rng.integers(0, 256, (rows, 1024 // per_block, block_bytes), dtype=np.uint8)
    half_ends = {
        "F32": (3,),
        "F16": (1,),
        "BF16": (1,),
        "Q4_1": (1, 3),
        "Q4_K": (1, 3),
        "Q6_K": (209,),
    }
    for at in half_ends.get(kind, (1,)):
        blocks[..., at] &= 0xBF
    return blocks.reshape(rows, -1)


@pytest.mark.parametrize("kind", SUPPORTED)
@pytest.mark.parametrize("rows", [1, 37, 300])
def test_dequantize_equals_the_gguf_package_bit_for_bit(kind: str, rows: int) -> None:
    blocks = random_blocks(kind, rows, rows)
    expected = gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType[kind])
    got = dequantize(blocks, kind)
    assert got.dtype == np.float32
    assert got.shape == (rows, 1024)
    np.testing.assert_array_equal(got.view(np.uint32), expected.reshape(rows, 1024).view(np.uint32))
    out = np.full((rows, 1024), np.nan, np.float32)
    assert dequantize(blocks, kind, out) is out
    np.testing.assert_array_equal(out, got)


def test_block_sizes_are_those_of_the_gguf_package() -> None:
    known = {t.value: (t.name, *size) for t, size in gguf.GGML_QUANT_SIZES.items()}
    assert known == BLOCKS


def test_header_agrees_with_the_reference_reader(tmp_path: Path) -> None:
    def every_type(writer: gguf.GGUFWriter, arch: str) -> None:
        writer.add_uint8("t.u8", 200)
        writer.add_int8("t.i8", -100)
        writer.add_uint16("t.u16", 60_000)
        writer.add_int16("t.i16", -30_000)
        writer.add_uint32("t.u32", 4_000_000_000)
        writer.add_int32("t.i32", -2_000_000_000)
        writer.add_uint64("t.u64", 2**63 + 5)
        writer.add_int64("t.i64", -(2**62))
        writer.add_float32("t.f32", 0.1)
        writer.add_float64("t.f64", 0.1)
        writer.add_bool("t.bool", True)
        writer.add_string("t.text", "häßlich 日本 \U0001f600")
        writer.add_array("t.texts", ["", "a", "日本", "x" * 300])
        writer.add_array("t.ints", [1, -2, 3])
        writer.add_array("t.floats", [0.5, 0.25])
        writer.add_custom_alignment(64)

    path = tmp_path / "m.gguf"
    write_gguf(path, metadata=every_type)
    ours, theirs = GGUFFile(path), gguf.GGUFReader(path)
    keys = {key for key in theirs.fields if not key.startswith("GGUF.")}
    assert set(ours.metadata) == keys
    for key in keys:
        value = ours.metadata[key]
        value = value.tolist() if isinstance(value, np.ndarray) else value
        assert value == theirs.fields[key].contents(), key
    assert list(ours.tensors) == [t.name for t in theirs.tensors]
    for tensor in theirs.tensors:
        info = ours.tensors[tensor.name]
        assert info.start == tensor.data_offset
        assert info.shape == tuple(reversed(tensor.shape.tolist()))
        np.testing.assert_array_equal(
            ours.blocks(tensor.name).reshape(-1), tensor.data.view(np.uint8).reshape(-1)
        )


def test_an_offset_that_does_not_follow_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    write_gguf(path, "llama")
    for victim in list(GGUFFile(path).tensors)[:3]:
        data = bytearray(path.read_bytes())
        at = gguf_entry(data, victim) + 4
        (offset,) = struct.unpack_from("<Q", data, at)
        struct.pack_into("<Q", data, at, offset + 32)
        damaged = tmp_path / "damaged.gguf"
        damaged.write_bytes(data)
        with pytest.raises(ModelFileError, match=rf"{victim}.*begin at byte {offset + 32}"):
            GGUFFile(damaged)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("tied", [True, False])
def test_tensors_come_out_under_their_hugging_face_names(
    tmp_path: Path, family: str, tied: bool
) -> None:
    path = tmp_path / "m.gguf"
    tensors = write_gguf(path, family, tied=tied)
    source = open_source(path)
    assert sorted(source.names()) == sorted(tensors)
    for name, value in tensors.items():
        assert source.shape(name) == value.shape
        np.testing.assert_array_equal(source.read(name), value, err_msg=name)
        out = np.empty_like(value)
        assert source.read(name, out) is out
        np.testing.assert_array_equal(out, value, err_msg=name)


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q8_0", "Q4_0", "Q4_1"])
@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_quantised_rows_are_in_hugging_face_order(tmp_path: Path, family: str, kind: str) -> None:
    path = tmp_path / "m.gguf"
    tensors = write_gguf(path, family, kind=kind)
    source = GGUFSource(path)
    dtype = gguf.GGMLQuantizationType[kind]
    for name, value in tensors.items():
        if value.ndim == 1:
            continue
        blocks = gguf.quants.quantize(value, dtype)  # blocks run along a row: order of rows is free
        raw = source.raw(name)
        assert (raw.kind, raw.shape) == (kind, value.shape)
        np.testing.assert_array_equal(raw.blocks, blocks.view(np.uint8), err_msg=name)
        expected = gguf.quants.dequantize(blocks, dtype)
        np.testing.assert_array_equal(source.read(name), expected, err_msg=name)


@pytest.mark.parametrize("family", FAMILIES)
def test_config_comes_from_metadata_and_tensors(tmp_path: Path, family: str) -> None:
    path = tmp_path / "m.gguf"
    write_gguf(path, family, tied=False)
    config = open_source(path).config()
    assert (config.family, config.vocab_size, config.hidden_size) == (family, 100, 64)
    assert (config.num_layers, config.num_heads, config.num_kv_heads, config.head_dim) == (
        2,
        4,
        2,
        16,
    )
    assert (config.ffn_size, config.max_context, config.rms_eps) == (96, 512, 1e-5)
    assert config.rope == RopeConfig(theta=5e5)
    assert not config.tie_embeddings
    assert (config.qkv_bias, config.out_bias) == (family == "qwen2", False)
    assert config.qk_norm == family.startswith("qwen3")
    assert (config.eos_ids, config.bos_id) == ((7,), 1)
    moe = (config.num_experts, config.experts_per_token, config.moe_ffn_size, config.dense_layers)
    assert moe == ((3, 2, 32, (1,)) if family == "qwen3_moe" else (0, 0, 0, ()))


def test_end_ids_include_end_of_turn(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    write_gguf(path, metadata=lambda w, _: (w.add_eot_token_id(9), w.add_eom_token_id(7)))
    assert open_source(path).config().eos_ids == (7, 9)


def test_rope_scaling_linear_and_yarn(tmp_path: Path) -> None:
    def linear(writer: gguf.GGUFWriter, arch: str) -> None:
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(2.5)

    def yarn(writer: gguf.GGUFWriter, arch: str) -> None:
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(4.0)
        writer.add_rope_scaling_orig_ctx_len(128)

    write_gguf(tmp_path / "l.gguf", metadata=linear)
    assert open_source(tmp_path / "l.gguf").config().rope == RopeConfig(
        theta=5e5, kind="linear", factor=2.5
    )
    write_gguf(tmp_path / "y.gguf", "qwen3", metadata=yarn)
    assert open_source(tmp_path / "y.gguf").config().rope == RopeConfig(
        theta=5e5, kind="yarn", factor=4.0, original_max_position=128
    )


def test_llama3_scaling_is_recovered_from_the_baked_divisors(tmp_path: Path) -> None:
    rope = RopeConfig(theta=5e5, kind="llama3", factor=32.0)
    divisors = llama3_divisors(rope, HEAD)
    # Independently: modeling_rope_utils._compute_llama3_parameters, per frequency.
    for i, divisor in enumerate(divisors):
        frequency = 5e5 ** (-2 * i / HEAD)
        wavelength = 2 * math.pi / frequency
        smooth = (8192 / wavelength - 1) / 3
        scaled = (1 - smooth) * frequency / 32 + smooth * frequency
        if wavelength > 8192:
            scaled = frequency / 32
        if wavelength < 2048:
            scaled = frequency
        assert frequency / divisor == pytest.approx(scaled, rel=1e-6)
    assert {1.0, 32.0} < set(divisors.tolist())
    path = tmp_path / "m.gguf"
    write_gguf(path, extra={"rope_freqs.weight": divisors})
    assert open_source(path).config().rope == rope
    write_gguf(path, extra={"rope_freqs.weight": divisors * np.float32(1.5)})
    one_line(path, lambda: open_source(path).config(), "rope_freqs.weight")


@pytest.mark.parametrize(
    "metadata,fragment",
    [
        (lambda w, a: w.add_rope_scaling_type(gguf.RopeScalingType.LONGROPE), "longrope"),
        (lambda w, a: w.add_sliding_window(128), "sliding_window=128"),
        (lambda w, a: w.add_rope_dimension_count(8), "rope.dimension_count=8"),
        (
            lambda w, a: w.add_rope_scaling_type(gguf.RopeScalingType.YARN),
            "original_context_length",
        ),
    ],
)
def test_unsupported_metadata_is_refused_by_name(tmp_path: Path, metadata, fragment: str) -> None:
    path = tmp_path / "m.gguf"
    write_gguf(path, metadata=metadata)
    one_line(path, lambda: open_source(path).config(), fragment)


def test_bundled_model_config() -> None:
    config = open_source(bundled_model_path()).config()
    name = config.name
    assert "smollm2" in name.lower()
    got = dataclasses.asdict(config)
    wanted = {
        "family": "llama",
        "vocab_size": 49_152,
        "hidden_size": 576,
        "num_layers": 30,
        "num_heads": 9,
        "num_kv_heads": 3,
        "head_dim": 64,
        "ffn_size": 1_536,
        "max_context": 8_192,
        "rms_eps": 1e-5,
        "tie_embeddings": True,
        "qkv_bias": False,
        "out_bias": False,
        "mlp_bias": False,
        "qk_norm": False,
        "num_experts": 0,
        "eos_ids": (2,),
        "bos_id": 1,
        "pad_id": 2,
    }
    assert {key: got[key] for key in wanted} == wanted
    assert config.rope == RopeConfig(theta=100_000.0)


def test_bundled_model_tensors() -> None:
    source = GGUFSource(bundled_model_path())
    kinds = [source.raw(name).kind for name in source.names() if source.raw(name).blocks.ndim]
    assert sorted(set(kinds)) == ["F32", "Q4_1", "Q8_0"]
    assert (kinds.count("Q4_1"), kinds.count("F32"), kinds.count("Q8_0")) == (210, 61, 1)
    name = "model.layers.3.self_attn.k_proj.weight"
    stored = gguf.quants.dequantize(
        source.file.blocks("blk.3.attn_k.weight"), gguf.GGMLQuantizationType.Q4_1
    )
    read = source.read(name)
    # Head 0 row 0 and its rotation partner, row 32, are neighbours in the file.
    np.testing.assert_array_equal(read[0], stored[0])
    np.testing.assert_array_equal(read[32], stored[1])
    np.testing.assert_array_equal(read[64 + 5], stored[64 + 10])
