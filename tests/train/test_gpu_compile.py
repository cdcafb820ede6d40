"""Planning for GPUs that are not there: sizes, and what is said without NVIDIA's packages."""

from __future__ import annotations

import dataclasses
import importlib.util

import pytest

from jetspec_jax.errors import ConfigError
from jetspec_jax.models.geometries import geometry
from pallas_kernels.gpu_target import TARGETS, config_text
from train import gpu_compile
from train.config import load_config
from train.head_setup import draft_config

CONFIG = "configs/train/qwen3_8b.toml"


def test_geometry_of_qwen3_8b() -> None:
    model = geometry("qwen3-8b")
    assert (model.num_layers, model.q_width, model.kv_width) == (36, 4096, 1024)
    assert model.qk_norm and not model.tie_embeddings
    with pytest.raises(ConfigError, match="geometry 'qwen4' is not known"):
        geometry("qwen4")


def test_operations_of_a_step() -> None:
    """The target's share is two operations a weight and token, within its attention's part; work
    grows with what it is proportional to."""
    cfg, model = load_config(CONFIG), geometry("qwen3-8b")
    head = draft_config(cfg, model, None)
    flops = gpu_compile.step_flops(cfg, head, model)
    tokens = cfg.data.sequences * cfg.data.max_tokens
    body = 6.946e9  # Qwen3-8B without embedding and LM head
    assert 1.0 < flops["target"] / (2 * body * tokens) < 1.2
    twice = dataclasses.replace(cfg, data=dataclasses.replace(cfg.data, sequences=32))
    more = gpu_compile.step_flops(twice, head, model)
    assert all(more[k] == pytest.approx(2 * flops[k]) for k in flops)
    kept = dataclasses.replace(cfg, optim=dataclasses.replace(cfg.optim, remat=False))
    assert gpu_compile.step_flops(kept, head, model)["head"] < flops["head"]


def test_target_text_names_the_device() -> None:
    text = config_text(TARGETS["h100"])
    assert "core_count: 132" in text and "ACCELERATED_FEATURES" in text
    assert text.count("{") == text.count("}")


@pytest.mark.skipif(
    importlib.util.find_spec("jax_plugins") is not None, reason="a JAX plugin is installed"
)
def test_missing_packages_and_bad_shares_are_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--config", CONFIG, "--geometry", "qwen3-8b"]
    assert gpu_compile.main(words) == 1
    err = capsys.readouterr().err
    assert "requirements/gpu-compile.txt" in err and err.count("\n") == 1
    assert gpu_compile.main([*words, "--devices", "7"]) == 2
    assert "give a multiple" in capsys.readouterr().err
