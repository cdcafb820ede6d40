"""The search: what a kill changes (nothing), pruning, budgets, databases that are not ours."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Generator, Mapping
from pathlib import Path
from typing import Any

import pytest

from jetspec_jax.autotune.search import Finished, Search, behind, studies
from jetspec_jax.errors import ConfigError, KernelError


@dataclasses.dataclass(frozen=True)
class Knob:
    name: str
    kind: str
    choices: tuple[Any, ...] = ()
    low: float | None = None
    high: float | None = None
    log: bool = False


SPACE = (
    Knob("spec.width", "int", low=1, high=12),
    Knob("spec.builder", "choice", choices=("exact", "chain")),
    Knob("policy.credit", "float", low=0.01, high=1.0, log=True),
)
DEFAULTS = {"spec.width": 8, "spec.builder": "exact", "policy.credit": 0.15}


def speed(params: Mapping[str, Any]) -> float:
    """Best at width 3 with the exact builder and a credit of 0.1."""
    off = abs(params["spec.width"] - 3) / 10 + abs(math.log(params["policy.credit"] / 0.1)) / 10
    return 0.3 - off - (0.2 if params["spec.builder"] == "chain" else 0)


def objective(params: Mapping[str, Any]) -> Generator[float]:
    for prompt in range(4):
        yield speed(params) + 0.01 * math.sin(prompt)


def search(path: Path, seed: int = 3, **more: Any) -> Search:
    return Search(path / "search.db", "key/tree", SPACE, seed=seed, defaults=DEFAULTS, **more)


def facts(trials: list[Finished]) -> list[Any]:
    return [(t.ordinal, dict(t.params), t.steps, t.pruned, t.note) for t in trials]


def test_finds_what_is_fast_and_prunes_what_is_not(tmp_path: Path) -> None:
    found = search(tmp_path, first=[{"spec.width": 6}])
    why = found.run(objective, trials=24)
    assert why == "24 trials are done"
    assert found.finished[0].params == DEFAULTS | {"spec.width": 6}
    assert found.best is not None and found.best.ratio is not None
    assert found.best.params["spec.builder"] == "exact"
    assert abs(found.best.params["spec.width"] - 3) <= 1 and found.best.ratio > 1.2
    pruned = [t for t in found.finished if t.pruned]
    assert pruned and all(len(t.steps) < 4 for t in pruned)
    whole = [t for t in found.finished if not t.pruned]
    assert all(len(t.steps) == 4 for t in whole)


@pytest.mark.parametrize("ahead", [1, 3])
def test_interrupted_anywhere_it_ends_where_it_would_have_ended(tmp_path: Path, ahead: int) -> None:
    """A process that ends in the middle of trial 2 and 9, and is started again each time."""
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    first = [{"spec.width": 6}, {"spec.width": 2}]
    straight = search(tmp_path / "a", first=first)
    straight.run(objective, trials=11, ahead=ahead)

    class Killed(BaseException):
        pass

    for fatal in (2, 9):
        part = search(tmp_path / "b", first=first)

        def dies(params: Mapping[str, Any], fatal: int = fatal, part: Search = part) -> Any:
            for step, value in enumerate(objective(params)):
                if len(part.finished) == fatal and step == 1:
                    raise Killed
                yield value

        with pytest.raises(Killed):
            part.run(dies, trials=11, ahead=ahead)
        assert len(search(tmp_path / "b").finished) == fatal
    last = search(tmp_path / "b", first=[{"spec.width": 11}])  # the plan of the first start holds
    last.run(objective, trials=11, ahead=ahead)
    assert facts(last.finished) == facts(straight.finished)


def test_killed_by_the_system_nothing_finished_is_lost(tmp_path: Path) -> None:
    """kill -9 while a trial runs; the next process has all finished trials and the same end."""
    program = textwrap.dedent(
        """
        import sys, time
        from pathlib import Path
        from tests.autotune.test_search import objective, search
        def slow(params):
            for value in objective(params):
                time.sleep(0.02)
                yield value
        def done(trial):
            print(trial.ordinal, flush=True)
        search(Path(sys.argv[1])).run(slow, trials=int(sys.argv[2]), done=done)
        """
    )
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    search(tmp_path / "a").run(objective, trials=10)
    command = [sys.executable, "-c", program, str(tmp_path / "b"), "10"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        while process.stdout.readline().strip() != "5":
            pass
        time.sleep(0.03)  # into the next trial
        os.kill(process.pid, signal.SIGKILL)
    kept = search(tmp_path / "b")
    assert len(kept.finished) >= 6
    kept.run(objective, trials=10)
    assert facts(kept.finished) == facts(search(tmp_path / "a").finished)


def test_another_seed_samples_others(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    one, two = search(tmp_path / "a", seed=1), search(tmp_path / "b", seed=2)
    assert one.plan(5) != two.plan(5)
    assert len({json.dumps(p) for p in one.plan(5)}) == 5


def test_what_is_refused_is_a_finished_trial_and_is_not_tried_again(tmp_path: Path) -> None:
    found = search(tmp_path)

    def refuses(params: Mapping[str, Any]) -> Generator[float]:
        yield 0.5
        if params["spec.builder"] == "chain":
            raise KernelError("no such\nkernel")
        yield 0.5

    found.run(refuses, trials=14)
    notes = {t.params["spec.builder"]: t.note for t in found.finished}
    assert notes == {"chain": "no such kernel", "exact": ""}
    assert all(t.ratio is None for t in found.finished if t.note)
    assert found.best is not None and found.best.params["spec.builder"] == "exact"
    later = [t.params["spec.builder"] for t in found.finished[8:]]
    assert later.count("chain") <= 3 and len({str(t.params) for t in found.finished}) == 14


def test_the_clock_is_looked_at_before_every_prompt(tmp_path: Path) -> None:
    found = search(tmp_path)

    def slow(params: Mapping[str, Any]) -> Generator[float]:
        for _ in range(1_000):
            time.sleep(0.02)
            yield 0.1

    started = time.monotonic()
    assert found.run(slow, deadline=started + 0.3) == "the time is up"
    assert time.monotonic() - started < 1.0
    assert found.finished == []
    assert found.run(objective, trials=2, deadline=time.monotonic() - 1) == "the time is up"


def test_a_small_space_is_tried_out(tmp_path: Path) -> None:
    few = (
        Knob("spec.builder", "choice", choices=("exact", "chain")),
        Knob("spec.width", "int", low=1, high=2),
    )
    found = Search(
        tmp_path / "s.db", "few", few, defaults={"spec.builder": "exact", "spec.width": 1}
    )
    assert found.run(objective_of_one) == "every combination was tried"
    assert len(found.finished) == 4


def objective_of_one(params: Mapping[str, Any]) -> Generator[float]:
    yield 0.1


def test_first_candidates_with_undeclared_values_are_left_out(tmp_path: Path) -> None:
    found = search(
        tmp_path, first=[{"spec.width": 99}, {"spec.builder": "nope"}, {"spec.width": 5}]
    )
    assert found.plan(1) == [DEFAULTS | {"spec.width": 5}]


def test_batches_are_prepared_together(tmp_path: Path) -> None:
    found, sizes = search(tmp_path), []
    found.run(objective, trials=8, ahead=3, prepare=lambda batch: sizes.append(len(batch)))
    assert sizes == [3, 3, 2]


def test_behind_wants_more_than_one_prompt_and_a_clear_difference() -> None:
    best = (0.10, 0.12, 0.11, 0.10)
    assert not behind([-1.0], best)
    assert behind([0.0, 0.0], best)
    assert not behind([0.09, 0.11, 0.12], best)
    assert not behind([0.20, -0.05], best)  # one up, one down: not clear
    assert behind([0.05, 0.07, 0.06, 0.05], best)


def test_databases_that_are_not_ours(tmp_path: Path) -> None:
    (tmp_path / "search.db").write_text("no database at all, but text")
    with pytest.raises(ConfigError, match=r"search\.db cannot be used as a search database"):
        search(tmp_path)
    (tmp_path / "search.db").unlink()
    search(tmp_path).run(objective, trials=1)
    with pytest.raises(ConfigError, match="another seed"):
        search(tmp_path, seed=4)


def test_reports_read_every_study(tmp_path: Path) -> None:
    assert studies(tmp_path / "none.db") == {}
    search(tmp_path, facts={"explorer": "builtin:tree"}).run(objective, trials=3)
    read = studies(tmp_path / "search.db")
    assert list(read) == ["key/tree"]
    assert read["key/tree"][0] == {"explorer": "builtin:tree"} and len(read["key/tree"][1]) == 3
