"""The attention kernel: meaning, exact bits wherever an ancestor lies, poisoned slots, batching."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels import native
from pallas_kernels.tree_attention import api, reference, resolve, specs, tree_attention

SCALE = 0.17
FORMS = {"avx2": 2, "portable": 0}


class Case(NamedTuple):
    """Operands of one call, as numpy arrays."""

    q: np.ndarray
    cache_k: np.ndarray
    cache_v: np.ndarray
    lengths: np.ndarray
    new_k: np.ndarray
    new_v: np.ndarray
    mask: np.ndarray


def tree_mask(rng: np.random.Generator, rows: int) -> np.ndarray:
    """Ancestor-or-self mask of a random tree in topological order."""
    mask = np.eye(rows, dtype=bool)
    for i in range(1, rows):
        mask[i] |= mask[rng.integers(0, i)]
    return mask


def make(seed: int, batch: int, heads: int, group: int, rows: int, dim: int, capacity: int) -> Case:
    """Random operands, mixed lengths, NaN in every slot at or after the length."""
    rng = np.random.default_rng(seed)

    def normal(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape, dtype=np.float32)

    lengths = rng.integers(0, capacity + 1, batch).astype(np.int32)
    caches = [normal(batch, heads, capacity, dim) for _ in range(2)]
    for b, length in enumerate(lengths):
        for cache in caches:
            cache[b, :, length:] = np.nan
    mask = np.stack([tree_mask(rng, rows) for _ in range(batch)])
    q = normal(batch, heads, group, rows, dim)
    new = [normal(batch, heads, rows, dim) for _ in range(2)]
    return Case(q, *caches, lengths, *new, mask)


def run(case: Case, threads: int = 0) -> np.ndarray:
    operands = map(jnp.asarray, case)
    out = tree_attention(*operands, scale=SCALE, implementation="cpu", threads=threads)
    return np.asarray(out)


def expect(case: Case) -> np.ndarray:
    """The same in float64, row by row, from each row's list of visible keys."""
    out = np.zeros(case.q.shape)
    batch, heads, group, rows, _ = case.q.shape
    for b, k, g, i in np.ndindex(batch, heads, group, rows):
        live, seen = case.lengths[b], case.mask[b, i]
        keys = np.concatenate([case.cache_k[b, k, :live], case.new_k[b, k, seen]])
        values = np.concatenate([case.cache_v[b, k, :live], case.new_v[b, k, seen]])
        if len(keys) == 0:
            continue
        score = keys.astype(np.float64) @ case.q[b, k, g, i] * SCALE
        p = np.exp(score - score.max())
        out[b, k, g, i] = p @ values.astype(np.float64) / p.sum()
    return out


def same_bits(a: np.ndarray, b: np.ndarray) -> bool:
    return np.array_equal(
        np.ascontiguousarray(a).view(np.int32), np.ascontiguousarray(b).view(np.int32)
    )


shapes = st.tuples(
    st.integers(1, 3),
    st.integers(1, 3),
    st.sampled_from([1, 2, 3, 7]),
    st.sampled_from([1, 2, 5, 16, 33]),
    st.sampled_from([8, 16, 20, 64, 80, 128, 144]),
    st.sampled_from([0, 1, 15, 16, 17, 64, 131]),
)


@settings(max_examples=30)
@given(st.integers(0, 2**20), shapes)
def test_matches_a_float64_softmax(seed: int, shape: tuple[int, ...]) -> None:
    case = make(seed, *shape)
    np.testing.assert_allclose(run(case), expect(case), rtol=0, atol=3e-6)


@pytest.mark.parametrize("dtype,atol", [(jnp.float32, 3e-6), (jnp.bfloat16, 8e-3)])
@pytest.mark.parametrize("dim", [20, 64, 128])
def test_reference_and_kernel_agree(dtype: jnp.dtype, atol: float, dim: int) -> None:
    case = make(3, 2, 2, 3, 6, dim, 40)
    q, ck, cv, lengths, nk, nv, mask = map(jnp.asarray, case)
    operands = (
        *(x.astype(dtype) for x in (q, ck, cv)),
        lengths,
        nk.astype(dtype),
        nv.astype(dtype),
    )
    kernel = tree_attention(*operands, mask, scale=SCALE, implementation="cpu")
    xla = tree_attention(*operands, mask, scale=SCALE, implementation="xla")
    assert kernel.dtype == xla.dtype == dtype
    wide = [np.asarray(x, np.float32) for x in (kernel, xla)]
    np.testing.assert_allclose(wide[0], wide[1], rtol=0, atol=atol)
    direct = reference.tree_attention(*operands, mask, scale=SCALE)
    assert np.array_equal(np.asarray(direct, np.float32), wide[1])


@pytest.mark.parametrize(
    "name,batch,heads,group,rows,dim,live", specs.SMOLLM2_135M[:4], ids=lambda x: str(x)
)
def test_shapes_of_the_bundled_model(
    name: str, batch: int, heads: int, group: int, rows: int, dim: int, live: int
) -> None:
    case = make(len(name), batch, heads, group, rows, dim, live)._replace(
        lengths=np.full(batch, live, np.int32)
    )
    rng = np.random.default_rng(0)
    full = [rng.standard_normal(case.cache_k.shape, dtype=np.float32) for _ in range(2)]
    case = case._replace(cache_k=full[0], cache_v=full[1])
    np.testing.assert_allclose(run(case), expect(case), rtol=0, atol=3e-6)


def decode_path(case: Case, b: int, row: int, split: int, room: int, batch: int) -> np.ndarray:
    """Row `row` of sequence `b` alone: `split` of its path in the cache, the rest as a chain.

    The call differs from the tree's in everything that must not matter: T, B, capacity, mask.
    """
    live = int(case.lengths[b])
    path = np.flatnonzero(case.mask[b, row])
    heads, _, dim = case.cache_k.shape[1:]

    def cache(old: np.ndarray, new: np.ndarray) -> np.ndarray:
        grown = np.full((batch, heads, live + split + room, dim), np.nan, np.float32)
        grown[:, :, :live] = old[b, :, :live]
        grown[:, :, live : live + split] = new[b][:, path[:split]]
        return grown

    def repeat(x: np.ndarray) -> np.ndarray:
        return np.repeat(x[None], batch, axis=0)

    chain = path[split:]
    alone = Case(
        repeat(case.q[b][:, :, chain]),
        cache(case.cache_k, case.new_k),
        cache(case.cache_v, case.new_v),
        np.full(batch, live + split, np.int32),
        repeat(case.new_k[b][:, chain]),
        repeat(case.new_v[b][:, chain]),
        repeat(np.tri(len(chain), dtype=bool)),
    )
    return run(alone)[-1, :, :, -1]


@settings(max_examples=16)
@given(st.integers(0, 2**20), shapes, st.data())
def test_bits_do_not_depend_on_where_ancestors_lie(
    seed: int, shape: tuple[int, ...], data: st.DataObject
) -> None:
    case = make(seed, *shape)
    whole = run(case)
    for _ in range(3):
        b = data.draw(st.integers(0, shape[0] - 1))
        row = data.draw(st.integers(0, shape[3] - 1))
        split = data.draw(st.integers(0, int(case.mask[b, row].sum()) - 1))
        room, batch = data.draw(st.sampled_from([0, 5])), data.draw(st.integers(1, 2))
        assert same_bits(decode_path(case, b, row, split, room, batch), whole[b, :, :, row])


@pytest.mark.parametrize("live", [0, 1, 30, 300])
def test_plain_decoding_of_every_path_gives_the_tree_rows(live: int) -> None:
    case = make(live, 1, 3, 3, 12, 64, live)
    case = case._replace(lengths=np.full(1, live, np.int32))
    case = case._replace(
        cache_k=np.nan_to_num(case.cache_k, nan=0.3), cache_v=np.nan_to_num(case.cache_v, nan=0.7)
    )
    whole = run(case)
    for row in range(12):
        depth = int(case.mask[0, row].sum()) - 1  # T = 1: all ancestors in the cache
        assert same_bits(decode_path(case, 0, row, depth, 3, 1), whole[0, :, :, row])


def test_bits_do_not_depend_on_heads_or_on_group() -> None:
    case = make(5, 2, 3, 4, 9, 64, 50)
    whole = run(case)
    one = Case(
        case.q[:, 1:2, 2:3],
        *(x[:, 1:2] for x in case[1:3]),
        case.lengths,
        *(x[:, 1:2] for x in case[4:6]),
        case.mask,
    )
    assert same_bits(run(one), whole[:, 1:2, 2:3])


@pytest.mark.parametrize(
    "shape",
    [
        (1, 3, 3, 16, 64, 200),
        (1, 3, 3, 1, 64, 300),  # these share the keys and columns of a head between threads
        (1, 5, 2, 3, 128, 900),
        (5, 2, 1, 1, 64, 90),
        (1, 1, 2, 256, 32, 40),
    ],
)
def test_bits_do_not_depend_on_threads(shape: tuple[int, ...]) -> None:
    case = make(7, *shape)
    alone = run(case, threads=1)
    assert all(same_bits(run(case, threads=n), alone) for n in (0, 2, 2, 2, 7))


@pytest.mark.parametrize("form", FORMS)
def test_bits_do_not_depend_on_the_vector_form(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    cases = [make(dim, 2, 2, 3, 7, dim, 45) for dim in (20, 64, 128)]
    best = [run(case) for case in cases]
    flags = (f"-DJETSPEC_FORM={FORMS[form]}", "-O1")
    if form == "avx2" and "avx2" not in native.cpu_identity():
        flags = ("-DJETSPEC_FORM=0", "-O2")  # another build of the portable form
    wide, narrow = native.library(), native.library(flags)
    assert narrow.target("TreeAttentionF32") != wide.target("TreeAttentionF32")
    monkeypatch.setattr(native, "library", lambda: narrow)
    assert all(same_bits(run(case), wide) for case, wide in zip(cases, best, strict=True))


def test_exp_is_within_one_ulp() -> None:
    x = np.concatenate(
        [np.linspace(-87.3, 0, 400_000), -np.logspace(-30, 0, 4_000), np.zeros(16)]
    ).astype(np.float32)
    x = x[: len(x) // 16 * 16]
    y = np.empty_like(x)
    call = native.library().handle.TreeAttentionExp
    pointers = [a.ctypes.data_as(ctypes.c_void_p) for a in (x, y)]
    call(*pointers, ctypes.c_int64(len(x)))
    exact = np.exp(x.astype(np.float64))
    ulp = np.spacing(exact.astype(np.float32)).astype(np.float64)
    assert np.abs((y - exact) / ulp).max() <= 1.0
    assert y[-1] == 1.0
    x[:4] = [-88.0, -1e30, -np.inf, np.nan]
    call(*pointers, ctypes.c_int64(len(x)))
    assert y[:3].tolist() == [0, 0, 0]
    assert np.isnan(y[3])


@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
def test_nan_and_infinity_reach_only_rows_that_see_them(poison: float) -> None:
    case = make(2, 2, 2, 3, 9, 64, 33)
    clean = run(case)
    for name in ("new_k", "new_v"):
        bad = getattr(case, name).copy()
        bad[0, 1, 4] = poison
        got = run(case._replace(**{name: bad}))
        sees = np.zeros(clean.shape, bool)
        sees[0, 1] = case.mask[0, :, 4][None, :, None]
        assert same_bits(got[~sees], clean[~sees])
        if name == "new_v" or np.isnan(poison):
            assert not np.isfinite(got[sees]).any()


def test_poison_in_a_live_slot_reaches_its_sequence_and_head() -> None:
    case = make(8, 2, 2, 2, 4, 64, 40)._replace(lengths=np.array([20, 40], np.int32))
    case = case._replace(
        cache_k=np.nan_to_num(case.cache_k, nan=0.1), cache_v=np.nan_to_num(case.cache_v, nan=0.1)
    )
    clean = run(case)
    bad = case.cache_k.copy()
    bad[:, 1, 25, 3] = np.nan  # live in sequence 1 only
    got = run(case._replace(cache_k=bad)).copy()
    assert np.isnan(got[1, 1]).all()
    got[1, 1] = clean[1, 1]
    assert same_bits(got, clean)


def test_rows_that_see_nothing_are_zero() -> None:
    case = make(4, 2, 2, 3, 5, 64, 8)._replace(lengths=np.array([0, 3], np.int32))
    case.mask[:, 2] = False
    case.new_v[:, :, 2] = np.nan
    case.mask[:, 3:, 2] = False
    for out in (
        run(case),
        np.asarray(api.reference.tree_attention(*map(jnp.asarray, case), scale=SCALE)),
    ):
        assert (out[0, :, :, 2] == 0).all()
        assert np.isfinite(out[0, :, :, [0, 1, 3, 4]]).all()


def test_large_scores_do_not_overflow() -> None:
    case = make(6, 1, 1, 2, 3, 64, 20)
    case = case._replace(q=case.q * 1e4)
    got = run(case)
    assert np.isfinite(got).all()
    np.testing.assert_allclose(got, expect(case), rtol=0, atol=1e-4)


def inside_while(case: Case) -> Callable[[], jax.Array]:
    operands = tuple(map(jnp.asarray, case))

    @jax.jit
    def program(*operands: jax.Array) -> jax.Array:
        def body(carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            i, q = carry
            forms = [
                lambda x, rest: tree_attention(x, *rest, scale=SCALE, implementation="cpu"),
                lambda x, rest: tree_attention(x, *rest, scale=2 * SCALE, implementation="cpu"),
            ]
            return i + 1, jax.lax.switch(i % 2, forms, q, operands[1:])

        return jax.lax.while_loop(lambda c: c[0] < 4, body, (jnp.int32(0), operands[0]))[1]

    return lambda: program(*operands)


def test_runs_inside_jit_while_and_switch() -> None:
    case = make(9, 1, 2, 2, 4, 64, 24)
    looped = np.asarray(inside_while(case)())
    q = jnp.asarray(case.q)
    for i in range(4):
        rest = map(jnp.asarray, case[1:])
        q = tree_attention(q, *rest, scale=SCALE * (1 + i % 2), implementation="cpu")
    assert same_bits(looped, np.asarray(q))


def test_vmap_is_more_batch() -> None:
    cases = [make(seed, 2, 2, 3, 4, 64, 19) for seed in (1, 2, 3)]
    stacked = [jnp.stack(list(map(jnp.asarray, xs))) for xs in zip(*cases, strict=True)]
    call = jax.vmap(lambda *x: tree_attention(*x, scale=SCALE, implementation="cpu"))
    assert same_bits(np.asarray(call(*stacked)), np.stack([run(case) for case in cases]))
    shared = jax.vmap(
        lambda q: tree_attention(
            q, *map(jnp.asarray, cases[0][1:]), scale=SCALE, implementation="cpu"
        )
    )(jnp.stack([case.q for case in cases]))
    one = cases[1]._replace(**{n: getattr(cases[0], n) for n in Case._fields[1:]})
    assert same_bits(np.asarray(shared)[1], run(one))


def test_no_rows_and_no_sequences() -> None:
    case = make(0, 1, 2, 3, 1, 64, 8)
    no_rows = case._replace(
        q=case.q[:, :, :, :0],
        new_k=case.new_k[:, :, :0],
        new_v=case.new_v[:, :, :0],
        mask=case.mask[:, :0, :0],
    )
    assert run(no_rows).shape == (1, 2, 3, 0, 64)
    assert run(Case(*(x[:0] for x in case))).shape == (0, 2, 3, 1, 64)


@pytest.mark.parametrize("length", [-1, 21])
def test_a_length_outside_the_cache_is_refused(length: int) -> None:
    case = make(1, 2, 1, 1, 2, 64, 20)._replace(lengths=np.array([3, length], np.int32))
    with pytest.raises(jax.errors.JaxRuntimeError, match=f"length {length} of sequence 1"):
        run(case)


@pytest.mark.parametrize(
    "field,change,message",
    [
        ("q", lambda x: x[0], r"need \[B, K, G, T, h\]"),
        ("cache_k", lambda x: x[..., :-1], "cache_k is float32"),
        ("cache_v", lambda x: x[:, :, :-1], "cache_v is float32"),
        ("lengths", lambda x: x.astype(np.uint32), "lengths is uint32"),
        ("new_k", lambda x: x[:, :, :-1], "new_k is float32"),
        ("new_v", lambda x: x.astype(jnp.bfloat16), "new_v is bfloat16"),
        ("mask", lambda x: x.astype(np.int32), "mask is int32"),
    ],
)
def test_shapes_that_do_not_fit_are_refused(
    field: str, change: Callable[[np.ndarray], np.ndarray], message: str
) -> None:
    case = make(1, 2, 2, 2, 3, 64, 20)
    case = case._replace(**{field: change(getattr(case, field))})
    with pytest.raises(native.KernelError, match=message) as caught:
        run(case)
    assert "\n" not in str(caught.value)


def test_other_dtypes_run_in_xla_or_are_refused() -> None:
    case = [jnp.asarray(x) for x in make(1, 1, 2, 2, 3, 64, 20)]
    half = [x.astype(jnp.float16) if x.dtype == jnp.float32 else x for x in case]
    assert tree_attention(*half, scale=SCALE).dtype == jnp.float16
    with pytest.raises(native.KernelError, match="no float16 form"):
        tree_attention(*half, scale=SCALE, implementation="cpu")
    with pytest.raises(native.KernelError, match="unknown kernel implementation"):
        resolve("fast")  # pyright: ignore[reportArgumentType]
    assert resolve("xla") == "xla"
