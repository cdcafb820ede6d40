"""serve.autotune on the real model: a search that is short, a gate that is real."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from jetspec_jax.autotune import search
from serve import autotune
from tests.serve.conftest import Run

# Its clock is that of a machine with nothing else to do, which CI is not.
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not os.environ.get("JETSPEC_DEEP"), reason="minutes of two cores: JETSPEC_DEEP=1 runs it"
    ),
]


def test_a_short_run_ends_in_time_with_the_same_tokens(run: Run, tmp_path: Path) -> None:
    began = time.monotonic()
    got = run(
        autotune.main,
        *("--out", str(tmp_path), "--suite", "humaneval", "--explorer", "builtin:tree"),
        *("--budget-seconds", "150", "--trials", "2", "--json"),
    )
    assert got.code == 0, got.err
    assert got.last["tokens_identical"] is True and got.last["speed_ratio_low"] >= 1.0
    # a step of the gate may end after the clock, a minute's worth of them may not
    assert time.monotonic() - began < 210
    trials = [t for _, made in search.studies(tmp_path / "search.db").values() for t in made]
    assert all(t.steps for t in trials) and not any(t.note for t in trials)
    report = run(autotune.main, "--out", str(tmp_path), "--report")
    assert report.code == 0 and "| verify" not in report.out and "verify" in report.out
