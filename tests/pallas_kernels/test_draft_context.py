"""Drafter context of committed rows: `drafter.fuse` and `context_kv`, slots, bits, poison."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jetspec_jax.config import DraftConfig, RopeConfig
from jetspec_jax.drafter import context_kv, fuse
from jetspec_jax.models.rope import inverse_frequencies
from pallas_kernels import native
from pallas_kernels import row_invariant_matmul as rim
from pallas_kernels.draft_context import ContextLayer, draft_context
from tests.pallas_kernels.test_decoder_stack import REFUSED, packed_as
from tests.pallas_kernels.test_tree_attention import FORMS, same_bits

HEADS, DIM, STEPS, NODES, CAPACITY, TAPS, LAYERS = 2, 16, 4, 7, 20, 2, 2
ROPE = RopeConfig(kind="yarn", factor=4.0, original_max_position=64)  # scales cos and sin
INV_FREQ, ROPE_SCALE = inverse_frequencies(ROPE, DIM)


class Case(NamedTuple):
    """Operands of one call; the caches are stacked: [L, B, K, S, h]."""

    fc: rim.PackedWeight
    hidden_norm: np.ndarray
    layers: tuple[ContextLayer, ...]
    taps: np.ndarray
    path: np.ndarray
    start: np.ndarray
    counts: np.ndarray
    cache_k: np.ndarray
    cache_v: np.ndarray


def make(
    seed: int,
    start: tuple[int, ...] = (0, 9, 20, 16),
    counts: tuple[int, ...] = (3, 1, 0, 4),
    *,
    form: str = "f32",
    width: int = 64,
    tapped: int = 32,
) -> Case:
    """NaN in the taps of all nodes that are not committed; junk in the path past the count."""
    rng, batch = np.random.default_rng(seed), len(start)

    def normal(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape, dtype=np.float32)

    def matrix(n: int, k: int) -> rim.PackedWeight:
        return packed_as(form, normal(n, k) * np.float32(k**-0.5))[0]

    path = rng.integers(-(2**31), 2**31, (batch, STEPS))
    taps = np.full((batch, NODES, TAPS, tapped), np.nan, np.float32)
    for b, count in enumerate(counts):
        path[b, :count] = np.sort(rng.permutation(NODES)[:count])
        taps[b, path[b, :count]] = normal(count, TAPS, tapped)
    cache = (LAYERS, batch, HEADS, CAPACITY, DIM)
    return Case(
        fc=matrix(width, TAPS * tapped),
        hidden_norm=1 + 0.2 * normal(width),
        layers=tuple(
            ContextLayer(matrix(2 * HEADS * DIM, width), jnp.asarray(1 + 0.2 * normal(DIM)))
            for _ in range(LAYERS)
        ),
        taps=taps,
        path=path.astype(np.int32),
        start=np.asarray(start, np.int32),
        counts=np.asarray(counts, np.int32),
        cache_k=normal(*cache),
        cache_v=normal(*cache),
    )


def call(case: Case, cache_k: Any, cache_v: Any, threads: int = 0, **changes: Any) -> Any:
    kwargs = {"eps": 1e-6, "rope_scale": ROPE_SCALE, "threads": threads, **changes}
    return draft_context(
        case.fc,
        jnp.asarray(case.hidden_norm),
        case.layers,
        *map(jnp.asarray, (case.taps, case.path, case.start, case.counts, INV_FREQ)),
        cache_k,
        cache_v,
        **kwargs,
    )


def run(case: Case, threads: int = 0, **changes: Any) -> tuple[np.ndarray, np.ndarray]:
    caches = (tuple(map(jnp.asarray, side)) for side in (case.cache_k, case.cache_v))
    k, v = call(case, *caches, threads=threads, **changes)
    return np.stack([np.asarray(c) for c in k]), np.stack([np.asarray(c) for c in v])


@jax.jit
def _rows(params: Any, taps: jax.Array, positions: jax.Array) -> Any:
    """fuse and context_kv of rows [B, P]: per layer keys and values [B, K, P, h]."""
    cfg = DraftConfig(
        hidden_size=params["fc"].n,
        num_layers=LAYERS,
        num_heads=HEADS,
        num_kv_heads=HEADS,
        head_dim=DIM,
        ffn_size=32,
        target_hidden_size=taps.shape[-1],
        num_target_layers=4,
        target_layer_ids=tuple(range(TAPS)),
        vocab_size=10,
        mask_token_id=3,
        rope=ROPE,
        rms_eps=1e-6,
    )
    return context_kv(params, cfg, fuse(params, cfg, taps), positions)


def expect(case: Case) -> tuple[np.ndarray, np.ndarray]:
    batch = len(case.start)
    path = np.clip(case.path, 0, NODES - 1)
    positions = case.start[:, None] + np.arange(STEPS, dtype=np.int32)
    layers = [{"kv": layer.kv, "k_norm": layer.k_norm} for layer in case.layers]
    params = {"fc": case.fc, "hidden_norm": jnp.asarray(case.hidden_norm), "layers": layers}
    found = _rows(params, case.taps[np.arange(batch)[:, None], path], positions)
    out = case.cache_k.copy(), case.cache_v.copy()
    for i, sides in enumerate(found):
        for to, rows in zip(out, sides, strict=True):
            for b, count in enumerate(case.counts):
                slots = slice(case.start[b], case.start[b] + count)
                to[i, b, :, slots] = np.asarray(rows)[b, :, :count]
    return out


def written(case: Case) -> np.ndarray:
    """[B, S]: the slots that the call writes."""
    slots = np.arange(CAPACITY)[None] - case.start[:, None]
    return (slots >= 0) & (slots < case.counts[:, None])


@pytest.mark.parametrize("form", ["f32", "bf16", "Q8_0", "Q4_1", "Q8_0i", "Q4_1i"])
def test_agrees_with_fuse_and_context_kv(form: str) -> None:
    assert ROPE_SCALE > 1.1
    case = make(1, form=form)
    hit = written(case)
    assert hit.sum() == 8
    for got, want, old in zip(run(case), expect(case), case[-2:], strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=2e-5)
        assert same_bits(np.moveaxis(got, 2, 3)[:, ~hit], np.moveaxis(old, 2, 3)[:, ~hit])


def test_odd_widths() -> None:
    case = make(2, width=45, tapped=21)
    for got, want in zip(run(case), expect(case), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=2e-5)


def test_bits_do_not_depend_on_threads_company_or_slots_of_others() -> None:
    case = make(3)
    alone = run(case, threads=1)
    for threads in (0, 2, 7):
        assert all(map(same_bits, run(case, threads=threads), alone))
    for b in range(4):
        fields = ("taps", "path", "start", "counts")
        one = case._replace(
            **{name: getattr(case, name)[b : b + 1] for name in fields},
            **{name: getattr(case, name)[:, b : b + 1] for name in ("cache_k", "cache_v")},
        )
        for got, whole in zip(run(one), alone, strict=True):
            assert same_bits(got[:, 0], whole[:, b])


def test_one_row_at_a_time_is_the_same() -> None:
    """Rows committed one by one, as plain decoding does, have the bits of a path's rows."""
    case = make(4, (0, 9), (4, 3))
    whole = run(case)
    for i in range(4):
        counts = np.asarray([1, int(i < 3)], np.int32)
        step = case._replace(
            path=np.roll(case.path, -i, 1), start=case.start + np.int32(i), counts=counts
        )
        k, v = run(step)
        case = case._replace(cache_k=k, cache_v=v)
    assert same_bits(case.cache_k, whole[0]) and same_bits(case.cache_v, whole[1])


@pytest.mark.parametrize("form", FORMS)
def test_bits_do_not_depend_on_the_vector_form(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    cases = [make(5, form=stored) for stored in ("f32", "bf16", "Q8_0", "Q4_1")]
    best = [run(case) for case in cases]
    number = FORMS[form] if "avx2" in native.cpu_identity() else 0
    narrow = native.library((f"-DJETSPEC_FORM={number}", "-O1"))
    monkeypatch.setattr(native, "library", lambda: narrow)
    for case, wide in zip(cases, best, strict=True):
        assert all(map(same_bits, run(case), wide))


def test_donated_caches_stay_where_they_are() -> None:
    case = make(6)
    program = jax.jit(functools.partial(call, case), donate_argnums=(0, 1))
    k, v = (tuple(jnp.array(c) for c in side) for side in (case.cache_k, case.cache_v))
    jax.block_until_ready((k, v))
    before = [c.unsafe_buffer_pointer() for c in (*k, *v)]
    out = program(k, v)
    assert [c.unsafe_buffer_pointer() for c in (*out[0], *out[1])] == before
    for side, want in zip(out, run(case), strict=True):
        assert same_bits(np.stack([np.asarray(c) for c in side]), want)


def test_nothing_to_write() -> None:
    case = make(7, (20, 3), (0, 0))
    assert all(map(same_bits, run(case), (case.cache_k, case.cache_v)))


@pytest.mark.parametrize(
    "changes,message",
    [
        ({"counts": [5, 1, 0, 4]}, "sequence 0 cannot write 5 rows at slot 0 of 20"),
        ({"counts": [3, -1, 0, 4]}, "sequence 1 cannot write -1 rows at slot 9 of 20"),
        ({"start": [0, 9, 20, 17]}, "sequence 3 cannot write 4 rows at slot 17 of 20"),
        ({"start": [-2, 9, 20, 16]}, "sequence 0 cannot write 3 rows at slot -2 of 20"),
        ({"path": [[0, 1, 7, 0]] + [[0] * 4] * 3}, "path of sequence 0 names row 7 of 7"),
        ({"path": [[0] * 4] * 3 + [[0, -1, 0, 0]]}, "path of sequence 3 names row -1 of 7"),
    ],
)
def test_slots_and_nodes_out_of_range(changes: dict[str, Any], message: str) -> None:
    values = {name: np.asarray(value, np.int32) for name, value in changes.items()}
    with pytest.raises(REFUSED, match=f"draft_context: {message}"):
        run(make(8)._replace(**values))


def test_errors_are_one_line() -> None:
    case = make(9)
    rows = rim.pack(np.zeros((64, 64), np.float32), "xla")
    for changes in (
        {"fc": rows},
        {"taps": case.taps[..., :-1]},
        {"layers": case.layers[:1]},
        {"cache_k": case.cache_k[:, :, :1]},
        {"layers": (case.layers[0], ContextLayer(rows, case.layers[0].k_norm))},
    ):
        with pytest.raises(native.KernelError, match="draft_context: taps") as caught:
            run(case._replace(**changes))
        assert "\n" not in str(caught.value)
    for changes, message in (
        ({"path": case.path[:1]}, r"taps are not \[B, T, n, H\]"),
        ({"counts": case.counts[:1]}, "shapes do not fit"),
        ({"cache_v": case.cache_v[:, :, :, :-1]}, "a cache does not fit"),
    ):
        with pytest.raises(REFUSED, match=f"draft_context: {message}"):
            run(case._replace(**changes))
