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
from jetspec_jax.cache import KVCache, after, append, gather_rows
from jetspec_jax.drafting import draft_tree, extend_context
from jetspec_jax.models.decoder import forward_block, head_logits
from jetspec_jax.plan import RoundPlan
from jetspec_jax.sampling import choose, greedy
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
from jetspec_jax.typing import Array


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
            taps=plan.taps,
            numerics=plan.numerics,
        )
        cache = append(cache, out.new_k, out.new_v, after(cached, out.hidden))
        if context is not None:
            context = extend_context(plan, params, context, out.taps, positions, cached)
        return jnp.minimum(cached + rows, target_end), cache, context

    carry = (state.cached, state.cache, state.context)
    cached, cache, context = lax.fori_loop(0, turns, step, carry)
    return dataclasses.replace(state, cached=cached, cache=cache, context=context)


@flax.struct.dataclass
class _Verified:
    """What verification of any budget hands to commit: only rows of the accepted path, P = D +
    1.
    """

    path: Array  # [B, P]
    accepted: Array  # [B]
    had_node: Array  # [B, D]
    emitted: Array  # [B, P]
    path_k: tuple[Array, ...]  # per layer [B, K, P, h]
    path_v: tuple[Array, ...]
    taps: Array | None  # [B, P, n, H]
    logprob: Array | None
    top_ids: Array | None
    top_logprobs: Array | None


def _pad_rows(x: Array, rows: int, value: int | float | bool) -> Array:
    return jnp.pad(x, ((0, 0), (0, rows - x.shape[1])), constant_values=value)


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
    logits = head_logits(params.target, out.hidden)[:, :nodes]
    # a choice after the node at position p is the token at position p + 1
    if plan.sampled:
        choice = choose(logits, positions[:, :nodes] + 1, tree.depth, state.sampling, plan.depth)
    else:
        choice = greedy(logits)
    # without speculation a sequence accepts nothing, whatever its neighbours' trees hold
    tree = dataclasses.replace(
        tree, valid=tree.valid & (state.speculate[:, None] | (tree.depth == 0))
    )
    result = jax.vmap(functools.partial(accept, depth=plan.depth))(tree, choice)
    emitted = jnp.take_along_axis(choice, result.path, axis=1)
    logprob = top_ids = top_logprobs = None
    if plan.logprobs is not None:
        chosen = jnp.take_along_axis(logits, result.path[:, :, None], axis=1)
        all_logprobs = jax.nn.log_softmax(chosen, -1)
        logprob = jnp.take_along_axis(all_logprobs, emitted[:, :, None], axis=2)[..., 0]
        top_logprobs, top_ids = lax.top_k(all_logprobs, plan.logprobs)
    return _Verified(
        path=result.path,
        accepted=result.accepted,
        had_node=result.had_node,
        emitted=emitted,
        path_k=gather_rows(out.new_k, result.path),
        path_v=gather_rows(out.new_v, result.path),
        taps=None
        if out.taps is None
        else jnp.take_along_axis(out.taps, result.path[:, :, None, None], axis=1),
        logprob=logprob,
        top_ids=top_ids,
        top_logprobs=top_logprobs,
    )


def spec_round(
    plan: RoundPlan, params: EngineParams, state: DecodeState
) -> tuple[DecodeState, RoundOut]:
    """Draft, tree, verify, accept, commit: one round of every running sequence (algorithm.md
    section 1).
    """
    active = state.status == RUNNING
    draft_now = (
        jnp.asarray(plan.drafts) & (state.control.cooldown == 0) & jnp.any(active & state.speculate)
    )
    tree = draft_tree(plan, params, state, draft_now)
    costs: policy.Costs = params.costs
    if len(plan.budgets) > 1:
        trust = state.control.trust
        index, promised = policy.choose_budget(
            tree.score, tree.valid, active, plan.budgets, costs, trust
        )
        index = jnp.where(draft_now, index, 0)
        branches = [functools.partial(verify, plan, params, state, tree, n) for n in plan.budgets]
        done = lax.switch(index, branches)
    else:
        index, promised = jnp.zeros((), jnp.int32), jnp.zeros(())
        done = verify(plan, params, state, tree, min(plan.budgets))
    budget = jnp.asarray(plan.budgets, jnp.int32)[index]

    room = state.limit - state.committed
    count, finished, reason = truncate_at_stop(
        done.emitted, done.accepted + 1, state.stop_ids, room
    )
    count = jnp.where(active, count, 0)
    status = jnp.where(
        active & finished, jnp.where(reason == REASON_STOP, STOPPED, LENGTH), state.status
    )

    # Rows past the accepted path land above the live keys and are overwritten by the next round.
    # With depth 0 the path is a constant: only `after` then orders the write behind the reads.
    tail = after(state.cached, done.emitted)
    cache = append(state.cache, done.path_k, done.path_v, tail)
    context = state.context
    if context is not None:
        positions = state.cached[:, None] + lax.iota(jnp.int32, plan.path_rows)[None]
        context = extend_context(plan, params, context, done.taps, positions, state.cached)

    is_drafted = lax.iota(jnp.int32, plan.path_rows)[None] < done.accepted[:, None]
    counters = _count(state.counters, tree, done, active, index, budget, draft_now)
    control = state.control
    if len(plan.budgets) > 1:
        spent = costs.verify[index] + jnp.where(draft_now, costs.draft, 0.0)
        control = policy.update(
            control,
            draft_now,
            jnp.where(active, done.accepted + 1, 0).sum(),
            active.sum(),
            promised,
            spent,
            costs.verify[0],
        )
    new_state = dataclasses.replace(
        state,
        tokens=_write_at(state.tokens, done.emitted, state.committed),
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
        done.path,
        done.accepted,
        done.emitted,
        count,
        budget,
        done.logprob,
        done.top_ids,
        done.top_logprobs,
    )
    return new_state, out


def _count(
    counters: Counters,
    tree: Tree,
    done: _Verified,
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
        + one[:, None] * (depths[None] == done.accepted[:, None]).astype(jnp.int32),
        had_node=counters.had_node + one[:, None] * done.had_node.astype(jnp.int32),
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
