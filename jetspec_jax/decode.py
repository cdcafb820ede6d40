"""Prefill, the speculative round, and the driver that repeats it: pure functions of (plan, params,
state).

Plain decoding is the round with budget 1, so both go through the same code. Nothing here talks to
the host; the streaming and the whole-generation driver are one program, `run_rounds`, called with
few or many rounds.
"""

from __future__ import annotations

import dataclasses
import functools

import flax.struct
import jax
import jax.numpy as jnp
from jax import lax

from jetspec_jax import policy
from jetspec_jax.cache import KVCache, after, commit, gather_rows
from jetspec_jax.drafting import draft_tree, extend_context
from jetspec_jax.models.decoder import forward_block, head_logits, lm_head_weight
from jetspec_jax.numerics import KernelWeight
from jetspec_jax.plan import RoundPlan
from jetspec_jax.sampling import choose, greedy, token_noise
from jetspec_jax.state import (
    LENGTH,
    RUNNING,
    STOPPED,
    Counters,
    DecodeState,
    EngineParams,
    RoundOut,
)
from jetspec_jax.stop import REASON_STOP, truncate_at_stop
from jetspec_jax.tree import accept, ancestor_mask, prune
from jetspec_jax.tree.topology import Tree
from jetspec_jax.typing import Array, PyTree
from pallas_kernels.gumbel_noise import gumbel_noise
from pallas_kernels.verify_head import verify_head


def _rows_at(buffer: Array, start: Array, count: int) -> Array:
    """buffer [B, S], start [B] -> [B, count]; callers keep start + count <= S."""
    return jax.vmap(lambda row, s: lax.dynamic_slice(row, (s,), (count,)))(buffer, start)


def _write_at(buffer: Array, rows: Array, start: Array) -> Array:
    """buffer [B, S] with rows [B, T] written at start [B]."""
    return jax.vmap(lambda row, new, s: lax.dynamic_update_slice(row, new, (s,)))(
        buffer, rows, start
    )


def prefill(plan: RoundPlan, params: EngineParams, state: DecodeState) -> DecodeState:
    """Computes the keys of all committed ids but the last, in chunks of `plan.prefill_chunk` rows.

    Sequences that are complete (`cached == committed - 1`) take part as idle rows: what they write
    lands above their live keys. So a batch can admit a prompt while others wait, with the same
    program.
    """
    rows = plan.prefill_chunk
    target_end = state.committed - 1
    turns = (jnp.max(target_end - state.cached) + (rows - 1)) // rows
    causal = jnp.tril(jnp.ones((rows, rows), bool))
    mask = jnp.broadcast_to(causal[None], (state.tokens.shape[0], rows, rows))

    def step(
        _: Array, carry: tuple[Array, KVCache, KVCache | None]
    ) -> tuple[Array, KVCache, KVCache | None]:
        cached, cache, context = carry
        counts = jnp.clip(target_end - cached, 0, rows)
        positions = cached[:, None] + lax.iota(jnp.int32, rows)[None]
        out = forward_block(
            params.target,
            plan.model,
            _rows_at(state.tokens, cached, rows),
            positions,
            cache.k,
            cache.v,
            cached,
            mask,
            counts=counts,
            taps=plan.taps,
            numerics=plan.numerics,
        )
        start = after(cached, out.hidden)
        cache = commit(cache, out.new_k, out.new_v, start, counts=counts)
        if context is not None:
            context = extend_context(plan, params, context, out.taps, cached, counts)
        return jnp.minimum(cached + rows, target_end), cache, context

    carry = (state.cached, state.cache, state.context)
    cached, cache, context = lax.fori_loop(0, turns, step, carry)
    return dataclasses.replace(state, cached=cached, cache=cache, context=context)


@flax.struct.dataclass
class _Walk:
    """The accepted path, P = D + 1 steps."""

    path: Array  # [B, P]
    accepted: Array  # [B]
    had_node: Array  # [B, D]
    emitted: Array  # [B, P]
    logprob: Array | None = None
    top_ids: Array | None = None
    top_logprobs: Array | None = None
    logits: Array | None = None  # [B, P, V], with log-probabilities only


@flax.struct.dataclass
class _Verified:
    """What verification of any budget hands to commit."""

    walk: _Walk
    new_k: PyTree  # rows for `cache.commit`: of the path (XLA), or of all nodes (native stack)
    new_v: PyTree
    taps: Array | None  # [B, P or N, n, H], the same rows


def _pad_rows(x: Array, rows: int, value: int | float | bool) -> Array:
    return jnp.pad(x, ((0, 0), (0, rows - x.shape[1])), constant_values=value)


def walk_tree(plan: RoundPlan, tree: Tree, choice: Array) -> _Walk:
    """Follows the target's choices [B, N] after the nodes of each tree."""
    result = jax.vmap(functools.partial(accept, depth=plan.depth))(tree, choice)
    emitted = jnp.take_along_axis(choice, result.path, axis=1)
    return _Walk(result.path, result.accepted, result.had_node, emitted)


def _walk_logits(
    plan: RoundPlan, params: EngineParams, state: DecodeState, tree: Tree, hidden: Array, nodes: int
) -> _Walk:
    """The same for the first `nodes` nodes, by their logits: sampling and log-probabilities, and
    greedy rounds where no kernel chooses without them.

    All rows of `hidden` [B, R, H] go through the LM head, R >= nodes (padded rounds need that).
    """
    tree = prune(tree, nodes)
    weight = lm_head_weight(params.target)
    if isinstance(weight, KernelWeight) and not plan.sampled and plan.logprobs is None:
        rows = hidden[:, :nodes]
        counts = jnp.full(rows.shape[:1], nodes, jnp.int32)
        return walk_tree(plan, tree, verify_head(rows, weight.w, counts).ids)
    logits = head_logits(params.target, hidden)[:, :nodes]
    # a choice after the node at position p is the token at position p + 1
    positions = state.cached[:, None] + tree.depth + 1
    if plan.sampled:
        noise = gumbel_noise if plan.numerics.stack else token_noise
        choice = choose(logits, positions, tree.depth, state.sampling, plan.depth, noise)
    else:
        choice = greedy(logits)
    walk = walk_tree(plan, tree, choice)
    if plan.logprobs is None:
        return walk
    chosen = jnp.take_along_axis(logits, walk.path[:, :, None], axis=1)
    all_logprobs = jax.nn.log_softmax(chosen, -1)
    top_logprobs, top_ids = lax.top_k(all_logprobs, plan.logprobs)
    return dataclasses.replace(
        walk,
        logprob=jnp.take_along_axis(all_logprobs, walk.emitted[:, :, None], axis=2)[..., 0],
        top_ids=top_ids,
        top_logprobs=top_logprobs,
        logits=chosen,
    )


def verify(
    plan: RoundPlan, params: EngineParams, state: DecodeState, tree: Tree, nodes: int
) -> _Verified:
    """One target forward over the first `nodes` nodes of each sequence's tree, and the walk along
    its choices.
    """
    tree = prune(tree, nodes)
    rows = max(nodes, plan.pad_rows)
    positions = state.cached[:, None] + tree.depth
    mask = jax.vmap(lambda p: ancestor_mask(p, plan.depth))(tree.parent)
    token = tree.token
    if rows > nodes:
        token, positions = _pad_rows(token, rows, 0), _pad_rows(positions, rows, 0)
        wide = jnp.broadcast_to(jnp.eye(rows, dtype=bool)[None], (token.shape[0], rows, rows))
        mask = wide.at[:, :nodes, :nodes].set(mask)
    out = forward_block(
        params.target,
        plan.model,
        token,
        positions,
        state.cache.k,
        state.cache.v,
        state.cached,
        mask,
        taps=plan.taps,
        numerics=plan.numerics,
    )
    # without speculation a sequence accepts nothing, whatever its neighbours' trees hold
    tree = dataclasses.replace(
        tree, valid=tree.valid & (state.speculate[:, None] | (tree.depth == 0))
    )
    walk = _walk_logits(plan, params, state, tree, out.hidden, nodes)
    return _Verified(
        walk,
        gather_rows(out.new_k, walk.path),
        gather_rows(out.new_v, walk.path),
        None
        if out.taps is None
        else jnp.take_along_axis(out.taps, walk.path[:, :, None, None], axis=1),
    )


def verify_ragged(
    plan: RoundPlan, params: EngineParams, state: DecodeState, tree: Tree, index: Array
) -> _Verified:
    """`verify` by the native stack: one program for every budget, since rows are data there.

    Args:
        plan, params, state: of the round.
        tree: [B, N] trees.
        index: [] int32, which of `plan.budgets` to verify. Sequences that do not speculate have one
            row, those that do not run none.
    """
    slots = lax.iota(jnp.int32, tree.token.shape[1])[None]
    nodes = jnp.asarray(plan.budgets, jnp.int32)[index]
    wanted = jnp.minimum(nodes, tree.valid.sum(1, dtype=jnp.int32))
    counts = jnp.where(state.speculate, wanted, 1)
    counts = jnp.where(state.status == RUNNING, counts, 0)
    tree = dataclasses.replace(tree, valid=tree.valid & (slots < counts[:, None]))
    out = forward_block(
        params.target,
        plan.model,
        tree.token,
        state.cached[:, None] + tree.depth,
        state.cache.k,
        state.cache.v,
        state.cached,
        jax.vmap(lambda p: ancestor_mask(p, plan.depth))(tree.parent),
        counts=counts,
        taps=plan.taps,
        numerics=plan.numerics,
    )
    if plan.sampled or plan.logprobs is not None:
        branches = [
            functools.partial(_walk_logits, plan, params, state, tree, out.hidden[:, :n], n)
            for n in plan.budgets
        ]
        walk = lax.switch(index, branches)
    else:
        head = lm_head_weight(params.target)
        walk = walk_tree(
            plan, tree, verify_head(out.hidden, head, counts, implementation="cpu").ids
        )
    return _Verified(walk, out.new_k, out.new_v, out.taps)


def target_verify(
    plan: RoundPlan, params: EngineParams, state: DecodeState, tree: Tree, index: Array
) -> _Verified:
    """The form of verification that the plan's kernels have; arguments as `verify_ragged`."""
    if plan.numerics.stack:
        return verify_ragged(plan, params, state, tree, index)
    if len(plan.budgets) == 1:
        return verify(plan, params, state, tree, plan.budgets[0])
    branches = [functools.partial(verify, plan, params, state, tree, n) for n in plan.budgets]
    return lax.switch(index, branches)


def spec_round(
    plan: RoundPlan, params: EngineParams, state: DecodeState
) -> tuple[DecodeState, RoundOut]:
    """Draft, tree, verify, accept, commit: one round of every running sequence (algorithm.md
    section 1).
    """
    active = state.status == RUNNING
    draft_now = jnp.asarray(plan.drafts) & jnp.any(active & state.speculate)
    costs: policy.Costs = params.costs
    if len(plan.budgets) > 1:
        draft_now = draft_now & policy.may_draft(costs, state.control)
    tree = draft_tree(plan, params, state, draft_now)
    if len(plan.budgets) > 1:
        index, promised = policy.choose_budget(
            tree.score, tree.valid, active, plan.budgets, costs, state.control
        )
        index = jnp.where(draft_now, index, 0)
    else:
        index, promised = jnp.zeros((), jnp.int32), jnp.zeros(())
    done = target_verify(plan, params, state, tree, index)
    walk = done.walk
    budget = jnp.asarray(plan.budgets, jnp.int32)[index]

    room = state.limit - state.committed
    count, finished, reason = truncate_at_stop(
        walk.emitted, walk.accepted + 1, state.stop_ids, room
    )
    count = jnp.where(active, count, 0)
    status = jnp.where(
        active & finished, jnp.where(reason == REASON_STOP, STOPPED, LENGTH), state.status
    )

    # Rows past the accepted path land above the live keys and are overwritten by the next round.
    # With depth 0 the path is a constant: only `after` then orders the write behind the reads.
    tail = after(state.cached, walk.emitted)
    path = walk.path if plan.numerics.stack else None  # XLA's branches have gathered it already
    cache = commit(state.cache, done.new_k, done.new_v, tail, path=path, counts=count)
    context = state.context
    if context is not None:
        context = extend_context(plan, params, context, done.taps, state.cached, count, path)

    is_drafted = lax.iota(jnp.int32, plan.path_rows)[None] < walk.accepted[:, None]
    counters = _count(state.counters, tree, walk, active, index, budget, draft_now)
    control = state.control
    if len(plan.budgets) > 1:
        spent = costs.verify[index] + jnp.where(draft_now, costs.draft, 0.0)
        control = policy.update(
            params.policy,
            control,
            draft_now,
            jnp.where(active, walk.accepted + 1, 0).sum(),
            active.sum(),
            promised,
            spent,
            costs.verify[0],
        )
    new_state = dataclasses.replace(
        state,
        tokens=_write_at(state.tokens, walk.emitted, state.committed),
        drafted=_write_at(state.drafted, is_drafted, state.committed),
        committed=state.committed + count,
        cached=state.cached + count,
        status=status,
        cache=cache,
        context=context,
        counters=counters,
        control=control,
    )
    out = RoundOut(
        tree,
        walk.path,
        walk.accepted,
        walk.emitted,
        count,
        budget,
        walk.logprob,
        walk.top_ids,
        walk.top_logprobs,
        walk.logits,
    )
    return new_state, out


def _count(
    counters: Counters,
    tree: Tree,
    walk: _Walk,
    active: Array,
    index: Array,
    budget: Array,
    drafted: Array,
) -> Counters:
    """Counters after a round, before stop and length cuts."""
    one = active.astype(jnp.int32)
    depths = lax.iota(jnp.int32, counters.accepted.shape[1])
    inside = lax.iota(jnp.int32, tree.token.shape[1])[None] < budget
    return Counters(
        rounds=counters.rounds + one,
        accepted=counters.accepted
        + one[:, None] * (depths[None] == walk.accepted[:, None]).astype(jnp.int32),
        had_node=counters.had_node + one[:, None] * walk.had_node.astype(jnp.int32),
        nodes=counters.nodes + one * (tree.valid & inside).astype(jnp.int32).sum(1),
        budget=counters.budget
        + (lax.iota(jnp.int32, counters.budget.shape[0]) == index).astype(jnp.int32),
        drafts=counters.drafts + drafted.astype(jnp.int32),
    )


def run_rounds(
    plan: RoundPlan, params: EngineParams, state: DecodeState, max_rounds: Array
) -> DecodeState:
    """Rounds until every sequence has ended or `max_rounds` (int32 []) are done.

    Whole generation: a large `max_rounds`. Streaming: a small one, then the host reads the new ids.
    """

    def go_on(carry: tuple[Array, DecodeState]) -> Array:
        done, state = carry
        return (done < max_rounds) & jnp.any(state.status == RUNNING)

    def body(carry: tuple[Array, DecodeState]) -> tuple[Array, DecodeState]:
        done, state = carry
        return done + 1, spec_round(plan, params, state)[0]

    return lax.while_loop(go_on, body, (jnp.zeros((), jnp.int32), state))[1]
