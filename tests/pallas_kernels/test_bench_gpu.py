"""The timing code of the bench on a tiny geometry: it runs anywhere, and means something only on a
GPU."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import bench, bench_gpu, bench_round, roofline
from pallas_kernels.geometries import DraftHead, Geometry

HEAD = DraftHead(layers=1, taps=1, ffn=64, block=4, vocab=64)
DENSE = Geometry("tiny", 1, 64, 2, 1, 64, 64, 128, HEAD)
EXPERTS = Geometry("tiny-moe", 1, 64, 2, 1, 64, 64, 128, HEAD, experts=4, active=2)


@pytest.fixture(autouse=True)
def native_dtype(monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU's kernels take float32."""
    if jax.default_backend() == "cpu":
        monkeypatch.setattr(bench_round, "DTYPE", jnp.float32)


@functools.cache
def params(g: Geometry) -> bench_round.Params:
    return bench_round.random_params(g)


def count(tree: Any) -> int:
    return sum(x.size for x in jax.tree.leaves(tree))


def test_weights_are_those_the_roofline_counts() -> None:
    found = params(DENSE)
    draft = count(found["fc"]) + count(found["draft_layers"])
    norms = 2 * HEAD.layers * (DENSE.hidden + DENSE.head_dim) + 2 * DENSE.hidden
    assert draft == roofline.draft_parameters(DENSE) - norms
    step = roofline.forward_work(DENSE, 1, 0)
    layers = sum(w.flops for w in step if w.op != "tree_attention")
    assert layers == 2 * (count(found["layers"]) + count(found["head"]))


@pytest.mark.parametrize("g", [DENSE, EXPERTS], ids=lambda g: g.name)
def test_a_round_of_the_bench_is_a_round(g: Geometry) -> None:
    """A row of a tree gets what plain decoding of its path gives; a round writes what it keeps."""
    state = bench_round.random_state(g, 2, 10, 8)
    forward = jax.jit(functools.partial(bench_round.forward, g))
    tokens = jnp.asarray([[5, 9, 7], [1, 2, 3]], jnp.int32)
    depth = jnp.asarray([[0, 1, 1]] * 2, jnp.int32)
    mask = bench_round.ancestors(jnp.asarray([[-1, 0, 0]] * 2, jnp.int32))
    assert mask[0].tolist() == [[True, False, False], [True, True, False], [True, False, True]]
    tree = forward(params(g), state, tokens, depth, mask)
    path = jnp.asarray([0, 2])
    chain = jnp.broadcast_to(jnp.tril(jnp.ones((2, 2), bool))[None], (2, 2, 2))
    alone = forward(params(g), state, tokens[:, path], depth[:, path], chain)
    for a, b in zip(tree.taps[:, path], alone.taps, strict=True):
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=1e-4, atol=1e-5)
    before = np.asarray(state.keys[0], np.float32)
    anchor = jnp.zeros((2,), jnp.int32)
    after, ids = bench_round.spec_round(g, params(g), state, 6, 3, 3, anchor)
    assert ids.shape == (2,) and (np.asarray(ids) < g.vocab).all()
    assert after.lengths.tolist() == [10, 10]
    now = np.asarray(after.keys[0], np.float32)
    np.testing.assert_array_equal(now[:, :, :10], before[:, :, :10])
    assert (now[:, :, 10:13] != before[:, :, 10:13]).any()


@pytest.mark.parametrize("g", [DENSE, EXPERTS], ids=lambda g: g.name)
def test_every_op_of_the_roofline_has_a_case(g: Geometry) -> None:
    cases = bench_gpu.cases(g, nodes=6, context=70, kept=3, width=3, batch=2)
    wanted = [w.op for w in roofline.round_work(g, 6, 70, 3.0, 3, 2)]
    assert [c.op for c in cases] == wanted
    for case in cases:
        fresh = jax.eval_shape(case.fresh, jax.random.key(0))
        shapes = [
            jax.eval_shape(functools.partial(case.call, form), *fresh, *case.fixed)
            for form in ("auto", "xla")
        ]
        assert jax.tree.map(lambda x: x.shape, shapes[0]) == jax.tree.map(
            lambda x: x.shape, shapes[1]
        )


def test_each_call_of_a_timing_is_run() -> None:
    """None is dropped (all count in the result), none leaves the loop."""
    fresh = [(2.0 * jnp.eye(16),), (3.0 * jnp.eye(16),)]
    run = bench_gpu.repeated(lambda w, x: x @ w, fresh, 3)
    assert float(run((jnp.ones((4, 16)),))) == 3 * (2 + 3)
    text = run.func.lower(*run.args, (jnp.ones((4, 16)),)).compile().as_text()
    entry = text[text.index("ENTRY ") :]
    assert text.count(" dot(") == 2 and " while(" in entry
    assert "dot" not in entry.replace("dot_general", "")  # nor a fusion named after one


def test_the_document_is_printed_and_drawn(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Any
) -> None:
    monkeypatch.setattr(bench_gpu, "measured_limits", lambda: (1e9, 1e10))
    monkeypatch.setattr(bench_gpu, "REPEATS", 1)
    first = bench_gpu.cases
    monkeypatch.setattr(bench_gpu, "cases", lambda *args: first(*args)[:1])
    monkeypatch.setattr(
        bench_gpu,
        "time_case",
        functools.partial(bench_gpu.time_case, turns=1),
    )
    document = bench_gpu.run(DENSE, 4, 10, (2.0, 3.0), 2, 1)
    assert document["ops"][0]["op"] == "qkv" and document["ops"][0]["ran"] == "xla"
    assert document["ops"][0]["kernel_s"] > 0
    assert set(document["round"]["phase_s"]) == {"verify", "commit", "draft", "tree"}
    plain, whole = document["round"]["plain_s"], document["round"]["round_s"]
    assert document["round"]["synthetic_speedup"]["3"] == pytest.approx(3 * plain / whole)
    bench.print_measured(document)
    out = capsys.readouterr().out
    assert "SYNTHETIC: at tau 2" in out and "qkv" in out
    bench.draw(document, tmp_path / "times.svg")
    assert (tmp_path / "times.svg").stat().st_size > 1000


@pytest.mark.gpu
def test_on_a_gpu_no_op_beats_its_roofline() -> None:
    g = bench.GEOMETRIES["qwen3-0.6b"]
    document = bench_gpu.run(g, 64, 1024, (4.0,), 8, 1)
    for row in document["ops"]:
        assert row["kernel_s"] > 0.8 * row["least_s"], row
    assert document["round"]["round_s"] > document["round"]["plain_s"]
