"""What drafting may lose: bounded in every sequence, and less after requests that lost."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from jetspec_jax import PolicyConfig, SpecConfig, policy
from jetspec_jax.config import EngineConfig
from jetspec_jax.policy import Costs, fresh_control, knobs, may_draft, next_allowance, update
from jetspec_jax.testing import oracle, tiny_llm
from tests.doubles import greedy

TOKENS, PROMPT = 512, [5, 6, 7]
# Times of a drafted round and of verification by node count, in plain steps (DESIGN.md section 9).
TABLES = {
    "xeon": (1.5 / 6.6, {1: 6.6, 2: 8.1, 4: 9.4, 8: 12.5, 12: 17.4, 16: 21.3, 24: 28.2}),
    "zen4": (0.25, {1: 4.3, 2: 5.2, 3: 5.5, 4: 7.1, 6: 9.7, 8: 12.2, 12: 17.7, 16: 22.9, 24: 33.0}),
    "float32": (0.1, {1: 1.0, 8: 1.25, 16: 1.55, 24: 1.95}),
}


@pytest.fixture(scope="module")
def llm():
    small = EngineConfig(capacity=640, attention_chunk=64, prefill_chunk=32)
    return tiny_llm(engine=small, max_context=1024)


def costs_of(table, budgets):
    draft, times = TABLES[table]
    verify = np.interp(budgets, list(times), list(times.values())) / times[1]
    return Costs(jnp.asarray(verify, jnp.float32), jnp.asarray(draft, jnp.float32))


def spent(llm, spec, table, tokens=TOKENS):
    """Plain steps that a text takes by the table: rounds by budget, and drafts."""
    plan = llm.plan_for(llm.resolve(spec))
    costs = costs_of(table, plan.budgets)
    with llm.session(plan, 1, costs, spec.policy) as session:
        session.admit(0, PROMPT, len(PROMPT) + tokens, (), greedy(tokens), True)
        session.run(2 * tokens)
        counters = session.state.counters
        assert int(session.state.committed[0]) == len(PROMPT) + tokens
        rounds = np.asarray(counters.budget, float)
        time = float(rounds @ np.asarray(costs.verify)) + int(counters.drafts) * float(costs.draft)
        return time, int(counters.drafts)


@pytest.mark.parametrize("table", TABLES)
def test_a_drafter_that_is_always_wrong_costs_three_percent_at_most(llm, table):
    """It promises 0.99 for every token and is never right."""
    wrong = dataclasses.replace(oracle(llm, [PROMPT], TOKENS, wrong=True), mode="auto", budget=24)
    time, drafts = spent(llm, wrong, table)
    assert drafts > 3  # it was tried
    assert time <= 1.03 * TOKENS
    # without the allowance the pauses alone would not hold it (so the bound is the allowance's)
    loose = PolicyConfig(first_pause=1, longest_pause=1, first_loss=1e6, most_loss=1e6)
    assert spent(llm, dataclasses.replace(wrong, policy=loose), table)[0] > 1.05 * TOKENS


@pytest.mark.parametrize("table", TABLES)
def test_a_drafter_that_is_always_right_is_not_held_back(llm, table):
    right = dataclasses.replace(oracle(llm, [PROMPT], TOKENS), mode="auto", budget=24)
    time, drafts = spent(llm, right, table)
    budget = 6  # the anchor and five drafted tokens
    costs = costs_of(table, [1, budget])
    best = -(-TOKENS // budget) * float(costs.draft + costs.verify[1])
    assert time == pytest.approx(best, rel=0.02)
    assert drafts == -(-TOKENS // budget)


def one_round(control, config, *, drafted, committed, spent):
    return update(
        knobs(config),
        control,
        jnp.bool_(drafted),
        jnp.int32(committed),
        jnp.int32(1),
        jnp.float32(1.0),
        jnp.float32(spent),
        jnp.float32(1.0),
    )


def test_the_allowance_is_a_ledger():
    config = PolicyConfig(first_loss=2.0, loss_share=0.1, most_loss=3.0, least_loss=1.0)
    control = fresh_control(config)
    control = one_round(control, config, drafted=True, committed=1, spent=1.5)
    assert float(control.allowance) == pytest.approx(2.0 - 0.5 + 0.1)
    control = one_round(control, config, drafted=False, committed=1, spent=1.0)
    assert float(control.allowance) == pytest.approx(1.7)
    control = one_round(control, config, drafted=True, committed=5, spent=1.5)
    assert float(control.allowance) == 3.0  # no more is kept
    table = Costs(jnp.asarray([1.0, 2.5, 5.0], jnp.float32), jnp.asarray(0.5, jnp.float32))
    assert policy.affordable(table, control).tolist() == [True, True, False]
    assert bool(may_draft(table, control))
    poor = control.replace(allowance=jnp.float32(1.9))
    assert not bool(may_draft(table, poor))


def test_earlier_requests_move_the_allowance():
    config = PolicyConfig(first_loss=4.0, memory=0.5, least_loss=1.5)
    assert next_allowance(config, 4.0, 0.0) == 2.0
    assert next_allowance(config, 2.0, 0.0) == 1.5
    assert next_allowance(config, 1.5, 6.0) == 2.75
    assert next_allowance(config, 4.0, 6.0) == 4.0


def test_an_engine_learns_from_its_requests(llm):
    """The second useless request tries less than the first, in the same session or the next."""
    spec = dataclasses.replace(oracle(llm, [PROMPT], 96, wrong=True), mode="auto", budget=23)
    times = [spent(llm, spec, "xeon", 96)[0] for _ in range(3)]
    assert times[1] < times[0]
    assert times[2] <= 1.03 * 96
    plan = llm.plan_for(llm.resolve(spec))
    start = llm._allowances[plan, 1, spec.policy]
    assert start == spec.policy.least_loss
    with llm.session(plan, 1, costs_of("xeon", plan.budgets), spec.policy) as session:
        assert session.allowance == start
        for _ in range(2):
            session.admit(0, PROMPT, len(PROMPT) + 20, (), greedy(20), True)
            assert float(session.state.control.allowance) == start
            session.run(40)
    # another policy has not learnt it
    other = SpecConfig(policy=PolicyConfig(decay=0.8)).policy
    assert (plan, 1, other) not in llm._allowances
