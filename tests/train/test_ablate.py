"""Ablations: equal batches, kept results, a table that says what it compares."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest

from jetspec_jax.errors import ConfigError
from train import ablate


def test_variants() -> None:
    got = ablate.parse_variants(["base:", "ce:loss.kl=0 loss.ce=1.0"])
    assert got == {"base": [], "ce": ["loss.kl=0", "loss.ce=1.0"]}
    for bad in (["a:", "a:x=1"], [":x=1"], ["a:words"]):
        with pytest.raises(ConfigError, match="--variant"):
            ablate.parse_variants(bad)


def test_two_variants_and_a_third_later(
    overrides: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    keep = [o for o in overrides if not o.startswith(("run.", "optim.steps"))]
    words = ["--steps", "6", "--out", str(tmp_path / "ab"), "--limit", "4", "--anchors", "4"]
    words += ["--builders", "exact", *keep]
    two = ["--variant", "base:", "--variant", "none:draft.path_head=none"]
    assert ablate.main([*two, *words]) == 0
    first = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert set(first) == {"base", "none"} and set(first["base"]) == {"exact"}
    stored = json.loads((tmp_path / "ab" / "ablation.json").read_text())["results"]
    assert stored["none"]["parameters"] < stored["base"]["parameters"]
    assert stored["base"]["steps"] == 6
    # what is there is not trained again
    before = (tmp_path / "ab" / "base" / "log.jsonl").stat().st_mtime_ns
    assert ablate.main([*two, "--variant", "ce:loss.kl=0.0 loss.ce=1.0", *words]) == 0
    again = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert again["base"] == first["base"] and "ce" in again
    assert (tmp_path / "ab" / "base" / "log.jsonl").stat().st_mtime_ns == before
    text = (tmp_path / "ab" / "ablation.md").read_text()
    assert text.count("\n") == 2 + 3 and "| none | exact |" in text
    assert (tmp_path / "ab" / "ablation.svg").stat().st_size > 1000
    words[1] = "7"
    assert ablate.main([*two, *words]) == 2
    assert "other settings" in capsys.readouterr().err


def test_a_variant_that_was_stopped_is_not_a_result(
    overrides: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    keep = [o for o in overrides if not o.startswith(("run.", "optim.steps"))]
    words = ["--steps", "6", "--limit", "4", "--anchors", "4", "--builders", "exact", *keep]
    two = ["--variant", "base:", "--variant", "none:draft.path_head=none"]
    assert ablate.main([*two, *words, "--out", str(tmp_path / "straight")]) == 0
    straight = json.loads(capsys.readouterr().out.splitlines()[-1])

    step, calls = ablate.Trainer.to_batch, []

    def interrupted(self: Any, arrays: Any) -> Any:
        calls.append(1)
        if len(calls) == 3:
            signal.raise_signal(signal.SIGTERM)
        return step(self, arrays)

    monkeypatch.setattr(ablate.Trainer, "to_batch", interrupted)
    out = ["--out", str(tmp_path / "cut")]
    assert ablate.main([*two, *words, *out]) == 1
    assert "SIGTERM at step" in capsys.readouterr().err
    assert not (tmp_path / "cut" / "ablation.json").exists()
    assert not (tmp_path / "cut" / "none").exists()
    assert ablate.main([*two, *words, *out]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1]) == straight
