"""At T > 0 a seed fixes the tokens (algorithm.md section 5): plain, any tree, any budget, any
drafter.
"""

import jax.numpy as jnp
import numpy as np
import pytest

from jetspec_jax import SpecConfig
from jetspec_jax.numerics import take_rows
from jetspec_jax.policy import Costs
from jetspec_jax.testing import scripted
from pallas_kernels import row_invariant_matmul as rim
from tests.doubles import PLAIN, PROMPTS, anti_oracle, engine, greedy, partly_right, target_says

TOKENS = 24
SETTINGS = {
    "warm": {"temperature": 0.7},
    "hot": {"temperature": 1.0},
    "top-p": {"temperature": 1.0, "top_p": 0.9},
    "top-k": {"temperature": 0.8, "top_k": 20},
    "min-p": {"temperature": 1.0, "min_p": 0.05},
    "all": {"temperature": 0.9, "top_k": 50, "top_p": 0.95, "min_p": 0.01},
}


def run(prompt, spec, **settings):
    (result,) = engine().generate([prompt], greedy(TOKENS, **settings), spec=spec)
    return result


@pytest.mark.parametrize("name", SETTINGS)
def test_same_seed_same_tokens(name):
    """A scripted tree that holds the sampled tokens, one that holds the greedy ones, and one that
    is wrong.
    """
    settings = SETTINGS[name]
    for prompt, seed in ((PROMPTS[0], 1), (PROMPTS[3], 2**32 - 1)):
        plain = run(prompt, PLAIN, seed=seed, **settings)
        right = scripted(engine(), {prompt: [list(plain.token_ids)]})
        sampled = run(prompt, right, seed=seed, **settings)
        assert sampled.token_ids == plain.token_ids
        assert sampled.spec.rounds == TOKENS / 6
        for spec in (partly_right(1), anti_oracle()):
            assert run(prompt, spec, seed=seed, **settings).token_ids == plain.token_ids
        assert run(prompt, PLAIN, seed=seed ^ 1, **settings).token_ids != plain.token_ids
        assert plain.token_ids != target_says(prompt)[:TOKENS]


def test_budget_and_drafter_do_not_show():
    """The head's trees (ranked with the target's own noise) merged with lookup, at every budget."""
    llm, settings = engine(), SETTINGS["top-p"]
    spec = SpecConfig(mode="auto", drafter="hybrid", budget=16)
    plan = llm.plan_for(llm.resolve(spec), [greedy(TOKENS, **settings)])
    expected = [run(p, PLAIN, seed=5, **settings).token_ids for p in PROMPTS]
    for index in range(len(plan.budgets)):
        verify = jnp.where(jnp.arange(len(plan.budgets)) == index, 1.0, 1e9).astype(jnp.float32)
        llm._costs[plan, 1] = Costs(verify, jnp.zeros((), jnp.float32))
        assert [run(p, spec, seed=5, **settings).token_ids for p in PROMPTS] == expected


def test_lowest_id_wins_ties(monkeypatch):
    """Every row of the LM head stands there twice, so that each choice is an exact tie."""
    llm = engine()
    half = 130
    rows = np.array(take_rows(llm._target.params["lm_head"], jnp.arange(260, dtype=jnp.int32)))
    rows[half:] = rows[:half]
    head = rim.pack(rows, "cpu") if llm._target.kernels == "cpu" else jnp.asarray(rows)
    monkeypatch.setitem(llm._target.params, "lm_head", head)
    plain = [llm.generate([p], greedy(TOKENS), spec=PLAIN)[0].token_ids for p in PROMPTS]
    assert max(max(ids) for ids in plain) < half
    right = scripted(llm, {p: [list(ids)] for p, ids in zip(PROMPTS, plain, strict=True)})
    for prompt, ids in zip(PROMPTS, plain, strict=True):
        assert llm.generate([prompt], greedy(TOKENS), spec=right)[0].token_ids == ids
    # drafting the other row of each tie is drafting something wrong
    other = scripted(
        llm, {p: [[t + half for t in ids]] for p, ids in zip(PROMPTS, plain, strict=True)}
    )
    for prompt, ids in zip(PROMPTS, plain, strict=True):
        (result,) = llm.generate([prompt], greedy(TOKENS), spec=other)
        assert (result.token_ids, result.spec.tau) == (ids, 1.0)
    # sampled and greedy sequences of one batch
    mixed = [greedy(TOKENS), greedy(TOKENS, temperature=1.0, seed=1)] * 2
    results = llm.generate(list(PROMPTS), mixed, spec=right)
    assert [results[i].token_ids for i in (0, 2)] == [plain[i] for i in (0, 2)]
