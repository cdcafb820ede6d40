"""Metrics (cases.md 14)."""

import itertools
import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jetspec_jax.errors import InputError
from jetspec_jax.stats import SpecStats, pooled, shown, tokens_per_second


def test_tau_is_pooled_over_rounds_not_averaged_over_prompts():
    short = SpecStats(10, (0, 10), (10,), nodes=20, delivered=21)
    long = SpecStats(100, (0, 0, 0, 0, 0, 100), (100,) * 5, nodes=1600, delivered=601)
    assert short.tau == 2.0 and long.tau == 6.0
    both = pooled([short, long])
    assert both.rounds == 110
    assert both.tau == pytest.approx((10 * 2 + 100 * 6) / 110)
    assert both.had_node == (110, 100, 100, 100, 100)
    assert both.acceptance_per_depth == (1.0, 1.0, 1.0, 1.0, 1.0)
    assert both.acceptance_rate_per_position == pytest.approx((1.0,) + (100 / 110,) * 4)
    assert both.delivered == 622
    assert both.node_efficiency == pytest.approx(510 / 1620)
    assert both.drafted == 1620 - 110


def test_no_rounds_has_no_figures():
    none = SpecStats(delivered=1)  # a request that ended in prefill
    assert none.tau is None and none.node_efficiency is None
    assert none.acceptance_per_depth is None and none.acceptance_rate_per_position is None
    assert none.summary() == "tau n/a, 0 rounds, n/a of nodes accepted"
    assert json.loads(json.dumps(none.to_dict()))["tau"] is None
    assert pooled([]).tau is None
    some = SpecStats(2, (1, 1), (2,), nodes=4, delivered=3)
    assert none.merge(some).tau == some.tau == 1.5
    assert some.summary() == "tau 1.50, 2 rounds, 25% of nodes accepted"


def test_a_depth_that_was_never_drafted_has_no_acceptance():
    stats = SpecStats(4, (2, 2, 0), (4, 0), nodes=8, delivered=6)
    assert stats.acceptance_per_depth == (0.5, None)
    assert stats.acceptance_rate_per_position == (0.5, 0.0)


def test_from_device_counters():
    stats = SpecStats.from_counts(np.array([1, 2, 3]), np.array([6, 5]), np.int32(40), np.int32(15))
    assert stats == SpecStats(6, (1, 2, 3), (6, 5), 40, 15)
    assert json.loads(json.dumps(stats.to_dict()))["accepted_hist"] == [1, 2, 3]


def test_counts_that_contradict_each_other_are_refused():
    with pytest.raises(InputError, match="rounds=3"):
        SpecStats(3, (1, 1), (2,))
    with pytest.raises(InputError, match="depth 2"):
        SpecStats(2, (1, 1), (2, 2))


@given(st.lists(st.lists(st.integers(0, 50), min_size=1, max_size=6), min_size=1, max_size=4))
def test_identities(hists):
    stats = pooled(
        SpecStats(sum(h), tuple(h), (sum(h),) * (len(h) - 1), 8 * sum(h), 0) for h in hists
    )
    assert sum(stats.accepted_hist) == stats.rounds
    at = stats.accepted_at
    assert all(a >= b for a, b in itertools.pairwise(at))
    if stats.rounds:
        assert 1 + sum(stats.acceptance_rate_per_position) == pytest.approx(stats.tau)


def test_rates():
    assert tokens_per_second(30, 2.0) == 15.0
    assert tokens_per_second(0, 0.0) is None
    assert shown(None) == "n/a" and shown(1.234) == "1.23"
