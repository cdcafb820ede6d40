"""GPU kernels of the projection, interpreted on the CPU: sums, bits of a row, races."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels import mosaic
from pallas_kernels.gpu_target import TARGETS, on_abstract
from pallas_kernels.native import KernelError
from pallas_kernels.row_invariant_matmul import gpu, mosaic_gpu, reference, specs

N, K = 128, 256
TILING = specs.Tiling(64, 64, 2, 2)


def normal(*shape: int, seed: int = 0) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.bfloat16)


X, W = normal(192, K), normal(N, K, seed=1)


def run(x: jax.Array, w: jax.Array = W, races: bool = False, **kwargs: Any) -> np.ndarray:
    kwargs.setdefault("tiling", TILING)
    with on_abstract(TARGETS["h100"]):
        params = mosaic.interpret_params(detect_races=races)
        return np.asarray(mosaic_gpu.matmul(x, w, interpret=params, **kwargs))


@functools.cache
def rows_alone() -> np.ndarray:
    """The first rows, each computed alone."""
    return np.concatenate([run(X[i : i + 1]) for i in range(3)])


def exact(x: jax.Array, w: jax.Array) -> tuple[np.ndarray, np.ndarray]:
    """Sums in float64, and the bound of float32's: (K - 1) roundings of the sum of magnitudes
    (products of bfloat16 are exact in float32), to first order."""
    a, b = np.asarray(x, np.float64), np.asarray(w, np.float64).T
    return a @ b, (x.shape[1] - 1) * 2.0**-24 * (np.abs(a) @ np.abs(b))


@pytest.mark.parametrize("m", [1, 64, 130])
def test_sums_are_right_and_nothing_races(m: int) -> None:
    y = run(X[:m], races=True)
    assert not mosaic.races_found()
    value, bound = exact(X[:m], W)
    assert y.shape == (m, N) and y.dtype == np.float32
    assert (np.abs(y - value) <= bound).all()


def test_no_rows() -> None:
    assert run(X[:0]).shape == (0, N)


@pytest.mark.parametrize("m", [3, 65, 192])
def test_bits_of_a_row_do_not_depend_on_the_number_of_rows(m: int) -> None:
    np.testing.assert_array_equal(run(X[:m])[:3], rows_alone())


def test_bits_of_a_row_do_not_depend_on_its_place_or_company() -> None:
    order = np.random.default_rng(2).permutation(70)
    y = run(X[:70][order])
    np.testing.assert_array_equal(y[np.argsort(order)][:3], rows_alone())
    poisoned = X[:70].at[3:].set(jnp.nan)
    y = run(poisoned)
    np.testing.assert_array_equal(y[:3], rows_alone())
    assert np.isnan(y[3:]).all()


def test_weight_stored_inputs_first() -> None:
    np.testing.assert_array_equal(run(X[:3], W.T, inputs_first=True), rows_alone())


def test_parts_of_k_are_added_from_left_to_right() -> None:
    """2^24 + 1 - 2^24 in this order loses the 1; in another it would not."""
    parts = jnp.asarray([2.0**24, 1.0, -(2.0**24)], jnp.float32).reshape(3, 1, 1)
    assert float(jax.jit(gpu.add_parts)(parts)[0, 0]) == 0.0


@settings(max_examples=6)
@given(
    m=st.sampled_from((1, 8, 9, 63, 65, 129)),
    n=st.sampled_from((64, 128, 192)),
    steps=st.sampled_from((1, 2, 3)),
    splits=st.sampled_from((1, 2)),
)
def test_any_shape(m: int, n: int, steps: int, splits: int) -> None:
    """Small integers, so that every order of addition gives the same; fewer steps than stages."""
    k = 64 * steps * splits
    rng = np.random.default_rng(m + n + k)
    x = jnp.asarray(rng.integers(-3, 4, (m, k)), jnp.bfloat16)
    w = jnp.asarray(rng.integers(-3, 4, (n, k)), jnp.bfloat16)
    y = run(x, w, tiling=specs.Tiling(64, 64, splits, 4))
    np.testing.assert_array_equal(y, np.asarray(x, np.float32) @ np.asarray(w, np.float32).T)


def grouped(x: jax.Array, w: jax.Array, experts: np.ndarray, races: bool = False) -> np.ndarray:
    with on_abstract(TARGETS["h100"]):
        params = mosaic.interpret_params(detect_races=races)
        ids = jnp.asarray(experts, jnp.int32)
        tiling = specs.Tiling(64, 64, 1, 2)
        return np.asarray(mosaic_gpu.grouped_matmul(x, w, ids, tiling=tiling, interpret=params))


def test_grouped_rows_meet_their_expert() -> None:
    """70 rows of one expert take two blocks; an expert without rows is never read (it is NaN)."""
    w = normal(5, 64, 128, seed=3).at[1].set(jnp.nan)
    x = normal(74, 128, seed=4)
    experts = np.array([4] * 70 + [0, 2, 0, 3])
    y = grouped(x, w, experts, races=True)
    assert not mosaic.races_found()
    np.testing.assert_allclose(
        y, np.asarray(reference.matmul_grouped(x, w, jnp.asarray(experts))), rtol=0, atol=1e-4
    )
    few = np.array([69, 70, 71])  # the same rows in other company
    np.testing.assert_array_equal(grouped(x[few], w, experts[few]), y[few])
    assert grouped(x[:0], w, experts[:0]).shape == (0, 64)


_group_rows = jax.jit(lambda ids: gpu.group_rows(ids, 7))


@settings(max_examples=30)
@given(
    st.sampled_from((1, 5, 70, 200)).flatmap(
        lambda n: st.lists(st.integers(0, 6), min_size=n, max_size=n)
    )
)
def test_places_of_grouped_rows(experts: list[int]) -> None:
    place, owner = _group_rows(jnp.asarray(experts, jnp.int32))
    place, owner = np.asarray(place), np.asarray(owner)
    assert len(set(place.tolist())) == len(experts)
    assert (place >= 0).all() and (place < 64 * len(owner)).all()
    np.testing.assert_array_equal(owner[place // 64], experts)
    used = np.unique(place // 64)
    assert (owner >= 0).sum() == len(used) and (np.diff(owner[owner >= 0]) >= 0).all()


def test_tilings_of_all_named_shapes() -> None:
    shapes = [(s.name, s.n, s.k) for s in (*specs.GPU_SHAPES, *specs.GROUPED_SHAPES)]
    assert len({name for name, _, _ in shapes}) == len(shapes)
    for name, n, k in shapes:
        tiling = specs.tiling(n, k)
        assert tiling is not None, name
        assert n % tiling.block_n == 0 and k % (tiling.block_k * tiling.splits) == 0
        assert tiling.splits == 1 or tiling.splits * 1024 <= k
    assert specs.tiling(4096, 4096) == (128, 64, 4, 4)
    assert specs.tiling(100, 64) is None and specs.tiling(64, 100) is None


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(KernelError, match="multiples of 64"):
        run(X[:, :100], W[:, :100], tiling=None)
    with pytest.raises(KernelError, match="do not fit"):
        run(X.astype(jnp.float32))
    with pytest.raises(KernelError, match="does not divide"):
        run(X, tiling=specs.Tiling(96, 64, 1, 2))


def test_a_store_that_is_not_awaited_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A planted fault: the next part of a block's sums overwrites what is still being copied."""
    wait = mosaic.wait_smem_to_gmem
    monkeypatch.setattr(
        mosaic,
        "wait_smem_to_gmem",
        lambda n, wait_read_only=False: None if wait_read_only else wait(n),
    )
    try:
        run(X[:65], races=True)
        assert mosaic.races_found()
    finally:
        mosaic.reset_interpreter()


def test_a_missing_commit_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A planted fault: the bulk copy may not see what the threads wrote."""
    monkeypatch.setattr(mosaic, "commit_smem", lambda: None)
    try:
        run(X[:2], races=True)
        assert mosaic.races_found()
    finally:
        mosaic.reset_interpreter()


@pytest.mark.gpu
@pytest.mark.parametrize("shape", specs.GPU_SHAPES, ids=lambda s: s.name)
def test_on_a_gpu_rows_have_the_same_bits_for_every_m(shape: specs.Shape) -> None:
    """What interpretation cannot show: that a wgmma treats its 64 rows alike."""
    x, w = normal(256, shape.k), normal(shape.n, shape.k, seed=1)
    call = jax.jit(mosaic_gpu.matmul)
    full = np.asarray(call(x, w))
    value, bound = exact(x[:2], w)
    # tensor cores may truncate where float32 rounds: twice the bound
    assert (np.abs(full[:2] - value) <= 2 * bound).all()
    for m in (1, 7, 8, 63, 64, 65, 128, 200):
        np.testing.assert_array_equal(np.asarray(call(x[:m], w)), full[:m], str(m))
    np.testing.assert_array_equal(np.asarray(call(x[::-1], w))[::-1], full)
