"""From the state to a tree: the draft head, prompt lookup, both merged, or nothing, behind one
function.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jetspec_jax import drafter
from jetspec_jax.cache import KVCache, commit
from jetspec_jax.config import SCRIPTED
from jetspec_jax.models.decoder import embed_tokens
from jetspec_jax.numerics.kernel_weight import KernelWeight
from jetspec_jax.plan import RoundPlan
from jetspec_jax.sampling import position_key, token_noise
from jetspec_jax.state import RUNNING, DecodeState, EngineParams
from jetspec_jax.tree import (
    Candidates,
    Chains,
    Tree,
    build_exact,
    build_tree,
    lookup_candidates,
    lookup_tree,
    merge,
)
from jetspec_jax.tree.topology import padded_root
from jetspec_jax.typing import Array
from pallas_kernels import draft_head_topk
from pallas_kernels.gumbel_noise import gumbel_noise


def extend_context(
    plan: RoundPlan,
    params: EngineParams,
    context: KVCache,
    taps: Any,
    start: Array,
    counts: Array,
    path: Array | None = None,
) -> KVCache:
    """Drafter context of newly committed rows: fuse, project, write at the tail.

    Only new rows are projected; the published fast path recomputes the whole context every round.

    Args:
        plan, params: of the round.
        context: the cache.
        taps: [B, T, n, H] tapped states.
        start: [B] int32, slot and position of the first row.
        counts: [B] int32, rows that are committed.
        path: [B, P] int32, which rows of `taps`, in order; None: as they are.
    """
    head, rows = plan.head_config, taps.shape[1]
    if plan.numerics.head:
        if path is None:
            path = jnp.broadcast_to(lax.iota(jnp.int32, rows)[None], taps.shape[:2])
        return drafter.extend(params.draft, head, context, taps, path, start, counts)
    if path is not None:
        taps = jnp.take_along_axis(taps, path[:, :, None, None], axis=1)
    positions = start[:, None] + lax.iota(jnp.int32, taps.shape[1])[None]
    ctx = drafter.fuse(params.draft, head, taps)
    k, v = zip(*drafter.context_kv(params.draft, head, ctx, positions), strict=True)
    return commit(context, k, v, start)


def draft_tree(plan: RoundPlan, params: EngineParams, state: DecodeState, draft_now: Array) -> Tree:
    """The tree of the round for every sequence, leaves [B, N] with N the largest budget.

    Args:
        plan, params, state: of the round.
        draft_now: [] bool; False gives trees of the root alone at no cost.
    """
    anchor = jnp.take_along_axis(state.tokens, state.committed[:, None] - 1, axis=1)[:, 0]
    nodes = plan.budgets[-1]

    def nothing() -> Tree:
        return jax.vmap(lambda token: padded_root(token, nodes))(anchor)

    if not plan.drafts:
        return nothing()
    # A round commits up to depth + 1 tokens, so the last depth that can still be delivered is room
    # - 1.
    room = state.limit - state.committed
    drafting = state.speculate & (state.status == RUNNING)
    max_depth = jnp.where(drafting, jnp.clip(room - 1, 0, plan.depth), 0)

    def draft() -> Tree:
        spec = plan.spec
        if spec.drafter == SCRIPTED:
            return jax.vmap(
                lambda t, n, a, m: lookup_tree(_script(params, t, n, plan.depth), a, nodes, m)
            )(state.tokens, state.committed, anchor, max_depth)
        if plan.uses_head:
            cands = head_candidates(plan, params, state, anchor)
            if plan.numerics.gpu and spec.builder == "exact":
                tree = build_exact(cands, anchor, budget=nodes, max_depth=max_depth)
            else:
                tree = jax.vmap(
                    lambda c, a, m: build_tree(
                        c, a, builder=spec.builder, budget=nodes, max_depth=m, spec=spec
                    )
                )(cands, anchor, max_depth)
            if spec.drafter == "head":
                return tree
        chains = jax.vmap(
            lambda t, n: lookup_candidates(
                t, n, ngram=spec.lookup_ngram, branches=spec.lookup_branches, depth=plan.depth
            )
        )(state.tokens, state.committed)
        if not plan.uses_head:
            return jax.vmap(lambda c, a, m: lookup_tree(c, a, nodes, m))(chains, anchor, max_depth)
        return jax.vmap(lambda t, c, m: merge(t, c, nodes, m))(tree, chains, max_depth)

    return lax.cond(draft_now, draft, nothing)


def _script(params: EngineParams, tokens: Array, committed: Array, depth: int) -> Chains:
    """Test double: the continuations written down for the prompt that begins with `tokens[0]`."""
    rows = lax.dynamic_slice_in_dim(
        jnp.asarray(params.script)[tokens[0]], committed, depth, axis=1
    )  # [R, D]
    valid = jnp.cumprod((rows >= 0).astype(jnp.int32), axis=1).astype(bool)
    # earlier continuations first, and none so unlikely that a budget would drop its last node
    # before another's first
    order = -0.01 * (1 + jnp.arange(rows.shape[0], dtype=jnp.float32))[:, None]
    return Chains(
        jnp.where(valid, rows, 0),
        jnp.where(valid, jnp.broadcast_to(order, rows.shape), -jnp.inf),
        valid,
    )


def head_candidates(
    plan: RoundPlan, params: EngineParams, state: DecodeState, anchor: Array
) -> Candidates:
    """One causal parallel forward of the head on [anchor, MASK, ...] -> candidates per depth,
    leaves [B, D, ...].
    """
    head, depth = plan.head_config, plan.spec.head_depth or plan.depth
    block = drafter.block_inputs(head, anchor[:, None], state.cached[:, None])
    embeds = embed_tokens(params.target, block.tokens)
    if plan.numerics.head:
        shape = (anchor.shape[0], depth, head.head_vocab_size)
        return drafter.block_candidates(
            params.draft,
            head,
            params.draft_lm,
            params.draft_ids,
            embeds[:, 0],
            block.positions[:, 0],
            anchor,
            state.context,
            state.cached,
            state.speculate & (state.status == RUNNING),
            depth=depth,
            width=plan.spec.width,
            temperature=state.sampling.temperature if plan.sampled else None,
            noise=_target_noise(plan, params, state, shape) if plan.sampled else None,
        )
    hidden = drafter.draft_block(
        params.draft,
        head,
        embeds,
        block.positions,
        state.context.k,
        state.context.v,
        state.cached[:, None],
        chunk=plan.numerics.attention_chunk,
        gpu=plan.numerics.gpu,
    )
    hidden = hidden[:, 0, :depth]
    rows = params.draft_lm
    if isinstance(rows, KernelWeight) and head.path_head == "none" and not plan.sampled:
        return Candidates(
            *draft_head_topk.candidates(hidden, rows.w, plan.spec.width, ids=params.draft_ids)
        )
    logits = drafter.draft_scores(params.draft, head, params.draft_lm, hidden)
    gate = drafter.path_gate(params.draft, head, hidden)

    def one(
        row: Array, anchor: Array, gate: Array | None, t: Array | None, noise: Array | None
    ) -> Candidates:
        return drafter.candidates(
            params.draft,
            head,
            row,
            anchor,
            params.draft_ids,
            plan.spec.width,
            temperature=t,
            noise=noise,
            gate=gate,
        )

    if not plan.sampled:
        return jax.vmap(lambda row, a, g: one(row, a, g, None, None))(logits, anchor, gate)
    return jax.vmap(one)(
        logits,
        anchor,
        gate,
        state.sampling.temperature,
        _target_noise(plan, params, state, logits.shape),
    )


def _target_noise(
    plan: RoundPlan, params: EngineParams, state: DecodeState, shape: tuple[int, ...]
) -> Array:
    """The target's own Gumbel noise of the drafted positions at the draft vocabulary's ids, [B, D,
    Vd].

    Ranking with it keeps acceptance high at T > 0: the target will choose argmax(warped logits +
    noise). Zero for greedy sequences.
    """
    ids = params.draft_ids
    if ids is None:
        ids = jnp.arange(plan.model.vocab_size, dtype=jnp.int32)
    depths = jnp.arange(1, shape[1] + 1, dtype=jnp.int32)
    sampling = state.sampling

    def row(seed: Array, anchor_position: Array) -> Array:
        keys = jax.vmap(position_key, (None, 0))(seed, anchor_position + depths)
        if plan.numerics.stack:
            return gumbel_noise(keys, ids)
        return jax.vmap(lambda key: token_noise(key, ids))(keys)

    def draw() -> Array:
        return jnp.where(
            (sampling.temperature > 0)[:, None, None],
            jax.vmap(row)(sampling.seed, state.cached),
            0.0,
        )

    return lax.cond(jnp.any(sampling.temperature > 0), draw, lambda: jnp.zeros(shape, jnp.float32))
