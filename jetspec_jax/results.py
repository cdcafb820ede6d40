"""What the engine hands back: frozen records, no arrays of the device."""

from __future__ import annotations

import dataclasses

import numpy as np

from jetspec_jax.stats import SpecStats


@dataclasses.dataclass(frozen=True)
class Timings:
    """Seconds. `decode_s` is all rounds of the batch the sequence was in; compilation is never part
    of it.
    """

    load_s: float = 0.0
    compile_s: float = 0.0
    prefill_s: float = 0.0
    decode_s: float = 0.0
    ttft_s: float = 0.0
    tokens: int = 0

    @property
    def tok_s(self) -> float | None:
        """Delivered tokens per second of decoding; None before the first."""
        return self.tokens / self.decode_s if self.decode_s > 0 else None


@dataclasses.dataclass(frozen=True)
class TokenLogprobs:
    """Log-probability (natural, of the unwarped distribution) of a token and of the best
    alternatives.
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...]


@dataclasses.dataclass(frozen=True)
class RoundTrace:
    """One verified tree. Arrays over its nodes, the root first; `path` lists the accepted nodes
    from the root.
    """

    token: np.ndarray
    parent: np.ndarray
    depth: np.ndarray
    score: np.ndarray
    source: np.ndarray
    path: tuple[int, ...]
    emitted: tuple[int, ...]
    budget: int


@dataclasses.dataclass(frozen=True)
class GenerationResult:
    """One finished sequence.

    Attributes:
        prompt_token_ids: as fed to the model.
        text: without the end token and cut before a stop string.
        token_ids: delivered ids; a stop id or the token that completed a stop string is the last
            one.
        finish_reason: "stop" (end token, stop id or stop string) or "length".
        logprobs: per delivered token, when asked for.
        timings: seconds.
        spec: counts of the verify rounds.
        trace: verified trees, when asked for.
        stop: the stop string or stop id that ended the sequence, None for "length".
        accepted: per delivered token, whether it was drafted and accepted.
    """

    prompt_token_ids: tuple[int, ...]
    text: str
    token_ids: tuple[int, ...]
    finish_reason: str
    logprobs: tuple[TokenLogprobs, ...] | None
    timings: Timings
    spec: SpecStats
    trace: tuple[RoundTrace, ...] | None
    stop: str | int | None
    accepted: tuple[bool, ...]


@dataclasses.dataclass(frozen=True)
class StreamChunk:
    """New text of one or more rounds; the last chunk carries the result."""

    text: str
    token_ids: tuple[int, ...]
    accepted: tuple[bool, ...]
    rounds: int
    finished: bool
    result: GenerationResult | None
