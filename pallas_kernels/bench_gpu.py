"""Timings of `bench` on a GPU.

An op is timed in a program that runs it many times in a row (XLA records the body of such a loop
as a CUDA graph and replays it), each turn with other weights until they exceed the level-2 cache
twice, and each call made to wait for the one before. Limits are measured too: bandwidth by reading
a large array, the rate by a large bfloat16 product.
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import bench_round, dispatch, draft_head_topk, roofline, tuned
from pallas_kernels import row_invariant_matmul as rim
from pallas_kernels.accept_commit import accept_commit
from pallas_kernels.build_tree import build_tree
from pallas_kernels.geometries import Geometry
from pallas_kernels.gpu_target import TARGETS, GpuTarget
from pallas_kernels.tree_attention import tree_attention
from pallas_kernels.verify_head import verify_head

REPEATS, TURNS = 5, 20


class Case(NamedTuple):
    """One op of the round.

    Attributes:
        op: its name in `roofline.round_work`.
        call: (form, operands...) -> result, form "auto" or "xla".
        fresh: makes the operands that change with every turn (weights, caches).
        fixed: the others.
    """

    op: str
    call: Callable[..., Any]
    fresh: Callable[[jax.Array], tuple[jax.Array, ...]]
    fixed: tuple[jax.Array, ...]


def normal(key: jax.Array, *shape: int) -> jax.Array:
    """Small numbers."""
    return 0.02 * jax.random.normal(key, shape, bench_round.DTYPE)


def cases(g: Geometry, nodes: int, context: int, kept: int, width: int, batch: int) -> list[Case]:
    """The ops of one round with operands of its shapes, in the order of `roofline.round_work`."""
    d, key = g.draft, jax.random.key(0)

    def project(op: str, rows: int, n: int, k: int) -> Case:
        def call(form: Any, w: jax.Array, x: jax.Array) -> jax.Array:
            return rim.project(x, w, implementation=form)

        return Case(op, call, lambda key: (normal(key, n, k),), (normal(key, rows, k),))

    def grouped(op: str, rows: int, n: int, k: int) -> Case:
        choose = jax.vmap(lambda key: jax.random.permutation(key, g.experts)[: g.active])
        experts = choose(jax.random.split(key, rows)).reshape(-1).astype(jnp.int32)

        def call(form: Any, w: jax.Array, x: jax.Array, experts: jax.Array) -> jax.Array:
            if form == "xla":  # the specification gathers a weight a row; XLA's own form does not
                order = jnp.argsort(experts)
                sizes = jnp.bincount(experts, length=g.experts).astype(jnp.int32)
                y = lax.ragged_dot(x[order], w.swapaxes(1, 2), sizes)
                return jnp.zeros_like(y).at[order].set(y)
            return rim.project_grouped(x, w, experts, implementation=form)

        fixed = (normal(key, rows * g.active, k), experts)
        return Case(op, call, lambda key: (normal(key, g.experts, n, k),), fixed)

    def attention(op: str, rows: int) -> Case:
        new = (batch, g.kv_heads, rows, g.head_dim)
        cache = (batch, g.kv_heads, -(-(context + nodes) // 64) * 64, g.head_dim)
        group = (batch, g.kv_heads, g.heads // g.kv_heads, rows, g.head_dim)
        mask = jnp.broadcast_to(jnp.tril(jnp.ones((rows, rows), bool))[None], (batch, rows, rows))
        lengths = jnp.full((batch,), context, jnp.int32)

        def call(form: Any, k: jax.Array, v: jax.Array, q: jax.Array, *rest: jax.Array) -> Any:
            lengths, new_k, new_v, mask = rest
            return tree_attention(
                *(q, k, v, lengths, new_k, new_v, mask),
                scale=g.head_dim**-0.5,
                implementation=form,
            )

        fixed = (normal(key, *group), lengths, normal(key, *new), normal(key, *new), mask)
        return Case(op, call, lambda key: (normal(key, *cache), normal(key, *cache)), fixed)

    def heads() -> tuple[Case, Case]:
        counts = jnp.full((batch,), nodes, jnp.int32)

        def verify(form: Any, w: jax.Array, x: jax.Array, counts: jax.Array) -> jax.Array:
            return verify_head(x, w, counts, implementation=form).ids

        def topk(form: Any, w: jax.Array, x: jax.Array) -> Any:
            return draft_head_topk.candidates(x, w, width, implementation=form)

        rows = normal(key, batch, nodes, g.hidden)
        block = normal(key, batch, d.block - 1, g.hidden)
        return (
            Case("verify_head", verify, lambda k: (normal(k, g.vocab, g.hidden),), (rows, counts)),
            Case("draft_head_topk", topk, lambda k: (normal(k, d.vocab, g.hidden),), (block,)),
        )

    def commit() -> Case:
        new = (g.layers, batch, g.kv_heads, nodes, g.head_dim)
        cache = (batch, g.kv_heads, context + nodes, g.head_dim)
        path = jnp.broadcast_to(jnp.arange(kept, dtype=jnp.int32)[None], (batch, kept))
        start = jnp.full((batch,), context, jnp.int32)
        caches = tuple(normal(key, *cache) for _ in range(2 * g.layers))

        def call(form: Any, *operands: jax.Array) -> Any:
            new_k, new_v, path, start, counts, *caches = operands
            return accept_commit(
                *(caches[: g.layers], caches[g.layers :], new_k, new_v, path, start, counts),
                implementation=form,
            )

        counts = jnp.full((batch,), kept, jnp.int32)
        fixed = (path, start, counts, *caches)
        return Case("accept_commit", call, lambda k: (normal(k, *new), normal(k, *new)), fixed)

    def tree() -> Case:
        depth = d.block - 1
        tokens = jnp.broadcast_to(jnp.arange(width, dtype=jnp.int32), (batch, depth, width))
        root = jnp.zeros((batch,), jnp.int32)

        def call(form: Any, table: jax.Array, tokens: jax.Array, root: jax.Array) -> Any:
            return build_tree(tokens, table, root, nodes, implementation=form)

        def table(key: jax.Array) -> tuple[jax.Array, ...]:
            return (jax.nn.log_softmax(jax.random.normal(key, (batch, depth, width, width))),)

        return Case("build_tree", call, table, (tokens, root))

    m, rows = nodes * batch, d.block * batch
    verify, topk = heads()
    feed = (
        (
            project("router", m, g.experts, g.hidden),
            grouped("experts gate_up", m, 2 * g.ffn, g.hidden),
            grouped("experts down", m, g.hidden, g.ffn),
        )
        if g.experts
        else (
            project("gate_up", m, 2 * g.ffn, g.hidden),
            project("down", m, g.hidden, g.ffn),
        )
    )
    return [
        project("qkv", m, g.qkv, g.hidden),
        attention("tree_attention", nodes),
        project("o", m, g.hidden, g.q_width),
        *feed,
        verify,
        commit(),
        project("draft_context fc", kept * batch, g.hidden, d.taps * g.hidden),
        project("draft_context kv", kept * batch, 2 * g.kv_width, g.hidden),
        project("draft qkv", rows, g.qkv, g.hidden),
        attention("draft attention", d.block),
        project("draft o", rows, g.hidden, g.q_width),
        project("draft gate_up", rows, 2 * d.ffn, g.hidden),
        project("draft down", rows, g.hidden, d.ffn),
        topk,
        tree(),
    ]


def repeated(
    call: Callable[..., Any], fresh: Sequence[tuple[jax.Array, ...]], turns: int
) -> Callable[..., jax.Array]:
    """A program that runs `call(*fresh[i], *fixed)` for every i, `turns` times over; fixed operands
    are its argument, the sum of the first elements of all results is its result.

    No call may be dropped, hoisted out of the loop or run beside another, so each adds zero times
    the sum so far to its smallest operand: one more elementwise kernel, of a microsecond or two, is
    part of every timing.
    """

    def run(fresh: Any, fixed: Any) -> jax.Array:
        def turn(_: jax.Array, total: jax.Array) -> jax.Array:
            for operands in fresh:
                leaves = [*operands, *fixed]
                at = min(range(len(leaves)), key=lambda i: leaves[i].size)
                leaves[at] = leaves[at] + (0.0 * total).astype(leaves[at].dtype)
                out = call(*leaves)
                total = total + jax.tree.leaves(out)[0].reshape(-1)[0].astype(jnp.float32)
            return total

        return lax.fori_loop(0, turns, turn, jnp.zeros((), jnp.float32))

    return functools.partial(jax.jit(run), tuple(fresh))


def best_time(call: Callable[[], Any], repeats: int = REPEATS) -> float:
    """Seconds of the fastest of `repeats` calls; one more comes first, to compile."""
    jax.block_until_ready(call())
    times = []
    for _ in range(repeats):
        started = time.perf_counter()
        jax.block_until_ready(call())
        times.append(time.perf_counter() - started)
    return min(times)


def time_case(case: Case, l2: int, form: str, turns: int = TURNS) -> float:
    """Seconds of one call."""
    first = case.fresh(jax.random.key(1))
    size = sum(x.nbytes for x in first)
    copies = max(1, min(16, math.ceil(2 * l2 / size)))
    fresh = [first, *(case.fresh(jax.random.key(2 + i)) for i in range(copies - 1))]
    run = repeated(functools.partial(case.call, form), fresh, turns)
    return best_time(lambda: run(case.fixed)) / (turns * copies)


def measured_limits() -> tuple[float, float]:
    """Bytes a second of a sum over 4 GB, and bfloat16 operations a second of an 8,192 product."""
    data = jnp.ones((1 << 31,), jnp.bfloat16)
    total = jax.jit(lambda x: jnp.sum(x, dtype=jnp.float32))
    bandwidth = data.nbytes / best_time(lambda: total(data))
    side = jnp.ones((8192, 8192), jnp.bfloat16)
    product = jax.jit(lambda a, b: jnp.matmul(a, b, preferred_element_type=jnp.bfloat16))
    return bandwidth, 2.0 * 8192**3 / best_time(lambda: product(side, side))


def run(
    g: Geometry, nodes: int, context: int, taus: Sequence[float], width: int, batch: int
) -> dict[str, Any]:
    """All timings of `bench` on the GPU at hand, as plain data."""
    device = jax.devices()[0]
    known = tuned.family(device.device_kind)
    bandwidth, rate = measured_limits()
    l2 = TARGETS[known].l2 if known else TARGETS["rtx-pro-6000"].l2  # the largest
    here = GpuTarget(device.device_kind, 0, 0, bandwidth, rate)
    kept = min(math.ceil(max(taus)), nodes)
    work = {w.op: w for w in roofline.round_work(g, nodes, context, max(taus), width, batch)}
    ops = []
    for case in cases(g, nodes, context, kept, width, batch):
        w = work[case.op]
        with dispatch.recorded() as taken:
            seconds = time_case(case, l2, "auto")
        ops.append(
            {
                "op": case.op,
                "count": w.count,
                "kernel_s": seconds,
                "xla_s": time_case(case, l2, "xla"),
                "least_s": w.seconds(here) / w.count,
                "ran": ", ".join(sorted({form for _, form in taken})),
            }
        )
    return {
        "kind": "measured",
        "device": device.device_kind,
        "model": g.name,
        "nodes": nodes,
        "context": context,
        "batch": batch,
        "width": width,
        "repeats": REPEATS,
        "bandwidth": bandwidth,
        "bf16_flops": rate,
        "ops": ops,
        "round": time_round(g, nodes, context, taus, width, batch),
    }


def time_round(
    g: Geometry, nodes: int, context: int, taus: Sequence[float], width: int, batch: int
) -> dict[str, Any]:
    """Plain step, verify, commit, draft and tree apart, then the whole round; random weights.

    The speed-up at a tau is tau x plain step / round, SYNTHETIC: nothing was accepted.
    """
    params = bench_round.random_params(g)
    kept = min(math.ceil(max(taus)), nodes)
    state = bench_round.random_state(g, batch, context, max(nodes, g.draft.block))
    anchor = jnp.zeros((batch,), jnp.int32)

    def chain(rows: int) -> tuple[jax.Array, jax.Array, jax.Array]:
        line = jnp.broadcast_to(jnp.arange(rows, dtype=jnp.int32)[None], (batch, rows))
        mask = jnp.broadcast_to(jnp.tril(jnp.ones((rows, rows), bool))[None], (batch, rows, rows))
        return jnp.zeros_like(line), line, mask

    forward = jax.jit(functools.partial(bench_round.forward, g))
    drafter = jax.jit(functools.partial(bench_round.draft, g), static_argnums=3)
    tree = jax.jit(bench_round.make_tree, static_argnums=3)
    commit = jax.jit(functools.partial(bench_round.commit, g), static_argnums=3, donate_argnums=1)
    plain = best_time(lambda: forward(params, state, *chain(1)).ids)
    done = forward(params, state, *chain(nodes))
    tokens, table = drafter(params, state, anchor, width)
    phases = {
        "verify": best_time(lambda: forward(params, state, *chain(nodes)).ids),
        "draft": best_time(lambda: drafter(params, state, anchor, width)),
        "tree": best_time(lambda: tree(tokens, table, anchor, nodes)),
    }
    held = state

    def commit_again() -> Any:
        nonlocal held
        held = commit(params, held, done, kept)
        # every call meets the same number of cached tokens
        held = held._replace(lengths=jnp.full((batch,), context, jnp.int32))
        return held

    phases["commit"] = best_time(commit_again)

    def again() -> Any:
        nonlocal held
        held, ids = bench_round.spec_round(g, params, held, nodes, kept, width, anchor)
        return ids

    whole = best_time(again)
    return {
        "plain_s": plain,
        "phase_s": phases,
        "round_s": whole,
        "synthetic_speedup": {f"{tau:g}": tau * plain / whole for tau in taus},
    }
