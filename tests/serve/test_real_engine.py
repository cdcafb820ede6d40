"""The commands over the real engine, with tiny random models: the fake one must not hide a
mismatch."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from jetspec_jax import LLM, EngineConfig, SamplingParams, SpecConfig, testing
from serve import bench, demo, doctor, generate
from serve.measure import measure, summarise
from serve.suites import SuitePrompt
from tests.serve.conftest import Run
from tests.serve.tiny_files import write_head, write_target

OFF = SpecConfig(mode="off")
LAST = SamplingParams(max_tokens=7, ignore_eos=True)
TREE = SpecConfig(mode="tree", budget=6, drafter="hybrid")
FLAGS = (
    "--spec",
    "tree",
    "--budget",
    "6",
    "--drafter",
    "hybrid",
    "--ignore-eos",
    "--capacity",
    "192",
)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A target and a draft head on disk."""
    folder = tmp_path_factory.mktemp("models")
    return write_target(folder / "model"), write_head(folder / "head")


@pytest.fixture(scope="module")
def llm(files: tuple[Path, Path]) -> Any:
    """Loaded from files, as a user would."""
    return LLM(*files, spec=TREE, engine=EngineConfig(capacity=192, attention_chunk=64))


@pytest.fixture
def tiny(llm: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Every command gets the one compiled engine."""
    monkeypatch.setattr("jetspec_jax.LLM", lambda *args, **kwargs: llm, raising=False)
    return llm


def test_json_with_compare(tiny: Any, run: Run) -> None:
    got = run(generate.main, "Hello there", *FLAGS, "--max-tokens", "40", "--compare", "--json")
    assert got.code == 0, got.err
    (result,) = got.json["results"]
    assert result["compare"]["identical"] is True
    assert len(result["token_ids"]) == 40 and result["finish_reason"] == "length"
    assert result["spec"]["delivered"] == 40 and result["spec"]["tau"] >= 1
    assert got.json["draft"] == "bundled" and got.json["spec"]["budget"] == 6
    assert result["timings"]["decode_s"] > 0 and result["timings"]["tok_s"] > 0


def test_the_stream_is_the_answer(tiny: Any, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    whole = run(generate.main, "Hello there", *FLAGS, "--max-tokens", "40", "--json")
    stream = run(generate.main, "Hello there", *FLAGS, "--max-tokens", "40", "--stats")
    text = whole.json["results"][0]["text"]
    assert stream.code == 0 and stream.out == text + "\n"
    assert "tau (tokens per round)" in stream.err and "acceptance by depth" in stream.err
    green = run(generate.main, "Hello there", *FLAGS, "--max-tokens", "40", "--color-accepted")
    assert re.sub("\x1b\\[\\d+m", "", green.out) == text + "\n"


def test_oracle_is_accepted_and_shown(tiny: Any, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    prompt = tiny.tokenizer.chat([{"role": "user", "content": "Hello there"}])
    spec = testing.oracle(tiny, [prompt], 40)
    monkeypatch.setattr("serve.cli.spec_from_args", lambda args: spec)
    got = run(generate.main, "Hello there", "--ignore-eos", "--max-tokens", "30", "--tree")
    assert got.code == 0
    assert "5 accepted (✓)" in got.err and got.err.count("✓ '") == 5
    monkeypatch.delenv("NO_COLOR", raising=False)
    green = run(
        generate.main, "Hello there", "--ignore-eos", "--max-tokens", "30", "--color-accepted"
    )
    assert green.out.count("\x1b[32m") >= 4
    assert re.sub("\x1b\\[\\d+m", "", green.out) == got.out


def test_jsonl_in_batches(tiny: Any, run: Run, tmp_path: Path) -> None:
    file = tmp_path / "many.jsonl"
    file.write_text(
        "".join(json.dumps({"prompt": "a" * (i + 1), "max_tokens": 3 + i}) + "\n" for i in range(5))
    )
    got = run(
        generate.main, "--prompts", str(file), *FLAGS, "--jsonl", "--batch-size", "2", "--compare"
    )
    rows = [json.loads(line) for line in got.out.splitlines()]
    assert got.code == 0, got.err
    assert [len(r["token_ids"]) for r in rows] == [3, 4, 5, 6, 7]
    alone = tiny.generate(
        tiny.tokenizer.chat([{"role": "user", "content": "aaaaa"}]), LAST, spec=OFF
    )
    assert rows[4]["token_ids"] == list(alone[0].token_ids)


def test_measured_pairs(tiny: Any) -> None:
    prompts = [SuitePrompt(str(i), ({"role": "user", "content": "x" * i + "?"},)) for i in range(2)]
    sampling = SamplingParams(max_tokens=24, ignore_eos=True)
    rows = measure(tiny, "s", prompts, {"spec": TREE}, sampling)
    got = summarise(rows, "spec")
    assert got["identical"] and got["tokens"] == 48 and got["speedup"] > 0
    assert got["tau"] >= 1 and 1 <= got["nodes_per_round"] <= 6


def test_bench_and_demo(tiny: Any, run: Run, tmp_path: Path) -> None:
    file = tmp_path / "own.jsonl"
    file.write_text('{"prompt": "one"}\n{"prompt": "two"}\n')
    got = run(
        bench.main,
        "--suite",
        str(file),
        *FLAGS,
        "--max-tokens",
        "16",
        "--out",
        str(tmp_path / "out"),
    )
    assert got.code == 0, got.err
    assert got.last["suites"]["own"]["identical"] is True
    assert {"report.md", "results.json", "phases.svg"} <= {
        p.name for p in (tmp_path / "out").iterdir()
    }
    shown = run(
        demo.main,
        "--spec",
        "tree",
        "--budget",
        "6",
        "--max-tokens",
        "12",
        "--limit",
        "2",
        "--capacity",
        "192",
    )
    assert shown.code == 0 and shown.last["tokens_identical"] is True


def test_too_long_prompts_name_both_numbers(tiny: Any, run: Run) -> None:
    got = run(generate.main, "x" * 300, *FLAGS)
    assert got.code == 1 and got.out == ""
    assert re.search(r"the prompt has 3\d\d tokens, but the context holds 192", got.error)


def test_plan(tiny: Any, run: Run) -> None:
    got = run(generate.main, "--plan", "--json", *FLAGS)
    assert got.code == 0 and got.json["budgets"] == [6] and got.json["memory"]["target_bytes"] > 0


# ---- models as files: nothing stands in for the engine -----------------------------------------


def test_unknown_family(run: Run, tmp_path: Path) -> None:
    model = write_target(tmp_path / "model")
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"model_type": "mamba"}))
    got = run(generate.main, "a", "--model", str(model))
    assert got.code == 1 and got.out == "" and "mamba" in got.error and str(model) in got.error


def test_not_a_model(run: Run, tmp_path: Path) -> None:
    got = run(generate.main, "a", "--model", str(tmp_path))
    assert got.code == 1 and str(tmp_path) in got.error
    (tmp_path / "x.gguf").write_bytes(b"GGUF but not really")
    got = run(generate.main, "a", "--model", str(tmp_path / "x.gguf"))
    assert got.code == 1 and "x.gguf" in got.error


def test_head_of_another_target(files: tuple[Path, Path], run: Run, tmp_path: Path) -> None:
    other = testing.tiny_config("llama", hidden_size=64)
    head = write_head(tmp_path / "head", other)
    got = run(generate.main, "a", "--model", str(files[0]), "--draft", str(head))
    assert got.code == 1 and got.out == ""
    assert "hidden size 64 (target: 32)" in got.error and str(head) in got.error


@pytest.mark.slow
def test_doctor_on_files(
    files: tuple[Path, Path], run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A random head is never accepted: said so, with every suspect really tried."""
    monkeypatch.setattr(doctor, "PROBE_TOKENS", 12)
    model, head = files
    got = run(
        generate.main,
        "--doctor",
        "--model",
        str(model),
        "--draft",
        str(head),
        "--capacity",
        "192",
        "--json",
    )
    assert got.code == 1
    found = {f["check"]: f["verdict"] for f in got.json["findings"]}
    assert found["fuse and final norms"] == "ok" and found["vocabulary"] == "ok"
    assert found["acceptance"] == "WRONG" and found["weights"] == "WRONG"
    assert "causal=False" in found and "draft_shift=True" in found
