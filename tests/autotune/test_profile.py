"""Profiles: recorded ones predict what was timed beside them; new ones are measured whole."""

import dataclasses
import json
import statistics
from pathlib import Path

import pytest

from jetspec_jax import SpecConfig
from jetspec_jax.autotune.cost_model import Device, Profile, at_batch, gap_table, predict_round
from jetspec_jax.autotune.profile import measure_profile, shape_of
from jetspec_jax.testing import tiny_llm

RECORDED = sorted((Path(__file__).parent / "profiles").glob("*.json"))


def errors(document):
    found = []
    for row in document["rows"]:
        profile = Profile.from_json(document["profiles"][row["drafter"]])
        profile = at_batch(profile, row["batch"])
        profile = dataclasses.replace(profile, rounds_per_call=document["rounds_per_call"])
        found.append(predict_round(profile, row["nodes"]) / row["measured"] - 1)
    return found


@pytest.mark.parametrize("path", RECORDED, ids=lambda p: p.stem)
def test_recorded_profiles_predict_what_was_timed(path):
    """Drafter x budget x batch on the real model; the file names the command and the machine."""
    document = json.loads(path.read_text())
    assert len(document["rows"]) >= 12
    assert statistics.median(abs(e) for e in errors(document)) < 0.15


@pytest.mark.parametrize("path", RECORDED, ids=lambda p: p.stem)
def test_recorded_profiles_lie_above_their_ceilings(path):
    for value in json.loads(path.read_text())["profiles"].values():
        profile = Profile.from_json(value)
        verify = next(r for r in gap_table(profile, 8, 2.0) if r.phase == "verify")
        assert 0 < verify.ceiling < verify.measured


def test_shape_of_a_tiny_engine():
    llm = tiny_llm()
    shape = shape_of(llm, llm.plan_for(llm.spec))
    # two layers of q, k, v, o (32 x 64, 32 twice, 64) and SwiGLU (3 x 96 x 32), head 260 x 32
    layer = 32 * (64 + 32 + 32 + 64) + 3 * 96 * 32
    assert shape.parameters == 2 * layer + 260 * 32
    assert shape.weight_bytes >= 4 * shape.parameters
    assert shape.weight_bytes < 4 * 1.1 * shape.parameters  # norms, padding to whole panels
    assert shape.key_bytes == 2 * 2 * 32 * 4
    assert shape.draft_parameters == 32 * 192 + 3 * 64 * 32 + 260 * 32
    assert (shape.draft_rows, shape.depth) == (1 + 4, 5)
    lookup = shape_of(llm, llm.plan_for(llm.resolve(SpecConfig(drafter="lookup"))))
    assert lookup.draft_bytes == lookup.draft_rows == 0


@pytest.mark.slow
def test_every_phase_is_measured():
    device = Device("here", 1e10, 1e11)
    llm = tiny_llm()
    profile = measure_profile(llm, 1, nodes=(1, 4, 8), hardware=device)
    assert Profile.from_json(json.loads(json.dumps(profile.to_json()))) == profile
    assert set(profile.verify_s) <= {1, 4, 8}
    times = list(profile.verify_s.values())
    assert times == sorted(times)
    assert profile.plain_s > 0
    assert profile.commit_s > 0
    assert profile.draft_s + profile.tree_s >= 0
    # the engine is whole afterwards
    assert len(llm.generate([5, 6, 7])[0].token_ids) > 0
