"""--doctor: each wrong setting is found and named; a healthy head is left in peace."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy

from jetspec_jax.config import DraftConfig, RopeConfig
from jetspec_jax.drafter.checkpoint import config_json, read_draft_config
from jetspec_jax.errors import ModelFileError
from jetspec_jax.stats import SpecStats
from serve import doctor, generate
from serve.doctor import diagnose
from serve.doctor_checks import BAD, NEEDED, OK, WARN, Finding, check_config, check_files
from tests.serve.conftest import Run
from tests.serve.fake_llm import MODEL, FakeLLM

TRUE = DraftConfig(
    hidden_size=32,
    num_layers=1,
    num_heads=2,
    num_kv_heads=1,
    head_dim=16,
    ffn_size=64,
    target_hidden_size=32,
    num_target_layers=8,
    target_layer_ids=(1, 3, 5),
    vocab_size=258,
    mask_token_id=200,
    block_size=4,
    causal=True,
    rope=MODEL.rope,
)
KEYS = ("causal", "draft_shift", "target_layer_ids", "rope")


def write_head(folder: Path, cfg: DraftConfig, without: str = "") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config_json(cfg, MODEL)))
    tensors = {name: np.zeros(2, np.float32) for name in NEEDED if name != without}
    safetensors.numpy.save_file(tensors, folder / "model.safetensors")
    return folder


class HeadLLM(FakeLLM):
    """Accepts two tokens a round when the head's config is the one it was trained with, else
    none."""

    trained = TRUE
    level = 2

    def __init__(self, draft: Path, **kwargs: Any) -> None:
        super().__init__(None, draft, **kwargs)
        assert (draft / "model.safetensors").is_file()  # the weights travel with a varied config
        self.draft_config = read_draft_config(draft)

    def _result(self, prompt: list[int], sampling: Any, on: bool, trace: bool) -> Any:
        result = super()._result(prompt, sampling, on, trace)
        fits = all(getattr(self.draft_config, key) == getattr(self.trained, key) for key in KEYS)
        hist = [0, 0, 0, 0]
        hist[self.level if fits else 0] = 10
        stats = SpecStats(10, tuple(hist), (10, 10, 10), 40, 30)
        return dataclasses.replace(result, spec=stats)


def verdicts(folder: Path, llm: Callable[[Path], Any] = HeadLLM) -> dict[str, list[Finding]]:
    told: list[Finding] = []
    found = diagnose(llm, folder, {}, told.append)
    assert told == found
    return {verdict: [f for f in found if f.verdict == verdict] for verdict in (OK, WARN, BAD)}


def test_a_healthy_head(tmp_path: Path) -> None:
    got = verdicts(write_head(tmp_path / "head", TRUE))
    assert got[BAD] == [] and got[WARN] == []
    assert "tau 3.00" in next(f for f in got[OK] if f.check == "acceptance").detail


WRONG = [
    ({"causal": False}, "causal=True"),
    ({"draft_shift": True}, "draft_shift=False"),
    ({"target_layer_ids": (2, 4, 6)}, "target_layer_ids=[1, 3, 5]"),
    ({"target_layer_ids": (0, 2, 4)}, "target_layer_ids=[1, 3, 5]"),
    ({"rope": RopeConfig(theta=77.0)}, "rope theta 10000"),
]


@pytest.mark.parametrize(("change", "name"), WRONG)
def test_each_wrong_setting_is_named(tmp_path: Path, change: dict[str, Any], name: str) -> None:
    got = verdicts(write_head(tmp_path / "head", dataclasses.replace(TRUE, **change)))
    assert got[BAD][1].check.startswith(name)
    assert len(got[BAD]) == 2  # the dead acceptance and its one cause
    assert "config.json" in got[BAD][1].detail


def test_a_dead_head_without_a_single_cause(tmp_path: Path) -> None:
    class Dead(HeadLLM):
        level = 0

    got = verdicts(write_head(tmp_path / "head", TRUE), Dead)
    assert [f.check for f in got[BAD]] == ["acceptance", "weights"]


def test_a_head_that_does_not_load(tmp_path: Path) -> None:
    def refuse(folder: Path) -> Any:
        raise ModelFileError("a head of another target: hidden size 7 (target: 32)")

    got = verdicts(write_head(tmp_path / "head", TRUE, without="norm.weight"), refuse)
    assert [f.check for f in got[BAD]] == ["fuse and final norms", "loading"]
    assert "norm.weight missing" in got[BAD][0].detail


CONFIG_FAULTS = [
    ({"target_layer_ids": (1, 3, 9)}, "layer ids in range", BAD),
    ({"target_layer_ids": (1, 2, 5)}, "layer ids usual", WARN),
    ({"num_target_layers": 30}, "target depth", BAD),
    ({"target_hidden_size": 64}, "target width", BAD),
    ({"vocab_size": 300}, "vocabulary", BAD),
    ({"mask_token_id": 257}, "mask token", BAD),
    ({"mask_token_id": 256}, "mask token", BAD),
    ({"mask_token_id": 258}, "mask token", BAD),
    ({"rope": RopeConfig(theta=5.0)}, "rope", WARN),
]


@pytest.mark.parametrize(("change", "check", "verdict"), CONFIG_FAULTS)
def test_config_checks(change: dict[str, Any], check: str, verdict: str) -> None:
    assert all(f.verdict == OK for f in check_config(TRUE, MODEL))
    found = {f.check: f.verdict for f in check_config(dataclasses.replace(TRUE, **change), MODEL)}
    assert found[check] == verdict


@pytest.mark.parametrize(
    ("flags", "verdict"),
    [({}, WARN), ({"causal_head": True}, OK), ({"causal_head": True, "causal": False}, BAD)],
)
def test_causal_flag_names(tmp_path: Path, flags: dict[str, bool], verdict: str) -> None:
    folder = write_head(tmp_path, TRUE)
    config = json.loads((folder / "config.json").read_text())
    config["dflash_config"] = {
        k: v for k, v in config["dflash_config"].items() if not k.startswith("causal")
    } | flags
    (folder / "config.json").write_text(json.dumps(config))
    assert check_files(folder)[0].verdict == verdict


def test_command_line(
    fake: type[FakeLLM], run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "opener", lambda args, engine: HeadLLM)
    good = write_head(tmp_path / "good", TRUE)
    got = run(generate.main, "--doctor", "--draft", str(good))
    assert got.code == 0 and got.out.endswith("nothing wrong found\n")
    bad = write_head(tmp_path / "bad", dataclasses.replace(TRUE, causal=False))
    got = run(generate.main, "--doctor", "--draft", str(bad), "--json")
    assert got.code == 1 and got.json["healthy"] is False
    got = run(generate.main, "--doctor", "--draft", str(bad))
    assert "wrong: acceptance; causal=True" in got.out
    got = run(generate.main, "--doctor", "--model", str(tmp_path))
    assert got.code == 2 and "--draft DIR" in got.error
