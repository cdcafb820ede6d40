"""Paired measurement: turns, processes, drift, wrong tokens, crashes."""

from __future__ import annotations

import math

import pytest

from jetspec_jax.autotune.candidate import Candidate
from jetspec_jax.autotune.pairs import Figures, Pairs, centre, fixed, overrides
from jetspec_jax.config import SamplingParams
from jetspec_jax.errors import TokensDiffer, WorkerError
from tests.autotune.fakes import FakeWorker

Workers = type[FakeWorker]
PROMPTS = [[10 * i] for i in range(6)]
WIDE = Candidate({"spec.width": 4})
LEAD = Candidate({"kernel.tree_attention.LEAD": 8, "spec.width": 4})


def pairs(reference: Candidate | None = None, batch: int = 1) -> Pairs:
    return Pairs(
        FakeWorker, reference or Candidate(), PROMPTS, sampling=SamplingParams(), batch=batch
    )


def test_ratios_are_against_the_reference_in_turn(workers: Workers) -> None:
    with pairs() as measured:
        got = list(measured.ratios(WIDE))
    assert got == pytest.approx([math.log(1.2)] * 6)
    assert len(workers.started) == 1  # both in one process
    asked = ["spec.width" in p for p in workers.started[0].asked]
    assert asked == [False, True, True, False] * 3  # A B, B A
    assert workers.started[0].closed
    both = Figures(rounds=12, nodes=48)
    assert measured.figures[WIDE.id] == {"candidate": both, "reference": both}


def test_a_machine_that_slows_down_favours_nobody(
    workers: Workers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workers, "on_call", staticmethod(lambda call: 1.0 + 0.1 * call))
    with pairs() as measured:
        got = list(measured.ratios(WIDE))
    assert math.exp(math.fsum(got) / len(got)) == pytest.approx(1.2, rel=0.01)


def test_what_is_fixed_at_load_has_its_own_process(workers: Workers) -> None:
    assert fixed(LEAD).params == {"kernel.tree_attention.LEAD": 8}
    assert overrides(LEAD) == {"spec.width": 4}
    with pairs() as measured:
        measured.prepare([LEAD, WIDE])
        assert sorted(len(w.candidate.params) for w in workers.started) == [0, 1]
        assert list(measured.ratios(LEAD)) == pytest.approx([math.log(1.2 / 0.9)] * 6)
        assert len(workers.started) == 2
        measured.prepare([WIDE])  # the kernel's process is not needed any more
        assert [w.closed for w in workers.started if w.candidate.params] == [True]
        assert len(list(measured.ratios(LEAD))) == 6  # and is started again when it is
    assert all(w.closed for w in workers.started)


def test_a_changed_token_ends_the_trial(workers: Workers, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "wrong", staticmethod(lambda p: p.get("spec.width") == 4))
    with pairs() as measured, pytest.raises(TokensDiffer, match="prompt 0 of the search: token 2"):
        list(measured.ratios(WIDE))


def test_a_process_that_dies_is_an_error_and_the_next_trial_has_another(
    workers: Workers, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pairs() as measured:
        values = measured.ratios(WIDE)
        next(values)
        workers.started[0].close()
        with pytest.raises(WorkerError):
            next(values)
        assert len(list(measured.ratios(WIDE))) == 6
        assert len(workers.started) == 2
        monkeypatch.setattr(workers, "dies", staticmethod(lambda p: "kernel." in str(p)))
        measured.prepare([LEAD])  # fails later, where it is measured
        with pytest.raises(WorkerError, match="signal 11"):
            list(measured.ratios(LEAD))
        assert len(list(measured.ratios(WIDE))) == 6


def test_batches_are_timed_whole(workers: Workers) -> None:
    with pairs(batch=2) as measured:
        assert measured.groups == 3
        assert len(list(measured.ratios(WIDE))) == 3
        assert len(list(measured.ratios(WIDE, 2))) == 1


def test_the_centre_is_hardly_moved_by_one_disturbed_value() -> None:
    assert centre([0.1]) == 0.1
    assert centre([0.1, 0.2]) == pytest.approx(0.15)
    calm = [0.10, 0.12, 0.09, 0.11, 0.10, 0.10, 0.11]
    assert centre([*calm, 3.0]) == pytest.approx(centre(calm), abs=0.01)
