"""From target and configuration to the start of training: head geometry, draft vocabulary, first
weights."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib

from jetspec_jax.config import DraftConfig, ModelConfig
from jetspec_jax.drafter import check_target, declare, default_layer_ids, load_draft
from jetspec_jax.errors import ConfigError
from jetspec_jax.models import decoder
from jetspec_jax.models.spec import flatten, init_params, nest
from jetspec_jax.numerics import take_rows
from jetspec_jax.typing import Params, PyTree
from train.config import OptimConfig, TrainConfig
from train.data import Dataset, draft_vocabulary
from train.step import Frozen, TrainState

_W1_SCALE = 0.1  # rms of the path head's parent features at the start


def draft_config(
    cfg: TrainConfig, target: ModelConfig, data_ids: tuple[int, ...] | None
) -> DraftConfig:
    """Geometry of the head to train.

    Raises:
        ConfigError: layer ids that contradict the data, a missing or unusable mask token.
    """
    section = cfg.draft
    ids = section.target_layer_ids or data_ids or default_layer_ids(section.taps, target.num_layers)
    if data_ids is not None and tuple(ids) != tuple(data_ids):
        raise ConfigError(
            f"draft.target_layer_ids={list(ids)}, but the data holds layers {list(data_ids)}; "
            "leave it empty"
        )
    if section.mask_token_id < 0:
        raise ConfigError(
            "draft.mask_token_id is not set; give a special id of the tokenizer that is "
            "neither pad nor EOS"
        )
    if section.vocab > target.vocab_size:
        raise ConfigError(
            f"draft.vocab={section.vocab} exceeds the target's {target.vocab_size}; give 0 "
            "for all of it"
        )
    head = DraftConfig(
        hidden_size=target.hidden_size,
        num_layers=section.layers,
        num_heads=section.heads or target.num_heads,
        num_kv_heads=section.kv_heads or target.num_kv_heads,
        head_dim=target.head_dim,
        ffn_size=section.ffn_size or target.ffn_size or target.moe_ffn_size,
        target_hidden_size=target.hidden_size,
        num_target_layers=target.num_layers,
        target_layer_ids=tuple(ids),
        vocab_size=target.vocab_size,
        mask_token_id=section.mask_token_id,
        block_size=section.block_size,
        causal=section.causal,
        draft_shift=section.draft_shift,
        rms_eps=target.rms_eps,
        rope=target.rope,
        draft_vocab_size=section.vocab or None,
        path_head=section.path_head,
        path_rank=section.path_rank if section.path_head != "none" else 0,
    )
    check_target(head, target, "the [draft] section")
    return head


def id_map_for(cfg: TrainConfig, target: ModelConfig, data: Dataset) -> np.ndarray | None:
    """Target ids of the draft vocabulary (EOS and BOS always included), or None for the whole
    vocabulary."""
    if not cfg.draft.vocab:
        return None
    always = [*target.eos_ids, *([target.bos_id] if target.bos_id is not None else [])]
    return draft_vocabulary(data.train, cfg.draft.vocab, target.vocab_size, always)


def frozen_of(target_params: Params, vocab: int, id_map: np.ndarray | None, dtype: Any) -> Frozen:
    """The target's embedding and the draft rows of its LM head, in the compute dtype."""
    ids = np.arange(vocab, dtype=np.int32) if id_map is None else id_map
    draft_of = np.full(vocab, -1, np.int32)
    draft_of[ids] = np.arange(len(ids), dtype=np.int32)
    everything = jnp.arange(vocab, dtype=jnp.int32)
    return Frozen(
        embed=take_rows(target_params["embed"], everything).astype(dtype),
        head=take_rows(decoder.lm_head_weight(target_params), jnp.asarray(ids)).astype(dtype),
        draft_of=jnp.asarray(draft_of),
    )


def parent_features_from_embedding(embed: np.ndarray, rank: int) -> np.ndarray:
    """The `rank` leading principal directions of the embedding table, [V, rank] float32.

    Tokens with similar embeddings start with similar corrections, so what frequent parents teach
    carries over to parents that the (small) data hardly shows.
    """
    centred = embed.astype(np.float32) - embed.mean(0, dtype=np.float32)
    _, vectors = np.linalg.eigh((centred.T @ centred).astype(np.float64))
    features = centred @ vectors[:, ::-1][:, :rank].astype(np.float32)
    # Whitened halfway: the first directions would otherwise drown the rest.
    features /= np.sqrt(np.maximum(features.std(0, keepdims=True), 1e-8))
    features *= _W1_SCALE / max(float(np.sqrt((features**2).mean())), 1e-8)
    if features.shape[1] < rank:
        features = np.pad(features, ((0, 0), (0, rank - features.shape[1])))
    return np.ascontiguousarray(features, np.float32)


def _copy_target_layers(
    flat: dict[str, Any],
    head: DraftConfig,
    target: ModelConfig,
    params: Params,
    layers: tuple[int, ...],
) -> None:
    if len(layers) != head.num_layers or not all(0 <= i < target.num_layers for i in layers):
        raise ConfigError(
            f"draft.init_layers={list(layers)} must name {head.num_layers} of "
            f"{target.num_layers} target layers"
        )
    for draft, source in enumerate(layers):
        p, here = params["layers"][source], f"layers.{draft}"
        if "gate_up" not in p:
            raise ConfigError(
                f"draft.init_layers: target layer {source} is a mixture of experts; leave it empty"
            )
        values = {
            "input_norm": p["attn_norm"],
            "post_norm": p["mlp_norm"],
            "q": p["qkv"][: target.q_width],
            "kv": p["qkv"][target.q_width :],
            "o": p["o"],
            "gate_up": p["gate_up"],
            "down": p["down"],
        }
        values |= {k: p[k] for k in ("q_norm", "k_norm") if k in p}
        for name, value in values.items():
            if flat[f"{here}.{name}"].shape != value.shape:
                raise ConfigError(
                    f"draft.init_layers needs heads and ffn_size of the target ({name} "
                    f"{value.shape}); set them to 0"
                )
            flat[f"{here}.{name}"] = jnp.asarray(value, jnp.float32)


def _move_vocabulary(params: Params, before: np.ndarray, now: np.ndarray) -> Params:
    """The weights of a head for another draft vocabulary of the same size (other data chose it).
    Only the path head has rows of its own for it; tokens that are new to it begin uncorrected.

    Args:
        params: of the head.
        before: [Vd] int32, ids that its rows stand for.
        now: [Vd] int32, ids that they shall stand for.
    """
    flat = flatten(params)
    if "path.w2" not in flat:
        return params
    rows = np.asarray(flat["path.w2"])
    moved = np.zeros_like(rows)
    row_of = {int(token): row for row, token in enumerate(before)}
    known = [(row, row_of[int(token)]) for row, token in enumerate(now) if int(token) in row_of]
    to, source = np.asarray(known, np.int32).reshape(-1, 2).T
    moved[to] = rows[source]
    return nest({**flat, "path.w2": jnp.asarray(moved)})


def first_params(
    cfg: TrainConfig,
    head: DraftConfig,
    target: ModelConfig,
    target_params: Params,
    id_map: np.ndarray | None,
) -> Params:
    """Weights at step 0: random, or from target layers, or from another head (`run.warm_start`)."""
    if cfg.run.warm_start:
        loaded = load_draft(cfg.run.warm_start, target)
        if loaded.config != head:
            what = [
                f.name
                for f in dataclasses.fields(head)
                if getattr(head, f.name) != getattr(loaded.config, f.name)
            ]
            raise ConfigError(
                f"run.warm_start={cfg.run.warm_start!r} differs in {', '.join(what)}; set the "
                "same values"
            )
        if id_map is None or loaded.id_map is None or np.array_equal(loaded.id_map, id_map):
            return loaded.params
        return _move_vocabulary(loaded.params, loaded.id_map, id_map)
    flat = flatten(init_params(declare(head), jax.random.key(cfg.data.seed)))
    if cfg.draft.init_layers:
        _copy_target_layers(flat, head, target, target_params, cfg.draft.init_layers)
    if head.path_head != "none":
        every = jnp.arange(head.vocab_size, dtype=jnp.int32)
        flat["path.w1"] = jnp.asarray(
            parent_features_from_embedding(
                np.asarray(take_rows(target_params["embed"], every)), head.path_rank
            )
        )
    return nest(flat)


def _muon_axes(params: Params) -> PyTree:
    """Which weights Muon takes: every [out, in] matrix but the path head's tables, whose rows are
    tokens that most steps do not touch."""
    axes = optax.contrib.MuonDimensionNumbers(reduction_axis=1, output_axis=0)

    def choose(path: Any, p: Any) -> Any:
        return axes if p.ndim == 2 and path[0].key != "path" else None

    return jax.tree_util.tree_map_with_path(choose, params)


def optimiser_of(cfg: OptimConfig) -> optax.GradientTransformation:
    """Clip, AdamW or Muon (no decay on norm weights), warm-up and cosine.

    Muon's updates are scaled to the size of Adam's (`consistent_rms`, arXiv 2502.16982, section
    2.2), so one learning rate serves both.
    """
    warmup = max(int(cfg.warmup * cfg.steps), 1)
    schedule = optax.warmup_cosine_decay_schedule(
        0.0, cfg.lr, warmup, max(cfg.steps, warmup + 1), cfg.final * cfg.lr
    )

    def decayed(params: Params) -> PyTree:
        return jax.tree.map(lambda p: p.ndim > 1, params)

    if cfg.optimiser == "muon":
        axes: Any = _muon_axes  # a function is allowed, optax's types do not say so
        rule = optax.contrib.muon(
            schedule,
            beta=cfg.beta2,
            weight_decay=cfg.weight_decay,
            weight_decay_mask=decayed,
            mu_dtype=jnp.bfloat16,  # also the dtype of its matrix products
            adam_b1=cfg.beta1,
            adam_b2=cfg.beta2,
            adam_weight_decay=cfg.weight_decay,
            muon_weight_dimension_numbers=axes,
            consistent_rms=0.2,
        )
    else:
        rule = optax.adamw(
            schedule, cfg.beta1, cfg.beta2, weight_decay=cfg.weight_decay, mask=decayed
        )
    return optax.chain(optax.clip_by_global_norm(cfg.clip), rule)


def first_state(params: Params, optimiser: optax.GradientTransformation, ema: float) -> TrainState:
    """Step 0."""
    average = jax.tree.map(jnp.copy, params) if ema > 0 else None
    return TrainState(params, optimiser.init(params), average, jnp.zeros((), jnp.int32))
