"""State of a batch of sequences while decoding, as one frozen pytree."""

from __future__ import annotations

import flax.struct
import jax.numpy as jnp

from jetspec_jax.cache import KVCache
from jetspec_jax.sampling import SamplingState
from jetspec_jax.typing import Array, Params, PyTree

RUNNING, STOPPED, LENGTH, IDLE = 0, 1, 2, 3


@flax.struct.dataclass
class EngineParams:
    """Everything a round reads and does not write.

    Attributes:
        target: target parameters.
        draft: draft-head parameters, None without a head.
        draft_lm: [Vd, H] rows of the target's LM head that the drafter scores (the whole head if
            not reduced).
        draft_ids: [Vd] int32, vocabulary ids of those rows; None when not reduced.
        costs: budget costs, see `policy.Costs`.
        policy: see `policy.Knobs`; None where a round has one budget only.
        script: [V, R, S] int32, only with the scripted test drafter: continuations by absolute
            position (-1: none) of the prompt whose first id is the index.
    """

    target: Params
    draft: PyTree
    draft_lm: PyTree
    draft_ids: Array | None
    costs: PyTree
    policy: PyTree = None
    script: Array | None = None


@flax.struct.dataclass
class Counters:
    """What happened, counted at verification, before any cut (algorithm.md section 1)."""

    rounds: Array  # [B] int32 verify rounds
    accepted: Array  # [B, D + 1] int32 rounds by number of accepted nodes
    had_node: Array  # [B, D] int32 rounds whose tree had a node at depth k + 1
    nodes: Array  # [B] int32 verified nodes, roots included
    budget: Array  # [n budgets] int32 rounds by budget index
    drafts: Array  # [] int32 rounds that ran the drafter


@flax.struct.dataclass
class Control:
    """Feedback that decides whether drafting pays at the moment (`policy`)."""

    gain: Array  # [] float32, running mean of the time saved per drafted round, in plain steps
    cooldown: Array  # [] int32, rounds left without drafting
    pause: Array  # [] int32, length of the next pause
    trust: Array  # [] float32, accepted tokens per expected one, running
    allowance: Array  # [] float32, plain steps that drafting may still lose


@flax.struct.dataclass
class DecodeState:
    """B sequences. Invariant after prefill: live keys = drafter context = committed - 1; the last
    committed id is the anchor of the next round and has no key yet.
    """

    tokens: Array  # [B, S] int32, ids at positions < committed; the rest is unused
    drafted: Array  # [B, S] bool, token was drafted and accepted (not a bonus, not prompt)
    committed: Array  # [B] int32, ids that are final, prompt included
    cached: Array  # [B] int32, live keys
    limit: Array  # [B] int32, committed may not exceed this
    status: Array  # [B] int32 RUNNING, STOPPED (a stop id), LENGTH, IDLE (empty slot)
    speculate: Array  # [B] bool
    stop_ids: Array  # [B, E] int32, -1 = none
    sampling: SamplingState
    cache: KVCache
    context: PyTree  # KVCache of the drafter per draft layer; None without a head
    counters: Counters
    control: Control


@flax.struct.dataclass
class RoundOut:
    """What one round did, for streaming, traces and log-probabilities. The whole-generation driver
    drops it.
    """

    tree: PyTree  # tree.Tree, batched
    path: Array  # [B, D + 1] node indices of the accepted path, padded with its last node
    accepted: Array  # [B] int32 accepted nodes, before stop and length cuts
    emitted: Array  # [B, D + 1] int32 accepted ids and the bonus id
    count: Array  # [B] int32 ids of `emitted` that were committed
    budget: Array  # [] int32 verified nodes per sequence, root included
    logprob: Array | None  # [B, D + 1] float32 of each emitted id
    top_ids: Array | None  # [B, D + 1, k] int32
    top_logprobs: Array | None  # [B, D + 1, k] float32
    logits: Array | None  # [B, D + 1, V] float32 that chose each emitted id, with log-probabilities


def empty_counters(batch: int, depth: int, budgets: int) -> Counters:
    def zeros(*shape: int) -> Array:
        return jnp.zeros(shape, jnp.int32)

    return Counters(
        zeros(batch),
        zeros(batch, depth + 1),
        zeros(batch, depth),
        zeros(batch),
        zeros(budgets),
        zeros(),
    )
