"""Losses as pure functions: values by hand, gradients against finite differences, masks before
reductions."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from train.losses import block_loss, cross_entropy, depth_weights, finish, forward_kl

RNG = np.random.default_rng(0)
LOGITS = jnp.asarray(RNG.standard_normal((2, 3, 5)), jnp.float32)
TEACHER = jnp.asarray(2 * RNG.standard_normal((2, 3, 5)), jnp.float32)
LABELS = jnp.asarray([[0, 4, 2], [1, 1, -1]], jnp.int32)
MASK = jnp.asarray([[True, True, False], [True, True, False]])


def _softmax(x: np.ndarray) -> np.ndarray:
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def test_cross_entropy_by_hand() -> None:
    got = cross_entropy(LOGITS, LABELS, MASK)
    p = _softmax(np.asarray(LOGITS))
    for b, d in np.ndindex(2, 3):
        want = -np.log(p[b, d, int(LABELS[b, d])]) if MASK[b, d] else 0.0
        np.testing.assert_allclose(got[b, d], want, rtol=1e-5)


@pytest.mark.parametrize("temperature", [1.0, 3.0])
def test_forward_kl_by_hand(temperature: float) -> None:
    got = forward_kl(LOGITS, TEACHER, MASK, temperature)
    q, p = _softmax(np.asarray(LOGITS) / temperature), _softmax(np.asarray(TEACHER) / temperature)
    want = np.where(MASK, temperature**2 * (p * np.log(p / q)).sum(-1), 0)
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(forward_kl(TEACHER, TEACHER, MASK, temperature), 0, atol=1e-6)


LOSSES: dict[str, Callable[[jax.Array], jax.Array]] = {
    "ce": lambda x: cross_entropy(x, LABELS, MASK).sum(),
    "kl": lambda x: forward_kl(x, TEACHER, MASK, 2.0).sum(),
    "block": lambda x: block_loss(
        x, LABELS, MASK, depth_weights(3, 1.5), teacher=TEACHER, ce=0.3, kl=0.7, temperature=2.0
    ).loss.sum(),
}


@pytest.mark.parametrize("name", LOSSES)
def test_gradients_against_finite_differences(name: str) -> None:
    loss = jax.jit(LOSSES[name])
    grad = np.asarray(jax.grad(loss)(LOGITS))
    for index in np.ndindex(2, 3, 5):
        step = jnp.zeros_like(LOGITS).at[index].set(1e-2)
        slope = (float(loss(LOGITS + step)) - float(loss(LOGITS - step))) / 2e-2
        np.testing.assert_allclose(grad[index], slope, atol=2e-3)
    assert np.all(grad[~np.asarray(MASK)] == 0)


def test_the_teacher_gets_no_gradient() -> None:
    assert np.all(np.asarray(jax.grad(lambda t: forward_kl(LOGITS, t, MASK).sum())(TEACHER)) == 0)


def test_nan_in_masked_slots_reaches_neither_value_nor_gradient() -> None:
    poisoned = jnp.where(MASK[..., None], LOGITS, jnp.nan)
    teacher = jnp.where(MASK[..., None], TEACHER, jnp.inf)

    def loss(x: jax.Array) -> jax.Array:
        return block_loss(
            x, LABELS, MASK, depth_weights(3, 0), teacher=teacher, ce=0.5, kl=0.5
        ).loss.sum()

    value, grad = jax.value_and_grad(loss)(poisoned)
    clean = block_loss(LOGITS, LABELS, MASK, depth_weights(3, 0), teacher=TEACHER, ce=0.5, kl=0.5)
    np.testing.assert_allclose(value, clean.loss.sum(), rtol=1e-6)
    assert np.isfinite(np.asarray(grad)).all()
    assert np.all(np.asarray(grad)[~np.asarray(MASK)] == 0)


def test_metrics_count_whole_blocks_and_runs_from_the_start() -> None:
    eye = jnp.eye(5)
    best = jnp.asarray([[1, 2, 3], [1, 0, 3], [0, 2, 3], [1, 2, 4]])
    labels = jnp.asarray([[1, 2, 3], [1, 2, 3], [1, 2, 3], [1, 2, -1]], jnp.int32)
    inside = jnp.ones((4, 3), bool)
    parts = block_loss(eye[best], labels, inside, depth_weights(3, 0))
    # accepted chains: 3, 1, 0 and 2 (the last label is outside the draft vocabulary: never
    # accepted)
    done = finish(parts)
    np.testing.assert_allclose(done["chain_tau"], 1 + 6 / 4)
    np.testing.assert_allclose(done["agreement"], [3 / 4, 3 / 4, 3 / 4])
    cut = finish(block_loss(eye[best], labels, inside.at[0, 2].set(False), depth_weights(3, 0)))
    np.testing.assert_allclose(
        cut["chain_tau"], 1 + 3 / 3
    )  # a block cut by the end of the text does not count
    assert float(cut["slots"]) == 11


def test_depth_weights() -> None:
    np.testing.assert_allclose(depth_weights(3, 0.0), 1.0)
    np.testing.assert_allclose(depth_weights(3, 2.0), np.exp([0, -0.5, -1.0]), rtol=1e-6)


def test_nothing_supervised_is_zero_not_nan() -> None:
    parts = block_loss(
        jnp.full_like(LOGITS, jnp.nan), LABELS, jnp.zeros((2, 3), bool), depth_weights(3, 0)
    )
    assert all(np.isfinite(np.asarray(v)).all() for v in finish(parts).values())
    assert float(finish(parts)["loss"]) == 0.0
