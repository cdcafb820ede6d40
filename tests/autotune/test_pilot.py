"""The loop with made-up speeds: what is found, judged, remembered, and gone on with."""

from __future__ import annotations

import dataclasses
import functools
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from jetspec_jax.autotune import session as sessions
from jetspec_jax.autotune.candidate import Candidate
from jetspec_jax.autotune.explorers import parts
from jetspec_jax.autotune.memory import Memory, Pattern
from jetspec_jax.autotune.pilot import Pilot, Task, describe
from jetspec_jax.config import SamplingParams
from jetspec_jax.errors import ConfigError
from tests.autotune.fakes import KEY, SPACE, FakeWorker, compose, seconds, verdict

Workers = type[FakeWorker]


def pilot(
    out: Path,
    judge: Callable[..., Any] = lambda a, b, s: verdict(a, b),
    start: Candidate | None = None,
    trials: int | None = 10,
    **more: Any,
) -> Pilot:
    task = Task(
        key=KEY,
        space=SPACE,
        compose=compose,
        order=("tree_attention",),
        prompts=[[10 * i] for i in range(30)],
        sampling=SamplingParams(),
        start=FakeWorker,
        judge=judge,
        out=out,
        code="c0de",
        predict=lambda reference, candidate: reference.rounds / candidate.rounds + 0.25,
        gate_seconds=1.0,
    )
    begin = start or Candidate()
    identity = {"key": KEY.to_json(), "start": dict(begin.params), "seed": 0}
    state, _ = sessions.open_session(out / "session.json", identity, begin)
    return Pilot(task, state, trials=trials, **more)


def test_finds_judges_and_remembers(workers: Workers, tmp_path: Path) -> None:
    said: list[str] = []
    made = pilot(tmp_path, say=said.append)
    made.run(["tree", "kernel"])
    assert made.session.done
    found = made.session.incumbent.params
    # the best width is some moves away, the best lead one; the kernels went on from the tree's
    assert found["kernel.tree_attention.LEAD"] == 8 and found["spec.width"] < 7
    assert seconds(found) < seconds({}) / 1.15
    steps = made.session.accepted()
    assert [s["search"] for s in steps] == ["tree", "kernel.tree_attention"]
    assert steps[1]["incumbent"]["params"] == steps[0]["candidate"]["params"]
    # memory has ratios against the heuristic
    best = Memory(tmp_path / "memory.db").best(KEY)
    assert best is not None and best.candidate.params == found
    assert best.measured == pytest.approx(seconds({}) / seconds(found))
    assert best.predicted == 1.25
    assert best.report["against"]["params"] == steps[0]["candidate"]["params"]
    assert all(w.closed for w in workers.started)
    assert any("accepted" in line for line in said)


def test_the_gate_sees_the_best_first_and_until_one_passes(
    workers: Workers, tmp_path: Path
) -> None:
    shown: list[float] = []

    def judge(incumbent: Candidate, candidate: Candidate, left: float) -> Any:
        shown.append(seconds(candidate.params))
        return verdict(incumbent, candidate, accepted=len(shown) == 2)

    made = pilot(tmp_path, judge)
    made.run(["tree"])
    assert len(shown) == 2 and shown[0] <= shown[1]
    memory = Memory(tmp_path / "memory.db")
    assert len(memory.rejected(KEY)) == 1 and memory.best(KEY) is not None
    assert made.session.incumbent.id == memory.best(KEY).candidate.id  # type: ignore[union-attr]


def test_nothing_faster_is_nothing_accepted(
    workers: Workers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.autotune.fakes.seconds", lambda params: 1.0)

    def never(*_: Any) -> Any:
        raise AssertionError("the gate was asked about something that is not faster")

    made = pilot(tmp_path, never)
    made.run(["tree"])
    assert made.session.done and made.session.verdicts == []
    assert made.session.incumbent.params == {}


def test_a_poor_start_is_left_for_the_heuristic_at_once(workers: Workers, tmp_path: Path) -> None:
    poor = Candidate({"spec.budget": 1, "spec.builder": "accum_logp"})
    made = pilot(tmp_path, start=poor)
    made.run(["tree"])
    first = made.session.accepted()[0]
    assert first["search"] == "known" and first["candidate"]["params"] == {}
    assert first["verdict"]["speed_ratio"] == pytest.approx(2.0 / 1.2)
    # what followed is against the heuristic, and is remembered; the first step is not
    assert [p.report["against"]["params"] for p in Memory(tmp_path / "memory.db").latest()] == [{}]


def test_patterns_of_memory_go_first_and_pass_the_gate_again(
    workers: Workers, tmp_path: Path
) -> None:
    pattern = Candidate({"spec.width": 4, "kernel.tree_attention.LEAD": 8})
    elsewhere = Pattern(KEY, pattern, True, measured=9.0, low=8.0, high=10.0)
    other = Memory(tmp_path / "other.db")
    other.record(elsewhere)
    other.export(tmp_path / "other.json")
    (tmp_path / "out").mkdir()
    Memory(tmp_path / "out" / "memory.db").import_(tmp_path / "other.json")
    made = pilot(tmp_path / "out", trials=1)
    made.run(["tree"])
    first = made.session.accepted()[0]
    assert first["search"] == "known" and first["candidate"]["params"] == dict(pattern.params)
    best = Memory(tmp_path / "out" / "memory.db").best(KEY)
    assert best is not None and best.measured == pytest.approx(1.2 / 0.9)  # ours, not theirs


def test_wrong_tokens_are_remembered_and_not_tried_again(
    workers: Workers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workers, "wrong", staticmethod(lambda p: p.get("spec.width") == 4))
    pilot(tmp_path, trials=3).run(["tree"])
    (bad,) = Memory(tmp_path / "memory.db").rejected(KEY)
    assert bad.candidate.params == {"spec.width": 4} and bad.counter_example is not None
    workers.started.clear()
    (tmp_path / "search.db").unlink()
    pilot(tmp_path, trials=3).run(["tree"])
    asked = [p for w in workers.started for p in w.asked]
    assert asked and all(p.get("spec.width") != 4 for p in asked)


@pytest.mark.parametrize("fatal", [3, 40, 150])
def test_ctrl_c_anywhere_and_the_same_command_again_ends_the_same(
    workers: Workers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fatal: int
) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    straight = pilot(tmp_path / "a", trials=6)
    straight.run(["tree", "kernel"])

    def interrupted(call: int) -> float:
        if call == fatal:
            raise KeyboardInterrupt
        return 1.0

    monkeypatch.setattr(workers, "on_call", staticmethod(interrupted))
    monkeypatch.setattr(workers, "calls", 0)
    with pytest.raises(KeyboardInterrupt):
        pilot(tmp_path / "b", trials=6).run(["tree", "kernel"])
    assert all(w.closed for w in workers.started)
    again = pilot(tmp_path / "b", trials=6)
    again.run(["tree", "kernel"])
    assert again.session.incumbent == straight.session.incumbent
    assert history(again) == history(straight)


def history(made: Pilot) -> list[Any]:
    steps = made.session.verdicts
    return [(v["candidate"], v["incumbent"], v["verdict"]["accepted"]) for v in steps]


def test_another_process_finds_its_study_again(workers: Workers, tmp_path: Path) -> None:
    """Functions in a declaration have other addresses there: they are no part of the name."""
    made = pilot(tmp_path)
    (one,), (two,), (three,) = (
        parts("tree", [dataclasses.replace(p, **change) for p in SPACE])
        for change in ({"applies": lambda: True}, {"applies": lambda: True}, {"log": True})
    )
    assert made._study(one) == made._study(two) != made._study(three)


def test_the_time_is_kept(
    workers: Workers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[float] = []

    def slow(call: int) -> float:
        calls.append(time.monotonic())
        time.sleep(0.01)
        return 1.0

    monkeypatch.setattr(workers, "on_call", staticmethod(slow))
    monkeypatch.setattr("jetspec_jax.autotune.pilot._LEAST_S", 0.5)
    monkeypatch.setattr("jetspec_jax.autotune.pilot._ENOUGH_S", 4.0)
    began = time.monotonic()
    made = pilot(tmp_path, trials=None, deadline=began + 7.0)
    made.run(["tree"])
    assert calls and max(calls) < began + 7.5
    assert time.monotonic() < max(began + 7.0, calls[-1]) + 10.0  # a loaded machine writes slowly
    assert made.session.ended.get("tree") in (None, "the time is up")


def test_one_process_a_folder_and_foreign_sessions(tmp_path: Path) -> None:
    with (
        sessions.lock(tmp_path),
        pytest.raises(ConfigError, match="another autotuner works there"),
        sessions.lock(tmp_path),
    ):
        pass
    with sessions.lock(tmp_path):
        pass
    (tmp_path / "session.json").write_text("{")
    with pytest.raises(ConfigError, match="is no session of this version"):
        sessions.read(tmp_path / "session.json")
    (tmp_path / "session.json").write_text(json.dumps({"version": 99}))
    with pytest.raises(ConfigError, match="version 99"):
        sessions.read(tmp_path / "session.json")


def test_another_question_is_another_session(tmp_path: Path) -> None:
    path, ask = tmp_path / "session.json", functools.partial(sessions.open_session)
    state, resumed = ask(path, {"seed": 0}, Candidate())
    assert not resumed
    state.ended["tree"] = "why"
    state.save()
    assert ask(path, {"seed": 0}, Candidate())[1]
    assert ask(path, {"seed": 0}, Candidate())[0].ended == {"tree": "why"}
    assert not ask(path, {"seed": 1}, Candidate())[1]


def test_describe() -> None:
    assert describe(Candidate()) == "the shipped heuristic"
    assert describe(Candidate({"spec.width": 4, "engine.x": "y"})) == "x=y, width=4"


def test_a_known_answer_that_was_not_judged_in_time_is_judged_next_time(
    workers: Workers, tmp_path: Path
) -> None:
    said: list[str] = []
    poor = Candidate({"spec.budget": 1, "spec.builder": "accum_logp"})
    first = pilot(tmp_path, start=poor, say=said.append, trials=1)
    first.task = dataclasses.replace(first.task, gate_seconds=1e9)  # there is never time for it
    first._deadline = time.monotonic() + 60.0
    first._known()
    assert "known" not in first.session.ended  # not even measured
    first.session.known[Candidate().id] = 0.5
    first._known()
    assert any("no time is left to judge the shipped heuristic" in line for line in said), said
    assert "known" not in first.session.ended and first.session.incumbent == poor
    started = len(workers.started)
    again = pilot(tmp_path, start=poor, trials=1)
    again._known()
    assert again.session.incumbent.params == {} and "known" in again.session.ended
    assert sum(len(w.asked) for w in workers.started[started:]) == 0  # it is not measured again
