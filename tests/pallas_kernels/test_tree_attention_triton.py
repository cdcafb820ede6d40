"""The Triton form of tree attention in Triton's interpreter: values, unused slots, pages, bits."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.tree_attention import reference
from tests.pallas_kernels.attention_cases import (
    Call,
    bits,
    exceeds_bound,
    plain_step,
    poisoned,
    random_call,
    wide,
)
from tests.pallas_kernels.triton_interpreter import interpreted

pytest.importorskip("triton")
SCALE = 0.125


def run(call: Call, pages: jax.Array | None = None) -> jax.Array:
    kernel = interpreted("tree_attention").tree_attention.__wrapped__
    return kernel(*call, pages, scale=SCALE, segment=128, num_warps=4, num_stages=1)


def test_mixed_batch_whatever_unused_slots_hold():
    call = random_call(0, lengths=[0, 70, 128, 192], rows=9, capacity=192)
    mask = np.array(call.mask)
    mask[:, 7:] = False
    mask[:, :, 7:] = False
    call = poisoned(call._replace(mask=jnp.asarray(mask)))
    out = run(call)
    assert not exceeds_bound(out, call, SCALE).any()
    np.testing.assert_array_equal(wide(out)[0, :, :, 7:], 0)


def test_float32_and_pages():
    call = random_call(1, lengths=[100, 65], rows=5, capacity=128, dtype=jnp.float32, heads=2)
    out = run(call)
    expected = reference.tree_attention(*call, scale=SCALE)
    np.testing.assert_allclose(wide(out), wide(expected), atol=2e-6)

    def paged(cache: jax.Array) -> jax.Array:
        return cache.reshape(2, 2, 4, 32, 64).swapaxes(1, 2).reshape(8, 2, 32, 64)[::-1]

    split = call._replace(cache_k=paged(call.cache_k), cache_v=paged(call.cache_v))
    pages = jnp.asarray(7 - np.arange(8).reshape(2, 4), jnp.int32)
    np.testing.assert_array_equal(bits(run(split, pages)), bits(out))


@pytest.mark.parametrize("length", [0, 61, 64, 125])
def test_a_row_has_the_bits_of_plain_decoding(length):
    call = random_call(2 + length, lengths=[length], rows=40, capacity=192)
    out = run(call)
    for row in (1, 39):
        alone = run(plain_step(call, 0, row))
        np.testing.assert_array_equal(bits(out[0, :, :, row]), bits(alone[0, :, :, 0]))
    part = Call(*call)._replace(
        q=call.q[:, :, :, :3],
        new_k=call.new_k[:, :, :3],
        new_v=call.new_v[:, :, :3],
        mask=call.mask[:, :3, :3],
    )
    np.testing.assert_array_equal(bits(run(part)), bits(out[:, :, :, :3]))
