"""The draft head against an independent torch transcription of algorithm.md section 2.

The transcription is tests/golden/torch_draft_head.py; make_goldens.py beside it made the data.
"""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

from jetspec_jax.config import DraftConfig
from jetspec_jax.drafter import (
    block_inputs,
    context_kv,
    draft_block,
    draft_scores,
    fuse,
    load_draft,
    save_draft,
)
from jetspec_jax.models import decoder
from jetspec_jax.typing import Array, Params
from jetspec_jax.weights import load_params, open_source

GOLDEN = Path(__file__).parents[1] / "golden"
TARGET = GOLDEN / "targets" / "qwen3_untied"
HEADS = {  # name: (causal, draft_shift)
    "causal": (True, False),
    "causal_shift": (True, True),
    "bidirectional": (False, False),
    "bidirectional_shift": (False, True),
}
CAPACITY, CHUNK = 64, 16
TOLERANCE = 1e-4
Layers = tuple[Array, ...]


@dataclasses.dataclass(frozen=True)
class Golden:
    """One golden head with its inputs and outputs; B sequences, two rounds."""

    config: DraftConfig
    params: Params
    tokens: np.ndarray  # [B, T]
    committed: np.ndarray  # [2, B]
    taps: np.ndarray  # [B, T, n, Ht]
    ctx: np.ndarray  # [C - 1, H] of sequence 0 in the second round
    hidden: np.ndarray  # [2, B, D, H]
    logits: np.ndarray  # [2, B, D, V]


@functools.cache
def target_params() -> Params:
    source = open_source(TARGET)
    return load_params(source, decoder.declare(source.config()), jnp.float32)


@functools.cache
def golden(name: str) -> Golden:
    head = load_draft(GOLDEN / "drafts" / name, open_source(TARGET).config())
    assert head.id_map is None
    arrays = np.load(GOLDEN / "drafts" / name / "golden.npz")
    return Golden(head.config, head.params, **{k: arrays[k] for k in arrays.files})


# Compiled once per configuration: the flipped flags of one golden are those of another.
@functools.partial(jax.jit, static_argnums=1)
def project(
    params: Params, cfg: DraftConfig, taps: Array, positions: Array
) -> tuple[tuple[Array, Array], ...]:
    return context_kv(params, cfg, fuse(params, cfg, taps), positions)


@functools.partial(jax.jit, static_argnums=1)
def draft(
    params: Params,
    cfg: DraftConfig,
    target: Params,
    tokens: Array,
    anchors: Array,
    k: Layers,
    v: Layers,
    seen: Array,
) -> tuple[Array, Array]:
    block = block_inputs(cfg, tokens, anchors)
    embeds = decoder.embed_tokens(target, block.tokens)
    hidden = draft_block(params, cfg, embeds, block.positions, k, v, seen, chunk=CHUNK)
    return hidden, draft_scores(params, cfg, decoder.lm_head_weight(target), hidden)


def serve(g: Golden, cfg: DraftConfig, *, streaming: bool) -> tuple[np.ndarray, np.ndarray]:
    """Both rounds as serving runs them: round 2 adds only newly committed rows.

    Returns hidden states [2, B, D, H] and logits [2, B, D, V].

    The cache holds NaN wherever no context has been written.
    """
    batch, length = g.tokens.shape
    shape = (cfg.num_layers, batch, cfg.num_kv_heads, CAPACITY, cfg.head_dim)
    keys, values = np.full(shape, np.nan, np.float32), np.full(shape, np.nan, np.float32)
    start = np.zeros(batch, np.int32)
    rounds = []
    for lengths in g.committed:
        # One static shape for both rounds; the rows past the new ones are dropped below.
        rows = start[:, None] + np.arange(length, dtype=np.int32)[None]
        taps = np.take_along_axis(g.taps, np.minimum(rows, length - 1)[..., None, None], 1)
        layers = project(g.params, cfg, jnp.asarray(taps), jnp.asarray(rows))
        for b in range(batch):
            # Rows start .. C - 2 are new; the anchor C - 1 has no context row yet.
            count = lengths[b] - 1 - start[b]
            for i, (k, v) in enumerate(layers):
                keys[i, b, :, start[b] : start[b] + count] = np.asarray(k)[b, :, :count]
                values[i, b, :, start[b] : start[b] + count] = np.asarray(v)[b, :, :count]
        start = lengths - 1
        anchors = jnp.asarray(start)[:, None]
        tokens = jnp.asarray(g.tokens[np.arange(batch), start])[:, None]
        seen = anchors if streaming else jnp.arange(CAPACITY)[None, None] < anchors[..., None]
        cache = (tuple(map(jnp.asarray, x.copy())) for x in (keys, values))
        out = draft(g.params, cfg, target_params(), tokens, anchors, *cache, seen)
        rounds.append([np.asarray(x)[:, 0] for x in out])
    return np.stack([r[0] for r in rounds]), np.stack([r[1] for r in rounds])


@pytest.mark.parametrize("name", HEADS)
def test_config_of_the_checkpoint(name: str) -> None:
    cfg = golden(name).config
    assert (cfg.causal, cfg.draft_shift) == HEADS[name]
    assert cfg.target_layer_ids == (0, 2, 3)
    assert cfg.mask_token_id == 95
    assert cfg.depth == (6 if cfg.draft_shift else 5) == golden(name).logits.shape[2]
    assert sorted(p.name for p in (GOLDEN / "drafts").iterdir()) == sorted(HEADS)


@pytest.mark.parametrize("name", HEADS)
@pytest.mark.parametrize("streaming", [True, False])
def test_two_rounds_equal_torch(name: str, streaming: bool) -> None:
    g = golden(name)
    hidden, logits = serve(g, g.config, streaming=streaming)
    assert logits.shape == g.logits.shape
    assert logits.dtype == np.float32
    np.testing.assert_allclose(hidden, g.hidden, rtol=0, atol=TOLERANCE)
    np.testing.assert_allclose(logits, g.logits, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("name", ["causal", "bidirectional_shift"])
def test_training_form_equals_torch(name: str) -> None:
    """Both rounds' anchors as two blocks of one forward, over one projection of the sequence."""
    g = golden(name)
    batch, length = g.tokens.shape
    positions = jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32)[None], (batch, length))
    anchors = jnp.asarray(g.committed.T - 1)  # [B, A]
    tokens = jnp.take_along_axis(jnp.asarray(g.tokens), anchors, 1)

    @jax.jit
    def train(p: Params, target: Params, taps: Array) -> tuple[Array, Array]:
        ctx = fuse(p, g.config, taps)
        k, v = zip(*context_kv(p, g.config, ctx, positions), strict=True)
        seen = jnp.arange(length)[None, None] < anchors[..., None]
        block = block_inputs(g.config, tokens, anchors)
        embeds = decoder.embed_tokens(target, block.tokens)
        hidden = draft_block(p, g.config, embeds, block.positions, k, v, seen)
        return ctx, draft_scores(p, g.config, decoder.lm_head_weight(target), hidden)

    ctx, logits = train(g.params, target_params(), jnp.asarray(g.taps))
    np.testing.assert_allclose(np.asarray(ctx)[0, : len(g.ctx)], g.ctx, rtol=0, atol=TOLERANCE)
    np.testing.assert_allclose(np.asarray(logits).swapaxes(0, 1), g.logits, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("flag", ["causal", "draft_shift"])
def test_a_wrong_flag_is_told_apart(flag: str) -> None:
    """The same weights under the other flag are far from the golden at every depth."""
    g = golden("causal")
    wrong = dataclasses.replace(g.config, **{flag: not getattr(g.config, flag)})
    _, logits = serve(g, wrong, streaming=False)
    depth = min(logits.shape[2], g.logits.shape[2])
    distance = np.abs(logits[:, :, :depth] - g.logits[:, :, :depth]).max((0, 1, 3))
    assert np.all(distance > 100 * TOLERANCE), distance


def test_taps_of_the_target_are_the_named_layers() -> None:
    g = golden("causal")
    cfg = open_source(TARGET).config()
    forward = jax.jit(
        lambda p, t: decoder.forward_full(p, cfg, t, taps=g.config.target_layer_ids).taps
    )
    np.testing.assert_allclose(
        forward(target_params(), jnp.asarray(g.tokens)), g.taps, rtol=0, atol=TOLERANCE
    )


@pytest.mark.parametrize("name", HEADS)
def test_written_checkpoint_has_the_published_layout(name: str, tmp_path: Path) -> None:
    g = golden(name)
    save_draft(tmp_path, g.config, g.params, dtype=np.float32, target=open_source(TARGET).config())
    ours = safetensors.numpy.load_file(tmp_path / "model.safetensors")
    theirs = safetensors.numpy.load_file(GOLDEN / "drafts" / name / "model.safetensors")
    assert sorted(ours) == sorted(theirs)
    for tensor, value in theirs.items():
        np.testing.assert_array_equal(ours[tensor], value.astype(np.float32), err_msg=tensor)
    assert load_draft(tmp_path).config == g.config
