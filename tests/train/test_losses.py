"""Losses as pure functions: values by hand, gradients against finite differences, masks before
reductions."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jetspec_jax.errors import ConfigError
from train.losses import (
    LossConfig,
    block_loss,
    cross_entropy,
    depth_weights,
    finish,
    forward_kl,
    reach,
    total_variation,
)

RNG = np.random.default_rng(0)
LOGITS = jnp.asarray(RNG.standard_normal((2, 3, 5)), jnp.float32)
TEACHER = jnp.asarray(2 * RNG.standard_normal((2, 3, 5)), jnp.float32)
LABELS = jnp.asarray([[0, 4, 2], [1, 1, -1]], jnp.int32)
MASK = jnp.asarray([[True, True, False], [True, True, False]])
EVERYTHING = LossConfig(ce=0.5, kl=0.5, tv=0.5, survival=0.5, acceptance=1.0, nodes=0.1)


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


def _block(x: jax.Array, loss: LossConfig) -> jax.Array:
    return block_loss(x, LABELS, MASK, loss, TEACHER).loss.sum()


LOSSES: dict[str, Callable[[jax.Array], jax.Array]] = {
    "ce": lambda x: cross_entropy(x, LABELS, MASK).sum(),
    "kl": lambda x: forward_kl(x, TEACHER, MASK, 2.0).sum(),
    "tv": lambda x: total_variation(x, TEACHER, MASK).sum(),
    "block": lambda x: _block(x, LossConfig(ce=0.3, kl=0.7, tv=0.5, temperature=2.0, gamma=1.5)),
    "acceptance": lambda x: _block(x, LossConfig(ce=0.0, kl=0.0, acceptance=1.0)),
    "acceptance and nodes": lambda x: _block(
        x, LossConfig(ce=0.1, kl=0.0, acceptance=1.0, nodes=0.3)
    ),
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
        return block_loss(x, LABELS, MASK, EVERYTHING, teacher).loss.sum()

    value, grad = jax.value_and_grad(loss)(poisoned)
    clean = block_loss(LOGITS, LABELS, MASK, EVERYTHING, TEACHER)
    np.testing.assert_allclose(value, clean.loss.sum(), rtol=1e-6)
    assert np.isfinite(np.asarray(grad)).all()
    assert np.all(np.asarray(grad)[~np.asarray(MASK)] == 0)


def test_metrics_count_whole_blocks_and_runs_from_the_start() -> None:
    eye = jnp.eye(5)
    best = jnp.asarray([[1, 2, 3], [1, 0, 3], [0, 2, 3], [1, 2, 4]])
    labels = jnp.asarray([[1, 2, 3], [1, 2, 3], [1, 2, 3], [1, 2, -1]], jnp.int32)
    inside = jnp.ones((4, 3), bool)
    ce = LossConfig(ce=1.0, kl=0.0)
    parts = block_loss(eye[best], labels, inside, ce)
    # accepted chains: 3, 1, 0 and 2 (the last label is outside the draft vocabulary: never
    # accepted)
    done = finish(parts)
    np.testing.assert_allclose(done["chain_tau"], 1 + 6 / 4)
    np.testing.assert_allclose(done["agreement"], [3 / 4, 3 / 4, 3 / 4])
    cut = finish(block_loss(eye[best], labels, inside.at[0, 2].set(False), ce))
    np.testing.assert_allclose(
        cut["chain_tau"], 1 + 3 / 3
    )  # a block cut by the end of the text does not count
    assert float(cut["slots"]) == 11


def test_depth_weights() -> None:
    np.testing.assert_allclose(depth_weights(3, 0.0), 1.0)
    np.testing.assert_allclose(depth_weights(3, 2.0), np.exp([0, -0.5, -1.0]), rtol=1e-6)


def test_nothing_supervised_is_zero_not_nan() -> None:
    poisoned = jnp.full_like(LOGITS, jnp.nan)
    parts = block_loss(poisoned, LABELS, jnp.zeros((2, 3), bool), EVERYTHING, poisoned)
    assert all(np.isfinite(np.asarray(v)).all() for v in finish(parts).values())
    assert float(finish(parts)["loss"]) == 0.0


def test_total_variation_by_hand() -> None:
    got = total_variation(LOGITS, TEACHER, MASK)
    p, q = _softmax(np.asarray(TEACHER)), _softmax(np.asarray(LOGITS))
    # 1 - sum of the smaller probabilities: what speculative sampling rejects
    want = np.where(MASK, 1 - np.minimum(p, q).sum(-1), 0)
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-6)


def test_reach_is_the_probability_of_the_whole_path() -> None:
    known = jnp.asarray([[True, True, True], [True, False, True]])
    got = reach(jnp.log(jnp.asarray([[0.5, 0.4, 0.1], [0.5, jnp.nan, 0.9]])), known)
    np.testing.assert_allclose(got, [[0.5, 0.2, 0.02], [0.5, 0.0, 0.0]], rtol=1e-6)


def test_the_acceptance_loss_is_minus_the_expected_length_of_a_sampled_chain() -> None:
    """Against simulation: draw each depth from the head, count the run of right tokens."""
    logits = 2 * jnp.asarray(RNG.standard_normal((1, 3, 5)), jnp.float32)
    labels, inside = jnp.argmax(logits, -1).astype(jnp.int32), jnp.ones((1, 3), bool)
    got = float(block_loss(logits, labels, inside, LossConfig(0.0, 0.0, acceptance=1.0)).loss.sum())
    p = _softmax(np.asarray(logits))[0]
    draws = np.stack([RNG.choice(5, 20_000, p=row / row.sum()) for row in p.astype(np.float64)], 1)
    run = np.cumprod(draws == np.asarray(labels)[0], 1).sum(1)
    np.testing.assert_allclose(-got, run.mean(), atol=4 * run.std() / np.sqrt(20_000))


def test_survival_weighs_a_slot_by_the_path_above_it() -> None:
    inside = jnp.ones((2, 3), bool)
    labels = jnp.maximum(LABELS, 0)
    nll = np.asarray(cross_entropy(LOGITS, labels, inside))
    above = np.concatenate([np.ones((2, 1)), np.exp(-np.cumsum(nll, 1))[:, :-1]], 1)
    got = block_loss(LOGITS, labels, inside, LossConfig(1.0, 0.0, survival=0.75)).loss
    np.testing.assert_allclose(got, (nll * (0.25 + 0.75 * above)).sum(0), rtol=1e-5)


def test_more_confidence_costs_more_nodes() -> None:
    inside = jnp.ones((2, 3), bool)
    labels = jnp.maximum(LABELS, 0)
    config = LossConfig(0.0, 0.0, nodes=1.0)
    flat, sharp = (block_loss(c * LOGITS, labels, inside, config).loss.sum() for c in (0.1, 5.0))
    assert 2 < float(flat) < float(sharp) <= 6  # two blocks: the first node of each is certain


def test_a_loss_that_needs_the_teacher_says_so() -> None:
    with pytest.raises(ConfigError, match="need the target's logits"):
        block_loss(LOGITS, LABELS, MASK, LossConfig(kl=1.0))
