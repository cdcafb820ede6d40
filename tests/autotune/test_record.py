"""A recording replayed gives the rounds that decoding takes."""

import numpy as np
import pytest

from jetspec_jax import SamplingParams, SpecConfig
from jetspec_jax.autotune.cost_model import oracle_tau
from jetspec_jax.autotune.record import Recording, accepted_path, record, tokens_by_budget
from jetspec_jax.errors import ConfigError, InputError
from tests.doubles import engine

TOKENS = 24
PROMPTS = [[5, 6, 7, 8] * 4, [9, 3, 9, 3, 9, 3, 9]]


def test_replay_equals_decoding():
    """Rounds of fixed trees over real texts of the tiny model, head and lookup merged."""
    llm = engine()
    recordings = record(llm, PROMPTS, TOKENS, SpecConfig(drafter="hybrid", depth=5), (1, 4, 8))
    found = tokens_by_budget(recordings)
    assert found[1] == 1.0
    assert found[1] <= found[4] <= found[8]
    spec = SpecConfig(mode="tree", drafter="hybrid", depth=5, budget=8)
    sampling = SamplingParams(max_tokens=TOKENS)
    results = [llm.generate([p], sampling, spec=spec)[0] for p in PROMPTS]
    assert found[8] > 1.0  # else nothing was tested
    for got, r in zip(results, recordings, strict=True):
        at = rounds = 0
        while at < len(r.accepted):
            at, rounds = at + r.accepted[at][2] + 1, rounds + 1
        assert rounds == got.spec.rounds
    # the head alone accepts no more than an oracle would of its candidates
    alone = record(llm, PROMPTS, TOKENS, SpecConfig(drafter="head"), (1, 8))
    hits = [h for r in alone for h in r.hits]
    assert len(hits[0]) == 5
    inside = [Recording(r.budgets, r.accepted[: len(r.hits)], r.hits) for r in alone]
    mean = 1 + np.mean([a[1] for r in inside for a in r.accepted])
    assert mean <= oracle_tau(hits)


def test_accepted_path_by_hand():
    tree = {
        "token": np.array([1, 7, 8, 7, 9, 0]),
        "parent": np.array([-1, 0, 0, 1, 3, 0]),
        "valid": np.array([True, True, True, True, True, False]),
    }
    assert accepted_path(tree, [7, 7, 9, 4]) == [1, 3, 4]
    assert accepted_path(tree, [8, 7]) == [2]
    assert accepted_path(tree, [0]) == []  # that slot is not valid


def test_tau_by_hand():
    # rounds begin at 0, 2 (accepted 1) and 3 with two nodes
    one = Recording((1, 2), ((0, 1), (0, 1), (0, 0), (0, 0)), ())
    assert tokens_by_budget([one]) == {1: 1.0, 2: 1 + 1 / 3}
    with pytest.raises(InputError, match="no recorded positions"):
        tokens_by_budget([])
    with pytest.raises(InputError, match="different budgets"):
        tokens_by_budget([one, Recording((1,), ((0,),), ())])


def test_what_cannot_be_recorded():
    llm = engine()
    with pytest.raises(ConfigError, match="draft nothing"):
        record(llm, PROMPTS, 4, SpecConfig(mode="off"))
    with pytest.raises(InputError, match="capacity of 192"):
        record(llm, [[5] * 190], 8, SpecConfig(drafter="lookup"))
