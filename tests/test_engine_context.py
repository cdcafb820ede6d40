"""The end of the context (cases.md 2): at the capacity, with the tokens of plain decoding."""

import pytest

from jetspec_jax import SpecConfig
from jetspec_jax.errors import ConfigError, InputError
from jetspec_jax.testing import scripted
from tests.doubles import DEPTH, PLAIN, engine, greedy


def prompt_of(length):
    return tuple((7 * i + length) % 250 for i in range(length))


def test_decoding_ends_at_the_capacity():
    llm = engine()
    capacity = llm.capacity
    prompts = [
        prompt_of(capacity - left)
        for left in (1, 2, 3, DEPTH, DEPTH + 1, DEPTH + 2, 2 * DEPTH + 3, 40)
    ]
    plain = [llm.generate([p], greedy(10_000), spec=PLAIN)[0] for p in prompts]
    right = {p: [r.token_ids] for p, r in zip(prompts, plain, strict=True)}
    wrong = {p: [[(t + 1) % 260 for t in r.token_ids]] for p, r in zip(prompts, plain, strict=True)}
    # a drafter that goes on beyond the end
    beyond = {p: [[*r.token_ids, *[5] * DEPTH]] for p, r in zip(prompts, plain, strict=True)}
    for script in (right, wrong, beyond):
        spec = scripted(llm, script)
        for prompt, expected in zip(prompts, plain, strict=True):
            (result,) = llm.generate([prompt], greedy(10_000), spec=spec)
            assert result.token_ids == expected.token_ids
            assert len(prompt) + len(result.token_ids) == capacity
            assert result.finish_reason == expected.finish_reason == "length"


@pytest.mark.parametrize("beyond", [0, 1, 100])
def test_prompt_as_long_as_the_context(beyond):
    capacity = engine().capacity
    with pytest.raises(InputError) as error:
        engine().generate([prompt_of(capacity + beyond)], greedy(4), spec=PLAIN)
    assert str(capacity + beyond) in str(error.value)
    assert str(capacity) in str(error.value)
    assert "\n" not in str(error.value)


def test_depth_beyond_the_cache_slack_is_refused():
    """A round writes depth + 1 rows; more than the slack above the capacity would overwrite live
    keys.
    """
    with pytest.raises(ConfigError, match="depth=64"):
        engine().generate(
            [prompt_of(5)], greedy(4), spec=SpecConfig(mode="tree", drafter="lookup", depth=64)
        )
