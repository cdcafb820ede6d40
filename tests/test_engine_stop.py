"""Ends inside an accepted block (cases.md 1): ids, text, reason, counts and log-probabilities
agree.
"""

import dataclasses

import pytest

from jetspec_jax import SamplingParams
from jetspec_jax.errors import ConfigError
from jetspec_jax.testing import EOS, scripted
from tests.doubles import (
    DEPTH,
    PLAIN,
    PROMPTS,
    anti_oracle,
    engine,
    first_ends,
    greedy,
    oracle,
    partly_right,
    target_says,
    text_of,
)

DRAFTERS = {
    "oracle": oracle,
    "anti-oracle": anti_oracle,
    "partly": lambda: partly_right(0),
    "plain": lambda: PLAIN,
}


def first_seen(ids):
    """Index of the first occurrence of each id."""
    return {token: ids.index(token) for token in dict.fromkeys(ids)}


def check(result, ids, reason, stop):
    assert result.token_ids == ids
    assert (result.finish_reason, result.stop) == (reason, stop)
    assert len(result.accepted) == len(ids) == result.spec.delivered == result.timings.tokens
    assert result.text == text_of(ids[:-1] if reason == "stop" else ids)


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_earliest_of_stop_id_and_cap(drafter):
    spec, prompt = DRAFTERS[drafter](), PROMPTS[0]
    says = target_says(prompt)
    early = [token for token, at in first_seen(says).items() if at <= DEPTH + 2]
    assert len(early) >= 4  # else the cases below would all be one
    for stop in early:
        for most in (1, 2, 3, 4, 5, 50):
            (result,) = engine().generate([prompt], greedy(most, stop_token_ids=(stop,)), spec=spec)
            check(result, *first_ends(says, (stop,), most))


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_earliest_of_several_stop_ids(drafter):
    says = target_says(PROMPTS[1])
    stops = tuple(first_seen(says))[2:6][::-1]
    (result,) = engine().generate(
        [PROMPTS[1]], greedy(50, stop_token_ids=stops), spec=DRAFTERS[drafter]()
    )
    check(result, *first_ends(says, stops, 50))


@pytest.mark.parametrize("drafter", ["oracle", "plain"])
def test_eos_of_the_model(drafter, monkeypatch):
    """The end token counts unless the request ignores it; its text is not shown."""
    llm, prompt, spec = engine(), PROMPTS[0], DRAFTERS[drafter]()
    says = target_says(prompt)
    end = says[3]
    monkeypatch.setattr(llm, "model_config", dataclasses.replace(llm.model_config, eos_ids=(end,)))
    (result,) = llm.generate([prompt], SamplingParams(max_tokens=50), spec=spec)
    check(result, *first_ends(says, (end,), 50))
    (result,) = llm.generate([prompt], SamplingParams(max_tokens=50, ignore_eos=True), spec=spec)
    check(result, says[:50], "length", None)


def test_rejected_end_token_is_no_end():
    prompt = PROMPTS[0]
    says = target_says(prompt)
    assert EOS not in says
    drafts = [[EOS], [*says[:2], EOS], [*says[:4], EOS, EOS]]
    spec = scripted(engine(), {prompt: drafts})
    (result,) = engine().generate([prompt], SamplingParams(max_tokens=50), spec=spec)
    check(result, says[:50], "length", None)


def completes(ids, stop):
    """Number of ids after which the text holds `stop`, and the text before it; reference by whole
    decodes.
    """
    for n in range(1, len(ids) + 1):
        text = text_of(ids[:n])
        if stop in text:
            return n, text[: text.index(stop)]
    return None


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_stop_string_inside_a_block(drafter):
    llm, spec, tried = engine(), DRAFTERS[drafter](), 0
    for prompt in PROMPTS:
        says = target_says(prompt)
        for at in range(12):
            for size in (1, 2, 3):
                piece = says[at : at + size]
                if not all(32 <= i < 127 for i in piece):
                    continue
                stop = bytes(piece).decode()
                n, text = completes(says, stop)
                (result,) = llm.generate([prompt], greedy(50, stop=("never", stop)), spec=spec)
                assert (result.token_ids, result.text) == (says[:n], text)
                assert (result.finish_reason, result.stop) == ("stop", stop)
                assert result.spec.delivered == n
                tried += 1
    assert tried >= 8


def test_stop_string_before_stop_id_in_one_block():
    """Both lie in the block of the first round; the earlier wins, whichever kind it is."""
    llm, spec = engine(), oracle()
    for prompt in PROMPTS:
        says = target_says(prompt)
        seen = first_seen(says)
        for text_at, id_at in ((0, 3), (3, 0), (1, 4), (4, 1)):
            if (
                not 32 <= says[text_at] < 127
                or seen[says[text_at]] != text_at
                or seen[says[id_at]] != id_at
            ):
                continue
            params = greedy(50, stop=(chr(says[text_at]),), stop_token_ids=(says[id_at],))
            (result,) = llm.generate([prompt], params, spec=spec)
            assert result.token_ids == says[: min(text_at, id_at) + 1]
            assert result.stop == (chr(says[text_at]) if text_at < id_at else says[id_at])


def test_one_token():
    for prompt in PROMPTS:
        for spec in (oracle(), PLAIN):
            (result,) = engine().generate([prompt], greedy(1), spec=spec)
            check(result, target_says(prompt)[:1], "length", None)


def test_no_tokens_is_refused():
    with pytest.raises(ConfigError, match="max_tokens=0"):
        SamplingParams(max_tokens=0)


def test_too_many_stop_ids_are_refused():
    with pytest.raises(ConfigError, match="17 stop ids"):
        engine().generate([PROMPTS[0]], greedy(4, stop_token_ids=tuple(range(17))), spec=PLAIN)
