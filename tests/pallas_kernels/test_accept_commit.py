"""The commit of an accepted path: which slots get which rows, and that nothing else is touched."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels import native
from pallas_kernels.accept_commit import accept_commit
from pallas_kernels.gpu_target import TARGETS, on_abstract
from tests.pallas_kernels.test_decoder_stack import REFUSED
from tests.pallas_kernels.test_tree_attention import same_bits


class Case(NamedTuple):
    """Operands of one call, as numpy arrays; the caches are stacked: [L, B, K, S, h]."""

    cache_k: np.ndarray
    cache_v: np.ndarray
    new_k: np.ndarray
    new_v: np.ndarray
    path: np.ndarray
    start: np.ndarray
    counts: np.ndarray


def make(
    seed: int,
    start: list[int],
    counts: list[int],
    *,
    layers: int = 2,
    heads: int = 3,
    rows: int = 7,
    steps: int = 4,
    capacity: int = 11,
    dim: int = 6,
) -> Case:
    """Random rows and caches (a third of the cache is NaN); junk in the path past the count."""
    rng = np.random.default_rng(seed)
    batch = len(start)
    caches = rng.standard_normal((2, layers, batch, heads, capacity, dim), dtype=np.float32)
    caches[rng.random(caches.shape) < 0.3] = np.nan
    new = rng.standard_normal((2, layers, batch, heads, rows, dim), dtype=np.float32)
    path = rng.integers(0, rows, (batch, steps))
    for b, count in enumerate(counts):
        path[b, count:] = rng.integers(-(2**31), 2**31, steps - count)
    ints = (np.asarray(a, np.int32).reshape(-1) for a in (start, counts))
    return Case(*caches, *new, path.astype(np.int32), *ints)


def call(case: Case, implementation: Any = "cpu") -> tuple[np.ndarray, np.ndarray]:
    k, v = accept_commit(
        *(tuple(map(jnp.asarray, caches)) for caches in case[:2]),
        *map(jnp.asarray, case[2:]),
        implementation=implementation,
    )
    return np.stack([np.asarray(c) for c in k]), np.stack([np.asarray(c) for c in v])


@jax.jit
def _xla(k: Any, v: Any, *rest: Any) -> Any:
    return accept_commit(k, v, *rest, implementation="xla")


@jax.jit
def _scattered(k: Any, v: Any, *rest: Any) -> Any:
    """The form of a GPU; the target is there while it is traced."""
    with on_abstract(TARGETS["h100"]):
        return accept_commit(k, v, *rest)


def expect(case: Case) -> tuple[np.ndarray, np.ndarray]:
    out = case.cache_k.copy(), case.cache_v.copy()
    for to, new in zip(out, (case.new_k, case.new_v), strict=True):
        for b, count in enumerate(case.counts):
            for i in range(count):
                to[:, b, :, case.start[b] + i] = new[:, b, :, case.path[b, i]]
    return out


def check(case: Case, got: tuple[np.ndarray, np.ndarray]) -> None:
    for a, b in zip(got, expect(case), strict=True):
        assert same_bits(a, b)


# every count 0..P; a full cache, the first and the last slot
CASES = [
    ([0, 3, 7, 11], [4, 2, 4, 0]),
    ([10, 0, 5, 8], [1, 0, 3, 2]),
    ([11, 11, 0, 0], [0, 0, 0, 0]),
]


@pytest.mark.parametrize("start,counts", CASES)
def test_agrees_with_the_definition_and_with_xla(start: list[int], counts: list[int]) -> None:
    case = make(1, start, counts)
    check(case, call(case))
    k, v = _xla(tuple(case.cache_k), tuple(case.cache_v), *case[2:])
    check(case, (np.stack(k), np.stack(v)))
    k, v = _scattered(tuple(case.cache_k), tuple(case.cache_v), *case[2:])
    check(case, (np.stack(k), np.stack(v)))


@settings(max_examples=25)
@given(st.integers(0, 2**20), st.data())
def test_any_shape(seed: int, data: st.DataObject) -> None:
    draw = data.draw
    batch, capacity = draw(st.integers(1, 4)), draw(st.integers(1, 20))
    steps = draw(st.integers(1, 6))
    start = [draw(st.integers(0, capacity)) for _ in range(batch)]
    counts = [draw(st.integers(0, min(steps, capacity - s))) for s in start]
    case = make(
        seed,
        start,
        counts,
        layers=draw(st.integers(1, 3)),
        heads=draw(st.integers(1, 3)),
        rows=draw(st.integers(1, 5)),
        steps=steps,
        capacity=capacity,
        dim=draw(st.sampled_from([1, 2, 5, 16])),
    )
    check(case, call(case))


def test_special_values_are_copied_bit_for_bit() -> None:
    case = make(2, [2, 0], [3, 1])
    case.new_k[:, :, :, :, :4] = [np.nan, -np.inf, -0.0, 1e-42]
    check(case, call(case))


@functools.partial(jax.jit, donate_argnums=(0, 1))
def _donated(k: Any, v: Any, *rest: Any) -> Any:
    return accept_commit(k, v, *rest, implementation="cpu")


def test_donated_caches_stay_where_they_are() -> None:
    case = make(3, [4, 0], [2, 4])
    k, v = (tuple(jnp.array(c) for c in caches) for caches in case[:2])
    jax.block_until_ready((k, v))
    before = [c.unsafe_buffer_pointer() for c in (*k, *v)]
    out = _donated(k, v, *map(jnp.asarray, case[2:]))
    assert [c.unsafe_buffer_pointer() for c in (*out[0], *out[1])] == before
    assert all(c.is_deleted() for c in (*k, *v))
    check(case, tuple(np.stack([np.asarray(c) for c in side]) for side in out))  # pyright: ignore[reportArgumentType]


def test_caches_that_are_not_donated_keep_their_values() -> None:
    case = make(4, [4, 0], [2, 4])
    k, v = (tuple(jnp.array(c) for c in caches) for caches in case[:2])
    out = accept_commit(k, v, *map(jnp.asarray, case[2:]), implementation="cpu")
    for kept, original in zip((*k, *v), (*case.cache_k, *case.cache_v), strict=True):
        assert same_bits(np.asarray(kept), original)
    check(case, tuple(np.stack([np.asarray(c) for c in side]) for side in out))  # pyright: ignore[reportArgumentType]


def test_in_a_while_loop() -> None:
    case = make(5, [0, 2], [3, 1])

    @functools.partial(jax.jit, donate_argnums=0)
    def program(caches: Any, new_k: Any, new_v: Any, path: Any, start: Any, counts: Any) -> Any:
        def body(state: Any) -> Any:
            i, (k, v), start = state
            rows = (new_k + i, new_v - i)
            caches = accept_commit(k, v, *rows, path, start, counts, implementation="cpu")
            return i + 1, caches, start + counts

        return jax.lax.while_loop(lambda s: s[0] < 3, body, (jnp.float32(0), caches, start))[1]

    caches = tuple(tuple(jnp.array(c) for c in side) for side in case[:2])
    got = program(caches, *map(jnp.asarray, case[2:]))
    for i in range(3):
        step = case._replace(
            new_k=case.new_k + np.float32(i),
            new_v=case.new_v - np.float32(i),
            start=case.start + i * case.counts,
        )
        case = case._replace(**dict(zip(("cache_k", "cache_v"), expect(step), strict=True)))
    assert same_bits(np.stack([np.asarray(c) for c in got[0]]), case.cache_k)
    assert same_bits(np.stack([np.asarray(c) for c in got[1]]), case.cache_v)


@pytest.mark.parametrize(
    "changes,message",
    [
        ({"counts": [2, 5]}, "sequence 1 cannot write 5 rows at slot 0 of 11"),
        ({"counts": [-1, 1]}, "sequence 0 cannot write -1 rows at slot 4 of 11"),
        ({"start": [8, 0], "counts": [4, 1]}, "sequence 0 cannot write 4 rows at slot 8 of 11"),
        ({"start": [2**31 - 1, 0]}, "sequence 0 cannot write 2 rows at slot 2147483647 of 11"),
        ({"start": [4, -1]}, "sequence 1 cannot write 4 rows at slot -1 of 11"),
        ({"path": [[0, 7, 0, 0], [0, 0, 0, 0]]}, "path of sequence 0 names row 7 of 7"),
        ({"path": [[0, 0, 0, 0], [0, 0, 0, -1]]}, "path of sequence 1 names row -1 of 7"),
    ],
)
def test_slots_and_rows_out_of_range(changes: dict[str, Any], message: str) -> None:
    case = make(6, [4, 0], [2, 4])
    case = case._replace(**{name: np.asarray(value, np.int32) for name, value in changes.items()})
    with pytest.raises(REFUSED, match=f"accept_commit: {message}"):
        call(case)


def test_shapes_that_do_not_fit_are_one_line() -> None:
    case = make(7, [4, 0], [2, 4])
    for changes in (
        {"cache_k": case.cache_k[:1]},
        {"cache_v": case.cache_v[:1]},
        {"cache_k": case.cache_k[:, :, :2]},
        {"cache_v": case.cache_v[..., :5]},
        {"path": case.path[:1]},
    ):
        with pytest.raises(native.KernelError, match=r"accept_commit: [34] caches \[") as caught:
            call(case._replace(**changes))
        assert "\n" not in str(caught.value)
    with pytest.raises(REFUSED, match="caches of different capacity"):
        call(case._replace(cache_v=case.cache_v[:, :, :, :-1]))
    with pytest.raises(REFUSED, match="rows, path, start and counts"):
        call(case._replace(counts=case.counts[:1]))
    with pytest.raises(native.KernelError, match="unknown kernel implementation 'fast'"):
        call(case, "fast")
