"""Candidates of a drafted block against `drafter.candidates` and, in bits, against themselves."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jetspec_jax.config import DraftConfig
from jetspec_jax.drafter import candidates
from pallas_kernels import native
from pallas_kernels import row_invariant_matmul as rim
from pallas_kernels.draft_head_topk import PathHead, draft_head_topk
from tests.pallas_kernels.test_decoder_stack import REFUSED, packed_as
from tests.pallas_kernels.test_tree_attention import FORMS, same_bits

TARGETS, HIDDEN, DEPTH, BATCH = 900, 32, 3, 3
VOCAB = 450  # two units of work of cpu.cc, the last panel not full


class Case(NamedTuple):
    """Operands of one call."""

    hidden: np.ndarray
    head: rim.PackedWeight
    anchor: np.ndarray
    ids: np.ndarray | None
    path: PathHead | None
    temperature: np.ndarray | None
    noise: np.ndarray | None


def make(
    seed: int,
    *,
    markov: bool = True,
    ids: bool = True,
    temperature: bool = False,
    noise: bool = False,
    form: str = "f32",
    half: bool = False,
    gated: bool = False,
    rank: int = 5,
    vocab: int = VOCAB,
) -> Case:
    rng = np.random.default_rng(seed)

    def normal(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape, dtype=np.float32)

    w1 = normal(TARGETS, rank).astype(ml_dtypes.bfloat16 if half else np.float32)
    w2 = packed_as(form if rank % 32 == 0 else "f32", normal(vocab, rank))[0]
    gate = jnp.asarray(normal(BATCH, DEPTH, rank)) if gated else None
    return Case(
        hidden=normal(BATCH, DEPTH, HIDDEN),
        head=packed_as(form, normal(vocab, HIDDEN) * np.float32(2 * HIDDEN**-0.5))[0],
        anchor=rng.integers(0, TARGETS, BATCH).astype(np.int32),
        ids=np.sort(rng.permutation(TARGETS)[:vocab]).astype(np.int32) if ids else None,
        path=PathHead(jnp.asarray(w1), w2, gate) if markov else None,
        temperature=np.asarray([0.0, 0.7, 1.5], np.float32) if temperature else None,
        noise=rng.gumbel(size=(BATCH, DEPTH, vocab)).astype(np.float32) if noise else None,
    )


def run(
    case: Case, width: int, counts: Any = (1, 1, 1), threads: int = 0
) -> tuple[np.ndarray, np.ndarray]:
    def optional(a: np.ndarray | None) -> jax.Array | None:
        return None if a is None else jnp.asarray(a)

    scale = None
    if case.temperature is not None:
        t = case.temperature
        scale = np.where(t > 0, 1 / np.maximum(t, np.float32(1e-3)), np.float32(1))
    tokens, table = draft_head_topk(
        jnp.asarray(case.hidden),
        case.head,
        width,
        anchor=jnp.asarray(case.anchor),
        counts=jnp.asarray(counts, jnp.int32),
        ids=optional(case.ids),
        path=case.path,
        scale=optional(scale),
        noise=optional(case.noise),
        threads=threads,
    )
    return np.asarray(tokens), np.asarray(table)


@functools.partial(jax.jit, static_argnums=0)
def _candidates(width: int, case: Any, w1: Any, w2: Any, gate: Any) -> Any:
    vocab = case.head.n
    cfg = DraftConfig(
        hidden_size=HIDDEN,
        num_layers=1,
        num_heads=2,
        num_kv_heads=1,
        head_dim=16,
        ffn_size=32,
        target_hidden_size=HIDDEN,
        num_target_layers=2,
        target_layer_ids=(0,),
        vocab_size=TARGETS,
        mask_token_id=3,
        block_size=DEPTH + 1,
        draft_vocab_size=vocab,
        path_head="none" if w2 is None else "markov",
        path_rank=0 if w2 is None else w2.k,
    )
    params = {} if w2 is None else {"path": {"w1": w1, "w2": w2}}
    logits = rim.matmul(case.hidden, case.head)

    def one(logits: Any, anchor: Any, temperature: Any, noise: Any, gate: Any) -> Any:
        return candidates(
            params,
            cfg,
            logits,
            anchor,
            case.ids,
            width,
            temperature=temperature,
            noise=noise,
            gate=gate,
        )

    return jax.vmap(one)(logits, case.anchor, case.temperature, case.noise, gate)


def expect(case: Case, width: int) -> tuple[np.ndarray, np.ndarray]:
    path = case.path
    parts = (None,) * 3 if path is None else (path.w1.astype(jnp.float32), path.w2, path.gate)
    out = _candidates(width, case._replace(path=None), *parts)
    return np.asarray(out.tokens), np.asarray(out.logp)


def check(case: Case, width: int, **kwargs: Any) -> None:
    """The seeds below have no two scores close enough for rounding to change their order."""
    (tokens, table), (want, logp) = run(case, width, **kwargs), expect(case, width)
    np.testing.assert_array_equal(tokens, want)
    np.testing.assert_allclose(table, logp, rtol=0, atol=1e-4)
    assert (table <= 0).all()


@pytest.mark.parametrize(
    "kwargs",
    [
        {"markov": False, "ids": False},
        {"markov": False, "temperature": True, "noise": True},
        {"ids": False},
        {"temperature": True, "noise": True},
        {"half": True, "noise": True},
        {"gated": True, "temperature": True},
        {"form": "bf16", "half": True, "temperature": True},
        {"form": "Q8_0", "rank": 32},
        {"form": "Q4_1", "rank": 32, "half": True},
        {"form": "Q8_0i", "rank": 32, "noise": True},
        {"form": "Q4_1i", "rank": 32, "gated": True},
    ],
    ids=lambda k: "-".join(str(v) if isinstance(v, str | int) else n for n, v in k.items()),
)
def test_agrees_with_candidates(kwargs: dict[str, Any]) -> None:
    check(make(1, **kwargs), 6)


@pytest.mark.parametrize("width", [1, 2, 33, 64])
def test_widths(width: int) -> None:
    check(make(2), width)


@pytest.mark.parametrize("vocab", [1, 31, 64, 384])
def test_small_vocabularies(vocab: int) -> None:
    check(make(3, vocab=vocab), min(4, vocab))


def test_equal_scores_keep_the_order_of_ids() -> None:
    case = make(4, markov=False, ids=False)
    case = case._replace(head=rim.pack(np.ones((VOCAB, HIDDEN), np.float32), "cpu"))
    tokens, table = run(case, 5)
    assert (tokens == np.arange(5)).all()
    np.testing.assert_allclose(table, -np.log(VOCAB), atol=1e-5)
    score = np.linspace(-3, -2, VOCAB, dtype=np.float32)
    score[[410, 3, 400, 5]] = 1.0  # in two units of work
    score[7] = 2.0
    case = case._replace(head=rim.pack(score[:, None] * np.eye(1, HIDDEN, dtype=np.float32), "cpu"))
    case = case._replace(hidden=np.ones((BATCH, DEPTH, HIDDEN), np.float32))
    assert (run(case, 5)[0] == [7, 3, 5, 400, 410]).all()


def test_conditional_scores_add_up() -> None:
    """All tokens as candidates: under every parent the probabilities are one."""
    case = make(5, vocab=40)
    _, table = run(case, 40)
    np.testing.assert_allclose(np.exp(table.astype(np.float64)).sum(-1), 1, atol=1e-4)
    assert np.abs(table[:, 1:, :1] - table[:, 1:]).max() > 0.1  # parents differ
    assert (table[:, 0, :1] == table[:, 0]).all()  # one parent: the anchor


def test_sequences_that_do_not_draft_are_zero_and_touch_nobody() -> None:
    case = make(6, temperature=True, noise=True)
    whole = run(case, 4)
    hidden = case.hidden.copy()
    hidden[1] = np.nan
    for counts in ((1, 0, 1), (4, 0, 9)):
        got = run(case._replace(hidden=hidden), 4, counts)
        for a, b in zip(got, whole, strict=True):
            assert not a[1].view(np.int32).any()
            assert same_bits(a[[0, 2]], b[[0, 2]])
    assert not any(a.any() for a in run(case, 4, (0, 0, 0)))


def test_bits_do_not_depend_on_threads_or_company() -> None:
    case = make(7, noise=True)
    alone = run(case, 8, threads=1)
    for threads in (0, 2, 7):
        assert all(map(same_bits, run(case, 8, threads=threads), alone))
    for b in range(BATCH):
        one = case._replace(
            **{name: getattr(case, name)[b : b + 1] for name in ("hidden", "anchor", "noise")}
        )
        got = run(one, 8, (1,))
        assert all(same_bits(x[0], y[b]) for x, y in zip(got, alone, strict=True))


@pytest.mark.parametrize("form", FORMS)
def test_vector_forms_agree(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    cases = [make(8, noise=True), make(8, form="Q4_1", rank=32, half=True)]
    best = [run(case, 7) for case in cases]
    number = FORMS[form] if "avx2" in native.cpu_identity() else 0
    narrow = native.library((f"-DJETSPEC_FORM={number}", "-O1"))
    monkeypatch.setattr(native, "library", lambda: narrow)
    for case, (tokens, table) in zip(cases, best, strict=True):
        got = run(case, 7)
        np.testing.assert_array_equal(got[0], tokens)
        np.testing.assert_allclose(got[1], table, rtol=0, atol=1e-5)


@pytest.mark.parametrize("markov", [True, False])
def test_nan_gives_real_tokens_and_stays_in_its_sequence(markov: bool) -> None:
    case = make(9, markov=markov)
    clean = run(case, 5)
    hidden = case.hidden.copy()
    hidden[0] = np.nan
    tokens, table = run(case._replace(hidden=hidden), 5)
    assert np.isin(tokens, case.ids).all()  # nothing that was never set
    assert same_bits(tokens[1:], clean[0][1:]) and same_bits(table[1:], clean[1][1:])


@pytest.mark.parametrize("markov", [True, False])
def test_tokens_ruled_out_by_the_noise(markov: bool) -> None:
    """A whole unit of work at -inf has no mass; the rest is normalised without it."""
    case = make(10, markov=markov, noise=True)
    assert case.noise is not None and case.ids is not None
    noise = case.noise.copy()
    case.noise[:, :, :384] = -np.inf
    check(case, 5)
    noise[:, :, 2:] = -np.inf  # two are left, five are asked for
    case = case._replace(noise=noise)
    tokens, table = run(case, 5)
    assert np.isin(tokens[..., :2], case.ids[:2]).all() and np.isin(tokens, case.ids).all()
    assert np.isfinite(table[..., :2]).all() and (table[..., 2:] == -np.inf).all()


def test_an_anchor_outside_the_vocabulary_is_clamped() -> None:
    case = make(11)
    low, high = (np.full(BATCH, n, np.int32) for n in (0, TARGETS - 1))
    for given, meant in ((-5, low), (TARGETS + 10_000, high)):
        got = run(case._replace(anchor=np.full(BATCH, given, np.int32)), 3)
        assert all(map(same_bits, got, run(case._replace(anchor=meant), 3)))


def test_inside_jit_and_loop() -> None:
    case = make(12)
    assert case.path is not None

    @jax.jit
    def program(hidden: jax.Array, anchor: jax.Array) -> tuple[jax.Array, jax.Array]:
        def body(_: Any, state: Any) -> Any:
            tokens, table = draft_head_topk(
                hidden,
                case.head,
                4,
                anchor=state[0],
                counts=jnp.ones(BATCH, jnp.int32),
                ids=jnp.asarray(case.ids),
                path=case.path,
            )
            return tokens[:, -1, 0], table

        return jax.lax.fori_loop(0, 3, body, (anchor, jnp.zeros((BATCH, DEPTH, 4, 4))))

    anchor, table = program(jnp.asarray(case.hidden), jnp.asarray(case.anchor))
    for _ in range(3):
        tokens, want = run(case, 4)
        case = case._replace(anchor=tokens[:, -1, 0])
    np.testing.assert_array_equal(anchor, case.anchor)
    assert same_bits(np.asarray(table), want)


def test_errors_are_one_line() -> None:
    case = make(13)
    assert case.path is not None
    rows = rim.pack(np.zeros((VOCAB, HIDDEN), np.float32), "xla")
    plain = PathHead(case.path.w1, rim.pack(np.zeros((VOCAB, 5), np.float32), "xla"))
    for changes, width, message in (
        ({"hidden": case.hidden[..., :-1]}, 4, r"hidden \[3, 3, 31\]"),
        ({}, 0, "width 0"),
        ({}, 65, "a width of 1 to 64"),
        ({"head": rim.gather(case.head, np.arange(9))}, 10, "a width of 1 to 9"),
        ({"head": rows}, 4, "in rows do not fit; need packed panels"),
        ({"path": plain}, 4, "need packed panels"),
    ):
        with pytest.raises(native.KernelError, match=f"draft_head_topk: .*{message}") as caught:
            run(case._replace(**changes), width)
        assert "\n" not in str(caught.value)
    assert case.ids is not None
    for changes, message in (
        ({"ids": case.ids[:-1]}, "operand 1 is missing, too many or does not fit"),
        ({"noise": np.zeros((BATCH, DEPTH, VOCAB - 1), np.float32)}, "operand 2 is missing"),
        ({"anchor": case.anchor[:1]}, "shapes that the kernel does not take"),
    ):
        with pytest.raises(REFUSED, match=f"draft_head_topk: {message}"):
            run(case._replace(**changes), 4)


def test_no_sequences_and_no_depths() -> None:
    case = make(14)
    none = case._replace(hidden=case.hidden[:0], anchor=case.anchor[:0])
    assert [a.shape for a in run(none, 4, ())] == [(0, 3, 4), (0, 3, 4, 4)]
    flat = case._replace(hidden=case.hidden[:, :0])
    assert [a.shape for a in run(flat, 4)] == [(3, 0, 4), (3, 0, 4, 4)]
