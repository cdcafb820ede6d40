"""Warping, position noise and the choice at tree nodes (cases.md 10 and 11)."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from jetspec_jax import sampling
from jetspec_jax.config import SamplingParams
from jetspec_jax.errors import InputError
from jetspec_jax.tree import Tree, accept

choose = jax.jit(sampling.choose, static_argnames="max_depth")
warp = jax.jit(sampling.warp)
noise = jax.jit(sampling.position_noise, static_argnums=2)
GREEDY = SamplingParams()


def state(*params):
    return sampling.sampling_state(params)


def batch_state(params, count, first_seed=0):
    """`count` sequences that differ in seed only."""
    one = state(params)
    rows = jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (count,)), one)
    return rows.replace(seed=jnp.arange(first_seed, first_seed + count, dtype=jnp.uint32))


def chi_square(counts, probs):
    """p-value; cells expected fewer than five times are pooled (and must be empty where the law is
    zero).
    """
    counts, probs = np.asarray(counts, float).ravel(), np.asarray(probs, float).ravel()
    assert counts[probs == 0].sum() == 0
    small = probs * counts.sum() < 5
    if small.any():
        counts = np.append(counts[~small], counts[small].sum())
        probs = np.append(probs[~small], probs[small].sum())
    keep = probs > 0
    return stats.chisquare(counts[keep], probs[keep] / probs.sum() * counts.sum()).pvalue


# --- warping --------------------------------------------------------------------------------------


def reference_support(row, t, k, p, m):
    """Textbook warping in float64 by sorting; ties with the last kept token are kept."""
    z = (row.astype(np.float64) - row.max()) / t
    keep = np.ones(len(z), bool)
    if 0 < k < len(z):
        keep &= z >= np.sort(z)[-k]
    if p < 1:
        mass = np.where(keep, np.exp(z), 0)
        order = np.argsort(-z, kind="stable")
        before = np.cumsum(mass[order]) - mass[order]
        keep &= z >= z[order][before < p * mass.sum()].min()
    if m > 0:
        keep &= np.exp(z) >= m
    return keep


FILTERS = [
    (1.0, 0, 1.0, 0.0),
    (0.7, 1, 1.0, 0.0),
    (1.0, 5, 1.0, 0.0),
    (1.0, 200, 1.0, 0.0),  # beyond the short list
    (1.0, 9_999, 1.0, 0.0),
    (0.5, 0, 0.9, 0.0),
    (3.0, 0, 0.9, 0.0),  # nucleus beyond the short list
    (1.0, 0, 0.001, 0.0),
    (1.0, 0, 1.0, 0.05),
    (4.0, 0, 1.0, 0.05),  # beyond the short list
    (0.7, 40, 0.9, 0.02),
    (5.0, 300, 0.9, 0.1),
    (1.0, 0, 1.0, 1.0),
]


@pytest.fixture(scope="module")
def rows():
    return np.random.default_rng(0).normal(0, 2, (3, 700)).astype(np.float32)


@pytest.mark.parametrize("t,k,p,m", FILTERS)
def test_warp_keeps_the_textbook_support(rows, t, k, p, m):
    warped = np.asarray(warp(rows, t, k, p, m))
    for row, out in zip(rows, warped, strict=True):
        want = reference_support(row, t, k, p, m)
        np.testing.assert_array_equal(np.isfinite(out), want)
        expected = (row - row.max()) / np.float32(t)
        np.testing.assert_allclose(out[want], expected[want], rtol=1e-6, atol=1e-6)


def test_the_filters_reach_both_the_short_list_and_the_whole_row(rows):
    sizes = [reference_support(rows[0], *f).sum() for f in FILTERS]
    filtered = [s for s, f in zip(sizes, FILTERS, strict=True) if f[1:] != (0, 1.0, 0.0)]
    assert min(filtered) == 1
    assert max(filtered) > sampling.SHORT_LIST
    assert sum(s > sampling.SHORT_LIST for s in filtered) >= 4


def test_warp_leaves_greedy_rows_untouched(rows):
    out = warp(rows, jnp.array([0.0, 1.0, 0.0]), 3, 0.5, 0.1)
    np.testing.assert_array_equal(out[0], rows[0])
    np.testing.assert_array_equal(out[2], rows[2])
    assert np.isfinite(out[1]).sum() <= 3


@pytest.mark.parametrize("size", [6, 300])  # within, and across the end of the short list
def test_ties_at_the_threshold_are_all_kept(size):
    row = np.full((1, 400), -9.0, np.float32)
    row[0, 10 : 10 + size] = 2.0
    row[0, 0] = 3.0
    for k, p in ((3, 1.0), (0, 0.5)):
        kept = np.isfinite(np.asarray(warp(row, 1.0, k, p, 0.0)))[0]
        assert kept.sum() == size + 1 and kept[0] and kept[10 : 10 + size].all()


def test_extreme_temperature_is_finite_where_it_matters(rows):
    for t in (1e-30, 100.0):
        out = np.asarray(warp(rows, t, 0, 0.9, 0.0))
        assert not np.isnan(out).any()
        assert (out.argmax(-1) == rows.argmax(-1)).all()


# --- noise ----------------------------------------------------------------------------------------


def test_noise_depends_on_seed_position_and_id_only():
    table = np.asarray(noise(jnp.array([3, 4], jnp.uint32), jnp.array([[7, 8, 9], [9, 7, 1]]), 300))
    alone = np.asarray(noise(jnp.array([4], jnp.uint32), jnp.array([[7]]), 120))
    np.testing.assert_array_equal(table[1, 1, :120], alone[0, 0])
    flat = table.reshape(6, 300)
    assert len(np.unique(flat, axis=0)) == 6
    key = sampling.position_key(jnp.uint32(4), jnp.int32(7))
    np.testing.assert_array_equal(
        jax.jit(sampling.token_noise)(key, jnp.array([250, 3, 299])), table[1, 1, [250, 3, 299]]
    )


def test_noise_is_standard_gumbel_and_uncorrelated():
    table = np.asarray(
        noise(jnp.arange(8, dtype=jnp.uint32), jnp.tile(jnp.arange(6), (8, 1)), 8192)
    )
    assert np.isfinite(table).all()
    assert stats.kstest(table.ravel(), "gumbel_r").pvalue > 1e-3
    # Neighbouring seeds, positions and ids: correlation of n pairs has standard deviation
    # 1/sqrt(n).
    for a, b in (
        (table[1:], table[:-1]),
        (table[:, 1:], table[:, :-1]),
        (table[..., 1:], table[..., :-1]),
        (table[1:, 1:, 1:], table[:-1, :-1, :-1]),
        (table[..., ::2], table[..., 1::2]),
    ):
        assert abs(np.corrcoef(a.ravel(), b.ravel())[0, 1]) < 4.5 / np.sqrt(a.size)


def test_the_low_bits_of_ids_do_not_bias_the_winner():
    table = np.asarray(noise(jnp.arange(4000, dtype=jnp.uint32), jnp.full((4000, 1), 11), 64))[:, 0]
    assert chi_square(np.bincount(table.argmax(-1), minlength=64), np.full(64, 1 / 64)) > 1e-3


# --- the choice -----------------------------------------------------------------------------------


def test_exact_ties_take_the_lowest_id():
    logits = np.zeros((1, 2, 50), np.float32)
    logits[0, 0, [17, 30, 49]] = 5.0
    ids = choose(
        logits,
        jnp.zeros((1, 2), jnp.int32),
        jnp.zeros((1, 2), jnp.int32),
        state(GREEDY),
        max_depth=0,
    )
    assert ids.tolist() == [[17, 0]]
    assert sampling.greedy(jnp.array([[-jnp.inf] * 3, [jnp.nan, 1.0, 2.0]])).tolist() == [0, 0]


MIXED = (
    GREEDY,
    SamplingParams(temperature=1.0, seed=5),
    GREEDY,
    SamplingParams(temperature=0.7, top_p=0.9, seed=5),
    SamplingParams(temperature=0.7, top_k=20, min_p=0.01, seed=6),
    SamplingParams(temperature=4.0, top_p=0.95, seed=7),
)


def mixed_batch():
    rng = np.random.default_rng(1)
    logits = (
        np.round(rng.normal(0, 2, (6, 7, 500)) * 4).astype(np.float32) / 4
    )  # rounding makes exact ties
    depth = jnp.tile(jnp.array([0, 1, 1, 2, 2, 2, 3]), (6, 1))
    positions = jnp.array([[3], [40], [5], [40], [0], [9]]) + depth
    return jnp.asarray(logits), positions, depth


def test_every_row_of_a_mixed_batch_equals_its_solo_run():
    logits, positions, depth = mixed_batch()
    together = choose(logits, positions, depth, state(*MIXED), max_depth=3)
    for i, params in enumerate(MIXED):
        one = slice(i, i + 1)
        alone = choose(logits[one], positions[one], depth[one], state(params), max_depth=3)
        np.testing.assert_array_equal(alone[0], together[i])
        for n in range(7):  # and its plain-decoding run: one node, at the same position
            plain = choose(
                logits[one, n : n + 1],
                positions[one, n : n + 1],
                jnp.zeros((1, 1), jnp.int32),
                state(params),
                max_depth=0,
            )
            assert int(plain[0, 0]) == int(together[i, n])
    np.testing.assert_array_equal(together[0], np.asarray(logits[0]).argmax(-1))
    np.testing.assert_array_equal(together[2], np.asarray(logits[2]).argmax(-1))


def test_the_choice_is_the_argmax_of_warped_logits_plus_noise():
    """The shortcuts inside `choose` (short list, noise per depth) change nothing."""
    logits, positions, depth = mixed_batch()
    s = state(*MIXED)
    column = lambda x: x[:, None]
    warped = warp(logits, column(s.temperature), column(s.top_k), column(s.top_p), column(s.min_p))
    gumbel = noise(s.seed, positions, 500)
    want = np.where(
        np.asarray(s.temperature)[:, None] > 0,
        np.asarray(warped + gumbel).argmax(-1),
        np.asarray(logits).argmax(-1),
    )
    np.testing.assert_array_equal(choose(logits, positions, depth, s, max_depth=3), want)


def test_loop_and_vectorised_forms_agree(monkeypatch):
    """CPU loops over rows, other backends take vmap: the same tokens."""
    logits, positions, depth = mixed_batch()
    looped = choose(logits, positions, depth, state(*MIXED), max_depth=3)
    monkeypatch.setattr(sampling, "_each_row", lambda f, *a: jax.vmap(f)(*a))
    vectorised = jax.jit(functools.partial(sampling.choose, max_depth=3))(
        logits, positions, depth, state(*MIXED)
    )
    np.testing.assert_array_equal(looped, vectorised)


def test_empty_batch_is_refused():
    with pytest.raises(InputError):
        sampling.sampling_state([])


# --- the law (cases.md 10) ------------------------------------------------------------------------

DRAWS = 200_000
# Target law of the next token given the last one (row 0 is the prompt's end, too).
P = np.array(
    [
        [0.50, 0.25, 0.15, 0.07, 0.03],
        [0.05, 0.60, 0.05, 0.20, 0.10],
        [0.20, 0.20, 0.20, 0.20, 0.20],
        [0.00, 0.10, 0.00, 0.90, 0.00],
        [0.30, 0.01, 0.30, 0.01, 0.38],
    ],
    np.float32,
)
LOGITS = np.log(np.maximum(P, 1e-38)).astype(np.float32)
LOGITS[P == 0] = -np.inf


@functools.partial(jax.jit, static_argnames="max_depth")
def round_of(tree, origin, sampler, max_depth):
    """Choose at every node of every tree, then accept: the compiled verification without the
    model.
    """
    logits = jnp.asarray(LOGITS)[tree.token]
    choice = sampling.choose(logits, origin[:, None] + tree.depth, tree.depth, sampler, max_depth)
    return jax.vmap(functools.partial(accept, depth=max_depth))(tree, choice)


def tree_of(tokens):
    """Root, two siblings at depth 1, one child under each. tokens [B, 5]."""
    count = len(tokens)
    row = lambda *v: jnp.tile(jnp.array(v, jnp.int32), (count, 1))
    return Tree(
        token=jnp.asarray(tokens, jnp.int32),
        parent=row(-1, 0, 0, 1, 2),
        depth=row(0, 1, 1, 2, 2),
        score=jnp.zeros((count, 5), jnp.float32),
        rank=row(-1, 0, 1, 0, 0),
        source=row(0, 0, 0, 0, 0),
        valid=jnp.ones((count, 5), bool),
    )


def plain_tokens(count, sampler, steps):
    """Tokens of plain decoding from state 0 at position 0: [count, steps]."""
    token, out = jnp.zeros((count, 1), jnp.int32), []
    zero = jnp.zeros((count, 1), jnp.int32)
    for step in range(steps):
        token = choose(jnp.asarray(LOGITS)[token], zero + step, zero, sampler, max_depth=0)
        out.append(np.asarray(token)[:, 0])
    return np.stack(out, 1)


def drafted(q_first, q_next, rng):
    """Two distinct siblings from q_first, and a child of each from q_next[sibling]: [DRAWS, 5]."""

    def draw(q, size):
        q = np.asarray(q, np.float64)
        return rng.choice(5, size=size, p=q / q.sum())

    first = draw(q_first, DRAWS)
    second = draw(q_first, DRAWS)
    second = np.where(second == first, (first + 1) % 5, second)

    def children(parents):
        out = np.empty(DRAWS, int)
        for token in range(5):
            here = parents == token
            out[here] = draw(q_next[token], here.sum())
        return out

    return np.stack([np.zeros(DRAWS, int), first, second, children(first), children(second)], 1)


UNIFORM = np.full((5, 5), 0.2)
DISJOINT = np.tile(
    np.array([0.5, 0.0, 0.5, 0.0, 0.0]), (5, 1)
)  # after token 3 the target never says 0 or 2


@pytest.fixture(scope="module")
def plain():
    return plain_tokens(DRAWS, batch_state(SamplingParams(temperature=1.0), DRAWS), 3)


def joint(depth):
    law = P[0].astype(np.float64)
    for _ in range(depth - 1):
        law = law[..., None] * P
    return law


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_plain_law(plain, depth):
    index = np.ravel_multi_index(tuple(plain[:, :depth].T), (5,) * depth)
    assert chi_square(np.bincount(index, minlength=5**depth), joint(depth)) > 1e-3


@pytest.mark.parametrize("q", ["p", "uniform", "disjoint"])
def test_tree_law(plain, q):
    q_next = {"p": P, "uniform": UNIFORM, "disjoint": DISJOINT}[q]
    tokens = drafted(q_next[0], q_next, np.random.default_rng(3))
    sampler = batch_state(SamplingParams(temperature=1.0), DRAWS)
    outcome = round_of(tree_of(tokens), jnp.zeros(DRAWS, jnp.int32), sampler, max_depth=2)
    accepted, path, bonus = (np.asarray(x) for x in (outcome.accepted, outcome.path, outcome.bonus))
    committed = np.where(
        np.arange(2) < accepted[:, None], np.take_along_axis(tokens, path[:, 1:], 1), -1
    )
    committed = np.concatenate([committed, np.full((DRAWS, 1), -1)], 1)
    np.put_along_axis(committed, accepted[:, None], bonus[:, None], 1)
    # Per depth, given everything before it: the law of each committed token is the target's.
    for depth in (1, 2, 3):
        reached = accepted >= depth - 1
        assert reached.sum() > 1000
        here = committed[reached]
        last = np.zeros(len(here), int) if depth == 1 else here[:, depth - 2]
        for token in np.unique(last):
            counts = np.bincount(here[last == token, depth - 1], minlength=5)
            assert chi_square(counts, P[token]) > 1e-4, (depth, token)
    assert set(np.unique(accepted)) == {0, 1, 2}  # the test saw every way a round can end
    assert set(np.unique(path[accepted > 0, 1])) == {1, 2}  # and both siblings
    # Stronger than the law: the very tokens of plain decoding.
    valid = np.arange(3) <= accepted[:, None]
    np.testing.assert_array_equal(committed[valid], plain[valid])


def test_warped_law():
    params = SamplingParams(temperature=0.7, top_k=4, top_p=0.9)
    tokens = plain_tokens(DRAWS, batch_state(params, DRAWS, first_seed=10**6), 1)[:, 0]
    row = LOGITS[0]
    law = np.exp(row.astype(np.float64) / 0.7) * reference_support(row, 0.7, 4, 0.9, 0.0)
    assert 1 < (law > 0).sum() < 5
    assert chi_square(np.bincount(tokens, minlength=5), law / law.sum()) > 1e-3


def test_law_over_positions_of_one_seed():
    """One request's own noise, position after position, is as good as fresh seeds."""
    count = 50_000
    logits = jnp.broadcast_to(jnp.asarray(LOGITS[0]), (1, count, 5))
    depth = jnp.arange(count, dtype=jnp.int32)[None]
    ids = np.asarray(
        choose(
            logits, depth, depth, state(SamplingParams(temperature=1.0, seed=9)), max_depth=count
        )
    )[0]
    assert chi_square(np.bincount(ids, minlength=5), P[0]) > 1e-3
    pairs = np.bincount(ids[:-1] * 5 + ids[1:], minlength=25)
    assert chi_square(pairs, np.outer(P[0], P[0])) > 1e-3
