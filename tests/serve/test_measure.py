"""The arithmetic of a benchmark on numbers small enough to check by hand."""

from __future__ import annotations

from typing import Any

import pytest

from jetspec_jax.config import SamplingParams, SpecConfig
from jetspec_jax.stats import SpecStats
from serve.measure import Row, Sample, bootstrap, first_difference, measure, ratio, summarise
from serve.suites import SuitePrompt
from tests.serve.fake_llm import FakeLLM

NO_ROUNDS = SpecStats()


def sample(
    tokens: int, decode_s: float, stats: SpecStats = NO_ROUNDS, group_s: float | None = None
) -> Sample:
    ids = tuple(range(tokens))
    return Sample(ids, decode_s, 0.5, 0.25, 0.0, decode_s if group_s is None else group_s, stats)


def row(name: str, group: int, plain: Sample, spec: Sample) -> Row:
    return Row(
        "s",
        name,
        group,
        7,
        plain,
        {"spec": spec},
        {"spec": first_difference(plain.token_ids, spec.token_ids)},
    )


def test_summary_of_two_prompts() -> None:
    a = SpecStats(4, (1, 1, 2), (4, 3), 12, 10)  # 5 accepted in 4 rounds
    b = SpecStats(6, (6, 0, 0), (6, 2), 18, 7)  # 0 accepted in 6 rounds
    rows = [
        row("a", 0, sample(11, 4.0), sample(11, 1.0, a)),
        row("b", 1, sample(7, 2.0), sample(7, 2.0, b)),
    ]
    got = summarise(rows, "spec")
    assert got["speedup"] == pytest.approx(6.0 / 3.0)
    assert got["speedup_of_medians"] == pytest.approx(3.0 / 1.5)
    assert got["speedup_min"] == pytest.approx(1.0)
    assert got["tau"] == pytest.approx(1 + 5 / 10)
    assert (got["tau_min"], got["tau_max"]) == (pytest.approx(1.0), pytest.approx(2.25))
    assert got["acceptance"] == [pytest.approx(3 / 10), pytest.approx(2 / 5)]
    assert got["accepted_hist"] == [7, 1, 2] and got["rounds"] == 10
    assert got["nodes_per_round"] == pytest.approx(3.0)
    assert got["plain_tok_s"] == pytest.approx((11 + 7) / 6.0)
    assert got["spec_tok_s"] == pytest.approx(18 / 3.0)
    assert got["round_ms"] == pytest.approx(300.0)
    assert (
        got["identical"] is True
        and got["identical_share"] == 1.0
        and got["first_different"] is None
    )


def test_a_batch_is_timed_once() -> None:
    rows = [
        row("a", 0, sample(5, 1.0, group_s=4.0), sample(5, 0.5, group_s=2.0)),
        row("b", 0, sample(9, 4.0, group_s=4.0), sample(9, 2.0, group_s=2.0)),
    ]
    got = summarise(rows, "spec")
    assert got["plain_decode_s"] == 4.0 and got["spec_decode_s"] == 2.0
    assert (
        got["speedup"] == 2.0 and got["speedup_interval"] is None
    )  # one batch says nothing about the spread
    assert got["tau"] is None and got["round_ms"] is None


def test_difference_is_found_and_named() -> None:
    plain, spec = sample(5, 1.0), sample(5, 1.0)
    other = Sample((0, 1, 9, 3, 4), 1.0, 0.0, 0.0, 0.0, 1.0, NO_ROUNDS)
    got = summarise([row("good", 0, plain, spec), row("bad", 1, plain, other)], "spec")
    assert got["identical"] is False and got["identical_share"] == 0.5
    assert got["first_different"] == {"id": "bad", "token": 2}


def test_first_difference() -> None:
    assert first_difference([1, 2, 3], [1, 2, 3]) is None
    assert first_difference([1, 2, 3], [1, 5, 3]) == 1
    assert first_difference([1, 2, 3], [1, 2]) == 2
    assert first_difference([], [4]) == 0
    assert first_difference([], []) is None


def test_ratio_of_nothing() -> None:
    assert ratio(1.0, 0.0) is None and ratio(0.0, 1.0) is None and ratio(3.0, 2.0) == 1.5


def test_bootstrap_brackets_and_is_deterministic() -> None:
    plain, spec = [2.0, 2.2, 1.8, 2.1], [1.0, 1.3, 0.8, 1.0]
    low, high = bootstrap(plain, spec) or (0.0, 0.0)
    assert low < sum(plain) / sum(spec) < high
    assert bootstrap(plain, spec) == (low, high)
    same = bootstrap([2.0] * 5, [1.0] * 5)
    assert same == (pytest.approx(2.0), pytest.approx(2.0))
    assert bootstrap([1.0], [1.0]) is None and bootstrap([0.0, 0.0], [1.0, 1.0]) is None


PROMPTS = [SuitePrompt(str(i), ({"role": "user", "content": "x" * (i + 1)},)) for i in range(3)]
VARIANTS = {"spec": SpecConfig()}


def test_order_alternates_and_pairs_are_complete() -> None:
    llm = FakeLLM()
    rows = measure(llm, "s", PROMPTS, VARIANTS, SamplingParams(max_tokens=9))
    assert llm.calls == ["plain", "spec", "spec", "plain", "plain", "spec"]
    assert [r.id for r in rows] == ["0", "1", "2"]
    assert all(r.speedup("spec") == pytest.approx(2.0) and r.identical("spec") for r in rows)
    llm = FakeLLM()
    measure(llm, "s", PROMPTS[:1], VARIANTS, SamplingParams(max_tokens=9), repeat=2)
    assert llm.calls == ["plain", "spec", "spec", "plain"]


def test_batches_and_progress() -> None:
    llm, done = FakeLLM(), []
    rows = measure(
        llm, "s", PROMPTS, VARIANTS, SamplingParams(max_tokens=9), batch=2, done=done.append
    )
    assert llm.batches == [2, 2, 1, 1] and done == [2, 1]
    assert [r.group for r in rows] == [0, 0, 1]


def test_a_difference_in_any_repeat_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    class Flaky(FakeLLM):
        def generate(self, *args: Any, **kwargs: Any) -> list[Any]:
            FakeLLM.differ_at = 3 if len(self.calls) == 2 else None  # the second speculative run
            return super().generate(*args, **kwargs)

    monkeypatch.setattr(FakeLLM, "differ_at", None)
    (got,) = measure(Flaky(), "s", PROMPTS[:1], VARIANTS, SamplingParams(max_tokens=9), repeat=2)
    assert got.first_difference["spec"] == 3
