"""Deployment keys: what they are made of, and which lie near each other."""

import dataclasses
import math

import pytest

from jetspec_jax.autotune.key import DeploymentKey, code_version, context_bucket, distance, key_of
from jetspec_jax.errors import ConfigError
from jetspec_jax.testing import tiny_llm
from tests.autotune.samples import KEY
from tests.doubles import engine


def near(**changes) -> float:
    return distance(KEY, dataclasses.replace(KEY, **changes))


def test_key_of_an_engine_names_what_runs():
    key = key_of(engine(), 1, 300, "humaneval")
    assert (key.batch, key.context, key.suite) == (1, 512, "humaneval")
    assert (key.target, key.target_family, key.dtype) == ("tiny-qwen3", "qwen3", "float32")
    assert key.drafter != "none" and len(key.drafter) == 16
    assert "core" in key.device and key.regime == "single"
    assert DeploymentKey.from_json(key.to_json()) == key


def test_another_head_or_geometry_is_another_key():
    llm = engine()
    bare, wide = tiny_llm(head=False), tiny_llm(ffn_size=128)
    assert key_of(bare, 1, 64).drafter == "none"
    assert key_of(bare, 1, 64).target_digest == key_of(llm, 1, 64).target_digest
    assert key_of(wide, 1, 64).target_digest != key_of(llm, 1, 64).target_digest


@pytest.mark.parametrize("batch,context", [(0, 64), (1, 0)])
def test_nonsense_sizes_are_refused(batch, context):
    with pytest.raises(ConfigError, match="give at least 1"):
        key_of(engine(), batch, context)


def test_buckets_are_powers_of_two():
    assert [context_bucket(n) for n in (1, 2, 3, 256, 257)] == [1, 2, 4, 256, 512]


def test_a_key_is_nearest_to_itself():
    assert near() == 0.0
    for field, value in [
        ("target_digest", "1" * 16),
        ("drafter", "1" * 16),
        ("device", "Some CPU, 8 cores"),
        ("weights", "float32"),
        ("arithmetic", "float"),
        ("dtype", "bfloat16"),
        ("suite", "mtbench"),
        ("target", "other"),
        ("context", 512),
    ]:
        assert 0 < near(**{field: value}) < math.inf, field


@pytest.mark.parametrize(
    "field,value",
    [
        ("target_family", "llama"),
        ("device", "Other CPU, 2 cores"),
        ("kernels", "xla"),
        ("batch", 2),  # another regime
    ],
)
def test_other_families_devices_and_regimes_are_no_neighbours(field, value):
    assert near(**{field: value}) == math.inf


def test_distance_grows_with_batch_and_is_symmetric():
    eight, sixteen, four = (dataclasses.replace(KEY, batch=b) for b in (8, 16, 4))
    assert distance(four, eight) < distance(four, sixteen)
    assert distance(four, sixteen) == distance(sixteen, four)
    assert near(suite="mtbench") < distance(
        dataclasses.replace(KEY, suite="gsm8k"), dataclasses.replace(KEY, suite="mtbench")
    )


def test_code_version_changes_with_the_code(tmp_path):
    source = tmp_path / "jetspec_jax" / "a.py"
    source.parent.mkdir()
    source.write_text("x = 1\n")
    before = code_version(tmp_path)
    (tmp_path / "README.md").write_text("no code")
    assert code_version(tmp_path) == before
    source.write_text("x = 2\n")
    assert code_version(tmp_path) != before
