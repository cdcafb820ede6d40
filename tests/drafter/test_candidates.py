"""Candidates: the published scores without a path head, conditional scores with it, ids, ties and
noise."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jetspec_jax.config import DraftConfig
from jetspec_jax.drafter import candidates, conditional_logits, path_correction, path_gate
from jetspec_jax.errors import ConfigError
from jetspec_jax.tree import Candidates
from jetspec_jax.typing import Params

DEPTH, VOCAB, WIDTH = 3, 24, 4
NONE = DraftConfig(
    hidden_size=8,
    num_layers=1,
    num_heads=2,
    num_kv_heads=1,
    head_dim=4,
    ffn_size=8,
    target_hidden_size=8,
    num_target_layers=2,
    target_layer_ids=(0,),
    vocab_size=40,
    mask_token_id=3,
    block_size=DEPTH + 1,
    draft_vocab_size=VOCAB,
)
MARKOV = dataclasses.replace(NONE, path_head="markov", path_rank=5)
RNG = np.random.default_rng(0)
LOGITS = jnp.asarray(2 * RNG.standard_normal((DEPTH, VOCAB)), jnp.float32)
PARAMS: Params = {
    "path": {
        "w1": jnp.asarray(RNG.standard_normal((40, 5)), jnp.float32),
        "w2": jnp.asarray(RNG.standard_normal((VOCAB, 5)), jnp.float32),
    }
}
ID_MAP = jnp.asarray(np.sort(RNG.permutation(40)[:VOCAB]), jnp.int32)
ANCHOR = jnp.asarray(7, jnp.int32)


def run(
    cfg: DraftConfig, logits: jax.Array = LOGITS, width: int = WIDTH, **kwargs: object
) -> Candidates:
    static = {k: v for k, v in kwargs.items() if isinstance(v, str)}
    traced = {k: v for k, v in kwargs.items() if k not in static}
    fn = functools.partial(
        candidates, PARAMS, cfg, anchor_token=ANCHOR, id_map=ID_MAP, width=width, **static
    )
    return jax.jit(lambda x, t: fn(x, **t))(logits, traced)


def conditional(depth: int, parent: int, gate: np.ndarray | None = None) -> np.ndarray:
    """log p(. | parent) over the draft vocabulary, in numpy."""
    features = np.asarray(PARAMS["path"]["w1"])[parent] * (1 if gate is None else gate[depth])
    row = np.asarray(LOGITS[depth]) + np.asarray(PARAMS["path"]["w2"]) @ features
    return row - np.log(np.exp(row - row.max()).sum()) - row.max()


def test_without_path_head_rows_repeat_the_log_softmax() -> None:
    got = run(NONE)
    logp = np.asarray(jax.nn.log_softmax(LOGITS, -1))
    order = np.argsort(-logp, axis=1, kind="stable")[:, :WIDTH]
    np.testing.assert_array_equal(got.tokens, np.asarray(ID_MAP)[order])
    want = np.take_along_axis(logp, order, 1)
    for parent in range(WIDTH):
        np.testing.assert_allclose(got.logp[:, parent], want, rtol=1e-5)


@pytest.mark.parametrize("path_head", ["markov", "pairwise"])
def test_exact_scores_are_conditional_log_probabilities(path_head: str) -> None:
    gate = RNG.standard_normal((DEPTH, 5)).astype(np.float32) if path_head == "pairwise" else None
    cfg = dataclasses.replace(MARKOV, path_head=path_head)
    got = run(cfg, normaliser="exact", gate=None if gate is None else jnp.asarray(gate))
    draft = {int(t): i for i, t in enumerate(np.asarray(ID_MAP))}
    first = conditional(0, int(ANCHOR), gate)
    np.testing.assert_array_equal(got.tokens[0], np.asarray(ID_MAP)[np.argsort(-first)[:WIDTH]])
    np.testing.assert_allclose(got.logp[0, 0], np.sort(first)[::-1][:WIDTH], rtol=1e-4, atol=1e-5)
    for depth in range(1, DEPTH):
        for a, parent in enumerate(np.asarray(got.tokens[depth - 1])):
            row = conditional(depth, int(parent), gate)
            want = [row[draft[int(t)]] for t in np.asarray(got.tokens[depth])]
            np.testing.assert_allclose(got.logp[depth, a], want, rtol=1e-4, atol=1e-5)


def test_tail_scores_are_exact_under_the_root_and_never_positive() -> None:
    got, exact = run(MARKOV, normaliser="tail"), run(MARKOV, normaliser="exact")
    np.testing.assert_array_equal(got.tokens[0], exact.tokens[0])
    np.testing.assert_allclose(
        got.logp[0, 0], exact.logp[0, 0], rtol=1e-4, atol=1e-5
    )  # one parent: no approximation
    assert float(got.logp.max()) <= 0
    mass = np.exp(np.asarray(got.logp)).sum(-1)
    assert (mass <= 1 + 1e-5).all()
    # equal corrections for all parents: the approximation is exact
    flat = {"path": {**PARAMS["path"], "w1": jnp.broadcast_to(PARAMS["path"]["w1"][:1], (40, 5))}}
    both = [
        jax.jit(
            lambda x, how=how: candidates(flat, MARKOV, x, ANCHOR, ID_MAP, WIDTH, normaliser=how)
        )(LOGITS)
        for how in ("tail", "exact")
    ]
    np.testing.assert_array_equal(both[0].tokens, both[1].tokens)
    np.testing.assert_allclose(both[0].logp, both[1].logp, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("normaliser", ["tail", "exact"])
def test_a_zero_path_head_is_the_published_head(normaliser: str) -> None:
    zero = {"path": {"w1": PARAMS["path"]["w1"], "w2": jnp.zeros((VOCAB, 5))}}
    got = candidates(zero, MARKOV, LOGITS, ANCHOR, ID_MAP, WIDTH, normaliser=normaliser)
    want = run(NONE)
    np.testing.assert_array_equal(got.tokens, want.tokens)
    np.testing.assert_allclose(got.logp, want.logp, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("cfg", [NONE, MARKOV], ids=["none", "markov"])
def test_candidates_are_distinct_and_without_id_map_draft_ids(cfg: DraftConfig) -> None:
    got = run(cfg)
    assert all(len(set(row)) == WIDTH for row in np.asarray(got.tokens).tolist())
    whole = dataclasses.replace(NONE, draft_vocab_size=None, vocab_size=VOCAB)
    raw = candidates(PARAMS, whole, LOGITS, ANCHOR, None, WIDTH)
    np.testing.assert_array_equal(ID_MAP[raw.tokens], run(NONE).tokens)


def test_ties_go_to_the_lowest_id() -> None:
    got = run(NONE, jnp.zeros((DEPTH, VOCAB)))
    np.testing.assert_array_equal(
        got.tokens, np.broadcast_to(np.asarray(ID_MAP)[:WIDTH], (DEPTH, WIDTH))
    )


@pytest.mark.parametrize("cfg", [NONE, MARKOV], ids=["none", "markov"])
def test_noise_and_temperature_follow_the_targets_choice(cfg: DraftConfig) -> None:
    """The best candidate is argmax(logits / T + noise), the target's own rule; T = 0 leaves the
    logits alone."""
    noise = jnp.asarray(RNG.gumbel(size=(DEPTH, VOCAB)), jnp.float32)
    hot = run(cfg, temperature=jnp.asarray(0.5), noise=noise)
    root = LOGITS[0] if cfg is NONE else LOGITS[0] + path_correction(PARAMS, MARKOV, ANCHOR)
    assert int(hot.tokens[0, 0]) == int(ID_MAP[int(jnp.argmax(root / 0.5 + noise[0]))])
    cold = run(cfg, temperature=jnp.asarray(0.0), noise=jnp.zeros_like(noise))
    np.testing.assert_array_equal(cold.tokens, run(cfg).tokens)


def test_the_gate_is_one_plus_a_projection_of_the_hidden_state() -> None:
    cfg = dataclasses.replace(MARKOV, path_head="pairwise")
    hidden = RNG.standard_normal((DEPTH, 6)).astype(np.float32)
    matrix = RNG.standard_normal((5, 6)).astype(np.float32)
    got = path_gate({"path": {"gate": jnp.asarray(matrix)}}, cfg, jnp.asarray(hidden))
    assert got is not None
    np.testing.assert_allclose(got, 1 + hidden @ matrix.T, rtol=1e-5, atol=1e-5)
    assert path_gate(PARAMS, MARKOV, jnp.asarray(hidden)) is None


def test_training_form_adds_the_true_parents_correction() -> None:
    parents = jnp.asarray([7, 1, 39], jnp.int32)
    got = conditional_logits(PARAMS, MARKOV, LOGITS, parents)
    want = (
        np.asarray(LOGITS)
        + np.asarray(PARAMS["path"]["w1"])[np.asarray(parents)] @ np.asarray(PARAMS["path"]["w2"]).T
    )
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)
    assert conditional_logits(PARAMS, NONE, LOGITS, parents) is LOGITS


def test_bad_arguments_are_named() -> None:
    with pytest.raises(ConfigError, match="width=25"):
        candidates(PARAMS, NONE, LOGITS, ANCHOR, ID_MAP, 25)
    with pytest.raises(ConfigError, match="normaliser='sum'"):
        candidates(PARAMS, MARKOV, LOGITS, ANCHOR, ID_MAP, 4, normaliser="sum")
