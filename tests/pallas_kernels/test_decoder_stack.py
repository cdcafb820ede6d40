"""The decoder stack: meaning, exact bits, tree rows against plain decoding, ragged rows, poison."""

from __future__ import annotations

import ctypes
import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import gguf
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels import native
from pallas_kernels import row_invariant_matmul as rim
from pallas_kernels.accept_commit import accept_commit
from pallas_kernels.decoder_stack import (
    Geometry,
    StackLayer,
    StackOut,
    decoder_stack,
    reference,
    specs,
)
from tests.pallas_kernels.test_tree_attention import FORMS, same_bits, tree_mask

LLAMA, QWEN3, QWEN2, ODD = specs.SMALL


# What a kernel refuses when it runs: a ValueError where jax runs it at once, else the other.
REFUSED = (jax.errors.JaxRuntimeError, ValueError)


@dataclasses.dataclass(frozen=True)
class Case:
    """Operands of one call as numpy arrays; `dense` are the float32 weights of each layer."""

    layers: tuple[StackLayer, ...]
    dense: tuple[dict[str, np.ndarray], ...]
    geometry: Geometry
    x: np.ndarray
    positions: np.ndarray
    inv_freq: np.ndarray
    cache_k: tuple[np.ndarray, ...]
    cache_v: tuple[np.ndarray, ...]
    lengths: np.ndarray
    counts: np.ndarray
    mask: np.ndarray
    final_norm: np.ndarray | None
    taps: tuple[int, ...]


def packed_as(form: str, w: np.ndarray) -> tuple[rim.PackedWeight, np.ndarray]:
    """A weight stored in one form, and its float32 values."""
    if form == "f32":
        return rim.pack(w, "cpu"), w
    if form == "bf16":
        narrow = w.astype(ml_dtypes.bfloat16)
        return rim.pack(narrow, "cpu"), narrow.astype(np.float32)
    name = form.removesuffix("i")  # "Q8_0i": multiplied in integers
    kind = gguf.GGMLQuantizationType[name]
    blocks = gguf.quantize(w, kind)
    packed = rim.pack_gguf(blocks, name, "cpu", arithmetic="float" if name == form else "integer")
    return packed, gguf.dequantize(blocks, kind)


def make_layer(
    rng: np.random.Generator, shape: specs.Shape, form: str, segments: int
) -> tuple[StackLayer, dict[str, np.ndarray]]:
    q, kv = shape.heads * shape.dim, shape.kv_heads * shape.dim
    parts = {1: [q + 2 * kv], 2: [q, 2 * kv], 3: [q, kv, kv]}[segments]

    def matrix(n: int, k: int) -> np.ndarray:
        return rng.standard_normal((n, k), dtype=np.float32) * np.float32(k**-0.5)

    def vector(n: int, mean: float = 0.0) -> jax.Array:
        return jnp.asarray(mean + 0.2 * rng.standard_normal(n), jnp.float32)

    pairs = {
        "o": packed_as(form, matrix(shape.width, q)),
        "gate_up": packed_as(form, matrix(2 * shape.ffn, shape.width)),
        "down": packed_as(form, matrix(shape.width, shape.ffn)),
    }
    qkv = [packed_as(form, matrix(n, shape.width)) for n in parts]
    dense = {name: pair[1] for name, pair in pairs.items()}
    layer = StackLayer(
        attn_norm=vector(shape.width, 1.0),
        mlp_norm=vector(shape.width, 1.0),
        qkv=tuple(pair[0] for pair in qkv),
        q_norm=vector(shape.dim, 1.0) if shape.qk_norm else None,
        k_norm=vector(shape.dim, 1.0) if shape.qk_norm else None,
        qkv_bias=tuple(vector(n) for n in parts) if shape.bias else None,
        o_bias=vector(shape.width) if shape.bias else None,
        gate_up_bias=vector(2 * shape.ffn) if shape.bias else None,
        down_bias=vector(shape.width) if shape.bias else None,
        **{name: pair[0] for name, pair in pairs.items()},
    )
    return layer, {"qkv": np.concatenate([pair[1] for pair in qkv]), **dense}


def make(
    seed: int,
    shape: specs.Shape,
    *,
    form: str = "f32",
    segments: int = 2,
    lengths: Sequence[int] = (5, 0, 12, 9),
    counts: Sequence[int] = (4, 6, 0, 1),
    rows: int = 6,
    capacity: int = 12,
    taps: tuple[int, ...] = (),
    final: bool = True,
) -> Case:
    """Random trees; NaN in every slot past a length, in every row past a count."""
    rng = np.random.default_rng(seed)
    batch = len(lengths)
    layers, dense = zip(
        *(make_layer(rng, shape, form, segments) for _ in range(shape.layers)), strict=True
    )
    x = rng.standard_normal((batch, rows, shape.width), dtype=np.float32)
    mask = np.stack([tree_mask(rng, rows) for _ in range(batch)])
    positions = np.asarray(lengths)[:, None] + mask.sum(-1) - 1
    size = (batch, shape.kv_heads, capacity, shape.dim)
    caches = rng.standard_normal((2, shape.layers, *size), dtype=np.float32)
    for b in range(batch):
        caches[:, :, b, :, lengths[b] :] = np.nan
        x[b, counts[b] :] = np.nan
        positions[b, counts[b] :] = 2**30
    return Case(
        layers=layers,
        dense=dense,
        geometry=Geometry(
            shape.heads, shape.kv_heads, shape.dim, eps=1e-5, scale=shape.dim**-0.5, rope_scale=1.25
        ),
        x=x,
        positions=positions.astype(np.int32),
        inv_freq=(100.0 ** -np.linspace(0, 1, shape.dim // 2)).astype(np.float32),
        cache_k=tuple(caches[0]),
        cache_v=tuple(caches[1]),
        lengths=np.asarray(lengths, np.int32),
        counts=np.asarray(counts, np.int32),
        mask=mask,
        final_norm=(1 + 0.2 * rng.standard_normal(shape.width)).astype(np.float32)
        if final
        else None,
        taps=taps,
    )


def run(case: Case, implementation: Any = "cpu", threads: int = 0, **changes: Any) -> StackOut:
    """One call; leaves are numpy arrays."""
    c = dataclasses.replace(case, **changes)
    out = decoder_stack(
        c.layers,
        c.geometry,
        *map(jnp.asarray, (c.x, c.positions, c.inv_freq)),
        *(tuple(map(jnp.asarray, caches)) for caches in (c.cache_k, c.cache_v)),
        *map(jnp.asarray, (c.lengths, c.counts, c.mask)),
        final_norm=None if c.final_norm is None else jnp.asarray(c.final_norm),
        taps=c.taps,
        implementation=implementation,
        threads=threads,
    )
    return jax.tree.map(np.asarray, out)


@functools.partial(jax.jit, static_argnums=0)
def _program(static: Any, layers: Any, *operands: Any) -> StackOut:
    geometry, taps, implementation = static
    *operands, final_norm = operands
    return decoder_stack(
        layers,
        geometry,
        *operands,
        final_norm=final_norm,
        taps=taps,
        implementation=implementation,
    )


def run_jitted(c: Case, implementation: str = "xla") -> StackOut:
    operands = (c.x, c.positions, c.inv_freq, c.cache_k, c.cache_v, c.lengths, c.counts, c.mask)
    static = (c.geometry, c.taps, implementation)
    return jax.tree.map(np.asarray, _program(static, c.layers, *operands, c.final_norm))


def same(a: StackOut, b: StackOut) -> bool:
    return all(same_bits(x, y) for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True))


def close(a: StackOut, b: StackOut, atol: float = 3e-5) -> None:
    for name in ("hidden", "new_k", "new_v", "taps"):
        np.testing.assert_allclose(
            getattr(a, name), getattr(b, name), rtol=1e-4, atol=atol, err_msg=name
        )


def visible(c: Case, b: int, t: int) -> np.ndarray:
    """Rows that row t sees, without itself."""
    seen = c.mask[b, t].copy()
    seen[t] = False
    seen[c.counts[b] :] = False
    return np.flatnonzero(seen)


def expect(c: Case) -> StackOut:
    """The definition in float64, row by row, each from its own list of visible keys."""
    g, batch, rows, width = c.geometry, *c.x.shape
    count, group = len(c.layers), g.heads // g.kv_heads
    new = np.zeros((2, count, batch, g.kv_heads, rows, g.dim))
    hidden, taps = np.zeros(c.x.shape), np.zeros((batch, rows, count, width))

    def wide(x: Any) -> np.ndarray:
        return np.asarray(x, np.float64)

    def norm(x: np.ndarray, weight: Any) -> np.ndarray:
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + g.eps) * wide(weight)

    def linear(x: np.ndarray, w: np.ndarray, bias: Any) -> np.ndarray:
        return x @ wide(w).T + (0 if bias is None else wide(bias))

    for b in range(batch):
        for t in range(c.counts[b]):
            x, seen = wide(c.x[b, t]), visible(c, b, t)
            angle = c.positions[b, t] * wide(c.inv_freq)
            cos, sin = np.cos(angle) * g.rope_scale, np.sin(angle) * g.rope_scale
            for i, (layer, w) in enumerate(zip(c.layers, c.dense, strict=True)):
                bias = None if layer.qkv_bias is None else np.concatenate(layer.qkv_bias)
                qkv = linear(norm(x, layer.attn_norm), w["qkv"], bias).reshape(-1, g.dim)
                q, k, v = np.split(qkv, [g.heads, g.heads + g.kv_heads])
                if layer.q_norm is not None:
                    q, k = norm(q, layer.q_norm), norm(k, layer.k_norm)
                q, k = (
                    np.concatenate([a * cos - d * sin, d * cos + a * sin], -1)
                    for a, d in (np.split(r, 2, -1) for r in (q, k))
                )
                new[:, i, b, :, t] = k, v
                live = c.lengths[b]
                keys, values = (
                    np.concatenate([wide(past[i][b, :, :live]), rest[i, b][:, [*seen, t]]], 1)
                    for past, rest in ((c.cache_k, new[0]), (c.cache_v, new[1]))
                )
                score = np.einsum("ghd,gsd->ghs", q.reshape(-1, group, g.dim), keys) * g.scale
                p = np.exp(score - score.max(-1, keepdims=True))
                out = np.einsum("ghs,gsd->ghd", p / p.sum(-1, keepdims=True), values)
                x = x + linear(out.reshape(-1), w["o"], layer.o_bias)
                gate_up = linear(norm(x, layer.mlp_norm), w["gate_up"], layer.gate_up_bias)
                gate, up = np.split(gate_up, 2)
                x = x + linear(gate / (1 + np.exp(-gate)) * up, w["down"], layer.down_bias)
                taps[b, t, i] = x
            hidden[b, t] = x if c.final_norm is None else norm(x, c.final_norm)
    return StackOut(hidden=hidden, new_k=new[0], new_v=new[1], taps=taps[:, :, list(c.taps)])


VARIANTS = [
    (LLAMA, "f32", 1, (), True),
    (LLAMA, "Q8_0", 2, (1,), True),
    (LLAMA, "Q4_1", 3, (1, 0), False),
    (LLAMA, "Q8_0i", 1, (1,), True),
    (LLAMA, "Q4_1i", 3, (1, 0), False),
    (QWEN3, "f32", 3, (0, 2), True),
    (QWEN3, "bf16", 1, (), False),
    (QWEN2, "f32", 2, (1,), True),
    (QWEN2, "bf16", 3, (0, 1), False),
    (ODD, "f32", 1, (0,), True),
    (ODD, "bf16", 3, (), True),
]


@pytest.mark.parametrize(
    "shape,form,segments,taps,final", VARIANTS, ids=[f"{v[0].name}-{v[1]}" for v in VARIANTS]
)
def test_agrees_with_xla_and_with_float64(
    shape: specs.Shape, form: str, segments: int, taps: tuple[int, ...], final: bool
) -> None:
    case = make(7, shape, form=form, segments=segments, taps=taps, final=final)
    got = run(case)
    close(got, expect(case))
    close(run_jitted(case), got)
    assert got.taps.shape == (*case.x.shape[:2], len(taps), shape.width)
    for b, count in enumerate(case.counts):  # nothing but zeros past the count
        for leaf in (got.hidden[b, count:], got.taps[b, count:]):
            assert not leaf.view(np.int32).any()
        for leaf in (got.new_k[:, b, :, count:], got.new_v[:, b, :, count:]):
            assert not leaf.view(np.int32).any()


@settings(max_examples=20)
@given(st.integers(0, 2**20), st.data())
def test_any_shape_matches_float64(seed: int, data: st.DataObject) -> None:
    draw = data.draw
    kv_heads, rows, batch = (draw(st.integers(1, 3)) for _ in range(3))
    shape = specs.Shape(
        "drawn",
        layers=draw(st.integers(1, 2)),
        width=draw(st.sampled_from([1, 7, 31, 64, 65])),
        heads=kv_heads * draw(st.integers(1, 3)),
        kv_heads=kv_heads,
        dim=draw(st.sampled_from([2, 6, 16, 18])),
        ffn=draw(st.sampled_from([32, 64])),
        qk_norm=draw(st.booleans()),
        bias=draw(st.booleans()),
    )
    rows = draw(st.sampled_from([1, 2, 5, 17]))
    capacity = draw(st.sampled_from([1, 4, 19]))
    case = make(
        seed,
        shape,
        form=draw(st.sampled_from(["f32", "bf16"])),
        segments=draw(st.integers(1, 3)),
        lengths=draw(st.lists(st.integers(0, capacity), min_size=batch, max_size=batch)),
        counts=draw(st.lists(st.integers(0, rows), min_size=batch, max_size=batch)),
        rows=rows,
        capacity=capacity,
        taps=tuple(range(shape.layers))[:: draw(st.sampled_from([1, -1]))],
        final=draw(st.booleans()),
    )
    close(run(case, threads=draw(st.integers(0, 3))), expect(case), atol=1e-4)


# --- exact bits -----------------------------------------------------------------------------------


def kernel_exp(x: np.ndarray) -> np.ndarray:
    """The attention's own exp."""
    size = -(-x.size // 16) * 16
    padded, y = np.zeros(size, np.float32), np.zeros(size, np.float32)
    padded[: x.size] = x.reshape(-1)
    pointers = [a.ctypes.data_as(ctypes.c_void_p) for a in (padded, y)]
    native.library().handle.TreeAttentionExp(*pointers, ctypes.c_int64(size))
    return y[: x.size].reshape(x.shape)


def exact(c: Case) -> StackOut:
    """Every row through every layer by `reference.row_exact`."""
    g, batch, rows, width = c.geometry, *c.x.shape
    count = len(c.layers)
    new = np.zeros((2, count, batch, g.kv_heads, rows, g.dim), np.float32)
    hidden = np.zeros(c.x.shape, np.float32)
    taps = np.zeros((batch, rows, count, width), np.float32)
    for b in range(batch):
        for t in range(c.counts[b]):
            x, seen = c.x[b, t], visible(c, b, t)
            for i, (layer, weights) in enumerate(zip(c.layers, c.dense, strict=True)):
                past = [(c.cache_k[i][b, :, s], c.cache_v[i][b, :, s]) for s in range(c.lengths[b])]
                past += [(new[0, i, b, :, s], new[1, i, b, :, s]) for s in seen]
                x, new[0, i, b, :, t], new[1, i, b, :, t] = reference.row_exact(
                    layer,
                    g,
                    weights,
                    x,
                    int(c.positions[b, t]),
                    c.inv_freq,
                    past,
                    reference.silu_exact,
                    kernel_exp,
                )
                taps[b, t, i] = x
            if c.final_norm is not None:
                x = reference.norm_exact(x, c.final_norm, g.eps)
            hidden[b, t] = x
    return StackOut(hidden=hidden, new_k=new[0], new_v=new[1], taps=taps[:, :, list(c.taps)])


def test_silu_of_the_oracle_is_the_gate_of_the_matmul() -> None:
    """gate rows take x as it is, up rows are one: what is left of the gated product is silu."""
    rng = np.random.default_rng(0)
    special = [0.0, -0.0, 1e-30, -1e-40, 20, -20, 87.5, -87.5, -103.9, -104.1, -3e38, 3e38]
    gate = np.concatenate([special, 8 * rng.standard_normal(500)]).astype(np.float32)
    w = np.zeros((64, 2), np.float32)
    w[:32, 0], w[32:, 1] = 1.0, 1.0
    x = jnp.asarray(np.stack([gate, np.ones_like(gate)], -1))
    got = np.asarray(rim.gated_matmul(x, rim.pack(w, "cpu"), implementation="cpu"))[:, 0]
    np.testing.assert_array_equal(got, reference.silu_exact(gate))


@pytest.mark.parametrize("shape", specs.SMALL, ids=lambda s: s.name)
def test_equals_the_sequential_oracle_bit_for_bit(shape: specs.Shape) -> None:
    form = "Q4_1" if shape is LLAMA else "f32"
    taps = tuple(range(shape.layers))
    case = make(
        3,
        shape,
        form=form,
        segments=3,
        lengths=(17, 0, 3),
        counts=(2, 4, 0),
        rows=5,
        capacity=18,
        taps=taps,
    )
    got, want = run(case), exact(case)
    for name in ("new_k", "new_v", "taps", "hidden"):
        np.testing.assert_array_equal(getattr(got, name), getattr(want, name), err_msg=name)


def plain_decoding(c: Case, b: int, capacity: int, company: int) -> StackOut:
    """Every row of sequence b decoded alone, one token a call, its ancestors committed before.

    The cache of a row is that of its parent and the parent's row, written by `accept_commit`.
    `company` other sequences run beside it.
    """
    g, rows, batch = c.geometry, int(c.counts[b]), 1 + company
    live = int(c.lengths[b])

    def grown(cache: np.ndarray) -> jax.Array:
        to = np.full((batch, g.kv_heads, capacity, g.dim), np.nan, np.float32)
        to[0, :, :live] = cache[b, :, :live]
        to[1:, :, :2] = 0.5
        return jnp.asarray(to)

    root = tuple(tuple(map(grown, side)) for side in (c.cache_k, c.cache_v))
    caches: dict[int, Any] = {-1: root}  # by the last committed row
    lengths = {-1: live}
    hidden = np.zeros((rows, c.x.shape[-1]), np.float32)
    new = np.zeros((2, len(c.layers), g.kv_heads, rows, g.dim), np.float32)
    beside = np.random.default_rng(b).standard_normal((company, 1, c.x.shape[-1]))
    for t in range(rows):
        parent = int(max(visible(c, b, t), default=-1))
        past_k, past_v = caches[parent]
        length = lengths[parent]
        out = decoder_stack(
            c.layers,
            g,
            jnp.asarray(np.concatenate([c.x[b, t][None, None], beside]), jnp.float32),
            jnp.full((batch, 1), int(c.positions[b, t]), jnp.int32),
            jnp.asarray(c.inv_freq),
            past_k,
            past_v,
            jnp.asarray([length] + [2] * company, jnp.int32),
            jnp.ones(batch, jnp.int32),
            jnp.ones((batch, 1, 1), bool),
            final_norm=None if c.final_norm is None else jnp.asarray(c.final_norm),
            implementation="cpu",
            threads=1,
        )
        hidden[t], new[0, :, :, t], new[1, :, :, t] = (
            np.asarray(a) for a in (out.hidden[0, 0], out.new_k[:, 0, :, 0], out.new_v[:, 0, :, 0])
        )
        lengths[t] = length + 1
        caches[t] = accept_commit(
            past_k,
            past_v,
            out.new_k,
            out.new_v,
            jnp.zeros((batch, 1), jnp.int32),
            jnp.asarray([length] + [2] * company, jnp.int32),
            jnp.asarray([1] + [0] * company, jnp.int32),
            implementation="cpu",
        )
    return StackOut(hidden=hidden, new_k=new[0], new_v=new[1], taps=np.zeros(0, np.float32))


def check_plain(case: Case, got: StackOut, b: int, company: int) -> None:
    count = int(case.counts[b])
    alone = plain_decoding(case, b, case.cache_k[0].shape[2] + 9, company)
    assert same_bits(got.hidden[b, :count], alone.hidden)
    assert same_bits(got.new_k[:, b, :, :count], alone.new_k)
    assert same_bits(got.new_v[:, b, :, :count], alone.new_v)


@pytest.mark.parametrize("shape", specs.SMALL, ids=lambda s: s.name)
@pytest.mark.parametrize("form", ["f32", "Q8_0", "Q8_0i", "Q4_1i", "Q4_0i"])
def test_tree_rows_are_those_of_plain_decoding(shape: specs.Shape, form: str) -> None:
    if form != "f32" and shape is not LLAMA:
        if form != "Q8_0":
            pytest.skip("inputs that are no whole blocks")
        form = "bf16"
    case = make(
        11,
        shape,
        form=form,
        lengths=(16, 0, 7, 33),
        counts=(9, 1, 0, 5),
        rows=9,
        capacity=33,
    )
    got = run(case, threads=2)
    for b in range(4):
        check_plain(case, got, b, company=b % 3)


@settings(max_examples=6)
@given(st.integers(0, 2**20), st.sampled_from(specs.SMALL), st.data())
def test_any_tree_equals_plain_decoding(seed: int, shape: specs.Shape, data: st.DataObject) -> None:
    counts = data.draw(st.lists(st.integers(0, 9), min_size=3, max_size=3))
    lengths = data.draw(st.lists(st.integers(0, 33), min_size=3, max_size=3))
    case = make(seed, shape, lengths=lengths, counts=counts, rows=9, capacity=33)
    got = run(case, threads=data.draw(st.integers(0, 3)))
    b = data.draw(st.integers(0, 2))
    check_plain(case, got, b, company=data.draw(st.integers(0, 1)))


def wide_case(shape: specs.Shape = LLAMA) -> Case:
    """Enough rows for several tiles, score blocks and threads."""
    return make(
        5, shape, lengths=(90, 3, 0, 64), counts=(70, 1, 33, 2), rows=70, capacity=90, taps=(0,)
    )


def test_bits_do_not_depend_on_threads_company_or_place() -> None:
    case = wide_case()
    alone = run(case, threads=1)
    for threads in (0, 2, 2, 7):
        assert same(run(case, threads=threads), alone)
    order = np.array([2, 0, 3, 1])
    fields = ("x", "positions", "lengths", "counts", "mask")
    changes: dict[str, Any] = {name: getattr(case, name)[order] for name in fields}
    for name in ("cache_k", "cache_v"):
        changes[name] = tuple(cache[order] for cache in getattr(case, name))
    moved = run(case, **changes)
    assert same_bits(moved.hidden, alone.hidden[order])
    assert same_bits(moved.new_k, alone.new_k[:, order])
    fewer = case.counts.copy()
    fewer[0] = 31  # the first rows of a tree do not depend on the later ones
    cut = run(case, counts=fewer)
    assert same_bits(cut.hidden[0, :31], alone.hidden[0, :31])
    assert same_bits(cut.hidden[1:], alone.hidden[1:])


@pytest.mark.parametrize("form", FORMS)
def test_bits_do_not_depend_on_the_vector_form(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    cases = [make(2, shape, taps=(0,)) for shape in specs.SMALL]
    cases += [make(2, LLAMA, form=stored) for stored in ("bf16", "Q8_0", "Q4_1", "Q8_0i", "Q4_1i")]
    best = [run(case) for case in cases]
    number = FORMS[form] if "avx2" in native.cpu_identity() else 0
    narrow = native.library((f"-DJETSPEC_FORM={number}", "-O1"))
    assert narrow.target("DecoderStack") != native.library().target("DecoderStack")
    monkeypatch.setattr(native, "library", lambda: narrow)
    assert all(same(run(case), wide) for case, wide in zip(cases, best, strict=True))


# --- poison ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_bad_row_reaches_only_rows_that_see_it(value: float) -> None:
    case = make(4, QWEN3, counts=(6, 6, 3, 5), taps=(2,))
    clean = run(case)
    x = case.x.copy()
    x[0, 1] = value
    got = run(case, x=x)
    sees = np.zeros(case.x.shape[:2], bool)
    sees[0] = case.mask[0, :, 1]
    assert 1 < sees.sum() < 6
    assert np.isnan(got.hidden[sees]).all() and np.isnan(got.taps[sees]).all()
    assert same_bits(got.hidden[~sees], clean.hidden[~sees])
    assert same_bits(got.taps[~sees], clean.taps[~sees])
    for a, b in ((got.new_k, clean.new_k), (got.new_v, clean.new_v)):
        rows = np.moveaxis(a, 3, 2), np.moveaxis(b, 3, 2)  # [L, B, T, K, h]
        assert same_bits(rows[0][:, ~sees], rows[1][:, ~sees])


def test_a_bad_live_slot_reaches_its_sequence_alone() -> None:
    case = make(6, LLAMA)
    clean = run(case)
    cache = tuple(c.copy() for c in case.cache_k)
    cache[1][0, 1, 4, 3] = np.nan  # live in sequence 0
    got = run(case, cache_k=cache)
    assert np.isnan(got.hidden[0, :4]).all() and same_bits(got.hidden[1:], clean.hidden[1:])


def test_a_mask_of_rows_past_the_count_shows_nothing() -> None:
    case = make(8, QWEN2)
    clean = run(case)
    mask = case.mask.copy()
    for b, count in enumerate(case.counts):
        mask[b, :, count:] = True
        mask[b, count:] = True
    assert same(run(case, mask=mask), clean)


# --- programs -------------------------------------------------------------------------------------


def test_inside_jit_while_loop_and_donated_caches() -> None:
    case = make(9, QWEN3, counts=(1, 1, 0, 1), lengths=(5, 0, 4, 9), rows=1, capacity=16)
    steps = 6

    def step(x: jax.Array, k: Any, v: Any, lengths: jax.Array) -> tuple[Any, ...]:
        out = decoder_stack(
            case.layers,
            case.geometry,
            x,
            lengths[:, None],
            jnp.asarray(case.inv_freq),
            k,
            v,
            lengths,
            jnp.asarray(case.counts),
            jnp.ones((4, 1, 1), bool),
            final_norm=jnp.asarray(case.final_norm),
            implementation="cpu",
        )
        path = jnp.zeros((4, 1), jnp.int32)
        counts = jnp.asarray(case.counts)
        k, v = accept_commit(k, v, out.new_k, out.new_v, path, lengths, counts)
        return out.hidden, k, v, lengths + counts

    @functools.partial(jax.jit, donate_argnums=(1, 2))
    def program(x: jax.Array, k: Any, v: Any, lengths: jax.Array) -> tuple[Any, ...]:
        state = (jnp.int32(0), (x, k, v, lengths))
        return jax.lax.while_loop(lambda s: s[0] < steps, lambda s: (s[0] + 1, step(*s[1])), state)[
            1
        ]

    def start() -> tuple[Any, ...]:
        # own copies: what is donated must not be the arrays of the case
        x = jnp.asarray(np.nan_to_num(case.x))
        k, v = (tuple(jnp.array(c) for c in side) for side in (case.cache_k, case.cache_v))
        return x, k, v, jnp.asarray(case.lengths)

    state = start()
    for _ in range(steps):
        state = step(*state)
    looped = program(*start())
    for a, b in zip(jax.tree.leaves(looped), jax.tree.leaves(state), strict=True):
        assert same_bits(np.asarray(a), np.asarray(b))


@pytest.mark.parametrize("batch,rows", [(0, 3), (2, 0)])
def test_no_rows_and_no_sequences(batch: int, rows: int) -> None:
    case = make(1, LLAMA, lengths=(3, 0), counts=(0, 0), rows=3, taps=(1,))
    case = dataclasses.replace(
        case,
        x=case.x[:batch, :rows],
        positions=case.positions[:batch, :rows],
        mask=case.mask[:batch, :rows, :rows],
        lengths=case.lengths[:batch],
        counts=case.counts[:batch],
        cache_k=tuple(c[:batch] for c in case.cache_k),
        cache_v=tuple(c[:batch] for c in case.cache_v),
    )
    out = run(case, threads=2)
    assert out.hidden.shape == (batch, rows, 64) and out.taps.shape == (batch, rows, 1, 64)
    assert out.new_k.shape == (2, batch, 2, rows, 16)


def test_a_layer_tapped_twice_is_there_twice() -> None:
    case = make(1, LLAMA, taps=(1, 0, 1))
    got = run(case)
    close(got, expect(case))


# --- errors ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes,message",
    [
        ({"counts": [4, 7, 0, 1]}, r"count 7 of sequence 1 is outside 0\.\.6"),
        ({"counts": [-1, 6, 0, 1]}, r"count -1 of sequence 0 is outside 0\.\.6"),
        ({"lengths": [5, 0, 13, 9]}, r"length 13 of sequence 2 is outside 0\.\.12"),
        ({"lengths": [5, 0, 12, -2]}, r"length -2 of sequence 3 is outside 0\.\.12"),
    ],
)
def test_counts_and_lengths_out_of_range(changes: dict[str, list[int]], message: str) -> None:
    case = make(1, LLAMA)
    values = {name: np.asarray(value, np.int32) for name, value in changes.items()}
    with pytest.raises(REFUSED, match=f"decoder_stack: {message}"):
        run(case, **values)


def test_operands_that_do_not_fit_are_errors_when_it_runs() -> None:
    case = make(1, LLAMA)
    short = (case.cache_k[0], case.cache_k[1][:, :, :-1])
    for changes, message in (
        ({"cache_k": short}, r"operand 15 of 15|operand \d+ of \d+ of the layers"),
        ({"mask": case.mask[:, :, :-1]}, "shapes do not fit"),
        ({"inv_freq": case.inv_freq[:-1]}, "shapes do not fit"),
        ({"final_norm": np.ones(3, np.float32)}, r"operand 1 of \d+ of the layers"),
    ):
        with pytest.raises(REFUSED, match=message):
            run(case, **changes)


def test_shapes_that_do_not_fit_are_one_line() -> None:
    case = make(1, LLAMA)
    first, second = case.layers
    narrow = make(1, LLAMA._replace(ffn=48, name="narrow"))
    unpacked = dataclasses.replace(first, o=rim.pack(case.dense[0]["o"], "xla"))
    twice = dataclasses.replace(second, o_bias=jnp.zeros(64))
    wide = dataclasses.replace(case.geometry, heads=6)
    for changes, message in (
        ({"layers": ()}, "0 layers with 2 and 2 caches"),
        ({"cache_v": case.cache_v[:1]}, "2 layers with 2 and 1 caches"),
        ({"x": case.x[0]}, r"x float32\[6, 64\] and positions"),
        ({"x": case.x.astype(np.float16)}, "x float16"),
        ({"positions": case.positions[:, 1:]}, r"positions \[4, 5\]"),
        ({"geometry": wide}, "128 outputs, but the heads need 160"),
        ({"layers": (first, twice)}, "layers of different shapes"),
        ({"taps": (0, 2)}, r"taps \[2\] are no layers of 2"),
        ({"layers": (unpacked, second)}, "needs packed weights with a feed-forward width"),
        ({"layers": narrow.layers}, "a multiple of 32; use 'xla'"),
    ):
        with pytest.raises(native.KernelError, match=f"decoder_stack: .*{message}") as caught:
            run(case, **changes)
        assert "\n" not in str(caught.value)
    with pytest.raises(native.KernelError, match="unknown kernel implementation 'fast'"):
        run(case, implementation="fast")


def test_auto_takes_xla_where_the_kernel_does_not_take_the_weights() -> None:
    case = make(1, LLAMA._replace(ffn=48, name="narrow"))
    close(run_jitted(case, "auto"), expect(case))
