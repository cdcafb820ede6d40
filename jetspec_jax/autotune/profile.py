"""Measures a `cost_model.Profile` on the real engine, phase by phase.

Whole rounds are timed by `costs.measure`, in the program that runs. The small phases are timed
alone, in loops on the device whose every turn depends on the one before, so that nothing is hoisted
out of them. What a round takes beside them is the target's forward.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax import lax

from jetspec_jax import costs, device
from jetspec_jax.autotune.cost_model import Device, Profile, Shape
from jetspec_jax.cache import commit
from jetspec_jax.config import SamplingParams, SpecConfig
from jetspec_jax.decode import target_verify, walk_tree
from jetspec_jax.drafting import draft_tree, extend_context, head_candidates
from jetspec_jax.plan import RoundPlan
from jetspec_jax.state import DecodeState, EngineParams
from jetspec_jax.stop import truncate_at_stop
from jetspec_jax.typing import Array

if TYPE_CHECKING:
    from jetspec_jax.engine import LLM
    from jetspec_jax.session import Session

NODES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48)
_TURNS, _REPEATS = 16, 5
_TINY = 1e-9  # seconds: what is left of a phase that noise has eaten


def measure_device() -> Device:
    """This device: reads of memory and the best matmul of this process's arithmetic, in seconds.

    On a CPU the bandwidth is that of numpy threads; on a GPU that of a copy by XLA.
    """
    first = jax.devices()[0]
    if first.platform == "cpu":
        return Device(
            f"{device.cpu_model()}, {device.cores()} cores",
            device.read_bandwidth(),
            _matmul_rate(1_024),
        )
    return Device(first.device_kind, _copy_rate(1 << 30), _matmul_rate(8_192))


def _best(call: Callable[[], Any], repeats: int = _REPEATS) -> float:
    jax.block_until_ready(call())  # compiles
    times = []
    for _ in range(repeats):
        started = time.perf_counter()
        jax.block_until_ready(call())
        times.append(time.perf_counter() - started)
    return min(times)


def _matmul_rate(size: int) -> float:
    """Operations a second of the faster of float32 and bfloat16 products of `size` squares."""
    product = jax.jit(lambda x: x @ x)
    rates = []
    for dtype in (jnp.float32, jnp.bfloat16):
        x = jnp.ones((size, size), dtype)
        rates.append(2.0 * size**3 / _best(lambda x=x: product(x)))
    return max(rates)


def _copy_rate(size: int) -> float:
    x = jnp.zeros(size // 4, jnp.float32)
    return 2.0 * x.nbytes / _best(lambda: jax.jit(lambda v: v + 1)(x))


def shape_of(llm: LLM, plan: RoundPlan) -> Shape:
    """Bytes and operations of a loaded engine's rounds."""
    cfg, params, item = llm.model_config, llm._target.params, jnp.dtype(llm.engine.dtype).itemsize
    experts = [layer for layer in range(cfg.num_layers) if cfg.is_moe_layer(layer)]
    ffn = 3 * cfg.hidden_size * cfg.moe_ffn_size
    expert_bytes = float(len(experts) * cfg.num_experts * ffn * item)
    attention = cfg.hidden_size * (2 * cfg.q_width + 2 * cfg.kv_width)
    dense = (cfg.num_layers - len(experts)) * 3 * cfg.hidden_size * cfg.ffn_size
    routed = len(experts) * (ffn * cfg.experts_per_token + cfg.hidden_size * cfg.num_experts)
    vocab = cfg.vocab_size * cfg.hidden_size
    # of an embedding that is not the LM head too a step reads a row
    embed = 0 if cfg.tie_embeddings else sum(x.nbytes for x in jax.tree.leaves(params["embed"]))
    shape = Shape(
        weight_bytes=llm._target.nbytes - expert_bytes - embed,
        parameters=cfg.num_layers * attention + dense + routed + vocab,
        key_bytes=2.0 * cfg.num_layers * cfg.kv_width * item,
        expert_bytes=expert_bytes,
        experts=cfg.num_experts,
        active=cfg.experts_per_token,
        depth=plan.depth,
    )
    head, d = llm._head, llm.draft_config
    if not plan.uses_head or head is None or d is None:
        return shape
    layer = d.hidden_size * (2 * d.num_heads + 2 * d.num_kv_heads) * d.head_dim
    layer += 3 * d.hidden_size * d.ffn_size
    return dataclasses.replace(
        shape,
        draft_bytes=head.nbytes + sum(x.nbytes for x in jax.tree.leaves(head.lm_rows)),
        draft_parameters=d.num_layers * layer + d.head_vocab_size * d.hidden_size,
        draft_key_bytes=2.0 * d.num_layers * d.num_kv_heads * d.head_dim * item,
        draft_rows=1 + (plan.spec.head_depth or plan.depth),
    )


def measure_profile(
    llm: LLM,
    batch: int = 1,
    spec: SpecConfig | None = None,
    *,
    nodes: Sequence[int] = NODES,
    hardware: Device | None = None,
) -> Profile:
    """Times every phase of the rounds that `spec` runs, with other node counts.

    Args:
        llm: the engine.
        batch: sequences.
        spec: None: the engine's own. What drafts must be a head, hybrid or lookup.
        nodes: node counts to time, ascending from 1.
        hardware: of `measure_device`; None measures it (some seconds).
    """
    spec = llm.resolve(spec) if spec is not None else llm.spec
    plan = dataclasses.replace(llm.plan_for(spec), budgets=tuple(nodes))
    # Lookup finds no more than its branches hold: what more nodes cost is the head's to tell where
    # there is one.
    full = plan if plan.uses_head or llm.draft_config is None else None
    timed_plan = full or dataclasses.replace(
        llm.plan_for(llm.resolve(SpecConfig())), budgets=tuple(nodes)
    )
    timed = costs.measure(llm, timed_plan, batch)
    phases = _phases(llm, plan, batch)
    whole = phases if full else _phases(llm, timed_plan, batch)
    rest = whole["accept"] + whole["commit"]
    # Of a drafted round as it was timed, what the phases that were timed alone do not explain.
    around = whole["draft"] + whole["tree"] - timed["t_draft_s"] + rest
    verify = {
        n: max(t - around, _TINY) for n, t in timed["t_verify_s"].items() if t < costs.NEVER / 2
    }
    verify[1] = max(timed["t_plain_s"] - rest, _TINY)
    level = 0.0
    for n, t in verify.items():  # more rows never cost less: a dip is noise
        level = verify[n] = max(level, t)
    return Profile(
        device=hardware or measure_device(),
        shape=shape_of(llm, plan),
        label=f"{spec.drafter}, {'+'.join(llm.weights)}, {llm.arithmetic} sums",
        batch=batch,
        context=costs.prompt_tokens(llm.capacity),
        plain_s=timed["t_plain_s"],
        verify_s=verify,
        draft_s=phases["draft"],
        tree_s=phases["tree"],
        accept_s=phases["accept"],
        commit_s=phases["commit"],
        host_s=phases["host"],
    )


def _phases(llm: LLM, plan: RoundPlan, batch: int) -> dict[str, float]:
    """Seconds of the small phases, each alone."""
    tokens = costs.prompt_tokens(llm.capacity)
    with llm.session(plan, batch, costs.unmeasured(plan)) as session:
        prompt = costs.prompt_for(plan, tokens)
        for slot in range(batch):
            session.admit(slot, prompt, llm.capacity, (), SamplingParams(), True)
        found = {
            "draft": _drafting(session, _head_only) if plan.uses_head else 0.0,
            "host": _host(session, tokens),
        }
        both = _drafting(session, _whole_tree) if plan.drafts else found["draft"]
        found["tree"] = max(both - found["draft"], 0.0)
        found |= _after_verify(session)
    return found


def _head_only(plan: RoundPlan, params: EngineParams, state: DecodeState) -> Array:
    anchor = jnp.take_along_axis(state.tokens, state.committed[:, None] - 1, axis=1)[:, 0]
    return head_candidates(plan, params, state, anchor).tokens.sum()


def _whole_tree(plan: RoundPlan, params: EngineParams, state: DecodeState) -> Array:
    return draft_tree(plan, params, state, jnp.asarray(True)).token.sum()


def _drafting(session: Session, run: Callable[..., Array]) -> float:
    """Seconds of a turn: the anchor of each comes from what the one before drafted."""
    plan, vocab = session.plan, session.plan.model.vocab_size

    @jax.jit
    def loop(params: EngineParams, state: DecodeState, turns: Array) -> Array:
        rows = jnp.arange(state.tokens.shape[0])

        def turn(_: Array, tokens: Array) -> Array:
            out = run(plan, params, dataclasses.replace(state, tokens=tokens))
            return tokens.at[rows, state.committed - 1].set((out % vocab).astype(jnp.int32))

        return lax.fori_loop(0, turns, turn, state.tokens)

    return _per_turn(lambda n: loop(session.params, session.state, n))


def _per_turn(call: Callable[[Array], Any]) -> float:
    """Seconds of a turn of a loop, the cost of its call taken off."""
    few, many = (_best(lambda n=n: call(jnp.int32(n))) for n in (1, 1 + _TURNS))
    return max(many - few, 0.0) / _TURNS


def _after_verify(session: Session) -> dict[str, float]:
    """Seconds of acceptance and of commit."""
    plan, vocab = session.plan, session.plan.model.vocab_size

    @jax.jit
    def prepare(params: EngineParams, state: DecodeState) -> tuple[Any, Any]:
        tree = draft_tree(plan, params, state, jnp.asarray(plan.drafts))
        return tree, target_verify(plan, params, state, tree, jnp.asarray(0))

    tree, done = prepare(session.params, session.state)

    @jax.jit
    def accepting(state: DecodeState, tree: Any, choice: Array, turns: Array) -> Array:
        def turn(_: Array, choice: Array) -> Array:
            walk = walk_tree(plan, tree, choice)
            count, _finished, _reason = truncate_at_stop(
                walk.emitted, walk.accepted + 1, state.stop_ids, state.limit - state.committed
            )
            return (choice + walk.emitted.sum() + count.sum()) % vocab

        return lax.fori_loop(0, turns, turn, choice)

    def committing(
        params: EngineParams, state: DecodeState, done: Any, turns: Array
    ) -> DecodeState:
        count = jnp.ones_like(state.committed)
        path = done.walk.path if plan.numerics.stack else None

        def turn(_: Array, state: DecodeState) -> DecodeState:
            cache = commit(
                state.cache, done.new_k, done.new_v, state.cached, path=path, counts=count
            )
            context = state.context
            if context is not None:
                context = extend_context(
                    plan, params, context, done.taps, state.cached, count, path
                )
            return dataclasses.replace(state, cache=cache, context=context)

        return lax.fori_loop(0, turns, turn, state)

    program = jax.jit(committing, donate_argnums=(1,))

    def commits(turns: Array) -> Any:
        session.state = program(session.params, session.state, done, turns)
        return session.state.cached

    choice = jnp.zeros_like(tree.token)
    return {
        "accept": _per_turn(lambda n: accepting(session.state, tree, choice, n)),
        "commit": _per_turn(commits),
    }


def _host(session: Session, tokens: int) -> float:
    """Seconds that a call of one round takes beside its round."""

    def run(rounds: int) -> Array:
        committed = jnp.full_like(session.state.committed, tokens)  # a call takes it
        session.state = dataclasses.replace(
            session.state, committed=committed, cached=committed - 1
        )
        session.run(rounds)
        return session.state.committed

    one, five = (_best(lambda n=n: run(n)) for n in (1, 5))
    return max(one - (five - one) / 4, 0.0)
