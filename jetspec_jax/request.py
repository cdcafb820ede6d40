"""Host side of one sequence: ids to text, stop strings, log-probabilities and traces."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from jetspec_jax.config import SamplingParams
from jetspec_jax.errors import InputError
from jetspec_jax.results import GenerationResult, RoundTrace, Timings, TokenLogprobs
from jetspec_jax.state import STOPPED
from jetspec_jax.stats import SpecStats
from jetspec_jax.stop import StopDetector
from jetspec_jax.text import Tokenizer


def check_prompt(ids: list[int], vocab: int, capacity: int) -> None:
    """Refuses a prompt that cannot be served.

    Raises:
        InputError: no tokens, an id outside the vocabulary, or no room for a single new token.
    """
    if not ids:
        raise InputError("the prompt is empty; give at least one token")
    bad = next((i for i in ids if not 0 <= i < vocab), None)
    if bad is not None:
        raise InputError(
            f"prompt token id {bad} is outside the vocabulary of {vocab}; check the tokenizer"
        )
    if len(ids) >= capacity:
        raise InputError(
            f"the prompt has {len(ids)} tokens, but the context holds {capacity} with the answer; "
            "shorten the prompt or raise --capacity"
        )


@dataclasses.dataclass
class Request:
    """A sequence from admission to its result. `limit` counts all ids, prompt included."""

    prompt: list[int]
    sampling: SamplingParams
    tokenizer: Tokenizer
    stop_ids: tuple[int, ...]
    limit: int
    trace: list[RoundTrace] | None = None
    ids: list[int] = dataclasses.field(default_factory=list)
    accepted: list[bool] = dataclasses.field(default_factory=list)
    logprobs: list[TokenLogprobs] = dataclasses.field(default_factory=list)
    text: str = ""
    finish_reason: str | None = None
    stop: str | int | None = None

    def __post_init__(self) -> None:
        self._decoder = self.tokenizer.incremental()
        self._detector = StopDetector(self.sampling.stop)

    @property
    def committed(self) -> int:
        """Ids taken so far, prompt included."""
        return len(self.prompt) + len(self.ids)

    def take(self, ids: list[int], accepted: list[bool], status: int, running: int) -> str:
        """Adds newly committed ids; returns the text that is now certain.

        Args:
            ids, accepted: new ids in order, and whether each was drafted.
            status: of the slot after the round, `running` meaning that it goes on.
            running: the value of `status` for a running slot.
        """
        out = ""
        for i, (token, drafted) in enumerate(zip(ids, accepted, strict=True)):
            self.ids.append(token)
            self.accepted.append(drafted)
            ends = status == STOPPED and i == len(ids) - 1
            if ends:
                self.stop = token
                break
            out += self._detector.feed(self._decoder.push(token))
            if self._detector.match is not None:
                self.stop = self._detector.match.stop
                self.finish_reason = "stop"
                break
        if self.finish_reason is None and status != running:
            self.finish_reason = "stop" if status == STOPPED else "length"
            out += self._detector.feed(self._decoder.flush()) + self._detector.flush()
            if self._detector.match is not None:  # a stop string completed by held-back bytes
                self.stop, self.finish_reason = self._detector.match.stop, "stop"
        self.text += out
        return out

    def add_logprobs(
        self, logprob: np.ndarray, top_ids: np.ndarray, top_logprobs: np.ndarray, first: int
    ) -> None:
        """Log-probabilities of the ids from index `first` on: [P], [P, k], [P, k] of the round that
        made them.
        """
        for i, token in enumerate(self.ids[first:]):
            top = tuple(
                (int(t), float(p)) for t, p in zip(top_ids[i], top_logprobs[i], strict=True)
            )
            self.logprobs.append(TokenLogprobs(token, float(logprob[i]), top))

    def result(self, timings: Timings, stats: SpecStats) -> GenerationResult:
        """The finished sequence."""
        return GenerationResult(
            prompt_token_ids=tuple(self.prompt),
            text=self.text,
            token_ids=tuple(self.ids),
            finish_reason=self.finish_reason or "length",
            logprobs=tuple(self.logprobs) if self.sampling.logprobs is not None else None,
            timings=dataclasses.replace(timings, tokens=len(self.ids)),
            spec=dataclasses.replace(stats, delivered=len(self.ids)),
            trace=tuple(self.trace) if self.trace is not None else None,
            stop=self.stop,
            accepted=tuple(self.accepted),
        )


def round_trace(out: Any, slot: int) -> RoundTrace:
    """The verified tree of one slot from a `RoundOut`."""
    tree = out.tree
    valid = np.asarray(tree.valid[slot])[: int(out.budget)]
    path = np.asarray(out.path[slot])[: int(out.accepted[slot]) + 1]
    # valid slots come first in every builder's order, so cutting the rest keeps parent indices
    # right
    count = int(valid.sum())
    rows = {
        k: np.asarray(getattr(tree, k)[slot])[:count]
        for k in ("token", "parent", "depth", "score", "source")
    }
    emitted = tuple(int(t) for t in np.asarray(out.emitted[slot])[: len(path)])
    return RoundTrace(
        **rows, path=tuple(int(i) for i in path), emitted=emitted, budget=int(out.budget)
    )
