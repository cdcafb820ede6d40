"""Company in a batch changes nothing (cases.md 6, 11), and slots come and go while others run."""

import dataclasses

import numpy as np
import pytest

from jetspec_jax import SamplingParams
from jetspec_jax.state import IDLE, LENGTH, RUNNING
from tests.doubles import (
    PLAIN,
    PROMPTS,
    anti_oracle,
    engine,
    greedy,
    oracle,
    partly_right,
    poison,
    target_says,
)

BATCH = 4


def slots(spec, sampling=()):
    llm = engine()
    return llm.session(llm.plan_for(llm.resolve(spec), sampling), BATCH)


def admit(session, slot, prompt, tokens, *, speculate=True, sampling=None):
    sampling = sampling or greedy(tokens)
    session.admit(
        slot, list(prompt), len(prompt) + tokens, sampling.stop_token_ids, sampling, speculate
    )


def answer(session, slot, prompt):
    committed, _ = session.status()
    return tuple(session.ids(slot, len(prompt), int(committed[slot]))[0])


@pytest.mark.parametrize("drafter", [oracle, anti_oracle, lambda: partly_right(3)])
def test_slots_come_and_go(drafter):
    with slots(drafter()) as session:
        admit(session, 0, PROMPTS[0], 40)
        admit(session, 1, PROMPTS[1], 1)  # ends in round 1
        admit(session, 3, PROMPTS[3], 40, speculate=False)
        session.run(1)
        _, status = session.status()
        assert status.tolist() == [RUNNING, LENGTH, IDLE, RUNNING]
        session.run(2)
        admit(session, 2, PROMPTS[2], 30)  # at round 3
        admit(session, 1, PROMPTS[2], 20)  # a slot used before
        session.run(1)
        session.free(1)
        gone, _ = session.status()
        session.run(1)
        admit(session, 1, PROMPTS[0], 7)
        session.run(1_000)
        committed, status = session.status()
        assert status.tolist() == [LENGTH] * 4
        assert gone[1] > len(PROMPTS[2])
        for slot, prompt, tokens in (
            (0, PROMPTS[0], 40),
            (1, PROMPTS[0], 7),
            (2, PROMPTS[2], 30),
            (3, PROMPTS[3], 40),
        ):
            assert answer(session, slot, prompt) == target_says(prompt)[:tokens]
        alone = session.stats(3)
        assert (alone.rounds, alone.tau) == (40, 1.0)
        _, drafted = session.ids(3, len(PROMPTS[3]), int(committed[3]))
        assert not any(drafted)


def test_a_freed_slot_stands_still():
    with slots(oracle()) as session:
        admit(session, 0, PROMPTS[0], 40)
        admit(session, 1, PROMPTS[1], 40)
        session.run(2)
        session.free(0)
        before = session.status()[0][0], session.stats(0)
        session.run(1_000)
        assert (session.status()[0][0], session.stats(0)) == before
        assert session.status()[1].tolist() == [IDLE, LENGTH, IDLE, IDLE]
        assert answer(session, 1, PROMPTS[1]) == target_says(PROMPTS[1])[:40]


@pytest.mark.parametrize("drafter", [oracle, anti_oracle, lambda: partly_right(5)])
def test_batch_equals_solo(drafter):
    """Different lengths; more prompts than slots, so that slots are refilled while others run."""
    llm, spec = engine(), drafter()
    llm.generate(list(PROMPTS), greedy(2), spec=spec)
    poison(llm)
    lengths = (40, 3, 17, 30)
    results = llm.generate(list(PROMPTS), [greedy(n) for n in lengths], spec=spec)
    for prompt, n, result in zip(PROMPTS, lengths, results, strict=True):
        assert result.token_ids == target_says(prompt)[:n]
        (solo,) = llm.generate([prompt], greedy(n), spec=spec)
        assert (solo.accepted, solo.spec) == (result.accepted, result.spec)


def test_more_prompts_than_slots(monkeypatch):
    llm, spec = engine(), partly_right(5)
    monkeypatch.setattr(llm, "engine", dataclasses.replace(llm.engine, max_batch=BATCH))
    prompts = [PROMPTS[i % 4] for i in range(11)]
    lengths = [1 + (7 * i) % 23 for i in range(11)]
    results = llm.generate(prompts, [greedy(n) for n in lengths], spec=spec)
    assert [r.token_ids for r in results] == [
        target_says(p)[:n] for p, n in zip(prompts, lengths, strict=True)
    ]
    assert all(r.prompt_token_ids == p for r, p in zip(results, prompts, strict=True))


MIXED = (
    greedy(24),
    greedy(24, temperature=1.0, seed=3),
    greedy(24),
    greedy(24, temperature=0.7, top_p=0.9, seed=4),
)


def test_mixed_sampling_equals_solo():
    llm = engine()
    for spec in (partly_right(6), oracle()):
        results = llm.generate(list(PROMPTS), list(MIXED), spec=spec)
        for prompt, params, result in zip(PROMPTS, MIXED, results, strict=True):
            (solo,) = llm.generate([prompt], params, spec=PLAIN)
            assert result.token_ids == solo.token_ids
            if params.temperature == 0:
                assert result.token_ids == target_says(prompt)[:24]


def test_stop_strings_of_one_do_not_touch_others():
    llm, spec = engine(), oracle()
    says = target_says(PROMPTS[0])
    stop = next(chr(t) for t in says[3:] if 32 <= t < 127)
    end = says.index(ord(stop)) + 1
    params = [SamplingParams(max_tokens=40, ignore_eos=True, stop=(stop,)), *[greedy(40)] * 3]
    results = llm.generate(list(PROMPTS), params, spec=spec)
    assert results[0].token_ids == says[:end]
    for prompt, result in zip(PROMPTS[1:], results[1:], strict=True):
        assert result.token_ids == target_says(prompt)[:40]


def test_idle_slots_cost_no_rounds():
    with slots(oracle()) as session:
        admit(session, 2, PROMPTS[0], 12)
        session.run(1_000)
        assert np.asarray(session.state.counters.rounds).tolist() == [0, 0, 2, 0]
