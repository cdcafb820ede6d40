"""The greedy choice: that of the stored logits bit for bit, ties, NaN, infinities, ragged rows."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels import native
from pallas_kernels import row_invariant_matmul as rim
from pallas_kernels.verify_head import Choice, reference, verify_head
from tests.pallas_kernels.test_decoder_stack import REFUSED, packed_as
from tests.pallas_kernels.test_tree_attention import FORMS, same_bits

TASK = 12 * 32  # outputs of a unit of work in cpu.cc


def choose(logits: np.ndarray) -> Choice:
    """The definition, from logits [..., V]: first NaN, else first largest."""
    ids = logits.argmax(-1)
    best = np.take_along_axis(logits, ids[..., None], -1)[..., 0]
    others = np.where(np.arange(logits.shape[-1]) == ids[..., None], -np.inf, logits)
    with np.errstate(invalid="ignore"):
        return Choice(ids, best, best - others.max(-1))  # pyright: ignore[reportArgumentType]


def run(hidden: Any, head: rim.PackedWeight, counts: Any, threads: int = 0) -> Choice:
    out = verify_head(
        jnp.asarray(hidden),
        head,
        jnp.asarray(counts, jnp.int32),
        implementation="cpu",
        threads=threads,
    )
    return Choice(*map(np.asarray, out))  # pyright: ignore[reportArgumentType]


def check(got: Choice, logits: np.ndarray, counts: Any) -> None:
    """Values equal (NaN to NaN, either zero to either) where rows are, zero bits where not."""
    want = choose(logits)
    there = np.arange(logits.shape[1])[None] < np.asarray(counts)[:, None]
    for name, a, b in zip(Choice._fields, got, want, strict=True):
        a, b = np.asarray(a), np.asarray(b)
        np.testing.assert_array_equal(a[there], b[there], err_msg=name)
        assert not a[~there].view(np.int32).any(), name


def head_of(rng: np.random.Generator, form: str, vocab: int, width: int) -> rim.PackedWeight:
    return packed_as(form, rng.standard_normal((vocab, width), dtype=np.float32))[0]


def same(a: Choice, b: Choice) -> bool:
    return all(same_bits(np.asarray(x), np.asarray(y)) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("form", ["f32", "bf16", "Q8_0", "Q4_1", "Q8_0i", "Q4_1i"])
@pytest.mark.parametrize("vocab", [TASK + 17, 3 * TASK])
def test_choice_is_that_of_the_stored_logits(form: str, vocab: int) -> None:
    rng = np.random.default_rng(vocab)
    head = head_of(rng, form, vocab, 64)
    hidden = rng.standard_normal((3, 50, 64), dtype=np.float32)
    counts = [50, 0, 37]  # more packed rows than a panel takes at once is below
    logits = np.asarray(rim.matmul(jnp.asarray(hidden), head, implementation="cpu"))
    hidden[1], hidden[2, 37:] = np.nan, np.nan  # rows that are not there
    for threads in (1, 2, 7):
        check(run(hidden, head, counts, threads), logits, counts)
    full = np.nan_to_num(hidden)
    logits = np.asarray(rim.matmul(jnp.asarray(full), head, implementation="cpu"))
    check(run(full, head, [50, 50, 50]), logits, [50, 50, 50])  # 150 rows, not gathered


@pytest.mark.parametrize("shape", [(1, 1, 40), (2, 3, 1000)])
def test_agrees_with_xla(shape: tuple[int, int, int]) -> None:
    batch, rows, vocab = shape
    rng = np.random.default_rng(vocab)
    head = head_of(rng, "f32", vocab, 24)
    hidden = jnp.asarray(rng.standard_normal((batch, rows, 24), dtype=np.float32))
    counts = jnp.asarray([rows] + [1] * (batch - 1), jnp.int32)
    xla = jax.jit(functools.partial(verify_head, implementation="xla"))(hidden, head, counts)
    got = run(hidden, head, counts)
    np.testing.assert_array_equal(got.ids, xla.ids)
    np.testing.assert_allclose(got.best, xla.best, rtol=1e-5)
    np.testing.assert_allclose(got.margin, xla.margin, rtol=1e-4, atol=1e-4)


_reference = jax.jit(reference.choose)


@pytest.mark.parametrize("vocab", range(1, 41))
def test_small_vocabularies_with_ties(vocab: int) -> None:
    """Width 1: logit = x * w, so the logits are whatever the weights are."""
    rng = np.random.default_rng(vocab)
    levels = np.array([-1.0, 0.5, 2.0, 2.0, -np.inf], np.float32)
    weight = rng.choice(levels, (vocab, 1))
    hidden = np.array([1.0, -1.0, 1e-30, 2.0], np.float32).reshape(1, 4, 1)
    logits = hidden * weight[:, 0]
    check(run(hidden, rim.pack(weight, "cpu"), [4]), logits, [4])
    check(run(-hidden, rim.pack(-weight, "cpu"), [3]), logits, [3])


def adversarial(vocab: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(vocab)
    base = rng.standard_normal(vocab).astype(np.float32)
    last, middle = vocab - 1, vocab // 2

    def put(**values: float) -> np.ndarray:
        places = {"first": 0, "second": 1, "middle": middle, "before": last - 1, "last": last}
        w = base.copy()
        for name, value in values.items():
            w[places[name]] = value
        return w

    nan, inf = np.nan, np.inf
    return {
        "all equal": np.full(vocab, 3.0, np.float32),
        "all zero, signs mixed": rng.choice(np.array([0.0, -0.0], np.float32), vocab),
        "all -inf": np.full(vocab, -inf, np.float32),
        "all nan": np.full(vocab, nan, np.float32),
        "rising": np.arange(vocab, dtype=np.float32),
        "falling": -np.arange(vocab, dtype=np.float32),
        "tie of first and last": put(first=9, last=9),
        "tie over units": put(middle=9, last=9),
        "best last": put(last=9, before=8),
        "best first": put(first=9, second=8),
        "nan last": put(last=nan),
        "nan first": put(first=nan, last=9),
        "two nan": put(middle=nan, last=nan),
        "nan after inf": put(second=inf, middle=nan, last=inf),
        "inf twice": put(second=inf, last=inf),
        "inf once": put(middle=inf),
        "-inf but one": np.where(np.arange(vocab) == middle, 1.0, -inf).astype(np.float32),
        "-inf but one, nan": np.where(np.arange(vocab) == middle, nan, -inf).astype(np.float32),
        "small": base * np.float32(1e-30),
    }


@pytest.mark.parametrize("vocab", [33, TASK, 2 * TASK + 5])
def test_adversarial_logits(vocab: int) -> None:
    hidden = np.ones((1, 1, 1), np.float32)
    for name, weight in adversarial(vocab).items():
        head = rim.pack(weight[:, None], "cpu")
        stored = np.asarray(rim.matmul(jnp.asarray(hidden), head, implementation="cpu"))
        np.testing.assert_array_equal(stored[0, 0], weight, err_msg=name)
        for threads in (1, 2):
            check(run(hidden, head, [1], threads), stored, [1])
        with np.errstate(invalid="ignore"):
            ids, best, margin = _reference(jnp.asarray(stored))
        want = choose(stored)
        for a, b in zip((ids, best, margin), want, strict=True):
            np.testing.assert_array_equal(np.asarray(a), np.asarray(b), err_msg=name)


@settings(max_examples=25)
@given(st.integers(0, 2**20), st.data())
def test_any_shape(seed: int, data: st.DataObject) -> None:
    draw, rng = data.draw, np.random.default_rng(seed)
    batch, rows = draw(st.integers(1, 3)), draw(st.sampled_from([1, 2, 13, 140]))
    form = draw(st.sampled_from(["f32", "bf16", "Q8_0", "Q4_1"]))
    width = draw(st.sampled_from([1, 5, 64])) if form in ("f32", "bf16") else 32
    vocab = draw(st.sampled_from([1, 2, 31, 32, 33, 70, TASK - 1, TASK + 1, 2 * TASK + 40]))
    counts = draw(st.lists(st.integers(0, rows), min_size=batch, max_size=batch))
    head = head_of(rng, form, vocab, width)
    hidden = rng.integers(-2, 3, (batch, rows, width)).astype(np.float32)  # ties and zero rows
    logits = np.asarray(rim.matmul(jnp.asarray(hidden), head, implementation="cpu"))
    check(run(hidden, head, counts, draw(st.integers(0, 3))), logits, counts)


@pytest.mark.parametrize("form", FORMS)
def test_bits_do_not_depend_on_the_vector_form(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(3)
    hidden = rng.standard_normal((2, 9, 64), dtype=np.float32)
    heads = [head_of(rng, stored, TASK + 17, 64) for stored in ("f32", "bf16", "Q8_0", "Q4_1")]
    best = [run(hidden, head, [9, 4]) for head in heads]
    number = FORMS[form] if "avx2" in native.cpu_identity() else 0
    narrow = native.library((f"-DJETSPEC_FORM={number}", "-O1"))
    monkeypatch.setattr(native, "library", lambda: narrow)
    assert all(same(run(hidden, head, [9, 4]), b) for head, b in zip(heads, best, strict=True))


def test_inside_jit_and_while_loop() -> None:
    rng = np.random.default_rng(4)
    head = head_of(rng, "f32", 500, 16)
    table = jnp.asarray(rng.standard_normal((500, 16), dtype=np.float32))

    @jax.jit
    def program(head: rim.PackedWeight, ids: jax.Array) -> jax.Array:
        def body(state: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            i, ids = state
            counts = jnp.full((2,), 3, jnp.int32)
            return i + 1, verify_head(table[ids], head, counts, implementation="cpu").ids

        return jax.lax.while_loop(lambda s: s[0] < 5, body, (jnp.int32(0), ids))[1]

    ids = np.arange(6).reshape(2, 3)
    got = program(head, jnp.asarray(ids, jnp.int32))
    for _ in range(5):
        ids = run(np.asarray(table)[ids], head, [3, 3]).ids
    np.testing.assert_array_equal(got, ids)


def test_no_rows_and_no_sequences() -> None:
    head = head_of(np.random.default_rng(0), "f32", 50, 8)
    for batch, rows in ((0, 4), (2, 0), (2, 4)):
        out = run(np.full((batch, rows, 8), np.nan, np.float32), head, [0] * batch)
        assert all(a.shape == (batch, rows) and not np.asarray(a).any() for a in out)


def test_errors_are_one_line() -> None:
    head = head_of(np.random.default_rng(0), "f32", 50, 8)
    plain = rim.pack(np.zeros((50, 8), np.float32), "xla")
    hidden, counts = jnp.zeros((2, 3, 8)), jnp.ones(2, jnp.int32)
    for call, message in (
        (lambda: verify_head(hidden[0], head, counts), r"hidden \[3, 8\]"),
        (lambda: verify_head(hidden[..., :7], head, counts), r"do not fit a head \[50, 8\]"),
        (lambda: verify_head(hidden, head, counts[:1]), r"counts \[1\]"),
        (lambda: verify_head(hidden, plain, counts, implementation="cpu"), "a head in panels"),
        (
            lambda: verify_head(hidden, head, counts, implementation="fast"),  # type: ignore[arg-type]
            "unknown kernel implementation 'fast'",
        ),
    ):
        with pytest.raises(native.KernelError, match=f"verify_head: .*{message}|{message}") as err:
            call()
        assert "\n" not in str(err.value)
    for bad in ([4, 1], [1, -1]):
        with pytest.raises(REFUSED, match=r"verify_head: count .*outside 0\.\.3"):
            run(hidden, head, bad)
    assert run(hidden, head, [1, 3]).ids.tolist() == [[0, 0, 0], [0, 0, 0]]
    auto = verify_head(hidden, plain, counts)  # rows as stored: XLA
    assert auto.ids.shape == (2, 3)
