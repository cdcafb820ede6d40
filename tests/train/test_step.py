"""The training step: equal to serving (case 15), right labels, right gradients, harmless where
nothing is supervised."""

from __future__ import annotations

import dataclasses
import functools
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jetspec_jax.config import DraftConfig
from jetspec_jax.drafter import block_inputs, context_kv, declare, draft_block, fuse
from jetspec_jax.models.spec import flatten, init_params, nest
from jetspec_jax.numerics import linear, trainable_dot
from jetspec_jax.typing import Params
from train.config import OptimConfig
from train.head_setup import first_state, optimiser_of
from train.losses import LossConfig, block_loss
from train.step import (
    Batch,
    Frozen,
    block_hidden,
    gradients,
    objective,
    slot_targets,
    train_step,
)

HEAD = DraftConfig(
    hidden_size=16,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=4,
    ffn_size=24,
    target_hidden_size=16,
    num_target_layers=4,
    target_layer_ids=(0, 2),
    vocab_size=32,
    mask_token_id=3,
    block_size=4,
    draft_vocab_size=20,
    path_head="markov",
    path_rank=4,
)
SMALL = dataclasses.replace(HEAD, num_layers=1)  # gradients: half the compilation
LOSS = LossConfig(
    ce=0.4, kl=0.6, temperature=2.0, gamma=2.0, chunk=4
)  # 6 blocks: the last chunk is padded
ROWS = 24


@functools.partial(jax.jit, static_argnames="cfg")
def hidden_of(params: Params, cfg: DraftConfig, frozen: Frozen, batch: Batch) -> jax.Array:
    return block_hidden(params, cfg, frozen, batch, jnp.float32)


@functools.partial(jax.jit, static_argnames=("cfg", "loss"))
def objective_grad(
    params: Params, cfg: DraftConfig, loss: LossConfig, frozen: Frozen, batch: Batch
) -> Any:
    """(value, parts), gradients."""
    scalar = functools.partial(objective, cfg=cfg, loss=loss, dtype=jnp.float32)
    return jax.value_and_grad(scalar, has_aux=True)(params, frozen=frozen, batch=batch)


@functools.partial(jax.jit, static_argnames="cfg")
def serve_block(
    params: Params,
    cfg: DraftConfig,
    frozen: Frozen,
    cache: Any,
    tokens: jax.Array,
    anchor: jax.Array,
) -> Any:
    block = block_inputs(cfg, tokens, anchor)
    hidden = draft_block(
        params, cfg, frozen.embed[block.tokens], block.positions, *cache, anchor, chunk=16
    )
    return linear(hidden, frozen.head)


@functools.partial(jax.jit, static_argnames="cfg")
def serve_context(params: Params, cfg: DraftConfig, taps: jax.Array, positions: jax.Array) -> Any:
    return context_kv(params, cfg, fuse(params, cfg, taps), positions)


def setup(
    cfg: DraftConfig = HEAD, batch: int = 2, anchors: int = 3, std: float = 0.4
) -> tuple[Params, Frozen, Batch]:
    rng = np.random.default_rng(0)
    params = init_params(declare(cfg), jax.random.key(0), std=std)
    if cfg.path_head != "none":
        params["path"]["w2"] = jnp.asarray(
            rng.standard_normal((cfg.head_vocab_size, cfg.path_rank)), jnp.float32
        )
    normal = lambda *shape: jnp.asarray(rng.standard_normal(shape), jnp.float32)
    if cfg.path_head == "pairwise":
        params["path"]["gate"] = normal(cfg.path_rank, cfg.hidden_size)
    ids = np.sort(rng.permutation(cfg.vocab_size)[: cfg.head_vocab_size])
    draft_of = np.full(cfg.vocab_size, -1, np.int32)
    draft_of[ids] = np.arange(len(ids))
    frozen = Frozen(
        normal(cfg.vocab_size, 16), normal(cfg.head_vocab_size, 16), jnp.asarray(draft_of)
    )
    tokens = jnp.asarray(rng.integers(0, cfg.vocab_size, (batch, ROWS)), jnp.int32)
    where = jnp.asarray(np.sort(rng.integers(4, 16, (batch, anchors)), 1), jnp.int32)
    return (
        params,
        frozen,
        Batch(
            tokens,
            normal(batch, ROWS, 2, 16),
            normal(batch, ROWS, 16),
            where,
            jnp.full((batch, anchors), ROWS, jnp.int32),
            jnp.ones((batch, anchors), bool),
        ),
    )


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("shift", [True, False])
def test_training_forward_equals_serving_forward(causal: bool, shift: bool) -> None:
    """Case 15: same logits at the same anchor in rounds 1 and 2, context kept incrementally, unused
    slots poisoned."""
    cfg = dataclasses.replace(HEAD, causal=causal, draft_shift=shift)
    params, frozen, batch = setup(cfg, batch=2)
    rounds = np.asarray([[9, 13], [5, 11]], np.int32)  # anchors [B, round]
    batch = batch.replace(
        anchors=jnp.asarray(rounds), stop=batch.stop[:, :2], valid=batch.valid[:, :2]
    )
    trained = hidden_of(params, cfg, frozen, batch) @ frozen.head.T
    capacity = 64
    poison = jnp.full((2, cfg.num_kv_heads, capacity, cfg.head_dim), jnp.nan)
    cache_k, cache_v = [poison] * cfg.num_layers, [poison] * cfg.num_layers
    held = np.zeros(2, np.int32)
    for turn in range(2):
        anchor = rounds[:, turn]
        for row in range(2):  # project only the newly committed rows, append them
            new = np.arange(held[row], anchor[row], dtype=np.int32)
            made = serve_context(
                params, cfg, batch.taps[row : row + 1, new], jnp.asarray(new)[None]
            )
            for i, (k, v) in enumerate(made):
                cache_k[i] = cache_k[i].at[row, :, new].set(k[0].transpose(1, 0, 2))
                cache_v[i] = cache_v[i].at[row, :, new].set(v[0].transpose(1, 0, 2))
        held = anchor
        tokens = jnp.take_along_axis(batch.tokens, jnp.asarray(anchor)[:, None], 1)
        cache = (tuple(cache_k), tuple(cache_v))
        served = serve_block(params, cfg, frozen, cache, tokens, jnp.asarray(anchor)[:, None])[:, 0]
        assert served.shape == (2, cfg.depth, cfg.head_vocab_size)
        np.testing.assert_allclose(served, trained[:, turn], atol=1e-5)


def test_settings_are_told_apart() -> None:
    params, frozen, batch = setup()
    base = hidden_of(params, HEAD, frozen, batch)
    both = hidden_of(params, dataclasses.replace(HEAD, causal=False), frozen, batch)
    shifted = hidden_of(params, dataclasses.replace(HEAD, draft_shift=True), frozen, batch)
    assert np.abs(np.asarray(base - both)).max() > 1e-2
    assert shifted.shape[2] == base.shape[2] + 1
    np.testing.assert_allclose(shifted[:, :, 1:], base, atol=1e-6)  # same slots, moved by one depth


def test_blocks_do_not_see_the_future_or_each_other() -> None:
    params, frozen, batch = setup()
    base = np.asarray(hidden_of(params, HEAD, frozen, batch))
    first = int(batch.anchors[0, 1])
    changed = batch.replace(
        taps=batch.taps.at[0, first:].add(5.0), tokens=batch.tokens.at[0, first + 1 :].set(7)
    )
    after = np.asarray(hidden_of(params, HEAD, frozen, changed))
    early = np.asarray(batch.anchors[0]) <= first
    np.testing.assert_array_equal(after[0][early], base[0][early])
    np.testing.assert_array_equal(after[1], base[1])


@pytest.mark.parametrize("shift", [True, False])
def test_labels_parents_and_teachers(shift: bool) -> None:
    cfg = dataclasses.replace(HEAD, draft_shift=shift)
    _, frozen, batch = setup(cfg)
    batch = batch.replace(
        # the last block of the second sequence is in a later answer than the others
        stop=jnp.asarray([[ROWS] * 3, [15, 15, 18]], jnp.int32),
        valid=batch.valid.at[0, 2].set(False),
    )
    label, inside, parent, row = (np.asarray(x) for x in slot_targets(cfg, frozen, batch))
    tokens, draft_of = np.asarray(batch.tokens), np.asarray(frozen.draft_of)
    for b in range(2):
        for a, anchor in enumerate(np.asarray(batch.anchors[b])):
            for d in range(cfg.depth):
                exists = anchor + 1 + d < int(batch.stop[b, a]) and bool(batch.valid[b, a])
                assert inside[b, a, d] == exists
                assert label[b, a, d] == (draft_of[tokens[b, anchor + 1 + d]] if exists else -1)
                if exists:
                    assert parent[b, a, d] == tokens[b, anchor + d]
                    assert row[b, a, d] == anchor + d
    assert (
        label[0, 0, 0] == draft_of[tokens[0, int(batch.anchors[0, 0]) + 1]]
    )  # first token supervised


def _plain_objective(
    params: Params, cfg: DraftConfig, loss: LossConfig, frozen: Frozen, batch: Batch
) -> jax.Array:
    """The same objective in one piece, without chunks and custom gradients."""
    hidden = block_hidden(params, cfg, frozen, batch, jnp.float32)
    label, inside, parent, row = slot_targets(cfg, frozen, batch)
    logits = hidden @ frozen.head.T
    if cfg.path_head != "none":
        features = params["path"]["w1"][parent]
        if cfg.path_head == "pairwise":
            features = features * (1 + hidden @ params["path"]["gate"].T)
        logits = logits + features @ params["path"]["w2"].T
    final = jnp.stack([batch.final[b][row[b]] for b in range(len(row))])
    shape = (-1, cfg.depth)
    parts = block_loss(
        logits.reshape(*shape, logits.shape[-1]),
        label.reshape(shape),
        inside.reshape(shape),
        loss,
        (final @ frozen.head.T).reshape(*shape, logits.shape[-1]),
    )
    return parts.loss.sum() / parts.count.sum()


@pytest.mark.parametrize("path_head", ["none", "markov", "pairwise"])
def test_chunked_gradient_equals_plain_gradient(path_head: str) -> None:
    cfg = dataclasses.replace(SMALL, path_head=path_head, path_rank=0 if path_head == "none" else 4)
    params, frozen, batch = setup(cfg)
    plain_fn = jax.jit(jax.value_and_grad(_plain_objective), static_argnums=(1, 2))
    plain_value, plain = plain_fn(params, cfg, LOSS, frozen, batch)
    (value, _), grads = objective_grad(params, cfg, LOSS, frozen, batch)
    np.testing.assert_allclose(value, plain_value, rtol=1e-5)
    again, _ = jax.jit(
        functools.partial(gradients, cfg=cfg, loss=LOSS, dtype=jnp.float32, remat=True)
    )(params, frozen, batch)
    for name, want in flatten(grads).items():
        np.testing.assert_allclose(flatten(again)[name], want, rtol=1e-4, atol=1e-6, err_msg=name)
    for name, want in flatten(plain).items():
        assert np.abs(np.asarray(want)).max() > 0, name  # every weight is trained
        np.testing.assert_allclose(flatten(grads)[name], want, rtol=2e-4, atol=2e-6, err_msg=name)


def test_gradient_against_finite_differences() -> None:
    params, frozen, batch = setup(SMALL, std=0.2)
    value = lambda flat: float(objective_grad(nest(flat), SMALL, LOSS, frozen, batch)[0][0])
    grads = flatten(objective_grad(params, SMALL, LOSS, frozen, batch)[1])
    flat = flatten(params)
    for name in (
        "fc",
        "layers.0.kv",
        "layers.0.q_norm",
        "layers.0.gate_up",
        "norm",
        "path.w1",
        "path.w2",
    ):
        size = float(jnp.linalg.norm(grads[name]))
        direction = grads[name] / size  # along the gradient, where float32 differences are largest
        ends = [value(flat | {name: flat[name] + step * direction}) for step in (5e-3, -5e-3)]
        np.testing.assert_allclose(
            (ends[0] - ends[1]) / 1e-2, size, rtol=0.03, atol=1e-3, err_msg=name
        )


def test_gradient_only_where_a_label_is_supervised() -> None:
    """Masked anchors and positions past the text change nothing, whatever they hold (cases 15 and
    17)."""
    params, frozen, batch = setup(SMALL)
    batch = batch.replace(stop=batch.stop.at[1].set(14), valid=batch.valid.at[0, 0].set(False))
    base = flatten(objective_grad(params, SMALL, LOSS, frozen, batch)[1])
    # NaN where no supervised slot looks: teacher rows past the text; other tokens in the padding
    other = batch.replace(final=batch.final.at[1, 14:].set(jnp.nan))
    other = other.replace(tokens=other.tokens.at[1, 14:].set(9))
    for name, value in flatten(objective_grad(params, SMALL, LOSS, frozen, other)[1]).items():
        np.testing.assert_array_equal(value, base[name], err_msg=name)


def test_batch_without_labels_is_harmless() -> None:
    params, frozen, batch = setup(SMALL)
    empty = batch.replace(
        valid=jnp.zeros_like(batch.valid), final=jnp.full_like(batch.final, jnp.nan)
    )
    optimiser = optimiser_of(OptimConfig(weight_decay=0.0))
    state = first_state(params, optimiser, 0.0)
    step = functools.partial(
        train_step, cfg=SMALL, loss=LOSS, optimiser=optimiser, ema_decay=0.0, dtype=jnp.float32
    )
    new, metrics = jax.jit(step)(state, empty, frozen)
    assert float(metrics["loss"]) == 0.0 and float(metrics["grad_norm"]) == 0.0
    for name, value in flatten(new.params).items():
        np.testing.assert_array_equal(value, flatten(params)[name], err_msg=name)


def test_bfloat16_products_are_near_float32_forward_and_backward() -> None:
    x = jax.random.normal(jax.random.key(0), (12, 16))
    w = jax.random.normal(jax.random.key(1), (8, 16))
    scalar = lambda x, w, d: (trainable_dot(x, w, d).astype(jnp.float32) ** 2).sum()
    low = jax.grad(scalar, (0, 1))(x, w, jnp.bfloat16)
    exact = jax.grad(lambda x, w: ((x @ w.T) ** 2).sum(), (0, 1))(x, w)
    for a, b in zip(low, exact, strict=True):
        assert a.dtype == jnp.float32
        np.testing.assert_allclose(a, b, atol=0.03 * float(jnp.abs(b).max()))


def test_parts_and_devices_give_the_gradient_of_the_whole_batch() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.train.two_devices"],
        env=os.environ | {"JAX_NUM_CPU_DEVICES": "2", "JAX_PLATFORMS": "cpu"},
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
