"""What the engine's tests share: one engine, few plans (compiling is their cost), and host-side
references.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np

from jetspec_jax.config import SamplingParams, SpecConfig
from jetspec_jax.engine import LLM
from jetspec_jax.testing import EOS, scripted, tiny_llm

PLAIN = SpecConfig(mode="off")
DEPTH = 5  # of `testing.scripted` and of the tiny head
VOCAB = 260

# Different lengths and first ids (the first id selects a script).
PROMPTS: tuple[tuple[int, ...], ...] = (
    (72, 101, 108, 108, 111),
    (97, 98, 97, 98, 97, 98, 97, 98, 97),
    (1,),
    tuple(range(10, 50)),
)


@functools.cache
def engine() -> LLM:
    """The engine of most tests: fp32, native kernels where they build, with a random head."""
    return tiny_llm()


@functools.cache
def target_says(prompt: tuple[int, ...], tokens: int = 60) -> tuple[int, ...]:
    """Greedy continuation by plain decoding."""
    (result,) = engine().generate([prompt], greedy(tokens), spec=PLAIN)
    return result.token_ids


def greedy(tokens: int, **changes) -> SamplingParams:
    return SamplingParams(**{"max_tokens": tokens, "ignore_eos": True, **changes})


def oracle() -> SpecConfig:
    """Drafts what the target will say."""
    return scripted(engine(), {p: [target_says(p)] for p in PROMPTS})


def anti_oracle() -> SpecConfig:
    """Drafts, and is always wrong."""
    return scripted(engine(), {p: [[(t + 1) % VOCAB for t in target_says(p)]] for p in PROMPTS})


def partly_right(seed: int, share: float = 0.6) -> SpecConfig:
    """Three continuations, each token right with probability `share`: accepted paths lie anywhere
    in memory.
    """
    rng = np.random.default_rng(seed)

    def noisy(tokens: Sequence[int]) -> list[int]:
        wrong = rng.integers(0, VOCAB, len(tokens))
        return [t if rng.random() < share else int(w) for t, w in zip(tokens, wrong, strict=True)]

    return scripted(engine(), {p: [noisy(target_says(p)) for _ in range(3)] for p in PROMPTS})


def poison(llm: LLM) -> None:
    """Fills every cache that the engine keeps with NaN."""
    for key, cache in llm._caches.items():
        llm._caches[key] = type(cache)(
            *(tuple(jnp.full(x.shape, jnp.nan, x.dtype) for x in xs) for xs in (cache.k, cache.v))
        )


def first_ends(
    ids: Sequence[int], stops: Sequence[int], most: int
) -> tuple[tuple[int, ...], str, int | None]:
    """Reference for ids, finish reason and stop: the earliest of a stop id and the cap."""
    for i, token in enumerate(ids[:most]):
        if token in stops:
            return tuple(ids[: i + 1]), "stop", token
    return tuple(ids[:most]), "length", None


def text_of(ids: Sequence[int]) -> str:
    """Text of ids of the byte tokenizer."""
    return bytes(i for i in ids if i < EOS).decode("utf-8", "replace")
