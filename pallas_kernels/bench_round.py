"""One speculative round of a named geometry from the ops alone, with random weights.

What it computes has the shapes, the bytes and the order of a real round (RMSNorm, RoPE, tree
attention, SwiGLU or experts, LM head, commit, draft block, tree), and no meaning. Which rows are
accepted is stated from outside. The decoder itself is `jetspec_jax.decode`, which this package may
not import.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels import draft_head_topk
from pallas_kernels import row_invariant_matmul as rim
from pallas_kernels.accept_commit import accept_commit
from pallas_kernels.build_tree import Nodes, build_tree
from pallas_kernels.geometries import DraftHead, Geometry
from pallas_kernels.tree_attention import tree_attention
from pallas_kernels.verify_head import verify_head

Params = dict[str, Any]
DTYPE = jnp.bfloat16  # of weights, rows and caches (tests on a CPU take float32, its native one)
_EPS, _BASE = 1e-6, 1e6  # of RMSNorm; of RoPE


class State(NamedTuple):
    """Caches of a batch, per layer [B, K, S, h]."""

    keys: tuple[jax.Array, ...]  # of the target
    values: tuple[jax.Array, ...]
    draft_keys: tuple[jax.Array, ...]
    draft_values: tuple[jax.Array, ...]
    lengths: jax.Array  # [B] int32, live slots


class Verified(NamedTuple):
    """What a forward leaves: choices [B, N], rows [L, B, K, N, h], taps [B, N, taps H]."""

    ids: jax.Array
    new_k: jax.Array
    new_v: jax.Array
    taps: jax.Array


def _layer_shapes(g: Geometry, ffn: int, experts: int) -> dict[str, tuple[int, ...]]:
    group = (experts,) if experts else ()
    shapes = {
        "qkv": (g.qkv, g.hidden),
        "o": (g.hidden, g.q_width),
        "gate_up": (*group, 2 * ffn, g.hidden),
        "down": (*group, g.hidden, ffn),
    }
    return shapes | ({"router": (experts, g.hidden)} if experts else {})


def random_params(g: Geometry, seed: int = 0) -> Params:
    """Random weights of target and draft head."""
    d = g.draft
    shapes: Params = {
        "embed": (g.vocab, g.hidden),
        "head": (g.vocab, g.hidden),
        "layers": tuple(_layer_shapes(g, g.ffn, g.experts) for _ in range(g.layers)),
        "fc": (g.hidden, d.taps * g.hidden),
        "draft_layers": tuple(_layer_shapes(g, d.ffn, 0) for _ in range(d.layers)),
        "draft_head": (d.vocab, g.hidden),
    }
    leaves, tree = jax.tree.flatten(shapes, is_leaf=lambda x: isinstance(x, tuple) and _numbers(x))
    keys = jax.random.split(jax.random.key(seed), len(leaves))
    draw = jax.jit(lambda key, shape: 0.02 * jax.random.normal(key, shape, DTYPE), static_argnums=1)
    return jax.tree.unflatten(tree, [draw(k, shape) for k, shape in zip(keys, leaves, strict=True)])


def _numbers(x: tuple[Any, ...]) -> bool:
    return all(isinstance(n, int) for n in x)


def random_state(g: Geometry, batch: int, context: int, slack: int, seed: int = 1) -> State:
    """Caches with `context` live slots and room for `slack` more (a multiple of 64 in all)."""
    slots = -(-(context + slack) // 64) * 64
    shape = (batch, g.kv_heads, slots, g.head_dim)
    draw = jax.jit(lambda key: jax.random.normal(key, shape, DTYPE))
    counts = (g.layers, g.layers, g.draft.layers, g.draft.layers)
    keys = iter(jax.random.split(jax.random.key(seed), sum(counts)))
    caches = [tuple(draw(next(keys)) for _ in range(n)) for n in counts]
    return State(*caches, lengths=jnp.full((batch,), context, jnp.int32))


def _norm(x: jax.Array) -> jax.Array:
    wide = x.astype(jnp.float32)
    return (wide * jax.lax.rsqrt((wide * wide).mean(-1, keepdims=True) + _EPS)).astype(x.dtype)


def _rotate(x: jax.Array, positions: jax.Array) -> jax.Array:
    """RoPE: x [B, N, heads, h], positions [B, N]."""
    half = x.shape[-1] // 2
    angle = positions[..., None, None].astype(jnp.float32) * (
        _BASE ** (-jnp.arange(half, dtype=jnp.float32) / half)
    ).reshape(1, 1, 1, half)
    a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)


def _project(x: jax.Array, w: jax.Array) -> jax.Array:
    return rim.project(x, w).astype(x.dtype)


def _feed_forward(g: Geometry, p: Params, x: jax.Array) -> jax.Array:
    if "router" not in p:
        gate, up = jnp.split(rim.project(x, p["gate_up"]), 2, axis=-1)
        return _project((jax.nn.silu(gate) * up).astype(x.dtype), p["down"])
    rows = x.reshape(-1, x.shape[-1])
    weight, expert = jax.lax.top_k(jax.nn.softmax(rim.project(rows, p["router"])), g.active)
    spread = jnp.repeat(rows, g.active, axis=0)
    ids = expert.reshape(-1).astype(jnp.int32)
    gate, up = jnp.split(rim.project_grouped(spread, p["gate_up"], ids), 2, axis=-1)
    out = rim.project_grouped((jax.nn.silu(gate) * up).astype(x.dtype), p["down"], ids)
    mixed = (out.reshape(*expert.shape, -1) * weight[..., None]).sum(1)
    return mixed.astype(x.dtype).reshape(x.shape)


def _layer(
    g: Geometry,
    p: Params,
    x: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    lengths: jax.Array,
    positions: jax.Array,
    mask: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """One decoder layer over rows [B, N, H]: new rows, and their keys and values [B, K, N, h]."""
    batch, rows, _ = x.shape
    qkv = _project(_norm(x), p["qkv"]).reshape(batch, rows, -1, g.head_dim)
    q, k, v = jnp.split(qkv, (g.heads, g.heads + g.kv_heads), axis=2)
    q, k = _rotate(q, positions), _rotate(k, positions)
    group = (batch, rows, g.kv_heads, g.heads // g.kv_heads, g.head_dim)
    new_k, new_v = k.swapaxes(1, 2), v.swapaxes(1, 2)
    seen = tree_attention(
        q.reshape(group).transpose(0, 2, 3, 1, 4),
        keys,
        values,
        lengths,
        new_k,
        new_v,
        mask,
        scale=g.head_dim**-0.5,
    )
    x = x + _project(seen.transpose(0, 3, 1, 2, 4).reshape(batch, rows, g.q_width), p["o"])
    return x + _feed_forward(g, p, _norm(x)), new_k, new_v


def forward(
    g: Geometry, params: Params, state: State, tokens: jax.Array, depth: jax.Array, mask: jax.Array
) -> Verified:
    """The target over N rows a sequence: tokens and depth [B, N] int32, mask [B, N, N] bool."""
    x = params["embed"][tokens]
    positions = state.lengths[:, None] + depth
    every = max(g.layers // g.draft.taps, 1)
    rows_k, rows_v, taps = [], [], []
    for i, p in enumerate(params["layers"]):
        x, k, v = _layer(g, p, x, state.keys[i], state.values[i], state.lengths, positions, mask)
        rows_k.append(k)
        rows_v.append(v)
        if i % every == every - 1 and len(taps) < g.draft.taps:
            taps.append(x)
    counts = jnp.full(tokens.shape[:1], tokens.shape[1], jnp.int32)
    ids = verify_head(_norm(x), params["head"], counts).ids
    return Verified(ids, jnp.stack(rows_k), jnp.stack(rows_v), jnp.concatenate(taps, axis=-1))


def commit(g: Geometry, params: Params, state: State, done: Verified, kept: int) -> State:
    """The first `kept` rows become context, of the target and of the draft head. (The rows that
    are accepted have no meaning here; that they are the first ones changes no byte.)"""
    batch = state.lengths.shape[0]
    path = jnp.broadcast_to(jnp.arange(kept, dtype=jnp.int32)[None], (batch, kept))
    counts = jnp.full((batch,), kept, jnp.int32)
    keys, values = accept_commit(
        state.keys, state.values, done.new_k, done.new_v, path, state.lengths, counts
    )
    fused = _norm(_project(done.taps[:, :kept], params["fc"]))
    positions = state.lengths[:, None] + jnp.arange(kept, dtype=jnp.int32)[None]
    rows_k, rows_v = [], []
    for p in params["draft_layers"]:
        kv = _project(fused, p["qkv"][g.q_width :]).reshape(batch, kept, -1, g.head_dim)
        k, v = jnp.split(kv, 2, axis=2)
        rows_k.append(_rotate(k, positions).swapaxes(1, 2))
        rows_v.append(v.swapaxes(1, 2))
    draft_keys, draft_values = accept_commit(
        state.draft_keys,
        state.draft_values,
        jnp.stack(rows_k),
        jnp.stack(rows_v),
        path,
        state.lengths,
        counts,
    )
    return State(keys, values, draft_keys, draft_values, state.lengths + kept)


def draft(
    g: Geometry, params: Params, state: State, anchor: jax.Array, width: int
) -> tuple[jax.Array, jax.Array]:
    """Candidates of a block behind anchor [B]: tokens [B, D, W], log-probabilities [B, D, W, W]."""
    d: DraftHead = g.draft
    tokens = jnp.concatenate(
        [anchor[:, None], jnp.zeros((anchor.shape[0], d.block - 1), jnp.int32)], axis=1
    )
    x = params["embed"][tokens]
    positions = state.lengths[:, None] + jnp.arange(d.block, dtype=jnp.int32)[None]
    mask = jnp.broadcast_to(
        jnp.tril(jnp.ones((d.block, d.block), bool))[None], (*tokens.shape, d.block)
    )
    for i, p in enumerate(params["draft_layers"]):
        x, _, _ = _layer(
            g, p, x, state.draft_keys[i], state.draft_values[i], state.lengths, positions, mask
        )
    return draft_head_topk.candidates(_norm(x)[:, 1:], params["draft_head"], width)


def ancestors(parent: jax.Array) -> jax.Array:
    """parent [B, N] (-1 at the root) -> [B, N, N] bool, ancestor or self."""
    nodes = parent.shape[1]
    mask = jnp.broadcast_to(jnp.eye(nodes, dtype=bool)[None], (*parent.shape, nodes))
    jump = jnp.maximum(parent, 0)
    for _ in range(max(nodes - 1, 1).bit_length()):
        mask = mask | jnp.take_along_axis(mask, jump[..., None], axis=1)
        jump = jnp.take_along_axis(jump, jump, axis=1)
    return mask


def make_tree(tokens: jax.Array, table: jax.Array, anchor: jax.Array, nodes: int) -> Nodes:
    """The best tree of the candidates."""
    return build_tree(tokens, table, anchor, nodes)


@functools.partial(jax.jit, static_argnums=(0, 3, 4, 5), donate_argnums=2)
def spec_round(
    g: Geometry, params: Params, state: State, nodes: int, kept: int, width: int, anchor: jax.Array
) -> tuple[State, jax.Array]:
    """A whole round that commits `kept` rows: the caches and the next anchor [B]."""
    tokens, table = draft(g, params, state, anchor, width)
    tree = make_tree(tokens, table, anchor, nodes)
    done = forward(g, params, state, tree.token, tree.depth, ancestors(tree.parent))
    after = commit(g, params, state, done, kept)
    # every round of a timing meets the same number of cached tokens
    return after._replace(lengths=state.lengths), done.ids[:, kept - 1]
