"""Unused cache slots never reach a result (cases.md 5, 17): they may hold NaN."""

import numpy as np
import pytest

from jetspec_jax import EngineConfig, SpecConfig
from jetspec_jax.testing import tiny_llm
from tests.doubles import PLAIN, PROMPTS, engine, greedy, poison, target_says

# One prompt is longer than a prefill chunk; prefill writes whole chunks, so rows above a prompt are
# stale too.
FORMS = {
    "native": {"kernels": "auto", "numerics": "fast"},
    "online": {"kernels": "xla", "numerics": "fast"},
    "fold": {"kernels": "xla", "numerics": "bitwise"},
}


@pytest.mark.parametrize("form", FORMS)
def test_nan_in_unused_slots(form):
    llm = tiny_llm(
        engine=EngineConfig(capacity=192, attention_chunk=64, prefill_chunk=32, **FORMS[form])
    )
    spec = SpecConfig(mode="tree", drafter="hybrid", budget=8)
    clean = llm.generate(list(PROMPTS), greedy(20, logprobs=2), spec=spec)
    assert {kind for kind, _ in llm._caches} == {"target", "draft"}
    poison(llm)
    assert all(np.isnan(np.asarray(x)).all() for c in llm._caches.values() for x in (*c.k, *c.v))
    poisoned = llm.generate(list(PROMPTS), greedy(20, logprobs=2), spec=spec)
    for a, b in zip(clean, poisoned, strict=True):
        assert (a.token_ids, a.accepted, a.spec, a.logprobs) == (
            b.token_ids,
            b.accepted,
            b.spec,
            b.logprobs,
        )
        assert all(np.isfinite(e.logprob) for e in b.logprobs)


def test_nan_in_the_rows_beyond_the_live_ones():
    """After a session the caches hold live rows of the last requests; the next request must not see
    them either.
    """
    llm, expected = engine(), target_says(PROMPTS[0])[:20]
    llm.generate([PROMPTS[3]], greedy(100), spec=PLAIN)
    assert llm.generate([PROMPTS[0]], greedy(20), spec=PLAIN)[0].token_ids == expected
