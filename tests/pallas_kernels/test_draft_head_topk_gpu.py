"""GPU kernel of the draft head, interpreted on the CPU."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jetspec_jax.drafter.candidates import candidates
from pallas_kernels import mosaic
from pallas_kernels.draft_head_topk import arrays, mosaic_gpu, reference, specs
from pallas_kernels.gpu_target import TARGETS, on_abstract
from pallas_kernels.native import KernelError
from tests.pallas_kernels.interpreted import interpreted_mosaic

V, H, DEPTH, WIDTH = 192, 128, 7, 5
RNG = np.random.default_rng(0)
# small integers: sums are exact in any order, and ties are frequent
X = jnp.asarray(RNG.integers(-1, 2, (2 * DEPTH, H)), jnp.bfloat16)
W = jnp.asarray(RNG.integers(-1, 2, (V, H)), jnp.bfloat16)
W = W.at[130:160].set(W[:30])
LOGITS = X.astype(jnp.float32) @ W.astype(jnp.float32).T


def run(call: Any, *args: Any, races: bool = False, **kwargs: Any) -> tuple[np.ndarray, np.ndarray]:
    with on_abstract(TARGETS["h100"]):
        params = mosaic.interpret_params(detect_races=races)
        first, second = call(*args, interpret=params, **kwargs)
    return np.asarray(first), np.asarray(second)


def test_ranking_and_probabilities() -> None:
    ids, logp = run(mosaic_gpu.topk, X, W, WIDTH, races=True)
    assert not mosaic.races_found()
    wanted_ids, wanted = reference.topk(LOGITS, WIDTH)
    np.testing.assert_array_equal(ids, np.asarray(wanted_ids))
    # exponentials of V terms, each within 2 ulp, and their sum: relative error below V 2^-22
    np.testing.assert_allclose(logp, np.asarray(wanted), rtol=1e-6, atol=V * 2.0**-22)
    values = np.take_along_axis(np.asarray(LOGITS), ids, axis=1)
    assert (values[:, 1:] == values[:, :-1]).any(), "no tie to resolve"
    assert (logp <= 0).all()


def test_temperature_scales_before_the_normaliser() -> None:
    scale = jnp.asarray(RNG.uniform(0.3, 3, 3), jnp.float32)
    ids, logp = run(mosaic_gpu.topk, X[:3], W, WIDTH, scale=scale)
    wanted_ids, wanted = reference.topk(LOGITS[:3], WIDTH, scale)
    np.testing.assert_array_equal(ids, np.asarray(wanted_ids))
    np.testing.assert_allclose(logp, np.asarray(wanted), rtol=1e-5, atol=1e-5)


def test_candidates_are_those_of_the_drafter() -> None:
    """Two sequences, a draft vocabulary of its own; XLA here, the kernel where it runs."""
    to_target = jnp.asarray(RNG.permutation(1000)[:V], jnp.int32)
    hidden = X.reshape(2, DEPTH, H)
    tokens, table = arrays.candidates(hidden, W, WIDTH, ids=to_target)
    with on_abstract(TARGETS["h100"]), interpreted_mosaic():
        kernel = arrays.candidates(hidden, W, WIDTH, ids=to_target, implementation="mosaic_gpu")
    np.testing.assert_array_equal(np.asarray(kernel[0]), np.asarray(tokens))
    np.testing.assert_allclose(np.asarray(kernel[1]), np.asarray(table), rtol=1e-6, atol=1e-5)
    cfg: Any = SimpleNamespace(path_head="none")
    for b in range(2):
        logits = LOGITS.reshape(2, DEPTH, V)[b]
        wanted = candidates({}, cfg, logits, jnp.int32(0), to_target, WIDTH)
        np.testing.assert_array_equal(np.asarray(tokens[b]), np.asarray(wanted.tokens))
        np.testing.assert_allclose(
            np.asarray(table[b]), np.asarray(wanted.logp), rtol=1e-6, atol=1e-5
        )


def test_rows_that_are_not_numbers_keep_to_themselves() -> None:
    bad = X[:3].at[1].set(jnp.nan)
    ids, logp = run(mosaic_gpu.topk, bad, W, WIDTH)
    assert np.isnan(logp[1]).all()
    wanted_ids, wanted = reference.topk(LOGITS[:3], WIDTH)
    np.testing.assert_array_equal(ids[[0, 2]], np.asarray(wanted_ids)[[0, 2]])
    np.testing.assert_allclose(logp[[0, 2]], np.asarray(wanted)[[0, 2]], rtol=1e-5, atol=1e-4)
    ids, logp = run(mosaic_gpu.topk, X[:0], W, WIDTH)
    assert ids.shape == logp.shape == (0, WIDTH)


# of the rows that are not there, which the copy fills with zeros
@pytest.mark.filterwarnings("ignore:invalid value encountered in matmul")
def test_blocks_of_minus_infinity_add_nothing() -> None:
    """-inf everywhere but in the last block."""
    w = jnp.ones((V, H), jnp.bfloat16).at[: V - 64].set(-jnp.inf)
    ids, logp = run(mosaic_gpu.topk, jnp.ones((1, H), jnp.bfloat16), w, 2)
    assert ids.tolist() == [[V - 64, V - 63]]
    np.testing.assert_allclose(logp, -np.log(64.0), rtol=1e-5)


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(KernelError, match="width 0"):
        run(mosaic_gpu.topk, X, W, 0)
    with pytest.raises(KernelError, match=f"1 to {specs.GPU_MAX_WIDTH}"):
        run(mosaic_gpu.topk, X, W, 64)
    with pytest.raises(KernelError, match="multiples of 64"):
        run(mosaic_gpu.topk, X, W[:100], 4)


def test_a_missing_commit_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mosaic, "commit_smem", lambda: None)
    try:
        run(mosaic_gpu.topk, X[:2], W, 2, races=True)
        assert mosaic.races_found()
    finally:
        mosaic.reset_interpreter()


@pytest.mark.gpu
@pytest.mark.parametrize("shape", specs.GPU_SHAPES, ids=lambda s: s.name)
def test_on_a_gpu(shape: specs.Shape) -> None:
    rng = np.random.default_rng(1)
    x = jnp.asarray(rng.standard_normal((shape.depth, shape.hidden)), jnp.bfloat16)
    w = jnp.asarray(rng.standard_normal((shape.vocab, shape.hidden)) / 64, jnp.bfloat16)
    ids, logp = jax.jit(mosaic_gpu.topk, static_argnums=2)(x, w, shape.width)
    logits = jnp.matmul(x, w.T, preferred_element_type=jnp.float32)
    wanted = np.take_along_axis(np.asarray(jax.nn.log_softmax(logits)), np.asarray(ids), 1)
    np.testing.assert_allclose(np.asarray(logp), wanted, rtol=1e-4, atol=1e-4)
    best = np.asarray(reference.topk(logits, shape.width)[1])
    np.testing.assert_allclose(np.asarray(logp), best, rtol=1e-4, atol=1e-4)
