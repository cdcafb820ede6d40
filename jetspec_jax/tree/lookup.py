"""Prompt lookup: what followed earlier occurrences of the last tokens, as a free second drafter.

Where a text repeats itself (code, quotations, tables, loops), copying what followed last time is
right more often than a small head, costs no forward pass, and a tree can hold both opinions
(`merge.merge`).
"""

from __future__ import annotations

import flax.struct
import jax.numpy as jnp
import numpy as np

from jetspec_jax.errors import ConfigError
from jetspec_jax.typing import Array

# Probability that a copied token is right when exactly m tokens before it match (index m; the last
# entry serves all longer matches). A copied token that was right makes the match one longer for the
# next. Measured with the SmolLM2 tokenizer on 40 Python modules of the standard library (35,000
# positions) and 40 markdown files (27,000), the first 1,024 tokens of each, longest match and then
# the most recent; mean of the two, smoothed: code 0.25 0.41 0.51 0.59 0.63 0.66 0.66 0.72 0.79
# 0.83, prose 0.19 0.47 0.59 0.65 0.73 0.72 0.71 0.77 0.86 0.84.
MATCH_PROBABILITY: tuple[float, ...] = (
    *(0.01, 0.22, 0.44, 0.55, 0.62, 0.67),
    *(0.69, 0.71, 0.75, 0.80, 0.83),
)
# Factor on the first token of the second, third, ... continuation, which is right only where the
# first is wrong. Same texts: where the first was wrong, the second was right 15% to 25% of the
# time.
BRANCH_FACTOR = 0.2

_PREFER = 1 << 29  # above any recency key: a continuation with a new first token beats one without


@flax.struct.dataclass
class Chains:
    """Continuations offered by prompt lookup.

    Attributes:
        token: `[R, D]` int32, 0 where not valid.
        score: `[R, D]` float32, log-probability of each token given the tokens before it in its
            chain (nats); -inf where not valid. The score of a path is the running sum.
        valid: `[R, D]` bool; once false, false to the end of the row.
    """

    token: Array
    score: Array
    valid: Array


def match_lengths(tokens: Array, length: Array, ngram: int) -> Array:
    """How many of the last tokens also stand before each position. `[S]` int32, 0..ngram.

    Entry i counts j = 1, 2, ... with `tokens[i-j] == tokens[length-j]`; it is 0 for i >= length (no
    continuation to copy) and i = 0.
    """
    size = tokens.shape[0]
    place = np.arange(size, dtype=np.int32)
    length = jnp.asarray(length, jnp.int32)
    run = (place < length) & (place > 0)
    count = jnp.zeros((size,), jnp.int32)
    for back in range(1, ngram + 1):
        last = tokens.at[jnp.maximum(length - back, 0)].get(mode="clip")
        before = jnp.pad(tokens, (back, 0))[:size]
        run = run & (before == last) & (place >= back)
        count = count + run.astype(jnp.int32)
    return count


def lookup_candidates(
    tokens: Array,
    length: Array,
    *,
    ngram: int,
    branches: int,
    depth: int,
    overlap: bool = False,
) -> Chains:
    """Finds earlier occurrences of the last tokens and offers what followed them.

    Longest match first, up to `ngram` tokens and no shorter than 2 (1 when ngram is 1: single
    tokens repeat by chance too often otherwise), then the most recent. Each further continuation
    must start with a token that no earlier one starts with, because siblings share one budget; only
    where there is none may it share the first token and differ in the second.

    Args:
        tokens: `[S]` int32 committed tokens, any values from `length` on.
        length: traced scalar, number of committed tokens.
        ngram: static, longest match looked for.
        branches: static R.
        depth: static D.
        overlap: False: a continuation stops at `length`. True: it goes on by repeating itself, as a
            copy with overlap in LZ77 would (a loop of period p then yields more than p tokens).

    Returns:
        R chains of D tokens.

    Raises:
        ConfigError: a static argument out of range.
    """
    size = tokens.shape[0]
    for name, value in (("ngram", ngram), ("branches", branches), ("depth", depth)):
        if value < 1:
            raise ConfigError(f"prompt lookup {name}={value} is too small; give at least 1")
    if (ngram + 2) * size >= _PREFER:
        raise ConfigError(
            f"prompt lookup over {size} tokens with ngram={ngram} overflows; "
            "lower the capacity or lookup_ngram"
        )
    length = jnp.asarray(length, jnp.int32)
    place = np.arange(size, dtype=np.int32)
    count = match_lengths(tokens, length, ngram)
    # One integer orders candidates by length, then recency, and holds its own position.
    key = jnp.where(count >= min(2, ngram), count * size + place, -1)
    following = jnp.pad(tokens[1:], (0, 1))
    alone = place == length - 1  # nothing known after the first token
    starts = []
    blocked_first = jnp.zeros((size,), bool)
    blocked_pair = jnp.zeros((size,), bool)
    for branch in range(branches):
        tier = key if branch == 0 else jnp.where(blocked_first, key, key + _PREFER)
        best = jnp.max(jnp.where(blocked_pair | (key < 0), -1, tier))
        best = jnp.where(best >= _PREFER, best - _PREFER, best)
        start = jnp.where(best < 0, size, best % size)  # `size`: none
        starts.append(start)
        if branch + 1 < branches:
            at = jnp.minimum(start, size - 1)
            found = best >= 0
            first_same = (tokens == tokens[at]) & found
            pair_same = first_same & ((following == following[at]) | alone | (at == length - 1))
            blocked_first = blocked_first | first_same
            blocked_pair = blocked_pair | pair_same
    start = jnp.stack(starts)[:, None]
    count = _full_match(tokens, length, start)
    step = np.arange(depth, dtype=np.int32)[None, :]
    if overlap:
        valid = jnp.broadcast_to(start < length, (branches, depth))
        source = start + step % jnp.maximum(length - start, 1)
    else:
        source = start + step
        valid = source < length
    token = tokens.at[jnp.minimum(source, size - 1)].get(mode="promise_in_bounds")
    logp = np.log(np.asarray(MATCH_PROBABILITY, np.float32))
    table = jnp.asarray(logp)
    score = table.at[jnp.minimum(count + step, len(logp) - 1)].get(mode="promise_in_bounds")
    later = (np.arange(branches)[:, None] > 0) & (step == 0)
    score = score + np.where(later, np.log(BRANCH_FACTOR), 0.0).astype(np.float32)
    return Chains(
        token=jnp.where(valid, token, 0),
        score=jnp.where(valid, score, -jnp.inf),
        valid=valid,
    )


def _full_match(tokens: Array, length: Array, start: Array) -> Array:
    """Tokens that match before each start, past `ngram`, up to the longest that scores differ for.

    start `[R, 1]` int32; returns `[R, 1]` int32. Only the few chosen starts are followed further
    back.
    """
    longest = len(MATCH_PROBABILITY) - 1
    back = np.arange(1, longest + 1, dtype=np.int32)[None, :]
    last = tokens.shape[0] - 1
    there = tokens.at[jnp.clip(start - back, 0, last)].get(mode="promise_in_bounds")
    here = tokens.at[jnp.clip(length - back, 0, last)].get(mode="promise_in_bounds")
    differ = (there != here) | (start < back)
    first = jnp.where(differ, back - 1, longest)  # matches before the first difference
    return jnp.min(first, axis=1, keepdims=True)
