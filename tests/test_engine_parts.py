"""Small parts on the way from a plan to a program: budgets, the policy's choice, and insertion into
a slot.
"""

import jax.numpy as jnp
import numpy as np
import pytest

from jetspec_jax import SpecConfig, policy
from jetspec_jax.config import PolicyConfig
from jetspec_jax.errors import ConfigError
from jetspec_jax.policy import (
    Costs,
    choose_budget,
    knobs,
    update,
)
from jetspec_jax.testing import tiny_llm
from tests.doubles import engine, greedy

POLICY = PolicyConfig()


def fresh_control():
    return policy.fresh_control(POLICY)


def int32(x):
    return jnp.asarray(x, jnp.int32)


def costs(*verify, draft=0.0):
    return Costs(jnp.asarray(verify, jnp.float32), jnp.asarray(draft, jnp.float32))


def chosen(probabilities, table, budgets=(1, 2, 4), active=None, trust=1.0, allowance=9.0):
    scores = jnp.log(jnp.asarray(probabilities, jnp.float32))
    active = jnp.ones(scores.shape[0], bool) if active is None else jnp.asarray(active)
    valid = jnp.ones(scores.shape, bool)
    control = fresh_control().replace(trust=jnp.float32(trust), allowance=jnp.float32(allowance))
    index, _ = choose_budget(scores, valid, active, budgets, table, control)
    return budgets[int(index)]


def after_round(control, committed, *, active=1, drafted=True, promised=1.0, spent=2.0):
    return update(
        knobs(POLICY),
        control,
        jnp.bool_(drafted),
        int32(committed),
        int32(active),
        jnp.float32(promised),
        jnp.float32(spent),
        jnp.float32(1.0),
    )


def test_budget_follows_expected_tokens_per_cost():
    sure, unsure = [1.0, 0.9, 0.8, 0.7], [1.0, 0.1, 0.01, 0.001]
    assert chosen([sure], costs(1, 1.1, 1.3)) == 4
    assert chosen([unsure], costs(1, 1.2, 1.4)) == 1
    assert chosen([[1.0, 0.9, 0.1, 0.1]], costs(1, 1.1, 1.9)) == 2
    # pooled over the sequences that run
    assert chosen([sure, unsure], costs(1, 1.2, 1.4), active=[True, False]) == 4
    assert chosen([sure, unsure], costs(1, 1.2, 1.4), active=[False, True]) == 1
    # the longer drafting takes, the more a round must bring
    assert chosen([[1.0, 0.5, 0.3, 0.2]], costs(1, 1.6, 2.0, draft=5.0)) == 4


def test_no_tree_that_the_allowance_does_not_cover():
    sure, table = [1.0, 0.9, 0.8, 0.7], costs(1, 1.1, 1.3, draft=0.5)
    assert chosen([sure], table, allowance=0.81) == 4
    assert chosen([sure], table, allowance=0.79) == 2
    assert chosen([sure], table, allowance=0.59) == 1


def test_ties_take_the_smaller_budget():
    assert chosen([[1.0, 0.0, 0.0, 0.0]], costs(1, 1, 1)) == 1


def test_scores_that_promised_too_much_count_for_less():
    promise = [1.0, 0.3, 0.2, 0.1]
    assert chosen([promise], costs(1, 1.2, 1.4)) == 4
    assert chosen([promise], costs(1, 1.2, 1.4), trust=0.5) == 1
    control = fresh_control()
    for _ in range(100):
        control = after_round(control, 1, promised=1.0, spent=1.0)
    assert float(control.trust) == pytest.approx(1 / 3, abs=1e-3)  # (0 + 0.5) / (1 + 0.5)
    for _ in range(100):
        control = after_round(control, 4, promised=1.0)
    assert float(control.trust) == pytest.approx(2.0)
    # a round without candidates says nothing about them
    assert after_round(control, 1, promised=0.0).trust == control.trust


def test_pause_after_drafting_did_not_pay():
    control, pauses = fresh_control(), []
    while len(pauses) < 7:
        control = after_round(control, 1)
        if int(control.cooldown):
            pauses.append(int(control.cooldown))
        while int(control.cooldown):
            control = after_round(control, 1, drafted=False, spent=1.0)
    assert pauses == [4, 8, 16, 16, 16, 16, 16]
    # one round that pays, and the next pause is short again
    control = after_round(control, 5)
    assert (int(control.cooldown), int(control.pause)) == (0, POLICY.first_pause)
    assert pauses[-1] == POLICY.longest_pause


def test_one_bad_round_is_no_reason_to_pause():
    assert int(after_round(fresh_control(), 1).cooldown) == 0


def test_a_batch_pays_when_its_mean_does():
    def after_many(committed):
        control = fresh_control()
        for _ in range(20):
            control = after_round(control, committed, active=4)
            if int(control.cooldown):
                return False
        return True

    assert after_many(9)
    assert not after_many(7)


@pytest.mark.parametrize(
    "spec,budgets",
    [
        (SpecConfig(mode="off"), (1,)),
        (SpecConfig(drafter="none"), (1,)),
        (SpecConfig(mode="chain", depth=3), (4,)),
        (SpecConfig(mode="chain", depth=3, budget=2), (2,)),
        (SpecConfig(mode="tree", budget=5), (5,)),
        (SpecConfig(budget=1), (1,)),
    ],
)
def test_budgets(spec, budgets):
    llm = engine()
    assert llm.budgets(llm.resolve(spec)) == budgets


def test_auto_budgets_start_plain_and_end_at_the_given_one():
    llm = engine()
    for most in (2, 7, 16, 40):
        budgets = llm.budgets(llm.resolve(SpecConfig(budget=most)))
        assert budgets[0] == 1
        assert budgets[-1] == most
        assert list(budgets) == sorted(set(budgets))
    plan = llm.plan()
    assert plan["budgets"] == list(llm.budgets(llm.spec))
    assert plan["memory"]["target_bytes"] > 0
    assert np.isfinite(plan["memory"]["cache_bytes_per_sequence"])


def test_the_head_drafts_to_its_own_depth():
    """Lookup may go on to `depth`; where the user asks for a depth, the head drafts all of it."""
    llm = tiny_llm(head=True)
    free = llm.resolve(SpecConfig())
    assert free.depth == llm.draft_config.depth
    assert free.head_depth == min(4, free.depth)
    for spec in (SpecConfig(depth=3), SpecConfig(drafter="head"), SpecConfig(mode="tree")):
        resolved = llm.resolve(spec)
        assert resolved.head_depth == resolved.depth
    assert llm.resolve(SpecConfig(head_depth=2)).head_depth == 2
    with pytest.raises(ConfigError, match="head_depth=3 is more than depth=2"):
        llm.resolve(SpecConfig(depth=2, head_depth=3))
    ids = [5, 6, 7, 5, 6]
    plain = llm.generate(ids, greedy(24), spec=SpecConfig(mode="off"))[0].token_ids
    for depth in (1, 2):
        got = llm.generate(ids, greedy(24), spec=SpecConfig(head_depth=depth))[0].token_ids
        assert got == plain
