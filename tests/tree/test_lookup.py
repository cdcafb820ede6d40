"""Prompt lookup against a plain search; truncation, distinct branches, scores."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jetspec_jax.errors import ConfigError
from jetspec_jax.tree import lookup_candidates
from jetspec_jax.tree.lookup import BRANCH_FACTOR, MATCH_PROBABILITY

SIZE, DEPTH = 48, 5


@functools.cache
def program(ngram: int, branches: int, overlap: bool = False):
    return jax.jit(
        functools.partial(
            lookup_candidates, ngram=ngram, branches=branches, depth=DEPTH, overlap=overlap
        )
    )


def plain_search(tokens: list[int], ngram: int, branches: int) -> list[tuple[int, int]]:
    """(start of the continuation, match length) per branch, in the documented order."""
    length = len(tokens)
    found = []
    for start in range(1, length):
        run = 0
        while run < min(ngram, start) and tokens[start - 1 - run] == tokens[length - 1 - run]:
            run += 1
        if run >= min(2, ngram):
            found.append((start, run))
    found.sort(key=lambda match: (-match[1], -match[0]))
    chosen: list[tuple[int, int]] = []
    for _ in range(branches):
        firsts = {tokens[start] for start, _ in chosen}
        fresh = [m for m in found if tokens[m[0]] not in firsts]

        def differs(match):
            # Same first token: both need a second token, and another one.
            for other, _ in chosen:
                if tokens[match[0]] != tokens[other]:
                    continue
                if length - 1 in (match[0], other) or tokens[match[0] + 1] == tokens[other + 1]:
                    return False
            return True

        pool = fresh or [m for m in found if m not in chosen and differs(m)]
        if not pool:
            break
        chosen.append(pool[0])
    return chosen


def full_match(tokens: list[int], start: int) -> int:
    run = 0
    while run < start and tokens[start - 1 - run] == tokens[len(tokens) - 1 - run]:
        run += 1
    return run


@settings(max_examples=30)
@given(
    seed=st.integers(0, 2**31 - 1),
    ngram=st.sampled_from((1, 3)),
    alphabet=st.sampled_from((2, 4)),
    length=st.integers(0, SIZE),
)
def test_lookup_equals_the_plain_search(seed, ngram, alphabet, length):
    branches = 3
    tokens = np.random.default_rng(seed).integers(0, alphabet, SIZE).astype(np.int32)
    chains = program(ngram, branches)(jnp.asarray(tokens), jnp.int32(length))
    expected = plain_search(tokens[:length].tolist(), ngram, branches)
    for row in range(branches):
        valid = np.asarray(chains.valid[row])
        if row >= len(expected):
            assert not valid.any()
            continue
        start, _ = expected[row]
        run = full_match(tokens[:length].tolist(), start)
        continuation = tokens[start : min(start + DEPTH, length)]
        np.testing.assert_array_equal(valid, np.arange(DEPTH) < len(continuation))
        np.testing.assert_array_equal(np.asarray(chains.token[row])[valid], continuation)
        last = len(MATCH_PROBABILITY) - 1
        wanted = np.log([MATCH_PROBABILITY[min(run + k, last)] for k in range(len(continuation))])
        wanted[0] += np.log(BRANCH_FACTOR) * (row > 0)
        np.testing.assert_allclose(np.asarray(chains.score[row])[valid], wanted, rtol=1e-6)
    assert (np.asarray(chains.score)[~np.asarray(chains.valid)] == -np.inf).all()
    assert (np.asarray(chains.token)[~np.asarray(chains.valid)] == 0).all()


def test_longest_match_beats_recency_and_first_tokens_differ():
    text = [1, 2, 3, 40, 41, 9, 2, 3, 50, 51, 9, 8, 2, 3, 50, 52, 7, 1, 2, 3]
    tokens = np.zeros(SIZE, np.int32)
    tokens[: len(text)] = text
    chains = program(3, 3)(jnp.asarray(tokens), jnp.int32(len(text)))
    rows = [np.asarray(chains.token[r])[np.asarray(chains.valid[r])].tolist() for r in range(3)]
    assert rows[0] == [40, 41, 9, 2, 3]  # three tokens match
    assert rows[1] == [50, 52, 7, 1, 2]  # two match, the most recent
    assert rows[2] == [50, 51, 9, 8, 2]  # no third first token: a second token that differs


def test_text_past_the_length_is_never_read():
    text = [5, 6, 7, 8, 5, 6]
    clean = np.zeros(SIZE, np.int32)
    clean[:6] = text
    dirty = np.tile(np.asarray([5, 6, 9], np.int32), SIZE // 3)
    dirty[:6] = text
    first, second = (program(3, 2)(jnp.asarray(t), jnp.int32(6)) for t in (clean, dirty))
    for one, two in zip(jax.tree.leaves(first), jax.tree.leaves(second), strict=True):
        np.testing.assert_array_equal(np.asarray(one), np.asarray(two))
    assert np.asarray(first.token[0]).tolist() == [7, 8, 5, 6, 0]
    assert not bool(first.valid[1].any())


def test_overlap_continues_a_loop_past_the_end():
    tokens = np.zeros(SIZE, np.int32)
    tokens[:7] = [3, 4, 3, 4, 3, 4, 3]
    plain = program(3, 1)(jnp.asarray(tokens), jnp.int32(7))
    assert np.asarray(plain.token[0]).tolist() == [4, 3, 0, 0, 0]
    copied = program(3, 1, True)(jnp.asarray(tokens), jnp.int32(7))
    assert np.asarray(copied.token[0]).tolist() == [4, 3, 4, 3, 4] and bool(copied.valid.all())


def test_scores_grow_with_match_length_even_past_the_ngram():
    tokens = np.zeros(SIZE, np.int32)
    tokens[:12] = [1, 2, 3, 4, 5, 9, 8, 1, 2, 3, 4, 5]
    scores = np.asarray(program(3, 1)(jnp.asarray(tokens), jnp.int32(12)).score[0])
    np.testing.assert_allclose(scores, np.log(MATCH_PROBABILITY[5:10]), rtol=1e-6)
    assert (np.diff(MATCH_PROBABILITY) > 0).all()
    assert MATCH_PROBABILITY[0] > 0 and MATCH_PROBABILITY[-1] < 1 and 0 < BRANCH_FACTOR < 1


def test_batch_by_vmap_equals_single_with_one_program():
    rng = np.random.default_rng(1)
    tokens = jnp.asarray(rng.integers(0, 3, (3, SIZE)), jnp.int32)
    lengths = jnp.asarray([48, 20, 1], jnp.int32)
    single = program(3, 2)
    batch = jax.jit(jax.vmap(single))(tokens, lengths)
    for row in range(3):
        one = single(tokens[row], lengths[row])
        for a, b in zip(jax.tree.leaves(batch), jax.tree.leaves(one), strict=True):
            np.testing.assert_array_equal(np.asarray(a[row]), np.asarray(b))
    assert single._cache_size() == 1


def test_bad_sizes_are_refused():
    tokens = jnp.zeros((8,), jnp.int32)
    for name in ("ngram", "branches", "depth"):
        sizes = {"ngram": 3, "branches": 2, "depth": 4, name: 0}
        with pytest.raises(ConfigError, match=f"{name}=0"):
            lookup_candidates(tokens, jnp.int32(4), **sizes)
    with pytest.raises(ConfigError, match="overflows"):
        jax.eval_shape(
            lambda t: lookup_candidates(t, 4, ngram=600, branches=1, depth=2),
            jax.ShapeDtypeStruct((1 << 20,), jnp.int32),
        )
