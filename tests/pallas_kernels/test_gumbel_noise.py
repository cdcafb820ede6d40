"""Gumbel noise: the reference's law to a few ulp, a function of (key, id) alone, the same bits in
every vector form."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jetspec_jax.sampling import token_noise
from pallas_kernels import native
from pallas_kernels.gumbel_noise import gumbel_noise

KEYS = jnp.asarray(np.random.default_rng(0).integers(0, 2**32, (3, 2), np.uint32))


def exact(key, ids):
    """float64 from the same mixed bits, by the reference's own integer part."""
    with np.errstate(over="ignore"):

        def mix(h):
            h = (h ^ (h >> np.uint32(16))) * np.uint32(0x7FEB352D)
            h = (h ^ (h >> np.uint32(15))) * np.uint32(0x846CA68B)
            return h ^ (h >> np.uint32(16))

        bits = mix(mix(ids.astype(np.uint32) + key[0]) ^ key[1])
    uniform = bits.astype(np.float32) * np.float32(2.0**-32) + np.float32(2.0**-33)
    uniform = np.minimum(uniform, np.float32(1 - 2.0**-24)).astype(np.float64)
    return -np.log(-np.log1p(-uniform))


def test_close_to_the_exact_value():
    ids = jnp.arange(1_000_003, dtype=jnp.int32)
    got = np.asarray(jax.jit(gumbel_noise)(KEYS, ids))
    for row, key in zip(got, np.asarray(KEYS), strict=True):
        want = exact(key, np.asarray(ids))
        # an error of the inner logarithm moves the outer by as many relative ulp
        assert np.abs(row - want).max() < 4e-6 * 16
        assert (np.abs(row - want) <= 4e-7 * np.maximum(1.0, np.abs(want))).all()
    assert got.min() > -3.5 and got.max() > 10


def test_equals_the_reference_within_rounding():
    ids = jnp.asarray([0, 5, 49_151, 7, 123_456], jnp.int32)
    want = np.stack([np.asarray(token_noise(key, ids)) for key in KEYS])
    np.testing.assert_allclose(gumbel_noise(KEYS, ids), want, atol=2e-6)


def test_a_function_of_key_and_id_alone():
    ids = np.random.default_rng(1).permutation(5_000).astype(np.int32)
    whole = np.asarray(gumbel_noise(KEYS, jnp.asarray(ids)))
    for take in (slice(0, 1), slice(3, 20), slice(17, 4_999)):
        part = gumbel_noise(KEYS[1], jnp.asarray(ids[take]), threads=1)
        np.testing.assert_array_equal(part, whole[1, take])
    mapped = jax.vmap(lambda key: gumbel_noise(key, jnp.asarray(ids)))(KEYS)
    np.testing.assert_array_equal(mapped, whole)
    assert gumbel_noise(KEYS, jnp.zeros((0,), jnp.int32)).shape == (3, 0)


@pytest.mark.parametrize("form", [0, 2])
def test_narrower_vectors_give_the_same_bits(form: int, monkeypatch: pytest.MonkeyPatch):
    if form == 2 and "avx2" not in native.cpu_identity():
        form = 0
    ids = jnp.arange(70_000, dtype=jnp.int32)
    wide = np.asarray(gumbel_noise(KEYS, ids))
    narrow = native.library((f"-DJETSPEC_FORM={form}", "-O1"))
    monkeypatch.setattr(native, "library", lambda: narrow)
    np.testing.assert_array_equal(gumbel_noise(KEYS, ids), wide)


def test_refuses_what_does_not_fit():
    with pytest.raises(native.KernelError, match="gumbel_noise: keys"):
        gumbel_noise(KEYS.astype(jnp.int32), jnp.zeros((1,), jnp.int32))
