"""serve.autotune: flags, the result line, exit codes, the report; over made-up speeds."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest

from jetspec_jax.autotune import cost_model
from jetspec_jax.autotune.candidate import Candidate
from jetspec_jax.autotune.memory import Memory, Pattern
from jetspec_jax.autotune.prompts import Prompt
from serve import autotune, autotune_run, autotune_survey
from tests.autotune.fakes import KEY, SPACE, FakeWorker, compose, verdict
from tests.serve.conftest import Run

BASE = ("--suite", "humaneval", "--json")
GAPS = (
    cost_model.Gap("tau", 2.0, 8.0, 0.01, 0.6, 2.9, False),
    cost_model.Gap("verify", 0.010, 0.006, 0.004, 0.25, 1.3, False),
)


@pytest.fixture
def made_up(monkeypatch: pytest.MonkeyPatch, workers: type[FakeWorker]) -> type[FakeWorker]:
    """Everything but the engine: the search, the session, the files."""

    def look(*_: Any, **__: Any) -> autotune_survey.Survey:
        prompts = tuple(Prompt(str(i), ({"role": "user", "content": str(i)},)) for i in range(40))
        ids = tuple((10 * i,) for i in range(30))
        return autotune_survey.Survey(KEY, SPACE, None, GAPS, {}, prompts, prompts, ids)

    monkeypatch.setattr(autotune_survey, "look", look)
    monkeypatch.setattr(autotune_survey, "searched", lambda survey: survey.space)
    monkeypatch.setattr(autotune_run, "_worker", lambda args, engine, c: FakeWorker(c))
    monkeypatch.setattr(autotune_run.gate, "judge", lambda a, b, **settings: verdict(a, b))
    monkeypatch.setattr("jetspec_jax.autotune.space.params_of", compose)
    monkeypatch.setattr(autotune_run, "code_version", lambda tree: "c0de")
    return workers


def test_the_last_line_says_what_came_of_it(
    made_up: type[FakeWorker], run: Run, tmp_path: Path
) -> None:
    out = tmp_path / "tuned"
    got = run(
        autotune.main, *BASE, "--out", str(out), "--trials", "6", "--explorer", "builtin:tree"
    )
    assert got.code == 0, got.err
    last = got.last
    assert last["accepted"] is True and last["tokens_identical"] is True
    assert last["speed_ratio"] > 1.0 and last["speed_ratio_low"] < last["speed_ratio"]
    assert last["trials"] == 6 and last["interrupted"] is False and last["start"] == {}
    assert last["params"] and last["verdicts"][-1]["positions"] == 6_000
    assert "accepted: " in got.err and "tokens identical on unseen prompts" in got.err
    assert {p.name for p in out.iterdir()} >= {
        "search.db",
        "memory.db",
        "session.json",
        "survey.json",
    }
    # a page of text for each verdict
    pages = [p.read_text() for p in out.glob("verdict-*.txt")]
    assert any(page.startswith("ACCEPTED: ") for page in pages)
    # an entry for serve.generate --tuned
    from jetspec_jax.autotune import tuned

    ((_, entry),) = tuned.readable(out, pytest.fail)
    assert dict(entry.params) == last["params"] and entry.key == KEY
    # the next run starts from there, and says so
    again = run(
        autotune.main, *BASE, "--out", str(out), "--trials", "3", "--explorer", "builtin:tree"
    )
    assert again.last["start"] == last["params"]


def test_apply_installs_the_entry(
    made_up: type[FakeWorker], run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = tmp_path / "home"
    monkeypatch.setattr("jetspec_jax.autotune.tuned.tuned_home", lambda: home)
    argv = ("--out", str(tmp_path / "o"), "--explorer", "builtin:tree")
    got = run(autotune.main, *BASE, *argv, "--trials", "6", "--apply")
    assert got.code == 0 and "installed " in got.err and len(list(home.iterdir())) == 1
    again = run(autotune.main, "--out", str(tmp_path / "o"), "--apply", "--json")
    assert again.code == 0 and Path(again.last["installed"]).parent == home
    (tmp_path / "empty").mkdir()
    nothing = run(autotune.main, "--out", str(tmp_path / "empty"), "--apply")
    assert nothing.code == 1 and "no run was made there" in nothing.error


def test_nothing_found_is_said_and_is_no_failure(
    made_up: type[FakeWorker], run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.autotune.fakes.seconds", lambda params: 1.0)
    got = run(autotune.main, *BASE, "--out", str(tmp_path), "--trials", "2")
    assert got.code == 0
    assert got.last["accepted"] is False and got.last["params"] == {}
    assert got.last["speed_ratio"] == got.last["speed_ratio_low"] == 1.0
    assert "no candidate passed" in got.err


def test_ctrl_c_prints_what_is_there(
    made_up: type[FakeWorker], run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(call: int) -> float:
        if call == 40:
            raise KeyboardInterrupt
        return 1.0

    monkeypatch.setattr(made_up, "on_call", staticmethod(interrupted))
    argv = (*BASE, "--out", str(tmp_path), "--trials", "8", "--explorer", "builtin:tree")
    got = run(autotune.main, *argv)
    assert got.code == 130 and got.last["interrupted"] is True and got.last["trials"] >= 1
    assert "interrupted; what is finished is kept" in got.err and "Traceback" not in got.err
    again = run(autotune.main, *argv)
    assert again.code == 0 and "going on with the run" in again.err
    assert f"goes on after {got.last['trials']} finished trials" in again.err
    assert again.last["trials"] == 8


def test_a_poor_start(made_up: type[FakeWorker], run: Run, tmp_path: Path) -> None:
    start = tmp_path / "start.toml"
    start.write_text('[spec]\nbudget = 1\nbuilder = "accum_logp"\n')
    argv = ("--out", str(tmp_path / "o"), "--trials", "2", "--explorer", "builtin:tree")
    got = run(autotune.main, *BASE, *argv, "--start", str(start))
    assert got.last["start"] == {"spec.budget": 1, "spec.builder": "accum_logp"}
    assert got.last["accepted"] and got.last["speed_ratio"] > 1.6


def test_report_is_made_of_the_files(made_up: type[FakeWorker], run: Run, tmp_path: Path) -> None:
    argv = ("--out", str(tmp_path), "--trials", "5", "--explorer", "builtin:tree,builtin:kernel")
    run(autotune.main, *BASE, *argv)
    refused = Pattern(
        KEY,
        Candidate({"spec.width": 11}),
        False,
        report={"reason": "token 7 differs"},
        counter_example={"prompt": "humaneval/3", "position": 7, "margin": 0.001},
        code="c0de",
    )
    Memory(tmp_path / "memory.db").record(refused)
    got = run(autotune.main, "--out", str(tmp_path), "--report")
    assert got.code == 0, got.err
    for words in (
        "verify", "0.25", "## Verdicts of the gate", "width=", "## Rejected patterns",
        "token 7 differs", "humaneval/3", "kernel.tree_attention", "history.svg",
    ):  # fmt: skip
        assert words in got.out.replace("25.0%", "0.25"), words
    root = ET.parse(tmp_path / "history.svg").getroot()
    assert len(root.findall(".//{http://www.w3.org/2000/svg}path")) > 10
    assert (tmp_path / "report.md").read_text() in got.out


def test_memories_travel(made_up: type[FakeWorker], run: Run, tmp_path: Path) -> None:
    argv = ("--trials", "6", "--explorer", "builtin:tree")
    run(autotune.main, *BASE, "--out", str(tmp_path / "a"), *argv)
    file = tmp_path / "memory.json"
    got = run(autotune.main, "--out", str(tmp_path / "a"), "--export", str(file), "--json")
    assert got.code == 0 and got.last["exported"] >= 1
    (tmp_path / "b").mkdir()
    got = run(autotune.main, "--out", str(tmp_path / "b"), "--import", str(file), "--json")
    assert got.last["imported"] >= 1
    got = run(autotune.main, *BASE, "--out", str(tmp_path / "b"), *argv)
    assert got.last["verdicts"][0]["search"] == "known"


def test_dry_run_prints_the_plan(made_up: type[FakeWorker], run: Run) -> None:
    got = run(autotune.main, "--suite", "humaneval", "--dry-run", "--json")
    assert got.code == 0
    assert next(p["name"] for p in got.last["parts"]) == "tree"
    assert got.last["gaps"][0]["phase"] == "tau"
    assert made_up.started == []


def test_planning_for_a_gpu_is_marked(run: Run) -> None:
    got = run(autotune.main, "--dry-run", "--device-spec", "h100", "--model", "qwen3-8b")
    assert got.code == 0 and got.out.count("(planned)") > 3 and "data sheet" in got.out


BAD = [
    ([], 2, "--out is missing"),
    (["--out", "x", "--budget-seconds", "0"], 2, "--budget-seconds 0"),
    (["--out", "x", "--budget-seconds", "nan"], 2, "--budget-seconds nan"),
    (["--out", "x", "--trials", "0"], 2, "--trials 0"),
    (["--out", "x", "--batch-size", "0"], 2, "--batch-size 0"),
    (["--out", "x", "--explorer", "cmd: "], 2, "names no command"),
    (["--out", "x", "--explorer", "builtin:nope"], 2, "builtin:nope"),
    (["--out", "x", "--explorer", "builtin:scheduler"], 2, "--batch-size 2"),
    (["--out", "x", "--start", "{"], 2, "--start: not valid JSON"),
    (["--out", "x", "--start", '{"spec.bugdet": 1}'], 2, "did you mean 'budget'"),
    (["--out", "x", "--start", '{"width": 1}'], 2, "no known section"),
    (["--out", "x", "--suite", "nope"], 2, "neither a known suite"),
    (["--out", "x", "--seed", "-1"], 2, "--seed -1"),
    (["--out", "/proc/nope/x", "--suite", "humaneval"], 2, "--out /proc/nope/x"),
    (["--out", "/no/such", "--report"], 2, "no such folder"),
    (["--out", "/no/such", "--apply"], 2, "no such folder"),
    (["--out", "x", "--report", "--dry-run"], 2, "exclude each other"),
    (["--out", "x", "--report", "--trials", "3"], 2, "--trials does not go with --report"),
    (["--out", "x", "--device-spec", "h100"], 2, "add --dry-run"),
    (["--dry-run", "--device-spec", "abacus"], 2, "--device-spec abacus"),
    (["--out", "x", "--model", "/no/such"], 1, "/no/such: no such file"),
    (["--out", "x", "--budget", "3"], 2, "did you mean"),
    (["--out", " ", "--budget-seconds", "9"], 2, "--out is empty"),
    (["--out", "x", "--import", "/no/such.json"], 2, "--import /no/such.json: no such file"),
    (["--out", "x", "--start", '{"engine.kernel_params": 3}'], 2, "give kernel.<op>.<NAME>"),
    (["--out", "x", "--start", '{"spec": {"policy": {}}}'], 2, "give policy.<field>"),
    (["--dry-run", "--device-spec", "h100", "--draft", "x"], 2, "--draft does not go with"),
]


@pytest.mark.parametrize(("argv", "code", "words"), BAD)
def test_bad_input_is_one_line_and_loads_nothing(
    run: Run,
    argv: list[str],
    code: int,
    words: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(autotune_survey, "look", lambda *_: pytest.fail("loaded something"))
    got = run(autotune.main, *argv)
    assert got.code == code and words in got.error and got.out == ""


def test_gap_lines_and_result_are_strict_json() -> None:
    assert "2.90x" in "\n".join(autotune_survey.gap_lines(GAPS))
    assert json.loads(json.dumps(verdict(Candidate(), Candidate()).to_json()))
