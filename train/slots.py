"""The target writes: prompts are prefilled in groups, answers and next turns run in slots.

Continuous batching over a fixed number of slots, with the features of every token kept from the
pass that computed them. `train.regenerate` drives it.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jetspec_jax.cache import KVCache, after, alloc, commit
from jetspec_jax.config import ModelConfig, SamplingParams
from jetspec_jax.loading import Target
from jetspec_jax.models.decoder import Numerics, declare, forward_block, head_logits
from jetspec_jax.models.spec import flatten, nest
from jetspec_jax.numerics import ComputeWeight
from jetspec_jax.sampling import SamplingState, choose, greedy, sampling_state
from jetspec_jax.typing import Array, Params
from train.shards import Writing

CHUNK = 64  # rows of a prefill step, and the unit of cache lengths
_STEPS = 16  # decode steps between two looks at the host


@dataclasses.dataclass(frozen=True)
class RegenConfig:
    """Static shapes of a regeneration run: `group` prompts are prefilled together."""

    slots: int
    group: int
    max_prompt: int
    max_new: int
    max_tokens: int
    taps: tuple[int, ...]
    numerics: Numerics
    sampled: bool = False

    @property
    def allocated(self) -> int:
        chunk = self.numerics.attention_chunk
        return -(-(self.max_tokens + CHUNK) // chunk) * chunk


@flax.struct.dataclass
class Slots:
    """B sequences that are being written."""

    cache: KVCache
    sampling: SamplingState


def kept_features(out: Any) -> Array:
    """Taps and final hidden state side by side, bfloat16 [B, T, n + 1, H]."""
    return jnp.concatenate([out.taps, out.hidden[:, :, None]], 2).astype(jnp.bfloat16)


def prefill_chunk(
    model: ModelConfig,
    cfg: RegenConfig,
    params: Params,
    cache: KVCache,
    tokens: Array,
    start: Array,
) -> tuple[KVCache, Array]:
    """Keys and features of the prompt tokens [G, CHUNK] from position `start` (int32 []) on.

    Rows past a prompt's end leave keys above its live ones, where its answer overwrites them.
    """
    batch, rows = tokens.shape
    mask = jnp.broadcast_to(jnp.tril(jnp.ones((rows, rows), bool)), (batch, rows, rows))
    starts = jnp.broadcast_to(start, (batch,))
    positions = starts[:, None] + lax.iota(jnp.int32, rows)[None]
    out = forward_block(
        params,
        model,
        tokens,
        positions,
        cache.k,
        cache.v,
        starts,
        mask,
        taps=cfg.taps,
        numerics=cfg.numerics,
    )
    return commit(cache, out.new_k, out.new_v, after(starts, out.hidden)), kept_features(out)


def admit(
    slots: Slots,
    group: KVCache,
    row: Array,
    slot: Array,
    sampling: SamplingState,
) -> Slots:
    """Copies prefilled sequence `row` (int32 []) of `group` into slot `slot` (int32 [])."""

    def place(whole: Array, part: Array) -> Array:
        return lax.dynamic_update_slice(
            whole, part.astype(whole.dtype), (slot,) + (0,) * (whole.ndim - 1)
        )

    one = jax.tree.map(lambda x: lax.dynamic_slice_in_dim(x, row, 1), group)
    return Slots(
        cache=jax.tree.map(place, slots.cache, one),
        sampling=jax.tree.map(place, slots.sampling, sampling),
    )


def write_steps(
    model: ModelConfig,
    cfg: RegenConfig,
    params: Params,
    slots: Slots,
    token: Array,
    cached: Array,
    given: Array,
) -> tuple[Slots, Array, Array]:
    """`_STEPS` tokens of every slot: new ids [steps, B] and the features of the tokens before them.

    A finished or empty slot writes on into its own slack; the host drops what it wrote.

    Args:
        token: [B] int32, first id without a key; cached: [B] int32, live keys.
        given: [steps, B] int32, ids that are known already (a next turn), -1 where the target
            chooses.
    """
    mask = jnp.ones((cfg.slots, 1, 1), bool)
    last = cfg.allocated - CHUNK

    def step(
        carry: tuple[KVCache, Array, Array], given: Array
    ) -> tuple[tuple[KVCache, Array, Array], tuple[Array, Array]]:
        cache, token, cached = carry
        out = forward_block(
            params,
            model,
            token[:, None],
            cached[:, None],
            cache.k,
            cache.v,
            cached,
            mask,
            taps=cfg.taps,
            numerics=cfg.numerics,
        )
        logits = head_logits(params, out.hidden)
        if cfg.sampled:
            zero = jnp.zeros_like(token)[:, None]
            chosen = choose(logits, cached[:, None] + 1, zero, slots.sampling, 0)[:, 0]
        else:
            chosen = greedy(logits)[:, 0]
        token = jnp.where(given < 0, chosen, given)
        cache = commit(cache, out.new_k, out.new_v, after(cached, token))
        return (cache, token, jnp.minimum(cached + 1, last)), (token, kept_features(out)[:, 0])

    (cache, _, _), (tokens, features) = lax.scan(step, (slots.cache, token, cached), given)
    return dataclasses.replace(slots, cache=cache), tokens, features


def compute_params(params: Params, model: ModelConfig, dtype: Any) -> Params:
    """Parameters whose projections and LM head multiply in `dtype`; all else stays float32."""
    decl = declare(model)
    flat = flatten(params)
    head = flat.get("lm_head", flat["embed"])  # a tied table keeps its float32 rows beside the head
    wrapped = {
        name: ComputeWeight(w.astype(dtype), dtype) if decl[name].linear and name != "embed" else w
        for name, w in flat.items()
    }
    return nest(wrapped | {"lm_head": ComputeWeight(head.astype(dtype), dtype)})


class Regenerator:
    """Compiled programs and slots of one run."""

    def __init__(self, target: Target, cfg: RegenConfig) -> None:
        self.target, self.cfg = target, cfg
        model = target.config
        dtype = jnp.float32
        self._alloc = functools.partial(
            alloc,
            model.num_layers,
            heads=model.num_kv_heads,
            allocated=cfg.allocated,
            head_dim=model.head_dim,
            dtype=dtype,
        )
        self._prefill = jax.jit(functools.partial(prefill_chunk, model, cfg), donate_argnums=(1,))
        self._admit = jax.jit(admit, donate_argnums=(0,))
        self._steps = jax.jit(functools.partial(write_steps, model, cfg), donate_argnums=(1,))
        self.group = self._alloc(batch=cfg.group)
        self.slots = Slots(
            self._alloc(batch=cfg.slots), sampling_state([SamplingParams()] * cfg.slots)
        )
        self.writing: list[Writing | None] = [None] * cfg.slots

    def free(self) -> list[int]:
        """Slots without a sequence."""
        return [i for i, seq in enumerate(self.writing) if seq is None]

    def start(self, prompts: Sequence[tuple[dict[str, Any], list[int], SamplingParams]]) -> None:
        """Prefills all ids but the last of up to `group` prompts (ids: of their first turn) and
        gives each a free slot."""
        kept = [len(ids) - 1 for _, ids, _ in prompts]
        chunks = -(-max(kept) // CHUNK)
        rows = np.zeros((self.cfg.group, chunks * CHUNK), np.int32)
        for i, (_, ids, _) in enumerate(prompts):
            rows[i, : kept[i]] = ids[:-1]
        pieces = []
        for start in range(0, chunks * CHUNK, CHUNK):
            self.group, feats = self._prefill(
                self.target.params,
                self.group,
                rows[:, start : start + CHUNK],
                jnp.asarray(start, jnp.int32),
            )
            pieces.append(np.asarray(feats))
        features = np.concatenate(pieces, 1)
        for i, ((prompt, ids, sampling), slot) in enumerate(
            zip(prompts, self.free(), strict=False)
        ):
            self.slots = self._admit(
                self.slots,
                self.group,
                jnp.asarray(i, jnp.int32),
                jnp.asarray(slot, jnp.int32),
                sampling_state([sampling]),
            )
            self.writing[slot] = seq = Writing.begin(prompt, ids)
            seq.features.append(features[i, : kept[i]])

    def advance(self, stop_ids: set[int]) -> list[Writing]:
        """Runs `_STEPS` steps; returns the conversations that ended."""
        cfg = self.cfg
        token, cached = np.zeros((2, cfg.slots), np.int32)
        given = np.full((_STEPS, cfg.slots), -1, np.int32)
        for slot, seq in enumerate(self.writing):
            if seq is not None:
                token[slot], *known = seq.ids[(at := seq.fed) : at + 1 + _STEPS]
                cached[slot], given[: len(known), slot] = at, known
        self.slots, tokens, features = self._steps(
            self.target.params, self.slots, token, cached, given
        )
        new, feats = np.asarray(tokens), np.asarray(features)
        ended = []
        for slot, seq in enumerate(self.writing):
            if seq is None:
                continue
            read = len(seq.ids) - 1 - seq.fed  # steps that only read what was given
            fresh = [int(t) for t in new[read:, slot]]
            room = min(seq.start + cfg.max_new, cfg.max_tokens) - len(seq.ids)
            stop = next((i + 1 for i, t in enumerate(fresh) if t in stop_ids), None)
            kept = min(x for x in (stop, room, len(fresh)) if x is not None)
            seq.ids += fresh[:kept]
            # row i belongs to the token that step i read
            seq.features.append(feats[: read + kept, slot])
            if kept in (room, stop):
                seq.spans.append((seq.start, len(seq.ids)))
                if not seq.next_turn(self.target.tokenizer, cfg.max_tokens):
                    ended.append(seq)
                    self.writing[slot] = None
        return ended
