"""The worker over a real tiny engine (in this process), and its client over the fake one."""

from __future__ import annotations

import pytest

from jetspec_jax.autotune.candidate import Candidate
from jetspec_jax.autotune.client import Worker
from jetspec_jax.autotune.engine import LLMEngine
from jetspec_jax.autotune.worker import Server, load_factory
from jetspec_jax.config import SamplingParams, SpecConfig
from jetspec_jax.errors import ConfigError, WorkerError
from tests.autotune.test_gate import FACTORY
from tests.doubles import PROMPTS, engine, partly_right

PLAIN = {"spec.mode": "off"}
TOKENS = 24
EACH = [{"max_tokens": TOKENS, "ignore_eos": True}] * len(PROMPTS)


@pytest.fixture(scope="module")
def tiny() -> LLMEngine:
    llm = engine()
    spec = partly_right(0)
    return LLMEngine(llm, Candidate(), spec)


def plain_streams(tiny: LLMEngine) -> list[list[int]]:
    return [s["token_ids"] for s in tiny.state(PROMPTS, EACH, PLAIN, 4)]


@pytest.mark.parametrize("batch", [1, 4])
def test_free_running_and_forcing_equal_plain_decoding(tiny, batch):
    truth = tiny.state(PROMPTS, EACH, PLAIN, 4)
    streams = [t["token_ids"] for t in truth]
    assert tiny.state(PROMPTS, EACH, {}, batch) == truth
    free = tiny.generate(PROMPTS, EACH, {}, batch)
    assert [a["token_ids"] for a in free] == streams
    assert max(a["tau"] for a in free) > 1.2  # the script is right at times: trees are accepted
    forced = tiny.force(PROMPTS, streams, EACH, {}, batch, False)
    assert [f["choices"] for f in forced] == streams
    assert [f["rows"] for f in forced] == [t["rows"] for t in truth]
    for prompt, one in zip(PROMPTS, truth, strict=True):
        assert len(one["rows"]) == len(prompt) + TOKENS - 1


@pytest.mark.parametrize("logits", [False, True])
def test_forcing_goes_on_with_the_stream_after_a_mismatch(tiny, logits):
    streams = plain_streams(tiny)
    changed = [list(s) for s in streams]
    changed[0][0] = (changed[0][0] + 1) % 256
    changed[1][7] = (changed[1][7] + 1) % 256
    changed[2][-1] = (changed[2][-1] + 1) % 256
    tree = tiny.force(PROMPTS, changed, EACH, {}, 4, logits)
    plain = tiny.force(PROMPTS, changed, EACH, PLAIN, 4, logits)
    assert tree == plain  # choices, rows, and in bits the logits
    for choices, stream, was in zip((t["choices"] for t in tree), changed, streams, strict=True):
        assert len(choices) == TOKENS
        first = next((i for i, (a, b) in enumerate(zip(stream, was, strict=True)) if a != b), None)
        end = TOKENS if first is None else first + 1
        assert choices[:end] == was[:end]
    if logits:
        assert all(m >= 0 for t in tree for m in t["margin"])
        assert all(len(t["digests"]) == TOKENS for t in tree)


def test_digests_see_one_changed_row(tiny):
    prompt = list(PROMPTS[3])
    other = [*prompt[:20], prompt[20] + 1, *prompt[21:]]
    one, two = tiny.state([prompt, other], EACH[:2], PLAIN, 1)
    assert one["rows"][:20] == two["rows"][:20]
    assert one["rows"][20] != two["rows"][20]


def test_sampling_is_the_same_with_trees(tiny):
    each = [{**e, "temperature": 0.9, "seed": 5 + i} for i, e in enumerate(EACH)]
    assert tiny.state(PROMPTS, each, {}, 4) == tiny.state(PROMPTS, each, PLAIN, 4)


def test_overrides_reach_the_rounds_and_fixed_parameters_are_refused(tiny):
    one = tiny.generate(PROMPTS[:1], EACH[:1], {"spec.budget": 1}, 1)[0]
    assert one["tau"] == 1.0 and one["rounds"] == TOKENS
    with pytest.raises(ConfigError, match=r"engine\.dtype"):
        tiny.generate(PROMPTS[:1], EACH[:1], {"engine.dtype": "bfloat16"}, 1)
    with pytest.raises(ConfigError, match="did you mean"):
        tiny.generate(PROMPTS[:1], EACH[:1], {"spec.budgte": 3}, 1)


def test_a_stream_that_does_not_fit_is_refused(tiny):
    with pytest.raises(ConfigError, match="at least one"):
        tiny.force(PROMPTS[:1], [[]], EACH[:1], {}, 1, False)
    with pytest.raises(ConfigError, match="up to"):
        tiny.force(PROMPTS[:1], [[1] * 500], EACH[:1], {}, 1, False)


def fake(**changes) -> Worker:
    return Worker(factory=FACTORY, **changes)


def test_the_client_speaks_to_a_process():
    with fake() as worker:
        (ids,) = worker.encode([[{"role": "user", "content": "hello"}]])
        assert worker.warm(1) == 0.0 and worker.facts["bitwise"]
        (answer,) = worker.generate([ids], 5)
        assert len(answer["token_ids"]) == 5
        sampled = SamplingParams(temperature=1.0, seed=3, max_tokens=5)
        assert worker.generate([ids], sampling=sampled)[0]["token_ids"] != answer["token_ids"]
        (state,) = worker.state([ids], 5)
        assert state["token_ids"] == answer["token_ids"]
        (forced,) = worker.force([ids], [answer["token_ids"]], logits=True)
        assert forced["choices"] == answer["token_ids"] and forced["rows"] == state["rows"]
        process = worker._supervised.process
    assert process.poll() is not None
    with pytest.raises(WorkerError, match="has ended"):
        worker.generate([ids], 5)


def test_errors_of_the_other_side_keep_their_type():
    with pytest.raises(ConfigError, match="give module:function"):
        Worker(factory="tests.autotune.fake_engine:nothing")
    with fake() as worker:
        with pytest.raises(ConfigError, match="one each"):
            worker.generate([[1], [2]], sampling=[SamplingParams()])
        with pytest.raises(ConfigError, match="is not known"):
            worker.request({"op": "dance"})
        assert worker.warm(1) == 0.0  # a refused request ends nothing


@pytest.mark.parametrize(
    "kind,says", [("crash", "ended with status 3"), ("hang", "did not answer 'generate'")]
)
def test_a_process_that_fails_is_one_line(kind, says):
    with (
        fake(candidate=Candidate({"kernel.fake.FAIL": kind})) as worker,
        pytest.raises(WorkerError, match=says) as caught,
    ):
        worker.generate([[1]], 5, timeout=2.0)
    assert "\n" not in str(caught.value)
    assert worker.close() is not None


def test_time_limit_of_a_whole_worker():
    with (
        fake(candidate=Candidate({"kernel.fake.FAIL": "hang"}), time_limit=2.0) as worker,
        pytest.raises(WorkerError, match="time limit"),
    ):
        worker.generate([[1]], 5, timeout=60.0)


def test_the_server_wants_a_load_first():
    server = Server(load_factory(FACTORY))
    with pytest.raises(ConfigError, match="load an engine first"):
        server.answer({"op": "warm"})
    server.answer({"op": "load", "candidate": Candidate().to_json(), "engine": {}})
    assert server.answer({"op": "warm"}) == {"seconds": 0.0}


def test_spec_of_the_base_is_kept_under_overrides(tiny):
    assert tiny._resolved({"spec.width": 3}).width == 3
    assert tiny._resolved({}).drafter == "scripted"
    assert SpecConfig().width != 3
