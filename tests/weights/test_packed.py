"""Weights in the format of the file: the values of the float32 path, in the memory of the file."""

from __future__ import annotations

import mmap
import subprocess
import sys
import tracemalloc
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jetspec_jax.models.decoder import declare
from jetspec_jax.models.spec import WeightSpec, flatten
from jetspec_jax.numerics import take_rows
from jetspec_jax.weights import RawTensor, bundled_model_path, load_params, open_source
from jetspec_jax.weights.dequant import dequantize
from jetspec_jax.weights.packed import Packer, pack_parts, refusal
from pallas_kernels import row_invariant_matmul as rim
from pallas_kernels.row_invariant_matmul import specs
from tests.weights.files import write_gguf, write_hf
from tests.weights.test_gguf import random_blocks

ROOT = Path(__file__).parents[2]
MATRIX = WeightSpec((0, 0), (None, None), ("w",), linear=True)
STATUS = Path("/proc/self/status")


def values(weight: Any) -> np.ndarray:
    """Float32 values of a weight, packed or not."""
    array = rim.unpack(weight) if isinstance(weight, rim.PackedWeight) else weight
    return np.asarray(array).astype(np.float32)


def raw(blocks: np.ndarray, kind: str) -> RawTensor:
    return RawTensor(kind, dequantize(blocks[:1], kind).shape, blocks)


def loaded(path: Path, stored: bool) -> tuple[dict[str, Any], Packer]:
    source, packer = open_source(path), Packer(stored)
    return flatten(load_params(source, declare(source.config()), pack=packer)), packer


def equal_bits(a: np.ndarray, b: np.ndarray, kind: str, name: str = "") -> None:
    """Equal bit for bit; Q4_0 (q d - 8 d in the kernel) but for the sign of a zero, which no sum
    that starts at +0 can show.
    """
    if kind == "Q4_0":
        a, b = a + np.float32(0), b + np.float32(0)
    np.testing.assert_array_equal(a.view(np.uint32), b.view(np.uint32), err_msg=name)


def same(stored: dict[str, Any], plain: dict[str, Any], kind: str = "") -> None:
    assert list(stored) == list(plain)
    for name, weight in stored.items():
        equal_bits(values(weight), values(plain[name]), kind, name)


@pytest.mark.parametrize("kind", [*specs.GGUF_KINDS, "BF16"])
@pytest.mark.parametrize("heights", [(32,), (7,), (40, 24, 33), (1_030, 3)])
def test_every_kind_keeps_its_values_however_the_rows_are_cut(
    kind: str, heights: tuple[int, ...]
) -> None:
    parts = [raw(random_blocks(kind, rows, rows), kind) for rows in heights]
    if kind == "Q4_0":
        for part in parts:  # scales that have an exact offset
            part.blocks.reshape(len(part.blocks), -1, 18)[..., 1] &= 0x3F
    packed = pack_parts(parts, stored=True)
    expanded = pack_parts(parts, stored=False)
    expected = np.concatenate([dequantize(part.blocks, kind) for part in parts])
    assert packed.shape == expanded.shape == expected.shape
    assert packed.layout == expanded.layout == "panels"
    assert (packed.format, expanded.format) == (
        "bf16" if kind == "BF16" else specs.GGUF_KINDS[kind].format,
        "f32",
    )
    for weight in (packed, expanded):
        equal_bits(values(weight), expected, kind)


def test_parts_of_different_kinds_are_one_float32_weight() -> None:
    parts = [raw(random_blocks(k, 37, 1), k) for k in ("Q4_1", "Q8_0", "F16", "BF16", "F32")]
    expected = np.concatenate([dequantize(part.blocks, part.kind) for part in parts])
    packer = Packer(stored=True)
    weight = packer("w", MATRIX, parts)
    assert weight is not None and weight.format == "f32"
    np.testing.assert_array_equal(values(weight), expected)
    assert packer.expanded_line() == (
        "weights expanded to float32: 1 (fused from parts stored as BF16 and F16 and F32 and Q4_1 "
        "and Q8_0)"
    )


def test_a_scale_that_the_kernel_cannot_hold_expands_that_weight() -> None:
    blocks = random_blocks("Q4_0", 300, 0)
    scales = blocks.reshape(300, -1, 18)
    scales[..., 1] &= 0x3F
    packer = Packer(stored=True)
    kept = packer("a", MATRIX, [raw(blocks.copy(), "Q4_0")])
    scales[299, 0, :2] = np.frombuffer(np.float16(9_000).tobytes(), np.uint8)  # in the last slice
    weight = packer("b", MATRIX, [raw(blocks, "Q4_0")])
    assert kept is not None and kept.format == "q4_1"
    assert weight is not None and weight.format == "f32"
    np.testing.assert_array_equal(values(weight), dequantize(blocks, "Q4_0"))
    line = packer.expanded_line()
    assert line is not None and line.startswith("weights expanded to float32: 1 (Q4_0 with a scale")


def test_what_has_no_kernel_is_named() -> None:
    assert refusal({"F16"}) == "stored as F16, which has no kernel"
    assert refusal({"Q4_1", "Q8_0"}) == "fused from parts stored as Q4_1 and Q8_0"
    for kind in (*specs.GGUF_KINDS, "BF16", "F32"):
        assert refusal({kind}) is None
    packer = Packer(stored=True)
    assert packer.expanded_line() is None
    packer("w", MATRIX, [raw(random_blocks("F32", 3, 0), "F32")])
    assert packer.expanded_line() is None  # float32 in the file is no expansion
    packer("embed", MATRIX, [raw(random_blocks("F16", 3, 0), "F16")])
    assert packer.expanded == {"stored as F16, which has no kernel": 1}


def test_rows_of_a_bfloat16_table_are_read_as_float32() -> None:
    packed = Packer(stored=True)("embed", MATRIX, [raw(random_blocks("BF16", 40, 0), "BF16")])
    assert isinstance(packed, rim.PackedWeight) and packed.format == "bf16"
    rows = take_rows(packed, jnp.asarray([3, 39]))
    assert rows.dtype == jnp.float32
    np.testing.assert_array_equal(
        rows, np.asarray(rim.unpack(packed)[np.array([3, 39])], np.float32)
    )


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q8_0"])
@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_gguf_of_one_kind(tmp_path: Path, kind: str, family: str) -> None:
    write_gguf(tmp_path / "m.gguf", family, kind=kind)
    stored, packer = loaded(tmp_path / "m.gguf", True)
    plain, _ = loaded(tmp_path / "m.gguf", False)
    same(stored, plain, kind)
    for name in ("embed", "layers.1.qkv", "layers.0.gate_up", "layers.0.down"):
        assert stored[name].format == specs.GGUF_KINDS[kind].format
        assert plain[name].format == "f32"
        assert plain[name].nbytes > 3 * stored[name].nbytes
    assert packer.expanded_line() is None
    assert isinstance(stored["layers.0.attn_norm"], jax.Array)


def test_gguf_of_mixed_kinds_expands_only_what_cannot_be_fused(tmp_path: Path) -> None:
    write_gguf(
        tmp_path / "m.gguf", kind="Q4_1", kinds={"attn_v": "Q8_0", "ffn": "Q8_0", "token": "F16"}
    )
    stored, packer = loaded(tmp_path / "m.gguf", True)
    plain, _ = loaded(tmp_path / "m.gguf", False)
    same(stored, plain)
    formats = {name: w.format for name, w in stored.items() if isinstance(w, rim.PackedWeight)}
    assert formats["layers.0.qkv"] == formats["embed"] == "f32"
    assert formats["layers.0.o"] == "q4_1"
    assert formats["layers.0.gate_up"] == formats["layers.1.down"] == "q8_0"
    assert packer.expanded == {
        "fused from parts stored as Q4_1 and Q8_0": 2,
        "stored as F16, which has no kernel": 1,
    }


def test_experts_are_read_dense_and_named(tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf", "qwen3_moe", kind="Q8_0")
    stored, packer = loaded(tmp_path / "m.gguf", True)
    plain, _ = loaded(tmp_path / "m.gguf", False)
    same(stored, plain)
    assert isinstance(stored["layers.0.experts_gate_up"], jax.Array)
    assert packer.expanded == {"experts, which have no packed kernel": 2}


@pytest.mark.parametrize("shards", [1, 2])
def test_bf16_directory_is_kept_in_bf16(tmp_path: Path, shards: int) -> None:
    tensors = write_hf(tmp_path, "qwen3", tied=False, shards=shards, dtype=ml_dtypes.bfloat16)
    stored, packer = loaded(tmp_path, True)
    plain, _ = loaded(tmp_path, False)
    same(stored, plain)
    formats = {w.format for w in stored.values() if isinstance(w, rim.PackedWeight)}
    assert formats == {"bf16"} and packer.expanded_line() is None
    here = "model.layers.1.self_attn"
    fused = np.concatenate([tensors[f"{here}.{p}_proj.weight"] for p in "qkv"])
    np.testing.assert_array_equal(rim.unpack(stored["layers.1.qkv"]), fused)


def test_bundled_weights_keep_their_values() -> None:
    source = open_source(bundled_model_path())
    decl = declare(source.config())
    for name in ("embed", "layers.0.qkv", "layers.17.gate_up", "layers.29.down"):
        parts = [source.raw(str(tensor)) for tensor in decl[name].sources]
        packed, plain = (pack_parts(parts, stored=stored) for stored in (True, False))
        assert packed.nbytes == sum(part.blocks.nbytes for part in parts)
        some = np.linspace(0, packed.n - 1, 700).astype(np.int32)
        equal_bits(values(rim.gather(packed, some)), values(rim.gather(plain, some)), "", name)


@pytest.mark.parametrize("stored", [True, False])
def test_packing_needs_the_final_array_and_little_more(stored: bool) -> None:
    part = raw(np.tile(random_blocks("Q4_1", 64, 0), (500, 1)), "Q4_1")
    tracemalloc.start()
    try:
        final = pack_parts([part], stored=stored).nbytes
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    # tracemalloc does not see the arena of huge pages, where the final array lies on Linux
    seen = 0 if hasattr(mmap, "MADV_HUGEPAGE") else final
    assert final > 20e6 and seen <= peak < seen + 6e6


_MEASURED = """
import re, sys, jax
from pathlib import Path
from jetspec_jax.config import EngineConfig
from jetspec_jax.loading import bundled_head_path, load_head, load_target, resolve_kernels

def status(key):
    return int(re.search(key + r":\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1]) * 1024

engine = EngineConfig(weights=sys.argv[1])
resolve_kernels(engine)
before = status("VmRSS")
target = load_target(None, engine)
head = load_head(bundled_head_path(), target, engine)
arrays = target.nbytes + head.nbytes + head.lm_rows.nbytes
print(before, arrays, status("VmHWM"))
"""


@pytest.mark.slow
@pytest.mark.skipif(not STATUS.exists(), reason="needs /proc")
@pytest.mark.parametrize(("weights", "most"), [("stored", 160e6), ("float32", 640e6)])
def test_memory_while_the_bundled_model_is_loaded(weights: str, most: float) -> None:
    done = subprocess.run(
        [sys.executable, "-c", _MEASURED, weights],
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
        cwd=ROOT,
    )
    before, arrays, peak = map(int, done.stdout.split())
    assert 0.5 * most < arrays < most
    # the tokenizer is 40 MB; the file is 98 MB, a second copy of any part of it would show
    assert peak - before - arrays < 75e6, (before, arrays, peak)
