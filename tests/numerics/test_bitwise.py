"""Level 2 of algorithm.md section 6: the logits of an accepted path are plain decoding's, bit for
bit.

`EngineConfig(numerics="bitwise")` promises it for trees up to the engine's own budget. Compared are
the 20 best log-probabilities of every token, which come from those logits, and the logits
themselves of one forward.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jetspec_jax import EngineConfig, SamplingParams
from jetspec_jax.cache import alloc, commit
from jetspec_jax.models.decoder import forward_block, head_logits
from jetspec_jax.numerics import fold_attention, online_attention, ordered_sum
from jetspec_jax.testing import scripted, tiny_llm
from tests.doubles import PLAIN, PROMPTS

TOKENS = 24


def config(**changes):
    return EngineConfig(
        capacity=192, attention_chunk=64, prefill_chunk=32, numerics="bitwise", **changes
    )


def scripts(says, seed):
    """Three continuations, partly right: the accepted path lies anywhere among the rows."""
    rng = np.random.default_rng(seed)
    return {
        p: [[t if rng.random() < 0.7 else int(rng.integers(260)) for t in ids] for _ in range(3)]
        for p, ids in says.items()
    }


@pytest.mark.parametrize(
    "kernels,dtype", [("xla", "float32"), ("cpu", "float32"), ("xla", "bfloat16")]
)
def test_tree_and_plain_agree(kernels, dtype):
    llm = tiny_llm(head=False, engine=config(kernels=kernels, dtype=dtype))
    params = SamplingParams(max_tokens=TOKENS, ignore_eos=True, logprobs=20)
    plain = {p: llm.generate([p], params, spec=PLAIN)[0] for p in PROMPTS}
    accepted = 0
    for seed in range(3):
        spec = scripted(llm, scripts({p: r.token_ids for p, r in plain.items()}, seed))
        for prompt, expected in plain.items():
            (result,) = llm.generate([prompt], params, spec=spec)
            assert result.token_ids == expected.token_ids
            if dtype == "float32":
                assert result.logprobs == expected.logprobs  # exactly
            accepted += sum(result.accepted)
    assert accepted > TOKENS


@functools.cache
def block(kernels, dtype):
    """forward_block of a tiny target as the engine calls it, a program per number of rows."""
    engine = config(kernels=kernels, dtype=dtype)
    llm = tiny_llm(head=False, engine=engine)
    plan = llm.plan_for(llm.spec)

    @jax.jit
    def run(tokens, positions, cache, lengths, mask):
        out = forward_block(
            llm._target.params,
            plan.model,
            tokens,
            positions,
            cache.k,
            cache.v,
            lengths,
            mask,
            numerics=plan.numerics,
        )
        return head_logits(llm._target.params, out.hidden), out.new_k, out.new_v

    return run, plan


@pytest.mark.parametrize("kernels,dtype", [("xla", "float32"), ("cpu", "float32")])
def test_logits_of_a_path_inside_a_tree(kernels, dtype):
    """A chain decoded token by token against the same chain scattered among wrong nodes of one
    forward.
    """
    run, plan = block(kernels, dtype)
    cfg, rows = plan.model, 16
    pad = plan.pad_rows
    rng = np.random.default_rng(0)
    chain = rng.integers(0, 256, 6)
    prefix = rng.integers(0, 256, 37)

    def arrays(tokens, positions, mask, count):
        size = max(count, pad)
        wide = np.eye(size, dtype=bool)
        wide[:count, :count] = mask
        filled = np.zeros((2, size), np.int32)
        filled[0, :count], filled[1, :count] = tokens, positions
        return jnp.asarray(filled[:1]), jnp.asarray(filled[1:]), jnp.asarray(wide[None])

    cache = alloc(cfg.num_layers, 1, cfg.num_kv_heads, 128, cfg.head_dim, jnp.dtype(dtype))

    def one_by_one(tokens, start, cache):
        out = []
        for i, token in enumerate(tokens):
            ids, positions, mask = arrays([token], [start + i], True, 1)
            length = jnp.asarray([start + i], jnp.int32)
            logits, k, v = run(ids, positions, cache, length, mask)
            out.append(np.asarray(logits[0, 0]))
            one = lambda xs: tuple(x[:, :, :1] for x in xs)
            cache = commit(cache, one(k), one(v), length)
        return out, cache

    _, cache = one_by_one(prefix, 0, cache)
    plain, _ = one_by_one(chain, len(prefix), cache)
    for seed in range(3):
        # parents come before children; the chain sits at sorted random rows, the first at row 0
        rng = np.random.default_rng(seed)
        where = np.sort(
            np.concatenate([[0], rng.choice(np.arange(1, rows), len(chain) - 1, replace=False)])
        )
        parent = np.array([-1] + [rng.integers(0, i) for i in range(1, rows)])
        parent[where[1:]] = where[:-1]
        tokens = rng.integers(0, 256, rows)
        tokens[where] = chain
        depth, mask = np.zeros(rows, int), np.eye(rows, dtype=bool)
        for i in range(1, rows):
            depth[i] = depth[parent[i]] + 1
            mask[i] |= mask[parent[i]]
        ids, positions, mask = arrays(tokens, len(prefix) + depth, mask, rows)
        logits, _, _ = run(ids, positions, cache, jnp.asarray([len(prefix)], jnp.int32), mask)
        for expected, row in zip(plain, where, strict=True):
            np.testing.assert_array_equal(np.asarray(logits[0, row]), expected)


def test_both_attentions_against_a_plain_softmax():
    rng = np.random.default_rng(3)
    batch, heads, group, rows, width, size = 2, 2, 3, 5, 8, 64
    normal = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)
    q, new_k, new_v = (
        normal(batch, heads, group, rows, width),
        *(normal(batch, heads, rows, width) for _ in range(2)),
    )
    cache_k, cache_v = (normal(batch, heads, size, width) for _ in range(2))
    lengths = np.array([0, 37])
    mask = np.tril(rng.random((batch, rows, rows)) < 0.5) | np.eye(rows, dtype=bool)
    dead = np.arange(size)[None, None, :, None] >= lengths[:, None, None, None]
    poisoned = [jnp.where(dead, jnp.nan, x) for x in (cache_k, cache_v)]
    for form in (online_attention, fold_attention):
        got = form(
            q,
            *poisoned,
            jnp.asarray(lengths, jnp.int32),
            new_k,
            new_v,
            jnp.asarray(mask),
            scale=0.3,
            chunk=16,
        )
        for b in range(batch):
            live = int(lengths[b])
            keys = np.concatenate([np.asarray(cache_k)[b, :, :live], np.asarray(new_k)[b]], 1)
            values = np.concatenate([np.asarray(cache_v)[b, :, :live], np.asarray(new_v)[b]], 1)
            scores = np.einsum("kgth,ksh->kgts", np.asarray(q)[b], keys).astype(np.float64) * 0.3
            visible = np.concatenate([np.ones((rows, live), bool), mask[b]], 1)
            scores = np.where(visible, scores, -np.inf)
            p = np.exp(scores - scores.max(-1, keepdims=True))
            expected = np.einsum("kgts,ksh->kgth", p / p.sum(-1, keepdims=True), values)
            np.testing.assert_allclose(got[b], expected, atol=2e-5)


@pytest.mark.parametrize("size", [1, 2, 7, 64, 129])
def test_ordered_sum(size):
    """The bits of a row do not depend on the number of rows."""
    x = jnp.asarray(np.random.default_rng(size).normal(size=(33, size)), jnp.float32)
    whole = np.asarray(jax.jit(ordered_sum)(x))
    np.testing.assert_allclose(whole[:, 0], np.asarray(x, np.float64).sum(-1), atol=1e-4)
    for rows in (1, 2, 5):
        np.testing.assert_array_equal(np.asarray(jax.jit(ordered_sum)(x[:rows])), whole[:rows])
