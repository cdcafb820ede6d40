"""Speculation changes no token (cases.md 5, 7, 9): fp32, any builder, budget, depth and drafter."""

import jax.numpy as jnp
import numpy as np
import pytest

from jetspec_jax import SpecConfig
from jetspec_jax.config import BUILDERS
from jetspec_jax.policy import Costs
from jetspec_jax.testing import tiny_llm, with_budget
from tests.doubles import (
    DEPTH,
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

TOKENS = 40
HISTOGRAM = tuple(tuple(0.5 / (1 + depth + rank) for rank in range(8)) for depth in range(DEPTH))


def same_as_plain(spec, tokens=TOKENS):
    llm = engine()
    results = [llm.generate([p], greedy(tokens), spec=spec)[0] for p in PROMPTS]
    for prompt, result in zip(PROMPTS, results, strict=True):
        assert result.token_ids == target_says(prompt)[:tokens]
        assert result.text == llm.tokenizer.decode(result.token_ids)
    return results


def test_oracle_is_accepted_whole():
    for result in same_as_plain(oracle()):
        assert result.spec.rounds == -(-TOKENS // (DEPTH + 1))
        assert result.spec.accepted == TOKENS - result.spec.rounds


def test_anti_oracle_is_never_accepted():
    for result in same_as_plain(anti_oracle()):
        assert result.spec.tau == 1.0
        assert not any(result.accepted)


@pytest.mark.parametrize("seed", range(6))
def test_paths_anywhere_in_memory(seed):
    """Three continuations, partly right: accepted nodes are seldom the first in memory."""
    poison(engine())
    spec = partly_right(seed)
    llm = engine()
    for prompt in PROMPTS:
        (result,) = llm.generate([prompt], greedy(TOKENS), spec=spec)
        assert result.token_ids == target_says(prompt)[:TOKENS]
        assert 1.0 < result.spec.tau < DEPTH + 1


@pytest.mark.parametrize("budget,depth", [(2, 1), (16, 15)])
def test_other_depths(budget, depth):
    for drafter in (oracle, anti_oracle, lambda: partly_right(7)):
        spec = with_budget(drafter(), budget=budget, depth=depth)
        for result in same_as_plain(spec):
            assert result.spec.depth == depth
            assert result.spec.nodes <= budget * result.spec.rounds


def forced(llm, spec, budget):
    """Makes rounds of an auto `spec` take `budget` nodes; the costs are arguments, so one program
    serves all.
    """
    plan = llm.plan_for(llm.resolve(spec), [greedy(TOKENS)])
    verify = jnp.asarray(np.where(np.asarray(plan.budgets) == budget, 1.0, 1e9), jnp.float32)
    llm._costs[plan, 1] = Costs(verify, jnp.zeros((), jnp.float32))


@pytest.mark.parametrize(
    "drafter,builder", [*(("hybrid", b) for b in BUILDERS), ("head", "exact"), ("lookup", "exact")]
)
def test_every_builder_and_budget(drafter, builder):
    llm = engine()
    histogram = HISTOGRAM if builder == "depth_rank_histogram" else None
    spec = SpecConfig(mode="auto", drafter=drafter, builder=builder, budget=16, histogram=histogram)
    budgets = llm.budgets(llm.resolve(spec))
    assert (budgets[0], budgets[-1]) == (1, 16)
    for budget in budgets:
        forced(llm, spec, budget)
        for result in same_as_plain(spec):
            assert result.spec.rounds <= result.spec.nodes <= budget * result.spec.rounds


def test_chain_mode():
    for result in same_as_plain(SpecConfig(mode="chain", drafter="lookup", depth=3)):
        assert result.spec.nodes <= 4 * result.spec.rounds


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3_moe"])
def test_families(family):
    """`qwen3` is the family of all other tests."""
    llm = tiny_llm(family)
    spec = SpecConfig(mode="tree", drafter="hybrid", budget=8)
    for prompt in PROMPTS:
        (plain,) = llm.generate([prompt], greedy(TOKENS), spec=PLAIN)
        (tree,) = llm.generate([prompt], greedy(TOKENS), spec=spec)
        assert tree.token_ids == plain.token_ids
        assert len(set(plain.token_ids)) > 4  # not one loop, where any mistake would pass


def test_nothing_is_left_between_requests():
    """A, B, A: the same tokens and accepted lengths for both A, also over poisoned caches."""
    llm = engine()
    spec = SpecConfig(mode="auto", drafter="hybrid", budget=16)
    forced(llm, spec, 16)
    first = llm.generate([PROMPTS[3]], greedy(TOKENS), spec=spec)[0]
    llm.generate([PROMPTS[1]], greedy(60), spec=spec)
    again = llm.generate([PROMPTS[3]], greedy(TOKENS), spec=spec)[0]
    poison(llm)
    poisoned = llm.generate([PROMPTS[3]], greedy(TOKENS), spec=spec)[0]
    for other in (again, poisoned):
        assert (other.token_ids, other.accepted, other.spec) == (
            first.token_ids,
            first.accepted,
            first.spec,
        )
