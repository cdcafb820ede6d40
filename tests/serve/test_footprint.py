"""serve.footprint: what it starts, what it makes of it, and that it measures the child alone."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest

from jetspec_jax.config import WEIGHTS
from jetspec_jax.errors import JetSpecError
from serve import footprint, generate
from serve.footprint import Child
from tests.serve.conftest import Run


def test_figures_are_best_and_median_above_the_runtime() -> None:
    runtime = [Child(200.0, 1.0), Child(210.0, 1.0), Child(260.0, 1.0)]
    runs = {"stored": [Child(500.0, 3.5), Child(480.0, 3.0), Child(490.0, 9.0)]}
    got = footprint.summarise(runtime, runs)
    assert got["runtime_rss_mb"] == {"best": 200.0, "median": 210.0}
    assert got["modes"]["stored"] == {
        "peak_rss_mb": {"best": 480.0, "median": 490.0},
        "peak_above_runtime_mb": {"best": 280.0, "median": 280.0},
        "first_token_s": {"best": 3.0, "median": 3.5},
    }


def test_the_command_is_what_a_user_types() -> None:
    for weights in WEIGHTS:
        got = footprint.generate_command(weights, "Hello", 9)
        assert got[1:4] == ["-m", "serve.generate", "Hello"]
        args = generate.build_parser().parse_args(got[3:])
        assert args.max_tokens == 9 and args.weights == weights


def test_report(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[list[str]] = []

    def measure(command: list[str]) -> Child:
        started.append(command)
        return Child(150.0, 0.5) if "-c" in command else Child(450.0 + len(started), 2.25)

    monkeypatch.setattr(footprint, "measure", measure)
    got = run(footprint.main, "--repeats", "2", "--max-tokens", "5")
    assert got.code == 0 and got.out.count("\n") == 1
    # a warming run of each, then two rounds with the runtime
    assert [c[1] for c in started] == ["-m", "-m", "-c", "-m", "-m", "-c", "-m", "-m"]
    assert got.last["runtime_rss_mb"] == {"best": 150.0, "median": 150.0}
    assert list(got.last["modes"]) == list(WEIGHTS)
    for figures in got.last["modes"].values():
        assert figures["first_token_s"] == {"best": 2.25, "median": 2.25}
        assert figures["peak_above_runtime_mb"]["best"] >= 300.0
    for key in ("prompt", "max_tokens", "repeats", "hardware", "versions", "command"):
        assert got.last[key] not in (None, ""), key
    assert "footprint" in got.err and "runtime alone" in got.err


def test_a_child_is_measured_alone() -> None:
    """In a process as small as the command's own: a child's peak starts with its parent's."""
    script = (
        "import sys\n"
        "from serve import footprint\n"
        "heavy = {name.split('.')[0] for name in sys.modules} & {'jax', 'numpy'}\n"
        "def child(text): return footprint.measure([sys.executable, '-c', text])\n"
        "small = child('print(1)')\n"
        "big = child('print(len(b\"x\" * 90_000_000))')\n"
        "print(len(heavy), big.peak_mb - small.peak_mb)"
    )
    out = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    heavy, more = map(float, out.stdout.split())
    assert heavy == 0 and 80 < more < 110


def test_first_byte_does_not_wait_for_the_end() -> None:
    text = "import time; print(1, flush=True); time.sleep(1.5)"
    began = time.perf_counter()
    got = footprint.measure([sys.executable, "-c", text])
    assert time.perf_counter() - began - got.first_byte_s > 1.4


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("raise SystemExit('error: no such model')", "status 1: error: no such model"),
        ("pass", "status 0: no message"),
    ],
)
def test_a_failing_child_is_one_line(text: str, words: str) -> None:
    with pytest.raises(JetSpecError, match=words) as caught:
        footprint.measure([sys.executable, "-c", text])
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--repeats", "0"], "--repeats 0: give at least 1"),
        (["--max-tokens", "-1"], "--max-tokens -1: give at least 1"),
        (["--prompt", " "], "--prompt is empty"),
        (["--repeat", "2"], "did you mean --repeats?"),
    ],
)
def test_bad_input(run: Run, monkeypatch: pytest.MonkeyPatch, argv: list[str], words: str) -> None:
    monkeypatch.setattr(footprint, "measure", lambda command: pytest.fail("something was started"))
    got = run(footprint.main, *argv)
    assert got.code == 2 and words in got.error and got.out == ""
