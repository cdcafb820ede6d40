"""Streaming gives what `generate` gives, round by round; counters add up (cases.md 14); nothing
recompiles.
"""

import numpy as np
import pytest

from jetspec_jax import SamplingParams, SpecConfig
from jetspec_jax.stats import pooled
from tests.doubles import (
    DEPTH,
    PLAIN,
    PROMPTS,
    anti_oracle,
    engine,
    greedy,
    oracle,
    partly_right,
    target_says,
)

DRAFTERS = {
    "oracle": oracle,
    "anti-oracle": anti_oracle,
    "partly": lambda: partly_right(8),
    "plain": lambda: PLAIN,
}


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_stream_equals_generate(drafter):
    llm, spec = engine(), DRAFTERS[drafter]()
    for i, prompt in enumerate(PROMPTS):
        stops = (
            tuple(chr(t) for t in target_says(prompt)[10:] if 32 <= t < 127)[:1] if i % 2 else ()
        )
        params = greedy(30, stop=stops)
        (whole,) = llm.generate([prompt], params, spec=spec)
        chunks = list(llm.stream(prompt, params, spec=spec))
        assert "".join(c.text for c in chunks) == whole.text
        assert sum((c.token_ids for c in chunks), ()) == whole.token_ids
        assert sum((c.accepted for c in chunks), ()) == whole.accepted
        assert [c.finished for c in chunks] == [False] * (len(chunks) - 1) + [True]
        assert [c.rounds for c in chunks] == list(range(1, len(chunks) + 1))
        assert all(c.result is None for c in chunks[:-1])
        last = chunks[-1].result
        assert (last.text, last.token_ids, last.finish_reason) == (
            whole.text,
            whole.token_ids,
            whole.finish_reason,
        )
        assert (last.stop, last.spec) == (whole.stop, whole.spec)
        assert len(chunks) == whole.spec.rounds


def test_abandoned_stream_gives_its_slot_back():
    """Cases.md 8, engine half: the caches come back when the reader leaves early."""
    llm, spec = engine(), oracle()
    expected = target_says(PROMPTS[0])[:20]
    for _ in range(10):
        stream = llm.stream(PROMPTS[1], greedy(60), spec=spec)
        next(stream)
        stream.close()
        assert ("target", 1) in llm._caches
        (result,) = llm.generate([PROMPTS[0]], greedy(20), spec=spec)
        assert result.token_ids == expected


def test_two_streams_at_once():
    llm, spec = engine(), oracle()
    streams = [llm.stream(p, greedy(24), spec=spec) for p in PROMPTS[:2]]
    got = [[], []]
    while any(len(ids) < 24 for ids in got):
        for stream, ids in zip(streams, got, strict=True):
            ids.extend(next(stream).token_ids)
    assert [tuple(ids) for ids in got] == [target_says(p)[:24] for p in PROMPTS[:2]]


def test_counts_of_an_oracle():
    for tokens in (1, DEPTH, DEPTH + 1, DEPTH + 2, 40):
        (result,) = engine().generate([PROMPTS[0]], greedy(tokens), spec=oracle())
        stats = result.spec
        full, rest = divmod(tokens, DEPTH + 1)
        assert stats.rounds == full + (rest > 0)
        # the last round drafts no deeper than what can still be delivered
        assert stats.accepted_hist[DEPTH] == full
        assert stats.accepted == tokens - stats.rounds
        assert stats.nodes == tokens
        assert (stats.delivered, sum(result.accepted)) == (tokens, tokens - stats.rounds)


def test_counts_of_an_anti_oracle():
    (result,) = engine().generate([PROMPTS[0]], greedy(20), spec=anti_oracle())
    assert result.spec.rounds == result.spec.delivered == 20
    assert result.spec.accepted_hist == (20,) + (0,) * DEPTH
    # rounds with 1, 2, ... tokens left drafted 0, 1, ... deep
    assert result.spec.had_node == tuple(20 - k for k in range(1, DEPTH + 1))


def test_sums():
    llm, results = engine(), []
    for seed in range(3):
        results += llm.generate(list(PROMPTS), greedy(37), spec=partly_right(seed))
    results += llm.generate([PROMPTS[0]], greedy(37), spec=PLAIN)
    every = [r.spec for r in results]
    for stats in (*every, pooled(every)):
        assert sum(stats.accepted_hist) == stats.rounds
        assert stats.tau == pytest.approx(1 + sum(stats.acceptance_rate_per_position), abs=1e-12)
        assert stats.tau == pytest.approx(1 + stats.accepted / stats.rounds, abs=1e-12)
        assert all(a <= n for a, n in zip(stats.accepted_at, stats.had_node, strict=True))
        assert stats.rounds <= stats.nodes
    # pooled over rounds, not averaged over requests
    assert pooled(every).tau == pytest.approx(
        sum(s.tau * s.rounds for s in every) / sum(s.rounds for s in every), abs=1e-12
    )
    # cut only by the length: what was delivered is what was committed
    assert all(s.rounds + s.accepted == s.delivered for s in every)


def test_trace_tells_the_same_story():
    llm, prompt = engine(), PROMPTS[0]
    spec = partly_right(9)
    (result,) = llm.generate([prompt], greedy(30), spec=spec, trace=True)
    assert result.token_ids == target_says(prompt)[:30]
    assert sum((r.emitted for r in result.trace), ()) == result.token_ids
    assert len(result.trace) == result.spec.rounds
    assert sum(len(r.token) for r in result.trace) == result.spec.nodes
    last = prompt[-1]
    for r in result.trace:
        assert (r.token[0], r.parent[0], r.depth[0], r.path[0]) == (last, -1, 0, 0)
        for parent, node in zip(r.path, r.path[1:], strict=False):
            assert r.parent[node] == parent
        assert tuple(r.token[n] for n in r.path[1:]) == r.emitted[:-1]
        assert np.all(np.diff(r.score) <= 0)
        last = r.emitted[-1]
    # siblings and later branches were taken, not only the first chain
    assert any(node != i for r in result.trace for i, node in enumerate(r.path))


def test_nothing_compiles_for_new_lengths():
    llm, spec = engine(), oracle()
    for params in (greedy(3), greedy(3, temperature=1.0)):
        llm.generate([PROMPTS[0]], params, spec=spec)
        before = len(llm.programs)
        for length in range(1, 31):
            prompt = [(length * 5 + i) % 256 for i in range(length * 4)]
            llm.generate(
                [prompt],
                SamplingParams(max_tokens=length, temperature=params.temperature),
                spec=spec,
            )
        assert len(llm.programs) == before


def test_budget_of_one_is_plain():
    (result,) = engine().generate([PROMPTS[0]], greedy(20), spec=SpecConfig(mode="tree", budget=1))
    assert result.token_ids == target_says(PROMPTS[0])[:20]
    assert result.spec.tau == 1.0


def test_a_smaller_last_group_compiles_nothing():
    llm, spec = engine(), SpecConfig(mode="chain")
    llm.generate(list(PROMPTS), greedy(6), spec=spec, group=4)
    before = len(llm.programs)
    (result,) = llm.generate([PROMPTS[0]], greedy(6), spec=spec, group=4)
    assert len(llm.programs) == before
    assert result.token_ids == target_says(PROMPTS[0])[:6]


@pytest.mark.parametrize(
    "sampling,trace",
    [(SamplingParams(max_tokens=4, temperature=0.7), False), (greedy(4, logprobs=2), False)],
    ids=["sampled", "logprobs"],
)
def test_warm_up_compiles_what_the_request_needs(sampling, trace):
    llm, spec = engine(), SpecConfig(mode="chain")
    llm.warmup(1, spec, [sampling], trace=trace)
    before = len(llm.programs)
    llm.generate([PROMPTS[0]], sampling, spec=spec, trace=trace)
    assert len(llm.programs) == before
