"""Targets against transformers: logits, taps, rotary tables, and 64 tokens of the real SmolLM2.

tests/golden/make_goldens.py made the data.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jetspec_jax.errors import JetSpecError
from jetspec_jax.models.decoder import Numerics, declare, forward_full
from jetspec_jax.models.rope import inverse_frequencies, rope_tables
from jetspec_jax.weights import load_params, open_source
from jetspec_jax.weights.hf_config import parse_config

GOLDEN = Path(__file__).parents[1] / "golden"
TOLERANCE = 1e-4
TARGETS = (  # by name, so that a missing folder fails instead of shrinking the test
    "llama_bias",
    "llama_linear",
    "llama_llama3",
    "llama_sharded",
    "llama_tied",
    "llama_yarn",
    "llama_yarn_attention",
    "qwen2_fp16",
    "qwen2_tied",
    "qwen3_bf16",
    "qwen3_moe_norm",
    "qwen3_moe_step",
    "qwen3_tied_yarn",
    "qwen3_untied",
)
ROPES: dict[str, dict[str, Any]] = json.loads((GOLDEN / "rope.json").read_text())


def errors(name: str, numerics: Numerics) -> dict[str, float]:
    """Largest absolute difference of the logits and of each layer's output from transformers'."""
    source = open_source(GOLDEN / "targets" / name)
    cfg = source.config()
    params = load_params(source, declare(cfg), jnp.float32)
    golden = np.load(GOLDEN / "targets" / name / "golden.npz")
    taps = tuple(range(cfg.num_layers))
    forward = jax.jit(lambda p, t: forward_full(p, cfg, t, taps=taps, numerics=numerics))
    out = forward(params, jnp.asarray(golden["tokens"]))
    assert golden["tokens"].shape[1] >= 40
    assert golden["hidden_states"].shape[0] == cfg.num_layers
    assert out.logits.dtype == jnp.float32
    assert out.logits.shape == golden["logits"].shape
    assert out.taps is not None
    found = {"logits": float(np.abs(np.asarray(out.logits) - golden["logits"]).max())}
    for i in taps:
        found[f"layer {i}"] = float(
            np.abs(np.asarray(out.taps[:, :, i]) - golden["hidden_states"][i]).max()
        )
    return found


@pytest.mark.parametrize("name", TARGETS)
def test_logits_and_taps_equal_transformers(name: str) -> None:
    found = errors(name, Numerics())
    assert max(found.values()) <= TOLERANCE, found


@pytest.mark.parametrize("name", ["llama_bias", "qwen3_moe_norm", "qwen3_tied_yarn"])
def test_bitwise_numerics_equal_transformers(name: str) -> None:
    # Chunks shorter than the sequence, so that the order-true reduction crosses a chunk boundary.
    found = errors(name, Numerics(bitwise=True, attention_chunk=16))
    assert max(found.values()) <= TOLERANCE, found


def test_every_golden_target_is_tested() -> None:
    assert sorted(p.name for p in (GOLDEN / "targets").iterdir()) == sorted(TARGETS)


def rope_config(name: str, layout: str) -> Any:
    """What a config.json with this golden's rope gives, in either generation's key layout."""
    case = ROPES[name]
    values = json.loads((GOLDEN / "targets" / "llama_tied" / "config.json").read_text())
    rope = dict(case["rope_parameters"])
    values |= {
        "head_dim": case["head_dim"],
        "max_position_embeddings": 4 * case["original_max_position"],
    }
    del values["rope_parameters"]
    if layout == "rope_parameters":
        values["rope_parameters"] = rope
    else:
        values["rope_theta"] = rope.pop("rope_theta")
        values["rope_scaling"] = None if rope["rope_type"] == "default" else rope
    return parse_config(values, Path("config.json")).rope


@pytest.mark.parametrize("layout", ["rope_parameters", "rope_scaling"])
@pytest.mark.parametrize("name", ROPES)
def test_rope_tables_equal_transformers(name: str, layout: str) -> None:
    table = {
        k.removeprefix(f"{name}."): v
        for k, v in np.load(GOLDEN / "rope.npz").items()
        if k.startswith(f"{name}.")
    }
    head_dim, original = ROPES[name]["head_dim"], ROPES[name]["original_max_position"]
    positions = table["positions"]
    assert positions.max() == 3 * original - 1
    rope = rope_config(name, layout)
    inv_freq, scale = inverse_frequencies(rope, head_dim)
    np.testing.assert_allclose(inv_freq, table["inv_freq"], rtol=1e-6)
    assert scale == pytest.approx(ROPES[name]["attention_scaling"], rel=1e-6)
    cos, sin = rope_tables(rope, head_dim, jnp.asarray(positions))
    # An angle p * f in float32 is uncertain by its own rounding: two units in the last place.
    slack = TOLERANCE + 2 * np.spacing((positions[:, None] * table["inv_freq"]).astype(np.float32))
    for ours, theirs in ((cos, table["cos"]), (sin, table["sin"])):
        assert np.all(np.abs(np.asarray(ours) - theirs) <= slack)


@pytest.mark.parametrize("kind", ["dynamic", "longrope", "no-such-rope"])
@pytest.mark.parametrize("layout", ["rope_parameters", "rope_scaling"])
def test_unknown_rope_type_is_an_error(kind: str, layout: str) -> None:
    values = json.loads((GOLDEN / "targets" / "llama_tied" / "config.json").read_text())
    del values["rope_parameters"]
    values |= {layout: {"rope_type": kind, "rope_theta": 1e4, "factor": 2.0}, "rope_theta": 1e4}
    with pytest.raises(JetSpecError, match=kind) as caught:
        parse_config(values, Path("config.json"))
    assert "\n" not in str(caught.value)


def test_greedy_tokens_of_the_real_smollm2_equal_transformers() -> None:
    from jetspec_jax import LLM, SamplingParams, SpecConfig

    cases = json.loads((GOLDEN / "smollm2_greedy.json").read_text())["cases"]
    assert len(cases) == 3
    assert all(len(case["greedy_ids"]) == 64 for case in cases)
    llm = LLM()
    prompts = [case["prompt_ids"] for case in cases]
    for case in cases:
        assert llm.tokenizer.encode(case["text"], add_special=False) == case["prompt_ids"]
    for spec in (SpecConfig(mode="off"), None):  # plain, then speculative as by default
        results = llm.generate(prompts, SamplingParams(max_tokens=64), spec=spec)
        for case, result in zip(cases, results, strict=True):
            assert list(result.token_ids) == case["greedy_ids"]
            assert result.finish_reason == "length"
