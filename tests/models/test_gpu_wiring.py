"""The decoder through the GPU's entries, on a CPU: there attention is the native kernel and
projections are XLA's, so values and tokens can be compared with the XLA engine.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jetspec_jax import LLM, SamplingParams, SpecConfig, gpu_programs
from jetspec_jax.config import EngineConfig
from jetspec_jax.errors import ConfigError, KernelError
from jetspec_jax.loading import resolve_kernels
from jetspec_jax.models import decoder
from jetspec_jax.models.decoder import Numerics
from jetspec_jax.models.layers import moe
from jetspec_jax.numerics import KernelWeight, for_kernels, linear, take_rows
from jetspec_jax.testing import tiny_config, tiny_head, tiny_target
from pallas_kernels import native, triton_call
from pallas_kernels.gpu_target import TARGETS, on_abstract

ENGINE = EngineConfig(kernels="xla", capacity=128, attention_chunk=64, prefill_chunk=32)


def test_a_marked_weight_gives_the_product_and_the_rows():
    x, w = (jax.random.normal(jax.random.key(i), s) for i, s in enumerate([(2, 3, 8), (5, 8)]))
    np.testing.assert_allclose(linear(x, KernelWeight(w)), linear(x, w), rtol=1e-5, atol=1e-5)
    ids = jnp.asarray([4, 0], jnp.int32)
    np.testing.assert_array_equal(take_rows(KernelWeight(w), ids), w[ids])


@pytest.mark.parametrize("normalise", [False, True])
def test_grouped_experts_are_the_experts_one_by_one(normalise):
    keys = jax.random.split(jax.random.key(3), 4)
    x = jax.random.normal(keys[0], (2, 5, 8))
    router = jax.random.normal(keys[1], (6, 8))
    gate_up = jax.random.normal(keys[2], (6, 2 * 4, 8))
    down = jax.random.normal(keys[3], (6, 8, 4))
    run = functools.partial(moe, x, router, top_k=3, normalise=normalise)
    expected = run(gate_up, down)
    marked = run(KernelWeight(gate_up), KernelWeight(down))
    np.testing.assert_allclose(marked, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
def test_every_matrix_is_marked(family):
    extra: dict[str, Any] = (
        {"num_experts": 4, "experts_per_token": 2, "moe_ffn_size": 16} if "moe" in family else {}
    )
    config = tiny_config(family, **extra)
    params = for_kernels(tiny_target(config, engine=ENGINE).params)
    declared = {
        name.split(".")[-1]
        for name, spec in decoder.declare(config).items()
        if spec.linear or spec.stack
    }
    marked = {
        name
        for tree in (params, *params["layers"])
        for name, value in tree.items()
        if isinstance(value, KernelWeight)
    }
    assert marked == declared


def test_an_engine_on_the_gpu_entries_writes_the_same_tokens():
    target = tiny_target(engine=ENGINE)
    marked = dataclasses.replace(target, kernels="gpu", params=for_kernels(target.params))
    prompts = [(72, 101, 108), (10, 20, 30, 40, 50, 60)]
    settings = SamplingParams(max_tokens=20, ignore_eos=True)
    spec = SpecConfig(mode="tree", budget=8)
    tokens = {}
    for name, one in (("xla", target), ("gpu", marked)):
        for speculate in (spec, SpecConfig(mode="off")):
            llm = LLM.from_parts(one, tiny_head(one, engine=ENGINE), spec=speculate, engine=ENGINE)
            results = llm.generate(prompts, settings)
            tokens[name, speculate.mode] = [r.token_ids for r in results]
    assert llm.plan()["kernels"].startswith("GPU kernels")
    assert llm.plan_for(llm.spec).numerics == Numerics(bitwise=True, gpu=True, attention_chunk=64)
    assert len({str(t) for t in tokens.values()}) == 1


def test_gpu_kernels_run_where_there_are_some(monkeypatch, caplog):
    asked = EngineConfig(kernels="gpu", dtype="bfloat16")
    with pytest.raises(KernelError, match=r"an NVIDIA GPU of .* is needed, not 'cpu'"):
        resolve_kernels(asked)
    with pytest.raises(ConfigError, match="multiply bfloat16, not float32; give dtype bfloat16"):
        resolve_kernels(EngineConfig(kernels="gpu"))
    free = EngineConfig(dtype="bfloat16")
    assert resolve_kernels(free) == "xla"
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    with on_abstract(TARGETS["h100"]):
        assert resolve_kernels(free) == resolve_kernels(asked) == "gpu"

    def missing(op: str) -> None:
        raise native.KernelError("triton is not installed")

    monkeypatch.setattr(triton_call, "load", missing)
    with on_abstract(TARGETS["rtx-pro-6000"]):
        assert resolve_kernels(free) == "xla"
        assert "XLA instead of GPU kernels: triton is not installed" in caplog.text
        with pytest.raises(KernelError, match="triton is not installed"):
            resolve_kernels(asked)


def test_whole_programs_trace_without_memory():
    names = {case.shape for case in gpu_programs.cases()}
    assert len(names) == 6
    fn, args = gpu_programs.program("qwen3-30b-a3b", "plain step", False)
    out = jax.eval_shape(fn, *args)
    assert out[0].cache.k[0].shape == (1, 4, gpu_programs.CONTEXT, 128)
