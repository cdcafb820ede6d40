"""Triton forms of row_invariant_matmul and verify_head in Triton's interpreter.

They are held to the same values as the Hopper kernels; ties, NaN and noise too.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jetspec_jax.sampling import token_noise
from pallas_kernels import triton_call
from pallas_kernels.native import KernelError
from pallas_kernels.row_invariant_matmul import reference as matmul_reference
from pallas_kernels.row_invariant_matmul import specs
from pallas_kernels.verify_head import reference
from pallas_kernels.verify_head.gpu import Sampling
from tests.pallas_kernels.triton_interpreter import interpreted

pytest.importorskip("triton")
RNG = np.random.default_rng(0)
X = jnp.asarray(RNG.standard_normal((70, 128)), jnp.bfloat16)
W = jnp.asarray(RNG.standard_normal((128, 128)), jnp.bfloat16)
TILING = specs.Tiling(64, 64, 2, 2)


def matmul(x: jax.Array, w: jax.Array = W, **kwargs: Any) -> np.ndarray:
    kwargs.setdefault("tiling", TILING)
    return np.asarray(interpreted("row_invariant_matmul").matmul(x, w, **kwargs))


@pytest.mark.parametrize("m", [0, 1, 70])
def test_projection(m: int) -> None:
    a, b = np.asarray(X[:m], np.float64), np.asarray(W, np.float64).T
    y = matmul(X[:m])
    assert y.shape == (m, 128)
    assert (np.abs(y - a @ b) <= 127 * 2.0**-24 * (np.abs(a) @ np.abs(b))).all()
    if m:
        np.testing.assert_array_equal(y[0], matmul(X[:1])[0])
        np.testing.assert_array_equal(y, matmul(X[:m], W.T, inputs_first=True))


def test_rows_keep_to_themselves() -> None:
    poisoned = X.at[1:].set(jnp.nan)
    np.testing.assert_array_equal(matmul(poisoned)[0], matmul(X[:1])[0])


def test_grouped_projection() -> None:
    w = jnp.asarray(RNG.standard_normal((4, 64, 128)), jnp.bfloat16).at[1].set(jnp.nan)
    experts = jnp.asarray([3] * 66 + [0, 2, 0, 3], jnp.int32)
    call = interpreted("row_invariant_matmul").grouped_matmul
    y = np.asarray(call(X, w, experts, tiling=specs.Tiling(64, 64, 1, 2)))
    wanted = np.asarray(matmul_reference.matmul_grouped(X, w, experts))
    np.testing.assert_allclose(y, wanted, rtol=0, atol=1e-4)


def integers() -> tuple[jax.Array, jax.Array, jax.Array]:
    """Rows, a head and logits with exact sums and many ties."""
    rng = np.random.default_rng(1)
    x = jnp.asarray(rng.integers(-2, 3, (66, 128)), jnp.bfloat16)
    w = jnp.asarray(rng.integers(-1, 2, (192, 128)), jnp.bfloat16)
    w = w.at[130:190].set(w[:60])
    return x, w, x.astype(jnp.float32) @ w.astype(jnp.float32).T


def test_choice_ties_and_margin() -> None:
    x, w, logits = integers()
    wanted = reference.choose(logits)
    assert (np.asarray(wanted[2]) == 0).any(), "no tie to resolve"
    for a, b in zip(interpreted("verify_head").verify_head(x, w), wanted, strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))
    ids, best, margin = interpreted("verify_head").verify_head(x[:2].at[1].set(jnp.nan), w)
    assert ids[1] == 0 and np.isnan(best[1]) and np.isnan(margin[1])
    assert ids[0] == wanted[0][0]
    assert interpreted("verify_head").verify_head(x[:0], w)[0].shape == (0,)


# the finaliser of the hash is meant to overflow
@pytest.mark.filterwarnings("ignore:overflow encountered")
def test_sampled_choice() -> None:
    x, w, logits = integers()
    keys = jnp.asarray(RNG.integers(0, 2**32, (66, 2)), jnp.uint32)
    temperature = jnp.asarray([0.0, 1.0, 0.5] * 22, jnp.float32)
    found = interpreted("verify_head").verify_head(x, w, sampling=Sampling(keys, temperature))
    noise = jax.vmap(lambda k: token_noise(k, jnp.arange(192, dtype=jnp.int32)))(keys)
    warm = temperature[:, None] > 0
    scaled = logits / jnp.where(warm, temperature[:, None], 1.0)
    ids, best, margin = reference.choose(jnp.where(warm, scaled + noise, logits))
    sure = np.asarray(margin) > 1e-3
    assert sure[1::3].mean() > 0.9
    np.testing.assert_array_equal(np.asarray(found[0])[sure], np.asarray(ids)[sure])
    np.testing.assert_allclose(np.asarray(found[1]), np.asarray(best), rtol=1e-6, atol=1e-5)


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(KernelError, match="multiples of 64"):
        matmul(X[:, :100], W[:, :100], tiling=None)
    with pytest.raises(KernelError, match="multiples of 64"):
        interpreted("verify_head").verify_head(X, W[:100])


@pytest.mark.gpu
@pytest.mark.parametrize("shape", specs.GPU_SHAPES[:6], ids=lambda s: s.name)
def test_on_a_gpu_rows_have_the_same_bits_for_every_m(shape: specs.Shape) -> None:
    """What interpretation cannot show: that mma.sync treats its rows alike."""
    call = jax.jit(triton_call.load("row_invariant_matmul").matmul)
    x = jnp.asarray(RNG.standard_normal((256, shape.k)), jnp.bfloat16)
    w = jnp.asarray(RNG.standard_normal((shape.n, shape.k)), jnp.bfloat16)
    full = np.asarray(call(x, w))
    a, b = np.asarray(x[:2], np.float64), np.asarray(w, np.float64).T
    # tensor cores may truncate where float32 rounds: twice the bound of rounding
    assert (np.abs(full[:2] - a @ b) <= shape.k * 2.0**-23 * (np.abs(a) @ np.abs(b))).all()
    for m in (1, 8, 63, 64, 65, 200):
        np.testing.assert_array_equal(np.asarray(call(x[:m], w)), full[:m], str(m))
    np.testing.assert_array_equal(np.asarray(call(x[::-1], w))[::-1], full)


@pytest.mark.gpu
def test_on_a_gpu_the_choice_is_the_references() -> None:
    x, w, logits = integers()
    found = jax.jit(triton_call.load("verify_head").verify_head)(x, w)
    for a, b in zip(found, reference.choose(logits), strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))
