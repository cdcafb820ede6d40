"""serve.exactness: it finds a difference where there is one, and none where there is none."""

import json

import numpy as np
import pytest

from jetspec_jax.config import BUILDERS
from serve import exactness


def test_every_builder_meets_every_budget():
    found = exactness.pairs()
    assert len(set(found)) == len(found) == len(BUILDERS) * len(exactness.BUDGETS)
    assert {b for b, _ in found[:5]} == set(BUILDERS)
    assert len({n for _, n in found[:6]}) == 6


def test_groups_are_whole():
    assert list(exactness.groups("abcde", 2)) == [["a", "b"], ["c", "d"], ["e", "a"]]


def test_bits_are_compared_within_an_arithmetic_only():
    float_only = {("float", 1): {"a"}, ("float", 8): {"b"}}
    assert exactness.same_bits(float_only, 2) is True
    assert exactness.same_bits({**float_only, ("float", 8): {"b", "c"}}, 2) is False
    # one mode each: nothing was compared, and that is not "identical"
    assert exactness.same_bits({("float", 1): {"a"}, ("integer", 1): {"b"}}, 2) is None


def test_agreement_names_where_texts_part():
    got = exactness.agreement([[1, 2, 3], [4, 5, 6]], [[1, 2, 3], [4, 5, 7]])
    assert got == {"prompts": 2, "identical": 1, "first_different": {1: 2}}


@pytest.mark.slow
def test_the_bundled_model_is_exact(capsys: pytest.CaptureFixture[str]):
    flags = ["--limit", "5", "--max-tokens", "6", "--batches", "1", "--weights-modes", "stored"]
    assert exactness.main(flags) == 0
    out = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert out["logits_identical"] and out["tokens_identical"]
    assert out["modes"]["stored, batch 1"]["positions"] == 30


@pytest.mark.slow
def test_one_bit_is_found(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    honest = exactness.decode

    def lying(llm, spec, prompts, max_tokens):
        tokens, digests, rounds = honest(llm, spec, prompts, max_tokens)
        if spec.enabled:
            digests[0][2] = bytes(np.frombuffer(digests[0][2], np.uint8) ^ 1)
        return tokens, digests, rounds

    monkeypatch.setattr(exactness, "decode", lying)
    flags = ["--limit", "1", "--max-tokens", "4", "--batches", "1", "--weights-modes", "stored"]
    assert exactness.main(flags) == 1
    out = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert not out["logits_identical"] and out["tokens_identical"]
    assert "token 2" in out["modes"]["stored, batch 1"]["first_different"]
