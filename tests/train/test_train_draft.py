"""Whole runs on the tiny target: learning, resumption bit for bit, kills, signals, limits, export,
refusals (case 18)."""

from __future__ import annotations

import json
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from jetspec_jax.drafter import load_draft
from jetspec_jax.errors import ConfigError, InputError, ModelFileError
from jetspec_jax.models.spec import flatten
from tests.train.conftest import CONFIG, TAPS, Tiny
from train import checkpoint, export
from train.config import load_config
from train.head_setup import _move_vocabulary, parent_features_from_embedding
from train.train_draft import Trainer, main


def make(overrides: list[str], *more: str) -> Trainer:
    return Trainer(load_config(None, [*overrides, *more]), "test", say=lambda text: None)


def last_line(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    return json.loads(capsys.readouterr().out.strip().splitlines()[-1])


def log_of(folder: Path) -> list[dict[str, Any]]:
    drop = {"slots_per_s"}  # wall time
    lines = (folder / "log.jsonl").read_text().splitlines()
    return [{k: v for k, v in json.loads(ln).items() if k not in drop} for ln in lines]


def leaves(trainer: Trainer) -> list[np.ndarray]:
    return [np.asarray(x) for x in jax.tree.leaves(trainer.state)]


@pytest.fixture(scope="module")
def straight(
    tiny: Tiny, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Trainer, dict[str, Any], list[str]]:
    """20 steps in one go; the other tests compare with it."""
    out = tmp_path_factory.mktemp("straight") / "run"
    overrides = [
        f"data.path={str(tiny.data)!r}",
        f"data.target={str(tiny.path)!r}",
        "data.sequences=2",
        "data.anchors=6",
        "data.bucket=32",
        "data.held_out=0.2",
        "draft.layers=1",
        "draft.block_size=4",
        "draft.vocab=48",
        "draft.path_rank=8",
        "draft.mask_token_id=3",
        "optim.steps=20",
        "optim.precision=float32",
        "optim.lr=3e-3",
        "optim.ema=0.9",
        "loss.chunk=6",
        "run.save_every=10",
        "run.eval_every=10",
    ]
    trainer = make(overrides, f"run.out={str(out)!r}")
    return trainer, trainer.run(), overrides


def test_it_learns_logs_and_evaluates(straight: tuple[Trainer, dict[str, Any], list[str]]) -> None:
    trainer, summary, _ = straight
    log = log_of(trainer.out)
    assert [line["step"] for line in log] == list(range(1, 21))
    assert np.mean([x["loss"] for x in log[-3:]]) < 0.9 * np.mean([x["loss"] for x in log[:3]])
    assert all(len(line["agreement"]) == 3 for line in log)
    held = [line["held_out"] for line in log if "held_out" in line]
    assert len(held) == 2
    for h in held:
        assert h["blocks"] > 0
        # a larger tree contains the smaller one; a chain of the head's depth lies within 16 nodes
        assert 1 <= h["tree_tau"]["4"] <= h["tree_tau"]["8"] <= h["tree_tau"]["16"] <= 4
    assert summary["stopped"] == "steps" and summary["best"]["tree_tau"]["16"] == max(
        h["tree_tau"]["16"] for h in held
    )
    assert [p.name for p in checkpoint.complete(trainer.out)] == ["step-0000010", "step-0000020"]


def test_exported_head_is_the_evaluated_one(
    straight: tuple[Trainer, dict[str, Any], list[str]], tmp_path: Path
) -> None:
    trainer, _, _ = straight
    head = load_draft(trainer.out / "last", CONFIG)
    assert head.config == trainer.head and head.config.target_layer_ids == TAPS
    for name, value in flatten(trainer.shipped_params()).items():
        np.testing.assert_allclose(
            flatten(head.params)[name], value, rtol=8e-3, atol=1e-6, err_msg=name
        )
    assert (
        head.id_map is not None and len(head.id_map) == 48 and {1, 2} <= set(head.id_map.tolist())
    )
    record = json.loads((trainer.out / "last" / "provenance.json").read_text())
    assert {
        "command",
        "config",
        "data",
        "metrics",
        "git",
        "versions",
        "weights_sha256",
        "dtype",
    } <= set(record)
    assert record["data"]["sha256"] == trainer.data.digest


def test_export_command_copies_checks_and_refuses(
    straight: tuple[Trainer, dict[str, Any], list[str]],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    trainer, _, _ = straight
    out = tmp_path / "head"
    assert export.main(["--run", str(trainer.out), "--out", str(out)]) == 0
    assert last_line(capsys)["bytes"] == (out / "model.safetensors").stat().st_size
    load_draft(out, CONFIG)
    card = (out / "README.md").read_text()
    best = json.loads((out / "provenance.json").read_text())["metrics"]["held_out"]
    assert f"| tree tau | {' | '.join(str(v) for v in best['tree_tau'].values())} |" in card
    assert str(trainer.data.answer_tokens) in card and "markov, rank 8" in card
    assert export.main(["--run", str(trainer.out), "--out", str(out), "--max-bytes", "1000"]) == 1
    assert "exceed 1000" in capsys.readouterr().err
    assert export.main(["--run", str(tmp_path), "--out", str(out)]) == 1
    assert "no exported head" in capsys.readouterr().err
    broken = tmp_path / "broken"
    shutil.copytree(trainer.out / "best", broken / "best")
    data = bytearray((broken / "best" / "model.safetensors").read_bytes())
    data[-1] ^= 1
    (broken / "best" / "model.safetensors").write_bytes(bytes(data))
    assert export.main(["--run", str(broken), "--out", str(out)]) == 1
    assert "not those of provenance.json" in capsys.readouterr().err


def test_resumption_is_bit_equal(
    straight: tuple[Trainer, dict[str, Any], list[str]], tmp_path: Path
) -> None:
    trainer, _, overrides = straight
    place = f"run.out={str(tmp_path / 'run')!r}"
    first = make(overrides, place, "run.max_seconds=1e-9", "run.save_every=1000")
    first.step_fn = trainer.step_fn  # same program: compile once
    first.evaluator = trainer.evaluator
    assert first.run()["stopped"] == "max_seconds"  # after one step, with a checkpoint
    # a kill during a later save leaves a half-written hidden folder, and log lines past the
    # checkpoint
    shutil.copytree(tmp_path / "run" / "step-0000001", tmp_path / "run" / ".tmp-step-0000005")
    (tmp_path / "run" / ".tmp-step-0000005" / "state.safetensors").write_bytes(b"half")
    with (tmp_path / "run" / "log.jsonl").open("a") as log:
        log.write(json.dumps({"step": 2, "loss": -1.0}) + "\n")
    second = make(overrides, place)
    second.step_fn, second.evaluator = trainer.step_fn, trainer.evaluator
    assert second.run()["step"] == 20
    for a, b in zip(leaves(trainer), leaves(second), strict=True):
        np.testing.assert_array_equal(a, b)
    assert [x["loss"] for x in log_of(tmp_path / "run")] == [x["loss"] for x in log_of(trainer.out)]


def test_resumption_with_another_config_or_data_is_refused(
    straight: tuple[Trainer, dict[str, Any], list[str]], tiny: Tiny
) -> None:
    trainer, _, overrides = straight
    place = f"run.out={str(trainer.out)!r}"
    with pytest.raises(ConfigError, match=r"optim\.lr.*start anew"):
        make(overrides, place, "optim.lr=1e-3").resume()
    with pytest.raises(ConfigError, match="data"):
        make(overrides, place, "data.max_tokens=20").resume()
    done = make(overrides, place, "run.eval_every=7")  # the run section is free
    done.resume()
    assert int(done.state.step) == 20


def test_damaged_checkpoint_is_named(
    straight: tuple[Trainer, dict[str, Any], list[str]], tmp_path: Path
) -> None:
    trainer, _, _ = straight
    folder = tmp_path / "step-0000020"
    shutil.copytree(trainer.out / "step-0000020", folder)
    data = (folder / "state.safetensors").read_bytes()
    (folder / "state.safetensors").write_bytes(data[:-10])
    with pytest.raises(ModelFileError, match="delete this checkpoint"):
        checkpoint.load(folder, trainer.state)
    (folder / "meta.json").write_text("{")
    with pytest.raises(ModelFileError, match=r"meta\.json: cannot be read"):
        checkpoint.read_meta(folder)


def test_a_signal_stops_with_a_checkpoint(
    straight: tuple[Trainer, dict[str, Any], list[str]], tmp_path: Path
) -> None:
    trainer, _, overrides = straight
    run = make(overrides, f"run.out={str(tmp_path / 'run')!r}")
    calls = 0

    def step_then_signal(*args: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 3:
            os.kill(os.getpid(), signal.SIGTERM)
        return trainer.step_fn(*args)

    run.step_fn, run.evaluator = step_then_signal, trainer.evaluator
    before = signal.getsignal(signal.SIGTERM)
    summary = run.run()
    assert (summary["stopped"], summary["step"]) == ("SIGTERM", 3)
    assert [p.name for p in checkpoint.complete(tmp_path / "run")] == ["step-0000003"]
    assert signal.getsignal(signal.SIGTERM) is before


def test_nan_stops_and_keeps_the_last_checkpoint(
    straight: tuple[Trainer, dict[str, Any], list[str]], tmp_path: Path
) -> None:
    trainer, _, overrides = straight
    run = make(overrides, f"run.out={str(tmp_path / 'run')!r}", "run.save_every=2")

    def poisoned(state: Any, *args: Any) -> Any:
        state, metrics = trainer.step_fn(state, *args)
        return state, metrics | ({"loss": np.float32("nan")} if int(state.step) == 3 else {})

    run.step_fn, run.evaluator = poisoned, trainer.evaluator
    with pytest.raises(InputError, match="step 3: loss nan"):
        run.run()
    assert [p.name for p in checkpoint.complete(tmp_path / "run")] == ["step-0000002"]


def test_features_on_the_fly_equal_stored_features(
    straight: tuple[Trainer, dict[str, Any], list[str]], tiny: Tiny
) -> None:
    trainer, _, overrides = straight
    bare = make([*overrides, f"data.path={str(tiny.bare)!r}"], "draft.target_layer_ids=[0, 2]")
    from train.data import train_batch

    stored = trainer.to_batch(train_batch(trainer.data, trainer.cfg.data, 0))
    made = bare.to_batch(train_batch(bare.data, bare.cfg.data, 0))
    np.testing.assert_array_equal(stored.tokens, made.tokens)
    live = np.arange(stored.tokens.shape[1])[None] < np.asarray(stored.stop).max(1)[:, None]
    for a, b in ((stored.taps, made.taps), (stored.final, made.final)):
        a, b = (np.asarray(x).astype(np.float32)[live] for x in (a, b))
        np.testing.assert_allclose(a, b, rtol=2e-2, atol=2e-2)


def test_starts_from_target_layers_or_another_head(
    straight: tuple[Trainer, dict[str, Any], list[str]], tiny: Tiny, tmp_path: Path
) -> None:
    trainer, _, overrides = straight
    run = make(overrides, "draft.init_layers=[2]")
    layer, source = run.state.params["layers"][0], tiny.params["layers"][2]
    np.testing.assert_array_equal(layer["gate_up"], source["gate_up"])
    np.testing.assert_array_equal(layer["q"], source["qkv"][: CONFIG.q_width])
    np.testing.assert_array_equal(layer["kv"], source["qkv"][CONFIG.q_width :])
    warm = make(overrides, f"run.warm_start={str(trainer.out / 'last')!r}")
    saved = load_draft(trainer.out / "last").params
    np.testing.assert_array_equal(warm.state.params["fc"], saved["fc"])
    assert int(warm.state.step) == 0
    with pytest.raises(ConfigError, match="differs in causal"):
        make(overrides, f"run.warm_start={str(trainer.out / 'last')!r}", "draft.causal=false")


def test_a_warm_start_follows_tokens_to_another_vocabulary() -> None:
    """Other data chooses other tokens: the rows of the path head go with their token."""
    rows = np.arange(8, dtype=np.float32).reshape(4, 2) + 1
    params: Any = {"fc": np.ones(3), "path": {"w1": np.ones((9, 2)), "w2": rows}}
    before, now = np.asarray([1, 4, 6, 8]), np.asarray([0, 4, 7, 8])
    moved = _move_vocabulary(params, before, now)
    np.testing.assert_array_equal(moved["path"]["w2"], [[0, 0], rows[1], [0, 0], rows[3]])
    np.testing.assert_array_equal(moved["fc"], params["fc"])
    none = _move_vocabulary(params, before, np.asarray([0, 2, 3, 5]))
    assert not np.asarray(none["path"]["w2"]).any()
    assert _move_vocabulary({"fc": 1}, before, now) == {"fc": 1}  # no path head


def test_parent_features_follow_the_embedding() -> None:
    rng = np.random.default_rng(0)
    embed = rng.standard_normal((50, 6)).astype(np.float32) * np.asarray(
        [9, 5, 3, 1, 0.1, 0.1], np.float32
    )
    embed[7] = embed[3]
    features = parent_features_from_embedding(embed, 4)
    assert features.shape == (50, 4) and np.isfinite(features).all()
    np.testing.assert_allclose(features[7], features[3], atol=1e-5)
    np.testing.assert_allclose(np.sqrt((features**2).mean()), 0.1, rtol=1e-3)
    assert parent_features_from_embedding(embed, 8).shape == (50, 8)


@pytest.mark.parametrize(
    ("override", "code", "message"),
    [
        ("draft.mask_token_id=-1", 2, "mask_token_id is not set"),
        ("draft.mask_token_id=2", 1, "pad or EOS"),
        ("draft.vocab=100", 2, "exceeds the target's 64"),
        ("draft.target_layer_ids=[1]", 2, "the data holds layers [0, 2]"),
        ("draft.init_layers=[9]", 2, "must name 1 of 4"),
        ("data.path='/none'", 1, "no such data folder"),
        ("optim.lrr=1", 2, "did you mean 'optim.lr'"),
        ("run.out='/dev/null/x'", 2, "run.out /dev/null/x: cannot be made"),
    ],
)
def test_bad_input_is_one_line(
    overrides: list[str], override: str, code: int, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*overrides, override]) == code
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith("error: ") and message in error


def test_plan_and_run_print_one_json_line(
    overrides: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*overrides[:2], "--plan", *overrides[2:]]) == 0  # overrides may stand anywhere
    plan = last_line(capsys)
    assert plan["slots_per_step"] == 2 * 6 * 3 and plan["head"]["target_layer_ids"] == list(TAPS)
    assert not Path(load_config(None, overrides).run.out).exists()
