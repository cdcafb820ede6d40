"""Cost tables on disk: what is not a sane table of this plan is measured again."""

import json
from pathlib import Path

import jax.numpy as jnp
import pytest

from jetspec_jax import SpecConfig, costs
from jetspec_jax.costs import _read
from jetspec_jax.drafting import draft_tree
from tests.doubles import engine, greedy

BUDGETS = (1, 2, 4)
GOOD = {"t_plain_s": 0.01, "t_verify_s": {"1": 0.01, "2": 0.011, "4": 1e9}, "t_draft_s": 0.0}


def read(tmp_path: Path, text: str):
    path = tmp_path / "table.json"
    path.write_text(text)
    return _read(path, BUDGETS)


def test_a_good_table_is_read(tmp_path: Path):
    got = read(tmp_path, json.dumps(GOOD))
    assert got == {**GOOD, "t_verify_s": {1: 0.01, 2: 0.011, 4: 1e9}}
    assert _read(tmp_path / "absent.json", BUDGETS) is None


@pytest.mark.parametrize(
    "change",
    [
        {"t_plain_s": 0},
        {"t_plain_s": "x"},
        {"t_plain_s": None},
        {"t_plain_s": float("nan")},
        {"t_draft_s": -1},
        {"t_verify_s": {"1": 0.01}},
        {"t_verify_s": {"1": 0.01, "2": -0.1, "4": 0.1}},
        {"t_verify_s": [1, 2, 3]},
        {"t_verify_s": {"1": 0.01, "2": 0.02, "x": 0.1}},
    ],
)
def test_a_wrong_table_is_not(tmp_path: Path, change: dict):
    assert read(tmp_path, json.dumps({**GOOD, **change})) is None


@pytest.mark.parametrize("text", ["", "[]", "null", "3", "{}", "\x00", '{"t_plain_s": 1'])
def test_no_table_at_all_is_not(tmp_path: Path, text: str):
    assert read(tmp_path, text) is None


def test_lookup_alone_is_timed_with_full_trees():
    """Else verification of any number of nodes would look as cheap as of one."""
    llm = engine()
    plan = llm.plan_for(llm.resolve(SpecConfig(drafter="lookup")))
    prompt = costs.prompt_for(plan, 64)
    assert len(prompt) == 64
    assert max(prompt) < plan.model.vocab_size
    with llm.session(plan, 1, costs.unmeasured(plan)) as session:
        session.admit(0, prompt, 128, (), greedy(8), True)
        tree = draft_tree(plan, session.params, session.state, jnp.asarray(True))
    most = 1 + plan.spec.lookup_branches * plan.depth
    assert int(tree.valid.sum()) == min(most, plan.budgets[-1])
