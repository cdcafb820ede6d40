"""The gate against an engine whose faults are known (fake_engine.py)."""

from __future__ import annotations

import dataclasses
import math

import pytest

from jetspec_jax.autotune.candidate import Candidate
from jetspec_jax.autotune.gate import judge
from jetspec_jax.autotune.prompts import Prompt, draw, split
from jetspec_jax.autotune.tally import Effort
from jetspec_jax.autotune.verdict import (
    Verdict,
    miss_probability,
    positions_for,
    rate_bound,
)
from jetspec_jax.errors import ConfigError, InputError

FACTORY = "tests.autotune.fake_engine:load"
SUITE = tuple(
    Prompt(f"p{i}", ({"role": "user", "content": f"question number {i}"},)) for i in range(120)
)
SMALL = Effort(positions=600, least=400, pairs=8, tokens=24, logits=3, sampled=4)


def fake(**faults) -> Candidate:
    return Candidate({f"kernel.fake.{name}": value for name, value in faults.items()})


def gate(candidate: Candidate, incumbent: Candidate | None = None, **changes) -> Verdict:
    given = {"suite": SUITE, "seed": 1, "effort": SMALL, "factory": FACTORY, "budget_seconds": 60}
    return judge(incumbent or Candidate(), candidate, **{**given, **changes})


def test_a_faster_candidate_with_equal_tokens_and_bits_is_accepted():
    verdict = gate(fake(SPEED=1.5))
    assert verdict.accepted and verdict.tokens_identical and verdict.bits_identical
    assert verdict.level == "bitwise" and verdict.mismatches == ()
    assert verdict.positions >= SMALL.positions
    assert verdict.speed_ratio_low is not None and verdict.speed_ratio_low > 1.3
    assert verdict.pairs == SMALL.pairs and verdict.clock == "engine"
    assert verdict.sampled_tokens == 4 * 12 and verdict.rows > verdict.positions
    assert Verdict.from_json(verdict.to_json()) == verdict
    page = verdict.text()
    assert page.startswith("ACCEPTED") and "bitwise" in page and f"{verdict.positions}" in page


def test_a_batch_deployment_is_judged_in_its_batch():
    verdict = gate(fake(SPEED=1.5), batch=4)
    assert verdict.accepted and verdict.batch == 4


def test_a_slower_candidate_is_refused_before_the_long_part():
    verdict = gate(fake(SPEED=0.8))
    assert not verdict.accepted and verdict.reason.startswith("slower")
    assert verdict.tokens_identical and verdict.positions < SMALL.positions


def test_as_fast_as_before_is_not_surely_faster():
    verdict = gate(fake(SPEED=1.001))
    assert not verdict.accepted and "below 1" in verdict.reason


def test_a_flipped_token_is_refused_with_prompt_position_and_margin():
    verdict = gate(fake(SPEED=3.0, FLIP=0.01))
    assert not verdict.accepted and not verdict.tokens_identical
    assert verdict.level == "none"
    prompt, position, margin = verdict.mismatches[0]
    assert prompt in verdict.prompts and 0 <= position < SMALL.tokens
    assert margin is not None and margin < 0.01
    for part in (prompt, f"position {position}", f"{margin:.6g}"):
        assert part in verdict.reason and part in verdict.text()
    assert verdict.counter_example == {"prompt": prompt, "position": position, "margin": margin}


@pytest.mark.parametrize("where", ["generate", "force", "state", "batch"])
def test_a_fault_in_any_way_of_decoding_is_refused(where):
    verdict = gate(fake(SPEED=3.0, FLIP=0.05, ON=where))
    assert not verdict.accepted and not verdict.tokens_identical


def test_a_fault_of_sampled_answers_is_refused():
    verdict = gate(fake(SPEED=3.0, FLIP=0.3, ON="sampled"))
    assert not verdict.accepted and "sampled answer" in verdict.reason
    assert verdict.mismatches[0][2] is None


def test_an_answer_that_ends_early_is_refused():
    verdict = gate(fake(SPEED=3.0, EOS=1))
    assert not verdict.accepted and not verdict.tokens_identical


def test_another_kv_row_is_refused_although_every_token_is_right():
    verdict = gate(fake(SPEED=3.0, ROWS=11))
    assert not verdict.accepted and verdict.tokens_identical
    assert verdict.bits_identical is False and "KV row 11" in verdict.reason
    assert verdict.level == "none"


def test_other_numbers_are_refused_at_level_bitwise_and_certified_within_the_noise():
    small, large = fake(SPEED=2.0, NOISE=1e-6), fake(SPEED=2.0, NOISE=1e-2)
    refused = gate(small)
    assert not refused.accepted and "logits" in refused.reason and refused.tokens_identical
    certified = gate(small, level="certified")
    assert certified.accepted and certified.level == "certified"
    assert certified.noise is not None and certified.deviation is not None
    assert certified.deviation <= certified.noise
    noisy = gate(large, level="certified")
    assert not noisy.accepted and "noise" in noisy.reason


def test_equal_bits_are_bitwise_whatever_was_asked():
    assert gate(fake(SPEED=2.0), level="certified").level == "bitwise"


@pytest.mark.parametrize("kind", ["crash", "nonsense", "short"])
def test_a_candidate_that_fails_is_refused(kind):
    verdict = gate(fake(FAIL=kind))
    assert not verdict.accepted and verdict.reason.startswith("the candidate failed")


def test_a_candidate_that_hangs_is_refused_within_the_budget():
    verdict = gate(fake(FAIL="hang"), budget_seconds=3)
    assert not verdict.accepted and verdict.seconds < 15


def test_too_few_positions_are_no_acceptance():
    verdict = gate(fake(SPEED=2.0), suite=SUITE[:30])
    assert not verdict.accepted and "positions were compared" in verdict.reason


def test_the_incumbent_is_what_the_speed_is_measured_against():
    verdict = gate(fake(SPEED=1.5), incumbent=fake(SPEED=2.0))
    assert not verdict.accepted and verdict.reason.startswith("slower")


def test_prompts_are_drawn_after_the_candidate_and_never_from_the_explorers_half():
    seen, unseen = split(SUITE)
    assert not {p.id for p in seen} & {p.id for p in unseen}
    assert len(seen) + len(unseen) == len(SUITE)
    one, two = gate(fake(SPEED=2.0)), gate(fake(SPEED=2.1))
    assert set(one.prompts) <= {p.id for p in unseen}
    assert one.prompts != two.prompts  # same seed, another candidate
    fresh = gate(fake(SPEED=2.0), seed=None), gate(fake(SPEED=2.0), seed=None)
    assert fresh[0].nonce != fresh[1].nonce and fresh[0].prompts != fresh[1].prompts


def test_a_text_is_in_one_half_however_it_is_written():
    twice = [
        Prompt("a", ({"role": "user", "content": "Why  is the sky blue?"},)),
        Prompt("b", ({"role": "user", "content": "why is the\nsky blue?"},)),
    ]
    seen, unseen = split([*twice, *SUITE])
    assert len([p for p in (*seen, *unseen) if p.id in "ab"]) == 1


def test_no_prompts_and_wrong_arguments_are_one_line():
    with pytest.raises(InputError, match="more prompts"):
        draw((), "c", "n")
    for changes in ({"level": "roughly"}, {"batch": 0}):
        with pytest.raises(ConfigError):
            gate(fake(), **changes)
    with pytest.raises(ConfigError, match="patched tree"):
        gate(dataclasses.replace(fake(), patch="diff"))


def test_the_arithmetic_of_missing_a_fault():
    assert positions_for(0.05) == math.ceil(math.log(0.05) / math.log(1 - 1 / 2000)) == 5990
    assert miss_probability(positions_for(0.01)) <= 0.01 < miss_probability(positions_for(0.01) - 1)
    assert rate_bound(3000) == pytest.approx(3 / 3000, rel=0.01)  # the rule of three
    assert Effort().positions == positions_for(0.01) and Effort().least == positions_for(0.05)


def test_a_fault_once_in_2000_tokens_is_caught_at_the_default_effort():
    effort = dataclasses.replace(Effort(), tokens=160)
    verdict = gate(fake(SPEED=2.0, FLIP=1 / 2000), effort=effort, suite=SUITE * 1, seed=3)
    assert not verdict.accepted and verdict.mismatches
    assert all(m[2] is not None and m[2] < 1 / 2000 for m in verdict.mismatches)
