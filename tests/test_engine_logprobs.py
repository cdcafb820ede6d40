"""Log-probabilities (cases.md 12): those of the parent node's verify logits, with and without
speculation.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jetspec_jax.models import decoder
from jetspec_jax.session import Session
from tests.doubles import (
    PLAIN,
    PROMPTS,
    anti_oracle,
    engine,
    greedy,
    oracle,
    partly_right,
    target_says,
)

TOKENS = 20


@functools.cache
def reference():
    """[prompt][i] log-softmax rows from one forward over the whole text, without any cache."""
    llm = engine()
    full = jax.jit(
        lambda ids: decoder.forward_full(llm._target.params, llm.model_config, ids).logits
    )
    out = []
    for prompt in PROMPTS:
        ids = [*prompt, *target_says(prompt)[:TOKENS]]
        logits = full(jnp.asarray([ids + [0] * (64 - len(ids))], jnp.int32))[0]
        rows = np.asarray(jax.nn.log_softmax(logits.astype(jnp.float32), -1))
        out.append(rows[len(prompt) - 1 : len(ids) - 1])
    return out


def check(result, rows, k):
    assert len(result.logprobs) == len(result.token_ids)
    for token, entry, row in zip(result.token_ids, result.logprobs, rows, strict=False):
        assert entry.token_id == token
        assert entry.logprob == pytest.approx(row[token], abs=1e-4)
        best = np.argsort(-row, kind="stable")[:k]
        assert [t for t, _ in entry.top] == best.tolist()
        np.testing.assert_allclose([p for _, p in entry.top], row[best], atol=1e-4)


@pytest.mark.parametrize("drafter", [lambda: PLAIN, oracle, anti_oracle, lambda: partly_right(2)])
def test_against_one_forward(drafter):
    """First, accepted and bonus tokens; a wrong row would be wrong by nats."""
    spec = drafter()
    for prompt, rows in zip(PROMPTS, reference(), strict=True):
        (result,) = engine().generate([prompt], greedy(TOKENS, logprobs=3), spec=spec)
        assert result.token_ids == target_says(prompt)[:TOKENS]
        check(result, rows, 3)


@pytest.mark.parametrize("drafter", [oracle, anti_oracle, lambda: partly_right(4)])
def test_equal_with_and_without_speculation(drafter):
    spec = drafter()
    for prompt in PROMPTS:
        (plain,) = engine().generate([prompt], greedy(TOKENS, logprobs=3), spec=PLAIN)
        (tree,) = engine().generate([prompt], greedy(TOKENS, logprobs=3), spec=spec)
        for a, b in zip(plain.logprobs, tree.logprobs, strict=True):
            assert a.token_id == b.token_id
            assert a.logprob == pytest.approx(b.logprob, abs=1e-5)
            assert [t for t, _ in a.top] == [t for t, _ in b.top]
            np.testing.assert_allclose([p for _, p in a.top], [p for _, p in b.top], atol=1e-5)


def test_streamed_and_cut_by_a_stop():
    llm, spec, prompt = engine(), oracle(), PROMPTS[0]
    says = target_says(prompt)
    stop = says[8]
    n = says.index(stop) + 1
    params = greedy(TOKENS, logprobs=3, stop_token_ids=(stop,))
    (whole,) = llm.generate([prompt], params, spec=spec)
    *_, last = llm.stream(prompt, params, spec=spec)
    assert whole.token_ids == last.result.token_ids == says[:n]
    assert whole.logprobs == last.result.logprobs
    check(whole, reference()[0], 3)


def test_not_asked_for():
    (result,) = engine().generate([PROMPTS[0]], greedy(4), spec=PLAIN)
    assert result.logprobs is None


def test_sampled_tokens_report_the_unwarped_law():
    """Temperature and filters choose the token; its log-probability is the model's."""
    (plain,) = engine().generate(
        [PROMPTS[0]], greedy(1, logprobs=3, temperature=1.0, seed=2), spec=PLAIN
    )
    row = reference()[0][0]
    check(plain, [row], 3)


def test_asked_for_by_one_of_two(monkeypatch):
    """The other goes on without, in a program that was built before the clock ran."""
    llm, compiled_in_a_round = engine(), []
    run = Session.run

    def watched(self, rounds):
        before = len(llm.programs)
        run(self, rounds)
        compiled_in_a_round.append(len(llm.programs) - before)

    monkeypatch.setattr(Session, "run", watched)
    one, other = llm.generate(list(PROMPTS[:2]), [greedy(3, logprobs=3), greedy(20)], spec=PLAIN)
    check(one, reference()[0], 3)
    assert (other.token_ids, other.logprobs) == (target_says(PROMPTS[1])[:20], None)
    assert compiled_in_a_round
    assert not any(compiled_in_a_round)
