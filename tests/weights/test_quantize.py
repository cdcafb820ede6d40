"""Q8_0 at load equals the gguf package's, and the draft head kept in it changes no token."""

import gguf
import numpy as np
import pytest

from jetspec_jax.config import EngineConfig, SamplingParams
from jetspec_jax.errors import ConfigError
from jetspec_jax.weights.quantize import q8_0


def test_blocks_are_those_of_the_gguf_package():
    rows = np.random.default_rng(0).normal(size=(37, 96)).astype(np.float32)
    rows[3] = 0
    rows[5, :32] *= 1e-3
    mine = q8_0(rows)
    theirs = gguf.quants.quantize(rows, gguf.GGMLQuantizationType.Q8_0)
    back = gguf.quants.dequantize(mine, gguf.GGMLQuantizationType.Q8_0)
    want = gguf.quants.dequantize(theirs, gguf.GGMLQuantizationType.Q8_0)
    step = np.abs(rows).reshape(37, 3, 32).max(-1, keepdims=True) / 127
    assert (np.abs(back - rows).reshape(37, 3, 32) <= 0.6 * step).all()
    # ties may be rounded the other way, the scales are the same
    np.testing.assert_array_equal(
        mine.reshape(37, 3, 34)[..., :2], theirs.reshape(37, 3, 34)[..., :2]
    )
    assert np.abs(back - want).max() <= step.max()


def test_an_unknown_mode_is_refused():
    with pytest.raises(ConfigError, match=r"draft_weights='q4'.*choose one of q8_0, stored"):
        EngineConfig(draft_weights="q4")


@pytest.mark.slow
def test_tokens_do_not_depend_on_the_drafts_weights():
    from jetspec_jax import LLM

    answers = []
    for mode in ("q8_0", "stored"):
        llm = LLM(engine=EngineConfig(draft_weights=mode, capacity=256))
        result = llm.generate("def add(a, b):", SamplingParams(max_tokens=40))[0]
        assert result.spec.tau > 1.0
        answers.append(result.token_ids)
    assert answers[0] == answers[1]
