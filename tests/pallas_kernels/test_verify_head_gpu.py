"""GPU kernels of the head, interpreted on the CPU: ids, ties, margins, noise, races."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jetspec_jax.sampling import token_noise
from pallas_kernels import mosaic
from pallas_kernels.gpu_target import TARGETS, on_abstract
from pallas_kernels.gumbel_noise import on_chip
from pallas_kernels.native import KernelError
from pallas_kernels.row_invariant_matmul import mosaic_gpu as matmul
from pallas_kernels.verify_head import mosaic_gpu, reference, specs

V, H = 192, 128
RNG = np.random.default_rng(0)
# small integers: sums are exact in any order, and ties are frequent
X = jnp.asarray(RNG.integers(-2, 3, (70, H)), jnp.bfloat16)
W = jnp.asarray(RNG.integers(-1, 2, (V, H)), jnp.bfloat16)
W = W.at[130:190].set(W[:60])  # the same rows in another block: every one of them ties
LOGITS = X.astype(jnp.float32) @ W.astype(jnp.float32).T


def run(
    x: jax.Array, w: jax.Array = W, races: bool = False, **kwargs: Any
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    with on_abstract(TARGETS["h100"]):
        params = mosaic.interpret_params(detect_races=races)
        ids, best, margin = mosaic_gpu.verify_head(x, w, interpret=params, **kwargs)
    return np.asarray(ids), np.asarray(best), np.asarray(margin)


def assert_same(found: tuple[np.ndarray, ...], wanted: tuple[jax.Array, ...]) -> None:
    for a, b in zip(found, wanted, strict=True):
        np.testing.assert_array_equal(a, np.asarray(b))


@pytest.mark.parametrize("m", [1, 70])
def test_ids_ties_and_margins_are_the_references(m: int) -> None:
    found = run(X[:m], races=True)
    assert not mosaic.races_found()
    wanted = reference.choose(LOGITS[:m])
    assert_same(found, wanted)
    if m > 1:
        assert (np.asarray(wanted[2]) == 0).any(), "no tie to resolve"


def test_no_rows() -> None:
    ids, best, margin = run(X[:0])
    assert ids.shape == best.shape == margin.shape == (0,) and ids.dtype == np.int32


def test_bits_do_not_depend_on_the_number_of_rows() -> None:
    x = jnp.asarray(RNG.standard_normal((66, H)), jnp.bfloat16)
    w = jnp.asarray(RNG.standard_normal((V, H)), jnp.bfloat16)
    many, alone = run(x, w), run(x[:1], w)
    assert_same(tuple(a[:1] for a in many), tuple(jnp.asarray(b) for b in alone))
    # and a chosen logit is the one of the projection op
    with on_abstract(TARGETS["h100"]):
        params = mosaic.interpret_params()
        logits = matmul.matmul(x[:3], w, tiling=specs.tiling(V, H), interpret=params)
    assert_same(tuple(a[:3] for a in many), reference.choose(logits))


def test_rows_that_are_not_numbers_keep_to_themselves() -> None:
    """The first NaN is chosen, as `jnp.argmax` does; so is id 0 where all logits are -inf."""
    bad = X[:4].at[1].set(jnp.nan)
    ids, best, margin = run(bad)
    assert ids[1] == 0 and np.isnan(best[1]) and np.isnan(margin[1])
    keep = [0, 2, 3]
    assert_same((ids[keep], best[keep], margin[keep]), reference.choose(LOGITS[jnp.array(keep)]))
    w = W.at[77].set(jnp.nan).at[150].set(jnp.nan)
    assert (run(X[:2], w)[0] == 77).all()
    low = jnp.zeros((1, H), jnp.bfloat16).at[0, 0].set(-jnp.inf)
    ids, best, margin = run(low, jnp.ones((V, H), jnp.bfloat16))
    assert ids[0] == 0 and best[0] == -np.inf and np.isnan(margin[0])


def test_sampled_rows_take_the_noise_of_their_position() -> None:
    keys = jnp.asarray(RNG.integers(0, 2**32, (6, 2)), jnp.uint32)
    temperature = jnp.asarray([0.0, 1.0, 0.5] * 2, jnp.float32)
    found = run(X[:6], sampling=mosaic_gpu.Sampling(keys, temperature), races=True)
    assert not mosaic.races_found()
    noise = jax.vmap(lambda k: token_noise(k, jnp.arange(V, dtype=jnp.int32)))(keys)
    warm = temperature[:, None] > 0
    scaled = LOGITS[:6] / jnp.where(warm, temperature[:, None], 1.0)
    ids, best, margin = reference.choose(jnp.where(warm, scaled + noise, LOGITS[:6]))
    decided = np.asarray(margin) > 1e-3  # no near tie
    assert decided[1::3].all()
    np.testing.assert_array_equal(found[0][decided], np.asarray(ids)[decided])
    np.testing.assert_allclose(found[1], np.asarray(best), rtol=1e-6, atol=1e-5)
    np.testing.assert_array_equal(found[0][::3], np.asarray(ids)[::3])  # greedy rows: exactly
    np.testing.assert_array_equal(found[2][::3], np.asarray(margin)[::3])


def test_noise_on_the_chip_is_the_samplers() -> None:
    """Within the stated error, over the whole range of the uniform number."""
    key = jnp.asarray([123, 456], jnp.uint32)
    ids = jnp.arange(200_000, dtype=jnp.int32)
    wanted = np.asarray(token_noise(key, ids))
    spread = [jnp.broadcast_to(key[i], ids.shape) for i in range(2)]
    found = np.asarray(jax.jit(on_chip.gumbel)(ids, (spread[0], spread[1])))
    assert wanted.max() > 10 and wanted.min() < -2
    assert (np.abs(found - wanted) <= on_chip.ERROR * (1 + np.abs(wanted))).all()


def test_what_does_not_fit_is_refused() -> None:
    for x, w in ((X.astype(jnp.float32), W), (X, W[:100]), (X[:, :64], W)):
        with pytest.raises(KernelError, match="verify_head: hidden"):
            run(x, w)


@pytest.mark.parametrize("fault", ["commit_smem", "wait_smem_to_gmem"])
def test_planted_faults_are_found(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Results that are not committed before the copy, or overwritten while it reads."""
    whole = getattr(mosaic, fault)
    if fault == "commit_smem":
        monkeypatch.setattr(mosaic, fault, lambda: None)
    else:
        monkeypatch.setattr(
            mosaic, fault, lambda n, wait_read_only=False: None if wait_read_only else whole(n)
        )
    try:
        run(X, races=True)
        assert mosaic.races_found()
    finally:
        mosaic.reset_interpreter()


def test_a_block_counted_twice_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A planted fault: ids of a block that start one too late."""
    iota = mosaic.broadcasted_iota
    monkeypatch.setattr(mosaic, "broadcasted_iota", lambda *a, **kw: iota(*a, **kw) + 1)
    ids, _, _ = run(X[:2])
    assert (ids != np.asarray(reference.choose(LOGITS[:2])[0])).all()


@pytest.mark.gpu
@pytest.mark.parametrize("shape", specs.GPU_SHAPES, ids=lambda s: s.name)
def test_on_a_gpu_choices_do_not_depend_on_the_number_of_rows(shape: specs.Shape) -> None:
    rng = np.random.default_rng(1)
    x = jnp.asarray(rng.standard_normal((256, shape.hidden)), jnp.bfloat16)
    w = jnp.asarray(rng.standard_normal((shape.vocab, shape.hidden)) / 64, jnp.bfloat16)
    call = jax.jit(mosaic_gpu.verify_head)
    full = [np.asarray(a) for a in call(x, w)]
    for m in (1, 8, 64, 65, 128):
        assert_same(tuple(np.asarray(a) for a in call(x[:m], w)), tuple(a[:m] for a in full))
    with jax.default_matmul_precision("highest"):
        ids, best, margin = reference.choose(jnp.matmul(x, w.T, preferred_element_type=jnp.float32))
    sure = np.asarray(margin) > 1e-3
    np.testing.assert_array_equal(full[0][sure], np.asarray(ids)[sure])
    np.testing.assert_allclose(full[1], np.asarray(best), rtol=1e-4)
