"""What only a GPU can show of the exact form: two promises of the tensor core.

An element of a product depends on its row and column only, and products that are exactly zero do
not change an accumulated sum. If both hold, a row has the same bits whatever N, the batch and the
place of its ancestors are; that is compared here at the shapes of Qwen3-8B and SmolLM2-135M.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import dispatch
from pallas_kernels.tree_attention import tree_attention
from tests.pallas_kernels.attention_cases import (
    Call,
    bits,
    exceeds_bound,
    plain_step,
    poisoned,
    random_call,
)

pytestmark = pytest.mark.gpu
SHAPES = {"qwen3-8b": (8, 4, 128), "smollm2-135m": (3, 3, 64)}


@functools.partial(jax.jit, static_argnames=("scale",))
def _kernel(call: Call, scale: float) -> jax.Array:
    return tree_attention(*call, scale=scale)


def run(call: Call) -> jax.Array:
    with dispatch.strict():
        return _kernel(call, scale=call.q.shape[-1] ** -0.5)


def made(model: str, lengths: list[int], rows: int, capacity: int = 4096, seed: int = 0) -> Call:
    heads, group, dim = SHAPES[model]
    call = random_call(
        seed, lengths=lengths, rows=rows, capacity=capacity, heads=heads, group=group, dim=dim
    )
    return poisoned(call)


@pytest.mark.parametrize("model", SHAPES)
@pytest.mark.parametrize("length", [0, 1, 63, 64, 1000, 1023, 1024, 2047, 4000])
def test_a_row_has_the_bits_of_plain_decoding(model, length):
    call = made(model, [length], 64, seed=length)
    out = run(call)
    for row in (0, 1, 7, 21, 40, 63):
        alone = run(plain_step(call, 0, row))
        np.testing.assert_array_equal(bits(out[0, :, :, row]), bits(alone[0, :, :, 0]))


@pytest.mark.parametrize("model", SHAPES)
def test_the_bits_of_a_row_do_not_depend_on_how_many_there_are(model):
    whole = made(model, [1017], 256)
    out = run(whole)
    for rows in (1, 8, 16, 32, 64, 128):
        part = whole._replace(
            q=whole.q[:, :, :, :rows],
            new_k=whole.new_k[:, :, :rows],
            new_v=whole.new_v[:, :, :rows],
            mask=whole.mask[:, :rows, :rows],
        )
        np.testing.assert_array_equal(bits(run(part)), bits(out[:, :, :, :rows]))


@pytest.mark.parametrize("model", SHAPES)
def test_a_sequence_has_the_same_bits_in_any_batch(model):
    lengths = [int(n) for n in np.random.default_rng(3).integers(0, 4096, 32)]
    call = made(model, lengths, 16)
    out = run(call)
    assert not exceeds_bound(out, call, call.q.shape[-1] ** -0.5).any()
    for b in (0, 13, 31):
        alone = run(Call(*(x[b : b + 1] for x in call)))
        np.testing.assert_array_equal(bits(alone[0]), bits(out[b]))


def test_pages_have_the_bits_of_a_contiguous_cache():
    call = made("qwen3-8b", [3000, 517], 32)
    count = 4096 // 32

    def paged(cache: jax.Array) -> jax.Array:
        split = cache.reshape(2, 8, count, 32, 128).swapaxes(1, 2)
        return split.reshape(2 * count, 8, 32, 128)[::-1]

    pages = jnp.asarray(2 * count - 1 - np.arange(2 * count).reshape(2, count), jnp.int32)
    split = call._replace(cache_k=paged(call.cache_k), cache_v=paged(call.cache_v))
    with dispatch.strict():
        out = tree_attention(*split, scale=128**-0.5, pages=pages)
    np.testing.assert_array_equal(bits(out), bits(run(call)))


def test_long_contexts_are_within_the_bound():
    call = made("qwen3-8b", [32700], 64, capacity=32768)
    assert not exceeds_bound(run(call), call, 128**-0.5).any()
