"""The policy's numbers: checked where they are given, and data of the compiled programs."""

import dataclasses

import jax.numpy as jnp
import pytest

from jetspec_jax import SpecConfig
from jetspec_jax.config import PolicyConfig
from jetspec_jax.errors import ConfigError
from jetspec_jax.policy import Costs, fresh_control, knobs
from tests.doubles import PROMPTS, engine, greedy

OTHER = PolicyConfig(
    first_pause=1, longest_pause=2, decay=0.5, first_credit=1.0, first_loss=1e3, most_loss=1e3
)


@pytest.mark.parametrize(
    "values,words",
    [
        ({"first_pause": -1}, "PolicyConfig.first_pause=-1"),
        ({"first_pause": 9, "longest_pause": 8}, "PolicyConfig.longest_pause=8"),
        ({"longest_pause": 2**31}, "PolicyConfig.longest_pause=2147483648"),
        ({"decay": 1.5}, "PolicyConfig.decay=1.5"),
        ({"decay": float("nan")}, "PolicyConfig.decay=nan"),
        ({"first_credit": "much"}, "PolicyConfig.first_credit='much'"),
        ({"trust_low": 3.0}, "PolicyConfig.trust_high=2.0"),
        ({"first_loss": 1.0}, "PolicyConfig.first_loss=1.0"),
        ({"most_loss": 3.0}, "PolicyConfig.most_loss=3.0"),
        ({"memory": 2}, "PolicyConfig.memory=2"),
        ({"decya": 0.5}, "did you mean 'decay'"),
    ],
)
def test_wrong_values_are_named(values, words):
    with pytest.raises(ConfigError, match=words):
        PolicyConfig.from_mapping(values)


def test_a_table_of_a_config_file_becomes_a_policy():
    assert SpecConfig.from_mapping({"policy": {"decay": 0.5}}).policy == PolicyConfig(decay=0.5)
    with pytest.raises(ConfigError, match=r"SpecConfig.policy=3"):
        SpecConfig.from_mapping({"policy": 3})


def test_every_number_reaches_the_program():
    """As an array of its declared kind, whatever kind of number the user wrote."""
    for config in (PolicyConfig(), dataclasses.replace(OTHER, decay=1)):
        arrays = knobs(config)
        for field in dataclasses.fields(config):
            value = getattr(arrays, field.name)
            assert value.dtype == (jnp.int32 if field.type == "int" else jnp.float32)
            assert float(value) == pytest.approx(getattr(config, field.name))
    assert float(fresh_control(OTHER).gain) == 1.0
    assert int(fresh_control(OTHER).pause) == 1


def test_policies_share_programs_and_are_obeyed():
    """Two specs that differ in policy alone: nothing is compiled, and the rounds are others."""
    llm, prompt = engine(), PROMPTS[0]
    specs = [SpecConfig(drafter="lookup", budget=4, policy=p) for p in (PolicyConfig(), OTHER)]
    plans = {llm.plan_for(llm.resolve(s)) for s in specs}
    assert len(plans) == 1
    # drafting that costs so much that nearly every drafted round fails
    (plan,) = plans
    verify = jnp.ones(len(plan.budgets), jnp.float32)
    llm._costs[plan, 1] = Costs(verify, jnp.asarray(0.9, jnp.float32))
    drafts, tokens, sizes = [], [], []
    for spec in specs:
        with llm.session(plan, 1, llm._costs[plan, 1], spec.policy) as session:
            session.admit(0, list(prompt), len(prompt) + 60, (), greedy(60), True)
            session.run(60)
            drafts.append(int(session.state.counters.drafts))
        tokens.append(llm.generate([prompt], greedy(60), spec=spec)[0].token_ids)
        sizes.append(len(llm.programs))
    assert tokens[0] == tokens[1]
    assert sizes[0] == sizes[1]
    # shorter pauses, and all that may be lost
    assert drafts[1] > 2 * drafts[0] > 0
