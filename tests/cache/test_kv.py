"""Cache updates: the right slots, nothing else, and in place."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jetspec_jax.cache import alloc, commit, gather_rows
from jetspec_jax.cache.kv import after
from jetspec_jax.config import SpecConfig
from tests.doubles import PLAIN, PROMPTS, engine, greedy, oracle

HEADS, SIZE, WIDTH = 2, 24, 4


def rows(seed, batch, count):
    rng = np.random.default_rng(seed)
    return tuple(
        jnp.asarray(rng.normal(size=(batch, HEADS, count, WIDTH)), jnp.float32) for _ in range(2)
    )


@pytest.mark.parametrize("batch", [1, 3, 9])  # 9: the form for large batches
def test_commit_writes_its_slots_only(batch):
    cache = alloc(2, batch, HEADS, SIZE, WIDTH, jnp.float32)
    start = jnp.asarray([(5 * b) % (SIZE - 3) for b in range(batch)], jnp.int32)
    k, v = rows(0, batch, 3), rows(1, batch, 3)
    new = jax.jit(commit)(cache, k, v, start)
    for got, given in ((new.k, k), (new.v, v)):
        for layer in range(2):
            for b in range(batch):
                expected = np.zeros((HEADS, SIZE, WIDTH), np.float32)
                expected[:, int(start[b]) : int(start[b]) + 3] = given[layer][b]
                np.testing.assert_array_equal(got[layer][b], expected)


def test_commit_keeps_the_cache_dtype():
    cache = alloc(2, 1, HEADS, SIZE, WIDTH, jnp.bfloat16)
    new = commit(cache, rows(0, 1, 2), rows(1, 1, 2), jnp.zeros((1,), jnp.int32))
    assert {x.dtype for x in (*new.k, *new.v)} == {jnp.dtype(jnp.bfloat16)}
    assert (new.allocated, new.nbytes) == (SIZE, 4 * HEADS * SIZE * WIDTH * 2)


def test_gather_rows_of_a_path():
    given = rows(2, 3, 6)
    path = jnp.asarray([[0, 2, 5], [0, 0, 0], [0, 1, 4]], jnp.int32)
    for layer, out in enumerate(gather_rows(given, path)):
        for b in range(3):
            np.testing.assert_array_equal(
                out[b], np.asarray(given[layer])[b][:, np.asarray(path)[b]]
            )


def test_after_changes_nothing():
    start = jnp.asarray([0, 7], jnp.int32)
    for value in (0.0, 5.0, -5.0, np.nan, np.inf):
        np.testing.assert_array_equal(after(start, jnp.full((2, 3), value)), start)


@pytest.mark.parametrize(
    "make,batch",
    [(lambda: PLAIN, 1), (lambda: PLAIN, 4), (oracle, 1), (oracle, 4), (SpecConfig, 1)],
    ids=["plain", "plain batch", "scripted", "scripted batch", "auto"],
)
def test_rounds_update_the_cache_in_place(make, batch):
    """No copy of a cache-shaped array in the compiled rounds: a copy costs the whole capacity at
    every step.
    """
    llm, spec = engine(), make()
    prompts = list(PROMPTS[:batch])
    llm.generate(prompts, greedy(4), spec=spec)
    plan = llm.plan_for(llm.resolve(spec), [greedy(4)])
    cfg, size = llm.model_config, llm._caches["target", batch].allocated
    shape = rf"f32\[{batch},{cfg.num_kv_heads},{size},{cfg.head_dim}\]"
    names = ("rounds", "prefill") if batch == 1 else ("rounds",)
    for name in names:
        text = llm.programs._compiled[name, plan, batch].as_text()
        assert re.search(shape, text), "the pattern of the cache's shape is wrong"
        copies = [
            line.strip() for line in text.splitlines() if re.search(rf"= {shape}\S* copy\(", line)
        ]
        assert copies == []
