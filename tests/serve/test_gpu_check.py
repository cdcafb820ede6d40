"""serve.gpu_check without a GPU: how steps end, what is said, and what is refused."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import pytest

from serve import gpu_check
from serve.gpu_check import Outcome


def run(tmp_path: Path, code: str, limit_s: float = 30.0) -> Outcome:
    command = [sys.executable, "-c", code]
    return gpu_check.run_step("step", command, tmp_path, limit_s, os.environ)


def test_a_step_that_holds(tmp_path: Path):
    outcome = run(tmp_path, "print('{broken'); print('{\"a\": 1}'); print('later')")
    assert (outcome.verdict, outcome.found, outcome.last_lines) == ("held", {"a": 1}, [])
    assert (tmp_path / "step.json").is_file()


def test_a_step_that_fails_shows_the_end_of_its_log(tmp_path: Path):
    outcome = run(tmp_path, "print('\\n'.join(map(str, range(20)))); raise SystemExit(3)")
    assert outcome.verdict == "failed"
    assert outcome.last_lines == ["14", "15", "16", "17", "18", "19"]


@pytest.mark.parametrize("hangs", [True, False])
def test_nothing_of_a_step_is_left(tmp_path: Path, hangs: bool):
    """A child that outlives its step would hold the GPU while the next one is timed."""
    pid_file = tmp_path / "pid"
    child = "import time; time.sleep(600)"
    code = (
        "import pathlib, subprocess, sys, time;"
        f"p = subprocess.Popen([sys.executable, '-c', {child!r}]);"
        f"pathlib.Path({str(pid_file)!r}).write_text(str(p.pid));"
        f"time.sleep({600 if hangs else 0})"
    )
    outcome = run(tmp_path, code, limit_s=3.0 if hangs else 30.0)
    assert outcome.verdict == ("out of time" if hangs else "held")
    state = Path(f"/proc/{pid_file.read_text()}/stat")
    for _ in range(100):  # a killed process stays for a moment, as a zombie or at all
        if not state.exists() or state.read_text().split(") ")[1][0] == "Z":
            return
        time.sleep(0.05)
    pytest.fail("the step's child still runs")


def test_counts_of_tests(tmp_path: Path):
    junit = tmp_path / "tests.xml"
    suite = '<testsuite tests="{}" failures="0" errors="0" skipped="{}"></testsuite>'
    held = Outcome("tests", "held", 1.0, {})
    for tests, skipped, verdict in ((5, 1, "held"), (2, 2, "failed"), (0, 0, "failed")):
        junit.write_text(f"<testsuites>{suite.format(tests, skipped)}</testsuites>")
        got = gpu_check.with_counts(held, gpu_check.counted(junit))
        assert got.verdict == verdict
        assert got.found["skipped"] == skipped
    assert gpu_check.with_counts(held, gpu_check.counted(tmp_path / "none")).verdict == "failed"


def test_summary_says_what_failed(tmp_path: Path):
    outcomes = [
        Outcome("facts", "held", 2.0, {"device": "NVIDIA H100", "versions": {"jax": "1"}}),
        Outcome("exactness", "failed", 3.0, {"different": 4}, ["row 3 differs"]),
    ]
    document = gpu_check.write_summary(tmp_path, outcomes, False)
    page = (tmp_path / "summary.md").read_text()
    assert not document["held"]
    assert "# GPU check: NVIDIA H100" in page
    assert "| exactness | failed | 3 | different 4 |" in page
    assert "row 3 differs" in page


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--steps", "facts,tset"], "--steps tset: choose from facts, tests"),
        (["--minutes", "0"], "--minutes 0.0: give a time above 0"),
        (["--wheels", "nowhere"], "--wheels nowhere: no .whl file there"),
        (["--model", "./nowhere"], "no such file or directory"),
        ([], "no GPU to check"),
    ],
)
def test_refusals(flags: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert gpu_check.main([*flags, "--out", str(tmp_path / "out")]) != 0
    err = capsys.readouterr().err.strip().splitlines()
    assert said in err[-1]
    assert len(err) == 1


def test_time_is_shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The last step gets what the others left, and none starts when time is up."""
    limits: dict[str, float] = {}

    def step(name: str, command: object, out: Path, limit_s: float, env: object) -> Outcome:
        limits[name] = limit_s
        return Outcome(name, "held", 0.0, {})

    monkeypatch.setattr(gpu_check, "run_step", step)
    flags = ["--rehearse", "--out", str(tmp_path)]
    assert gpu_check.main([*flags, "--steps", "facts,bench"]) == 0
    assert limits["facts"] == gpu_check.STEPS["facts"]
    assert limits["bench"] == pytest.approx(600, abs=5)
    assert gpu_check.main([*flags, "--minutes", "0.001", "--steps", "facts"]) == 1
    assert "out of time" in (tmp_path / "summary.md").read_text()


@pytest.mark.slow
def test_rehearsal_on_a_cpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    flags = ["--rehearse", "--out", str(tmp_path), "--steps", "facts,exactness,run"]
    assert gpu_check.main(flags) == 0, (tmp_path / "summary.md").read_text()
    assert '"different": 0' in (tmp_path / "exactness.json").read_text()
    assert capsys.readouterr().out.startswith('{"held": true')
