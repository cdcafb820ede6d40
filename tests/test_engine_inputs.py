"""Inputs that cannot be served (cases.md 3): a reason, and an engine that goes on as before."""

import numpy as np
import pytest

from jetspec_jax import SpecConfig
from jetspec_jax.errors import ConfigError, InputError, JetSpecError
from tests.doubles import PLAIN, PROMPTS, engine, greedy, target_says

BAD = {
    "empty text": lambda llm: llm.generate("", greedy(4), spec=PLAIN),
    "spaces": lambda llm: llm.generate(" ", greedy(4), spec=PLAIN),
    "no prompts": lambda llm: llm.generate([], greedy(4), spec=PLAIN),
    "list with an empty text": lambda llm: llm.generate([""], greedy(4), spec=PLAIN),
    "no ids": lambda llm: llm.generate([[]], greedy(4), spec=PLAIN),
    "one bad of two": lambda llm: llm.generate([PROMPTS[0], []], greedy(4), spec=PLAIN),
    "id outside": lambda llm: llm.generate([[3, 260]], greedy(4), spec=PLAIN),
    "negative id": lambda llm: llm.generate([[-1]], greedy(4), spec=PLAIN),
    "no messages": lambda llm: llm.chat([], greedy(4), spec=PLAIN),
    "no messages in one of many": lambda llm: llm.chat([[]], greedy(4), spec=PLAIN),
    "stream of nothing": lambda llm: llm.stream("", greedy(4), spec=PLAIN),
    "stream of no ids": lambda llm: llm.stream([], greedy(4), spec=PLAIN),
    "settings for another number": lambda llm: llm.generate(
        [PROMPTS[0]], [greedy(4)] * 2, spec=PLAIN
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_refused_with_a_reason_then_a_normal_request(case):
    llm = engine()
    expected = target_says(PROMPTS[0])[:8]
    programs, caches = len(llm.programs), sorted(llm._caches)
    with pytest.raises(InputError) as error:
        BAD[case](llm)
    assert str(error.value)
    assert "\n" not in str(error.value)
    (result,) = llm.generate([PROMPTS[0]], greedy(8), spec=PLAIN)
    assert result.token_ids == expected
    assert (len(llm.programs), sorted(llm._caches)) == (programs, caches)


def test_one_prompt_and_many():
    llm, expected = engine(), target_says(PROMPTS[0])[:6]
    text = bytes(PROMPTS[0]).decode()
    for prompts in (text, [text], list(PROMPTS[0]), np.array(PROMPTS[0]), [np.array(PROMPTS[0])]):
        (result,) = llm.generate(prompts, greedy(6), spec=PLAIN)
        assert result.token_ids == expected
        assert result.prompt_token_ids == PROMPTS[0]


@pytest.mark.parametrize(
    "spec",
    [
        SpecConfig(mode="chain", builder="top2gap"),
        SpecConfig(depth=6),
        SpecConfig(drafter="scripted"),
    ],
)
def test_settings_that_cannot_be_honoured(spec, monkeypatch):
    monkeypatch.setattr(engine(), "script", None)
    with pytest.raises(ConfigError):
        engine().generate([PROMPTS[0]], greedy(4), spec=spec)


def test_a_failed_round_leaves_a_usable_engine(monkeypatch):
    """The session's caches are donated to the program that fails: they must not be handed on."""
    llm = engine()
    expected = target_says(PROMPTS[0])[:8]
    get = llm.programs.get

    def broken(name, plan, batch, *args):
        program = get(name, plan, batch, *args)
        if name != "rounds":
            return program

        def run(params, state, rounds):
            program(params, state, rounds)  # takes the state's buffers
            raise JetSpecError("the device went away")

        return run

    monkeypatch.setattr(llm.programs, "get", broken)
    with pytest.raises(JetSpecError, match="went away"):
        llm.generate([PROMPTS[0]], greedy(8), spec=PLAIN)
    monkeypatch.undo()
    (result,) = llm.generate([PROMPTS[0]], greedy(8), spec=PLAIN)
    assert result.token_ids == expected


@pytest.mark.parametrize("prompts", [None, 7, {"role": "user"}])
def test_prompts_of_another_type(prompts):
    with pytest.raises(InputError, match="is no text and no list"):
        engine().generate(prompts)
