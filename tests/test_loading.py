"""Which kernels and weight formats an engine gets, and what is said where it cannot have them."""

import subprocess
import sys
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import pytest

from jetspec_jax import LLM, SamplingParams, SpecConfig
from jetspec_jax.config import EngineConfig
from jetspec_jax.errors import ConfigError, KernelError
from jetspec_jax.loading import (
    Target,
    format_line,
    load_target,
    make_head,
    weight_arithmetic,
    weight_formats,
    weight_transform,
)
from jetspec_jax.models.decoder import forward_full
from jetspec_jax.models.spec import flatten
from jetspec_jax.testing import byte_tokenizer
from pallas_kernels import native
from pallas_kernels import row_invariant_matmul as rim
from tests.weights.files import VOCAB, write_gguf, write_hf


def no_compiler(*_):
    raise native.KernelError("no C++ compiler on PATH; install g++")


def test_native_kernels_in_another_dtype_are_refused():
    with pytest.raises(ConfigError, match="run float32, not bfloat16"):
        weight_transform(EngineConfig(kernels="cpu", dtype="bfloat16"))
    assert weight_transform(EngineConfig(dtype="bfloat16")) == (None, "xla")


def test_kernels_that_cannot_be_built_are_one_line(monkeypatch):
    monkeypatch.setattr(rim, "resolve", no_compiler)
    with pytest.raises(KernelError, match="no C\\+\\+ compiler"):
        weight_transform(EngineConfig(kernels="cpu"))


@pytest.fixture(autouse=True)
def plain_tokenizer(monkeypatch):
    """The tiny checkpoints come without one."""
    for name in ("load_tokenizer", "tokenizer_from_gguf"):
        monkeypatch.setattr(f"jetspec_jax.loading.{name}", lambda _: byte_tokenizer())


def logits(target: Target) -> np.ndarray:
    tokens = np.arange(3, 15, dtype=np.int32)[None]
    return np.asarray(forward_full(target.params, target.config, jax.device_put(tokens)).logits)


def test_bad_values_of_weights_are_one_line():
    with pytest.raises(ConfigError, match="weights='store' is not known; did you mean 'stored'"):
        EngineConfig(weights="store")
    assert EngineConfig().weights == "stored"


def test_stored_and_float32_weights_of_a_gguf(tmp_path: Path):
    write_gguf(tmp_path / "m.gguf", kind="Q4_1", kinds={"token": "Q8_0", "attn_k": "Q8_0"})
    lines: list[str] = []
    engine = EngineConfig(arithmetic="float")
    stored = load_target(tmp_path / "m.gguf", engine, lines.append)
    plain = load_target(tmp_path / "m.gguf", EngineConfig(weights="float32"))
    assert stored.kernels == plain.kernels == "cpu"
    assert set(weight_formats(stored.params)) == {"q4_1", "q8_0", "float32"}
    assert set(weight_formats(plain.params)) == {"float32"}
    assert sum(weight_formats(stored.params).values()) == stored.nbytes
    assert lines[1] == f"weights: {format_line(stored.params)}"
    assert lines[2] == ("weights expanded to float32: 2 (fused from parts stored as Q4_1 and Q8_0)")
    np.testing.assert_array_equal(logits(stored), logits(plain))


def test_arithmetic_of_stored_weights(tmp_path: Path):
    write_gguf(tmp_path / "m.gguf", kind="Q4_1")
    whole = EngineConfig(arithmetic="integer")
    stored = load_target(tmp_path / "m.gguf", whole)
    assert weight_arithmetic(stored.params) == "integer"
    plain = load_target(tmp_path / "m.gguf", EngineConfig(arithmetic="float"))
    assert weight_arithmetic(plain.params) == "float" and plain.nbytes == stored.nbytes
    np.testing.assert_allclose(logits(stored), logits(plain), rtol=1e-4, atol=1e-4)
    auto = load_target(tmp_path / "m.gguf", EngineConfig())
    assert weight_arithmetic(auto.params) == ("integer" if rim.integer_pays() else "float")
    write_gguf(tmp_path / "f.gguf", kind="F32")
    with pytest.raises(ConfigError, match=r"f\.gguf has none"):
        load_target(tmp_path / "f.gguf", whole)
    for other, why in (
        (EngineConfig(arithmetic="integer", kernels="xla"), "kernels 'xla'"),
        (EngineConfig(arithmetic="integer", dtype="bfloat16"), "dtype bfloat16"),
    ):
        with pytest.raises(ConfigError, match=rf"do not run here \({why}\)"):
            load_target(tmp_path / "m.gguf", other)
    with pytest.raises(ConfigError, match="not weights='float32'"):
        EngineConfig(arithmetic="integer", weights="float32")


@pytest.mark.parametrize("tied", [True, False])
def test_stored_weights_of_a_bf16_directory(tmp_path: Path, tied: bool):
    write_hf(tmp_path, "qwen3", tied=tied, dtype=ml_dtypes.bfloat16)
    stored = load_target(tmp_path, EngineConfig())
    plain = load_target(tmp_path, EngineConfig(weights="float32"))
    assert flatten(stored.params)["layers.0.qkv"].format == "bf16"
    assert stored.nbytes < plain.nbytes
    np.testing.assert_array_equal(logits(stored), logits(plain))


@pytest.mark.parametrize("weights", ["stored", "float32"])
def test_xla_has_arrays_of_dtype_in_both_modes(tmp_path: Path, weights: str):
    write_gguf(tmp_path / "m.gguf", kind="Q8_0")
    for dtype in ("float32", "bfloat16"):
        engine = EngineConfig(kernels="xla", weights=weights, dtype=dtype)
        assert set(weight_formats(load_target(tmp_path / "m.gguf", engine).params)) == {dtype}


@pytest.mark.parametrize("weights", ["stored", "float32"])
def test_reduced_draft_vocabulary_keeps_the_format(tmp_path: Path, weights: str):
    write_gguf(tmp_path / "m.gguf", kind="Q8_0")
    target = load_target(tmp_path / "m.gguf", EngineConfig(weights=weights))
    ids = np.random.default_rng(0).permutation(VOCAB)[:45].astype(np.int32)
    head = make_head(tmp_path, None, {}, ids, target)  # type: ignore[arg-type]
    assert isinstance(head.lm_rows, rim.PackedWeight)
    assert head.lm_rows.format == target.params["embed"].format
    whole = np.asarray(rim.unpack(target.params["embed"]))
    np.testing.assert_array_equal(rim.unpack(head.lm_rows), whole[ids])


@pytest.mark.slow
def test_tokens_are_the_same_with_stored_and_float32_weights(monkeypatch):
    monkeypatch.undo()  # the bundled model has its tokenizer
    talk = [{"role": "user", "content": "Name three colours of the rainbow."}]
    answers = []
    for weights in ("stored", "float32"):
        llm = LLM(engine=EngineConfig(weights=weights, capacity=256, arithmetic="float"))
        for spec in (SpecConfig(mode="off"), SpecConfig(mode="tree", budget=8)):
            answers.append(llm.chat([talk], SamplingParams(max_tokens=32), spec=spec)[0].token_ids)
    assert len(answers[0]) > 8 and answers.count(answers[0]) == len(answers)


def test_importing_the_engine_imports_no_library_that_it_may_not_need():
    late = ("tokenizers", "transformers", "jinja2", "huggingface_hub", "optax", "matplotlib")
    code = f"import sys, jetspec_jax.engine; print(*[m for m in {late} if m in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True
    )
    assert done.stdout.split() == []
