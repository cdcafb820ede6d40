"""serve.bench: the last line, the exit code, and the files of a report."""

from __future__ import annotations

import csv
import json
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from jetspec_jax.config import SpecConfig
from serve import bench
from serve.report import phases_of
from tests.serve.conftest import Run
from tests.serve.fake_llm import FakeLLM

Fake = type[FakeLLM]
ARGS = ("--suite", "humaneval,gsm8k", "--limit", "3", "--max-tokens", "21")


def test_last_line_is_the_summary(fake: Fake, run: Run) -> None:
    got = run(bench.main, *ARGS)
    assert got.code == 0
    assert got.out.count("\n") == 1
    assert list(got.last["suites"]) == ["humaneval", "gsm8k"]
    for suite in got.last["suites"].values():
        assert suite["prompts"] == 3 and suite["identical"] is True
        assert suite["speedup"] == pytest.approx(2.0) and suite["tau"] == 4.0
        assert suite["plain_tok_s"] == pytest.approx(10.0) and suite["spec_tok_s"] == pytest.approx(
            20.0
        )
    facts = got.last["facts"]
    for key in ("hardware", "dtype", "batch", "temperature", "budget", "versions", "command"):
        assert facts[key] not in (None, ""), key
    assert facts["command"] == "python -m serve.bench " + " ".join(ARGS)
    assert "HumanEval" in got.err and "2.00x" in got.err
    assert fake.made[0].calls == ["plain", "spec", "spec", "plain", "plain", "spec"] * 2


def test_a_difference_ends_with_exit_code_1(
    fake: Fake, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FakeLLM, "differ_at", 5)
    got = run(bench.main, *ARGS)
    assert got.code == 1
    suite = got.last["suites"]["humaneval"]
    assert suite["identical"] is False and suite["identical_share"] == 0
    assert suite["first_different"] == {"id": "HumanEval/0", "token": 5}


def test_report_files_and_svg_plots(fake: Fake, run: Run, tmp_path: Path) -> None:
    out = tmp_path / "deep" / "report"
    got = run(bench.main, *ARGS, "--out", str(out), "--sweep-budget", "8,4", "--json")
    assert got.code == 0
    names = {"speedup", "tau", "acceptance", "accepted", "phases", "sweep"}
    for name in names:
        root = ET.parse(out / f"{name}.svg").getroot()
        assert root.tag == "{http://www.w3.org/2000/svg}svg"
        assert len(root.findall(".//{http://www.w3.org/2000/svg}path")) > 10
    assert {p.stem for p in out.glob("*.svg")} == names
    document = json.loads((out / "results.json").read_text())
    assert document == got.last  # --json prints the file
    assert list(document["sweep"]["gsm8k"]) == ["4", "8"]
    assert document["costs"]["t_plain_s"] == 0.1
    with (out / "per_prompt.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 2 * 3 * 3  # suites x prompts x (spec, two budgets)
    assert {r["variant"] for r in rows} == {"spec", "budget 4", "budget 8"} and {
        r["identical"] for r in rows
    } == {"True"}
    text = (out / "report.md").read_text()
    for word in (
        "HumanEval",
        "GSM8K",
        "2.00x",
        "batch 1",
        "temperature 0",
        "python -m serve.bench",
        "speedup.svg",
    ):
        assert word in text
    assert all(f"]({name}.svg)" in text for name in names)
    assert 'speculation: `{"mode": "auto"' in text


def test_ctrl_c_keeps_what_is_measured(
    fake: Fake, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FakeLLM, "interrupt_at", 5)  # in the middle of the third prompt
    got = run(bench.main, *ARGS)
    assert got.code == 130
    assert got.last["interrupted"] is True and list(got.last["suites"]) == ["humaneval"]
    assert got.last["suites"]["humaneval"]["prompts"] == 2


def test_variants_fix_the_budget() -> None:
    made = bench.variants_of(SpecConfig(width=5), [4, 8])
    assert made["spec"] == SpecConfig(width=5)
    assert made["budget 4"] == SpecConfig(mode="tree", budget=4, width=5)


def test_phases_add_up_to_the_round() -> None:
    costs = {"t_plain_s": 0.010, "t_verify_s": {8: 0.020}, "t_draft_s": 0.003}
    suites = {
        "s": {"round_ms": 25.0, "nodes_per_round": 8.0},
        "half": {"round_ms": 10.0, "nodes_per_round": 4.5},
    }
    got = phases_of(suites, costs)
    assert got["plain step"] == {"plain step": 10.0}
    assert got["s"] == {"draft": 3.0, "verify": 20.0, "rest": pytest.approx(2.0)}
    assert got["half"]["verify"] == pytest.approx(15.0) and got["half"]["rest"] == 0.0


BAD = [
    (["--suite", "nope"], 2, "neither a known suite"),
    (["--limit", "0"], 2, "--limit 0"),
    (["--batch", "0"], 2, "--batch 0"),
    (["--sweep-budget", "1,x"], 2, "whole numbers"),
    (["--sweep-budget", "0"], 2, "at least 1"),
    (["--sweep-budget", ""], 2, "at least 1"),
    (["--spec", "off"], 2, "nothing to compare"),
    (["--max-tokens", "0"], 2, "max_tokens=0"),
    (["--out", "/proc/nope/x"], 2, "--out /proc/nope/x"),
    (["--model", "/no/such"], 1, "/no/such: no such file"),
    (["--limits", "3"], 2, "did you mean --limit?"),
]


@pytest.mark.parametrize(("argv", "code", "words"), BAD)
def test_bad_input_is_one_line(
    fake: Fake, run: Run, argv: list[str], code: int, words: str
) -> None:
    got = run(bench.main, *argv)
    assert got.code == code and words in got.error and got.out == ""
    assert fake.made == []


def test_the_header_says_what_was_tuned(fake: Fake, run: Run) -> None:
    from serve.report import facts_line

    facts = run(bench.main, *ARGS, "--json").last["facts"]
    assert facts["tuned"]["entry"] is None and "heuristic" in facts["tuned"]["reason"]
    assert "tuned entry" not in facts_line(facts)
    assert facts_line(facts | {"tuned": {"entry": "3f2a" * 4}}).endswith("tuned entry 3f2a3f2a")
