"""How the target's logits become tokens: warping, position-keyed noise, and the choice at every
tree node.

The noise of a position is a function of (request seed, absolute position, token id) only, and a
sampled token is `argmax(warped logits + Gumbel noise)` (the Gumbel-max trick), so plain decoding
and any tree emit the same tokens for the same seed, whatever the budget, the batch or the round
boundaries, and the law is exactly the target's (algorithm.md section 5). Greedy rows take the
argmax; the lowest id wins ties.

Everything here works row by row: a row's result depends on that row alone. On CPU rows run in a
loop whose body has one row's shape, so not even a reduction order can depend on the batch, and the
branches that a row does not need are really skipped.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from jetspec_jax.config import SamplingParams
from jetspec_jax.errors import InputError
from jetspec_jax.typing import Array

# Best logits looked at before the whole row is. Support sets after top-k / top-p / min-p nearly
# always fit, and finding them this way costs one partial sort instead of about 25 passes over the
# vocabulary.
SHORT_LIST = 128


@flax.struct.dataclass
class SamplingState:
    """Per-sequence sampling parameters on the device (B sequences)."""

    temperature: Array  # [B] float32, 0 = greedy
    top_k: Array  # [B] int32, 0 = off
    top_p: Array  # [B] float32, 1 = off
    min_p: Array  # [B] float32, 0 = off
    seed: Array  # [B] uint32


def sampling_state(params: Sequence[SamplingParams]) -> SamplingState:
    """Stacks the sampling parameters of a batch.

    Args:
        params: one entry per sequence.

    Raises:
        InputError: the batch is empty.
    """
    if not params:
        raise InputError(
            "no sampling parameters for an empty batch; give one SamplingParams per prompt"
        )

    def column(name: str, dtype: Any) -> Array:
        return jnp.asarray(np.array([getattr(p, name) for p in params], dtype=dtype))

    return SamplingState(
        temperature=column("temperature", np.float32),
        top_k=column("top_k", np.int32),
        top_p=column("top_p", np.float32),
        min_p=column("min_p", np.float32),
        seed=column("seed", np.uint32),
    )


def greedy(logits: Array) -> Array:
    """Lowest id among the best logits. [..., V] -> [...] int32.

    Two vectorisable passes; XLA CPU's own argmax (a two-operand reduction) takes twice as long.
    """
    best = jnp.max(logits, axis=-1, keepdims=True)
    ids = jax.lax.broadcasted_iota(jnp.int32, logits.shape, logits.ndim - 1)
    # `~(x < best)` rather than `x >= best`: a NaN row then yields id 0, not an id out of range.
    return jnp.min(jnp.where(~(logits < best), ids, logits.shape[-1] - 1), axis=-1)


# --- noise ----------------------------------------------------------------------------------------


def _mix(h: Array) -> Array:
    """32-bit finaliser with low bias (C. Wellons, hash-prospector: 0x7feb352d / 0x846ca68b)."""
    h = (h ^ (h >> 16)) * jnp.uint32(0x7FEB352D)
    h = (h ^ (h >> 15)) * jnp.uint32(0x846CA68B)
    return h ^ (h >> 16)


def position_key(seed: Array, position: Array) -> Array:
    """Two key words of one position: threefry of (seed, position). scalars -> [2] uint32."""
    key = jax.random.fold_in(jax.random.key(seed, impl="threefry2x32"), position)
    return jax.random.key_data(key)


def token_noise(key: Array, ids: Array) -> Array:
    """Standard Gumbel noise of tokens at one position.

    Random access: the noise of an id needs no other id. Two rounds of a 32-bit mixer under a
    threefry key cost a third of threefry itself on CPU. All 32 bits are used, and the small end of
    the uniform (where Gumbel noise is large and decides) keeps a float's full relative precision.

    Args:
        key: [2] uint32 from `position_key`.
        ids: [...] int32 token ids.

    Returns:
        [...] float32.
    """
    bits = _mix(_mix(ids.astype(jnp.uint32) + key[0]) ^ key[1])
    uniform = bits.astype(jnp.float32) * jnp.float32(2.0**-32) + jnp.float32(2.0**-33)
    uniform = jnp.minimum(uniform, jnp.float32(1.0 - 2.0**-24))  # rounding up to 1 would give -inf
    return -jnp.log(-jnp.log1p(-uniform))


def position_noise(seed: Array, positions: Array, vocab: int) -> Array:
    """Gumbel noise of every token at the given positions.

    Args:
        seed: [B] uint32.
        positions: [B, P] int32 absolute positions.
        vocab: vocabulary size V.

    Returns:
        [B, P, V] float32, a function of (seed, position, token id) only.
    """
    ids = jax.lax.iota(jnp.int32, vocab)
    one = lambda s, p: token_noise(position_key(s, p), ids)  # noqa: E731
    return jax.vmap(jax.vmap(one, (None, 0)))(seed, positions)


# --- warping --------------------------------------------------------------------------------------


def _ordered_to_float(bits: Array) -> Array:
    """int32 whose order is that of the floats -> the float."""
    return jax.lax.bitcast_convert_type(jnp.where(bits < 0, bits ^ 0x7FFFFFFF, bits), jnp.float32)


# -inf in that order
_LOWEST = int(np.array(-np.inf, np.float32).view(np.int32) ^ np.int32(0x7FFFFFFF))


def _bisect(enough: Callable[[Array], tuple[Array, Array]]) -> Array:
    """Largest float t <= 0 for which `enough(t)` holds.

    `enough` returns (holds, exact); the search may stop at an exact t.
    """

    def body(carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        low, high, _ = carry
        middle = low + (high - low) // 2
        ok, exact = enough(_ordered_to_float(middle))
        return jnp.where(ok, middle, low), jnp.where(ok, high, middle), exact

    def unfinished(carry: tuple[Array, Array, Array]) -> Array:
        low, high, exact = carry
        return (high - low > 1) & ~exact

    start = (jnp.int32(_LOWEST), jnp.int32(1), jnp.bool_(False))
    return _ordered_to_float(jax.lax.while_loop(unfinished, body, start)[0])


def _threshold_dense(z: Array, top_k: Array, top_p: Array) -> Array:
    """Smallest logit that top-k and top-p keep, by bisection over float bits.

    z [V] with maximum 0 -> scalar.
    """

    def kth() -> Array:
        def enough(t: Array) -> tuple[Array, Array]:
            count = jnp.sum((z >= t).astype(jnp.int32))
            return count >= top_k, count == top_k

        return _bisect(enough)

    keep_all = jnp.float32(-jnp.inf)
    by_k = jax.lax.cond((top_k > 0) & (top_k < z.shape[-1]), kth, lambda: keep_all)

    def nucleus() -> Array:
        mass = jnp.where(z >= by_k, jnp.exp(z), 0.0)
        wanted = top_p * jnp.sum(mass)

        def enough(t: Array) -> tuple[Array, Array]:
            held = jnp.sum(jnp.where(z >= t, mass, 0.0))
            return held >= wanted, held == wanted

        return jnp.maximum(_bisect(enough), by_k)

    return jax.lax.cond(top_p < 1.0, nucleus, lambda: by_k)


def _threshold_short(z: Array, best: Array, top_k: Array, top_p: Array) -> tuple[Array, Array]:
    """Same threshold from the `best` [K] logits alone (sorted, best first).

    Returns:
        (threshold, complete): `complete` says that the top-k set and the mass it holds lie inside
        `best`, so that the threshold is right if the last of `best` is below it.
    """
    size = best.shape[0]
    by_k = jnp.where(top_k > 0, best[jnp.clip(top_k, 1, size) - 1], -jnp.inf)
    complete = (top_k == 0) | ((top_k <= size) & (best[-1] < by_k))

    def nucleus() -> Array:
        mass = jnp.where(best >= by_k, jnp.exp(best), 0.0)
        total = jax.lax.cond(top_k > 0, lambda: jnp.sum(mass), lambda: jnp.sum(jnp.exp(z)))
        before = jnp.cumsum(mass) - mass
        kept = (before < top_p * total) & (best >= by_k)
        return jnp.min(jnp.where(kept, best, jnp.inf))

    return jax.lax.cond(top_p < 1.0, nucleus, lambda: by_k), complete


def _top_k(z: Array, size: int) -> tuple[Array, Array]:
    """Best `size` of z [V], with ids, in the one form that XLA CPU turns into its partial sort.

    That needs rank 2 and slices of the sort that no other slice is merged into (hence the barrier);
    any other form is a full sort, a hundred times slower.
    """
    values, ids = jax.lax.optimization_barrier(tuple(jax.lax.top_k(z[None], size)))
    return values[0], ids[0]


def _support(
    z: Array, top_k: Array, top_p: Array, min_p: Array
) -> tuple[Array, Array, Array, Array]:
    """Support of a warped row: z [V] with maximum 0.

    Returns:
        threshold: scalar; the support is {z >= threshold}.
        best, ids: [K] the best logits and their ids.
        short: True when the whole support is among them.
    """
    size = min(SHORT_LIST, z.shape[-1])
    by_min = jnp.log(min_p)  # p >= min_p * p_max; log(0) = -inf keeps all
    best, ids = _top_k(z, size)
    quick, complete = _threshold_short(z, best, top_k, top_p)
    quick = jnp.maximum(quick, by_min)
    short = complete & (best[-1] < quick)
    threshold = jax.lax.cond(
        short, lambda: quick, lambda: jnp.maximum(_threshold_dense(z, top_k, top_p), by_min)
    )
    return threshold, best, ids, short


def _tempered(row: Array, temperature: Array) -> Array:
    """Row / temperature, the maximum moved to 0 first: a tiny temperature cannot overflow."""
    return (row - jnp.max(row)) / temperature


def _filters(top_k: Array, top_p: Array, min_p: Array) -> Array:
    return (top_k > 0) | (top_p < 1.0) | (min_p > 0.0)


def _each_row(f: Callable[..., Any], *rows: Array) -> Any:
    """f over the leading axis: a loop on CPU (skips branches, keeps a row in cache), else vmap."""
    return jax.lax.platform_dependent(
        *rows, cpu=lambda *a: jax.lax.map(lambda r: f(*r), a), default=lambda *a: jax.vmap(f)(*a)
    )


def warp(logits: Array, temperature: Array, top_k: Array, top_p: Array, min_p: Array) -> Array:
    """Temperature, top-k, top-p over what top-k kept, then min-p (the order of transformers).

    A filter keeps every token that ties with the last one it keeps, so the result does not depend
    on token order.

    Args:
        logits: [..., V] float.
        temperature, top_k, top_p, min_p: broadcastable to [...]; 0, 1 and 0 switch the filters off.

    Returns:
        [..., V] float32 logits up to a constant per row, -inf where masked. Rows with temperature 0
        are untouched.
    """
    logits = logits.astype(jnp.float32)
    lead = logits.shape[:-1]

    def row(x: Array, t: Array, k: Array, p: Array, m: Array) -> Array:
        def warped() -> Array:
            z = _tempered(x, t)

            def filtered() -> Array:
                return jnp.where(z >= _support(z, k, p, m)[0], z, -jnp.inf)

            return jax.lax.cond(_filters(k, p, m), filtered, lambda: z)

        return jax.lax.cond(t > 0.0, warped, lambda: x)

    def rows(value: Array, dtype: Any) -> Array:
        return jnp.broadcast_to(jnp.asarray(value, dtype), lead).reshape(-1)

    out = _each_row(
        row,
        logits.reshape(-1, logits.shape[-1]),
        rows(temperature, jnp.float32),
        rows(top_k, jnp.int32),
        rows(top_p, jnp.float32),
        rows(min_p, jnp.float32),
    )
    return out.reshape(logits.shape)


# --- the choice -----------------------------------------------------------------------------------


Noise = Callable[[Array, Array], Array]  # `token_noise`, or a kernel that computes the same law


def _choose_sequence(
    token_noise: Noise,
    logits: Array,
    origin: Array,
    depth: Array,
    t: Array,
    k: Array,
    p: Array,
    m: Array,
    seed: Array,
    max_depth: int,
) -> Array:
    """Sampled choices of one sequence: logits [N, V], root's position, depth [N] -> [N] int32."""
    vocab = logits.shape[-1]
    all_ids = jax.lax.iota(jnp.int32, vocab)
    keys = jax.vmap(position_key, (None, 0))(
        seed, origin + jnp.arange(max_depth + 1, dtype=jnp.int32)
    )
    filters = _filters(k, p, m)

    # Without a filter each node needs the noise of the whole vocabulary: made once per depth, not
    # per node.
    def table() -> Array:
        return _each_row(lambda key: token_noise(key, all_ids), keys)

    noise = jax.lax.cond(filters, lambda: jnp.zeros((max_depth + 1, vocab), jnp.float32), table)

    def unfiltered(z: Array) -> tuple[Array, Array, Array, Array]:
        size = min(SHORT_LIST, vocab)
        return jnp.float32(-jnp.inf), jnp.zeros(size), jnp.zeros(size, jnp.int32), jnp.bool_(False)

    def node(x: Array, d: Array) -> Array:
        z = _tempered(x, t)
        threshold, best, ids, short = jax.lax.cond(
            filters, lambda: _support(z, k, p, m), lambda: unfiltered(z)
        )

        def from_list() -> Array:
            score = jnp.where(best >= threshold, best + token_noise(keys[d], ids), -jnp.inf)
            return jnp.min(jnp.where(score >= jnp.max(score), ids, vocab - 1))

        def from_row() -> Array:
            g = jax.lax.cond(filters, lambda: token_noise(keys[d], all_ids), lambda: noise[d])
            return greedy(jnp.where(z >= threshold, z + g, -jnp.inf))

        return jax.lax.cond(short, from_list, from_row)

    return _each_row(node, logits, depth)


def choose(
    logits: Array,
    positions: Array,
    depth: Array,
    state: SamplingState,
    max_depth: int,
    noise: Noise = token_noise,
) -> Array:
    """The target's own choice after every node of every sequence.

    The noise that decides the token after a node is that of the node's absolute position, so a
    token's noise is the same whether the position is reached by plain decoding (N = 1, depth 0) or
    inside a tree.

    Args:
        logits: [B, N, V] float, logits of node n for the next token. Node 0 is the root.
        positions: [B, N] int32 absolute positions; positions[b, n] = positions[b, 0] + depth[b, n].
        depth: [B, N] int32 in 0..max_depth.
        state: sampling parameters of the B sequences.
        max_depth: D, static.
        noise: (key [2] uint32, ids [...] int32) -> [...] float32.

    Returns:
        [B, N] int32 token ids. Temperature 0: lowest id among the best logits. Otherwise the
        Gumbel-max sample of the warped logits. If no sequence samples, neither noise nor warping is
        computed.
    """
    logits = logits.astype(jnp.float32)
    depth = jnp.clip(depth, 0, max_depth)

    def sequence(
        x: Array, origin: Array, d: Array, t: Array, k: Array, p: Array, m: Array, s: Array
    ) -> Array:
        return jax.lax.cond(
            t > 0.0,
            lambda: _choose_sequence(noise, x, origin, d, t, k, p, m, s, max_depth),
            lambda: greedy(x),
        )

    def mixed() -> Array:
        return _each_row(
            sequence,
            logits,
            positions[:, 0],
            depth,
            state.temperature,
            state.top_k,
            state.top_p,
            state.min_p,
            state.seed,
        )

    return jax.lax.cond(jnp.any(state.temperature > 0.0), mixed, lambda: greedy(logits))
