"""The Hopper form of tree attention, interpreted on the CPU: values, bits, races, faults."""

from __future__ import annotations

import functools
import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels import mosaic
from pallas_kernels.gpu_cases import all_cases
from pallas_kernels.gpu_target import TARGETS, on_abstract
from pallas_kernels.tree_attention import mosaic_gpu, plan, reference
from tests.pallas_kernels.attention_cases import (
    Call,
    bits,
    exceeds_bound,
    plain_step,
    poisoned,
    random_call,
    tree_mask,
    wide,
)

SCALE = 0.125
SEGMENT = 128
# JETSPEC_DEEP=1 looks at as many trees and split points as an afternoon allows.
EXAMPLES = 200 if os.environ.get("JETSPEC_DEEP") else 6


def run(call: Call, pages: jax.Array | None = None, *, races: bool = False) -> jax.Array:
    interpret = mosaic.interpret_params(detect_races=races)
    with on_abstract(TARGETS["h100"]):
        return jax.block_until_ready(
            mosaic_gpu.tree_attention(
                *call, pages, scale=SCALE, segment=SEGMENT, interpret=interpret
            )
        )


@pytest.fixture
def untraced(monkeypatch):
    """The kernel without its jit, so that a planted fault is not hidden by what was traced."""
    monkeypatch.setattr(mosaic_gpu, "tree_attention", mosaic_gpu.tree_attention.__wrapped__)
    yield monkeypatch
    mosaic.reset_interpreter()


# Lengths: nothing cached; a chunk and a bit; whole chunks; a full cache.
MIXED = [0, 70, 128, 192]


@functools.cache
def mixed_batch() -> tuple[Call, jax.Array, bool]:
    """A poisoned batch of mixed lengths with rows that see nothing new, its result, its races."""
    call = random_call(0, lengths=MIXED, rows=9, capacity=192)
    mask = np.array(call.mask)
    mask[:, 7:] = False  # rows that see no new row: in sequence 0 nothing at all
    mask[:, :, 7:] = False
    call = poisoned(call._replace(mask=jnp.asarray(mask)))
    return call, run(call, races=True), mosaic.races_found()


def test_mixed_batch_is_within_the_bound_whatever_unused_slots_hold():
    call, out, raced = mixed_batch()
    assert not raced
    assert not exceeds_bound(out, call, SCALE).any()


def test_a_row_that_sees_nothing_is_zero():
    _, out, _ = mixed_batch()
    np.testing.assert_array_equal(wide(out)[0, :, :, 7:], 0)
    assert (wide(out)[1, :, :, 7:] != 0).all()  # it sees the cache


def test_a_sequence_has_the_same_bits_alone():
    call, out, _ = mixed_batch()
    for b in (1, 3):
        alone = run(Call(*(x[b : b + 1] for x in call)))
        np.testing.assert_array_equal(bits(alone[0]), bits(out[b]))


@pytest.mark.parametrize("page", [16, 128])
def test_pages_have_the_bits_of_a_contiguous_cache(page):
    call = random_call(1, lengths=[200, 65], rows=5, capacity=256)
    rng = np.random.default_rng(2)
    count = 256 // page
    pages = rng.permutation(3 * count)[: 2 * count].reshape(2, count).astype(np.int32)

    def paged(cache: jax.Array) -> jax.Array:
        live = np.arange(256)[None, None, :, None] < np.asarray(call.lengths)[:, None, None, None]
        whole = np.where(live, np.asarray(cache), np.asarray(np.nan, cache.dtype))
        out = np.full((3 * count, 1, page, 64), np.nan, cache.dtype)
        out[pages] = whole.reshape(2, 1, count, page, 64).swapaxes(1, 2)
        return jnp.asarray(out)

    split = call._replace(cache_k=paged(call.cache_k), cache_v=paged(call.cache_v))
    np.testing.assert_array_equal(bits(run(split, jnp.asarray(pages))), bits(run(call)))


@pytest.mark.parametrize("dim", [64, 128])
def test_float16_and_both_head_dimensions_agree_with_the_reference(dim):
    call = random_call(3, lengths=[100], rows=6, capacity=128, dim=dim, group=3, dtype=jnp.float16)
    expected = reference.tree_attention(*call, scale=SCALE)
    np.testing.assert_allclose(wide(run(call)), wide(expected), atol=2e-3)


@st.composite
def trees(draw: st.DrawFn) -> tuple[list[int], int, int]:
    """(parents, length, row): a tree of 8 rows, how much is committed, a row to look at."""
    parents = [-1] + [draw(st.integers(0, row - 1)) for row in range(1, 8)]
    length = draw(st.one_of(st.integers(0, 180), st.integers(56, 66), st.integers(120, 130)))
    return parents, length, draw(st.integers(1, 7))


@settings(max_examples=EXAMPLES)
@given(trees())
def test_a_row_has_the_bits_of_plain_decoding(tree):
    parents, length, row = tree
    call = random_call(4, lengths=[length], rows=8, capacity=192)
    call = poisoned(call._replace(mask=jnp.asarray(tree_mask(parents))[None]))
    out = run(call)
    alone = run(plain_step(call, 0, row))
    np.testing.assert_array_equal(bits(out[0, :, :, row]), bits(alone[0, :, :, 0]))


def test_the_bits_of_a_row_do_not_depend_on_how_many_there_are():
    # two blocks of new keys, two tiles of rows
    large = random_call(5, lengths=[121], rows=66, capacity=128, group=1)
    out = run(large)
    for rows in (5,):
        part = large._replace(
            q=large.q[:, :, :, :rows],
            new_k=large.new_k[:, :, :rows],
            new_v=large.new_v[:, :, :rows],
            mask=large.mask[:, :rows, :rows],
        )
        np.testing.assert_array_equal(bits(run(part)), bits(out[:, :, :, :rows]))
    for row in (37, 65):
        alone = run(plain_step(large, 0, row))
        np.testing.assert_array_equal(bits(out[0, :, :, row]), bits(alone[0, :, :, 0]))


def test_any_mask_is_right():
    call = random_call(6, lengths=[30], rows=10, capacity=64)
    mask = np.random.default_rng(7).random((1, 10, 10)) < 0.4
    call = call._replace(mask=jnp.asarray(mask))
    assert not exceeds_bound(run(call), call, SCALE).any()


@settings(max_examples=40)
@given(st.sampled_from([1, 5, 12]), st.sampled_from([1, 3]), st.booleans(), st.integers(0, 10**6))
def test_plan_gives_every_row_the_list_it_sees(rows, group, is_tree, seed):
    rng = np.random.default_rng(seed)
    mask = rng.random((2, rows, rows)) < 0.5
    if is_tree:
        mask = np.stack(
            [tree_mask([int(rng.integers(-1, r)) if r else -1 for r in range(rows)])] * 2
        )
    lengths = np.array([5, 0], np.int32)
    made = jax.tree.map(
        np.asarray, plan.make_plan(jnp.asarray(mask), jnp.asarray(lengths), group=group, tile=8)
    )
    for b in range(2):
        assert sorted(made.order[b]) == list(range(rows))
        for packed in range(rows * group):
            row, path = made.order[b, packed // group], made.row_path[b, packed]
            count = made.row_end[b, packed] - lengths[b]
            seen = np.flatnonzero(mask[b, row])
            np.testing.assert_array_equal(made.members[b, path, :count], seen)
            np.testing.assert_array_equal(made.rank[b, path, seen], np.arange(count))
        for tile, named in enumerate(made.paths[b]):
            of_tile = made.row_path[b, tile * 8 : tile * 8 + 8]
            assert set(named[: made.counts[b, tile]]) == set(of_tile[of_tile >= 0])
        leaves = {row for row in range(rows) if mask[b, :, row].sum() == 1}
        if is_tree:
            assert set(made.row_path[b][made.row_path[b] >= 0]) == leaves


def test_queries_survive_packing():
    call = random_call(8, lengths=[5, 9], rows=7, capacity=64, group=3, heads=2)
    made = plan.make_plan(call.mask, call.lengths, group=3, tile=64)
    back = plan.unpack_rows(plan.pack_rows(call.q, made), made, 3)
    np.testing.assert_array_equal(bits(back), bits(call.q))


def test_it_lowers_for_hopper_and_more_shared_memory_than_there_is_does_not(monkeypatch):
    """Stage 2: block shapes, layouts and shared memory; no compiler is needed."""
    case = next(
        c for c in all_cases() if c.name.startswith("tree_attention/mosaic") and "rows 64" in c.name
    )
    fn, args = case.build()
    with on_abstract(TARGETS["h100"]):
        text = jax.jit(fn).trace(*args).lower(lowering_platforms=("cuda",)).as_text()
        assert text.count("mosaic_gpu") >= 2
        monkeypatch.setattr(mosaic_gpu, "STAGES", 8)
        monkeypatch.setattr(mosaic_gpu, "tree_attention", mosaic_gpu.tree_attention.__wrapped__)
        fn, args = case.build()
        with pytest.raises(ValueError, match="exceeds available shared memory"):
            jax.jit(fn).trace(*args).lower(lowering_platforms=("cuda",))


# --- planted faults ---------------------------------------------------------------------------


def test_a_missing_commit_is_a_race(untraced):
    """The one before the result leaves shared memory. The interpreter does not know that wgmma
    needs one, too: `gpu_compile` counts the fences in the machine code.
    """
    commit, calls = mosaic.commit_smem, []

    def all_but_the_last() -> None:
        calls.append(None)
        if len(calls) < 6:
            commit()

    untraced.setattr(mosaic, "commit_smem", all_but_the_last)
    run(random_call(9, lengths=[70], rows=3, capacity=128), races=True)
    assert len(calls) == 6
    assert mosaic.races_found()


def test_a_mask_that_is_off_by_one_is_found(untraced):
    def late(*args, **kwargs):
        made = make(*args, **kwargs)
        return made._replace(row_end=jnp.maximum(made.row_end - 1, 0))

    call = random_call(10, lengths=[70], rows=3, capacity=128)
    assert not exceeds_bound(run(call), call, SCALE).any()
    make = plan.make_plan
    untraced.setattr(mosaic_gpu, "make_plan", late)
    assert exceeds_bound(run(call), call, SCALE).any()
