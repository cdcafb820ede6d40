"""Paired measurement of candidates against a reference, made for a machine that is never quiet.

A prompt is answered by the reference and by the candidate back to back, in an order that
alternates, so a slow minute slows both. What is kept is the log of the ratio of their times. Many
candidates share one engine process: only `engine.*`, `kernel.*` and a patch need another one.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import statistics
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

from jetspec_jax.autotune.candidate import Candidate
from jetspec_jax.config import SamplingParams
from jetspec_jax.errors import JetSpecError, TokensDiffer, WorkerError

_IN_PROCESS = ("spec", "policy")  # sections that a running engine takes
_TRIAL_S = 90.0  # the longest that one request of a trial may take


class Asked(Protocol):
    """What is needed of a worker (`autotune.client.Worker`)."""

    def warm(
        self,
        batch: int = ...,
        overrides: Mapping[str, Any] | None = ...,
        sampling: Sequence[SamplingParams] = ...,
        timeout: float = ...,
    ) -> float: ...

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        max_tokens: int = ...,
        *,
        sampling: Any = ...,
        overrides: Mapping[str, Any] | None = ...,
        batch: int = ...,
        timeout: float = ...,
    ) -> list[dict[str, Any]]: ...

    def close(self) -> Any: ...


def overrides(candidate: Candidate) -> dict[str, Any]:
    """The part of a candidate that a running engine takes."""
    return {k: v for k, v in candidate.params.items() if k.partition(".")[0] in _IN_PROCESS}


def fixed(candidate: Candidate) -> Candidate:
    """The part that is fixed when an engine is loaded."""
    params = {k: v for k, v in candidate.params.items() if k.partition(".")[0] not in _IN_PROCESS}
    return Candidate(params, candidate.patch)


def centre(values: Sequence[float]) -> float:
    """Median of the means of all pairs, each value paired with itself, too (Hodges and Lehmann,
    1963): nearly as sharp as the mean, and one disturbed value in four does not move it far.
    """
    return statistics.median((a + b) / 2 for i, a in enumerate(values) for b in values[: i + 1])


@dataclasses.dataclass
class Figures:
    """Rounds of some answers, and the nodes they verified."""

    rounds: int = 0
    nodes: int = 0


class Pairs:
    """Measures candidates against one reference, prompt by prompt.

    Args:
        start: makes a worker for the fixed part of a candidate.
        reference: what every candidate is compared with.
        prompts: token ids, in the order in which they are used; with batch > 1 they are used in
            groups of that size.
        sampling: of every answer.
        batch: sequences decoded together.
        deadline: of `time.monotonic`; no request waits for longer.
    """

    def __init__(
        self,
        start: Callable[[Candidate], Asked],
        reference: Candidate,
        prompts: Sequence[Sequence[int]],
        *,
        sampling: SamplingParams,
        batch: int = 1,
        deadline: float = math.inf,
    ) -> None:
        self.reference, self.deadline = reference, deadline
        self._start, self._sampling, self._batch = start, sampling, batch
        self._groups = [
            [list(p) for p in prompts[i : i + batch]]
            for i in range(0, len(prompts) - batch + 1, batch)
        ]
        self._workers: dict[str, Asked] = {}
        self._warm: set[tuple[str, str]] = set()
        self._turn = 0
        # candidate id -> "reference" and "candidate", on the same prompts
        self.figures: dict[str, dict[str, Figures]] = {}

    def __enter__(self) -> Pairs:
        return self

    def __exit__(self, *_: object) -> None:
        for worker in self._workers.values():
            worker.close()
        self._workers.clear()

    @property
    def groups(self) -> int:
        """Values that a whole trial has."""
        return len(self._groups)

    def prepare(self, candidates: Sequence[Candidate]) -> None:
        """Loads the engines of several candidates side by side (kernels are built, programs
        compiled), and closes those of others. Nothing is measured meanwhile.
        """
        wanted = {fixed(c).id: c for c in (self.reference, *candidates)}
        for name in [n for n in self._workers if n not in wanted]:
            self._close(name)

        def load(candidate: Candidate) -> None:
            # what fails here fails again, and is reported, where it is measured
            with contextlib.suppress(JetSpecError):
                self._ready(candidate)

        missing = [c for name, c in wanted.items() if name not in self._workers]
        with ThreadPoolExecutor(max(len(missing), 1)) as pool:
            list(pool.map(load, missing))

    def ratios(self, candidate: Candidate, first: int = 0) -> Generator[float]:
        """log(reference's decode seconds / candidate's), prompt by prompt from number `first`.

        Raises:
            TokensDiffer: the candidate's answer is not the reference's.
            JetSpecError: the candidate cannot be loaded or run.
        """
        self._ready(self.reference)
        try:
            self._ready(candidate)
            for number in range(first, len(self._groups)):
                value = self._pair(candidate, number)
                if value is not None:
                    yield value
        except WorkerError:
            self._forget(candidate)
            raise

    def _pair(self, candidate: Candidate, number: int) -> float | None:
        """None where an answer of one token leaves nothing to time."""
        self._turn += 1
        order = (self.reference, candidate) if self._turn % 2 else (candidate, self.reference)
        spent: dict[bool, float] = {}
        texts: dict[bool, list[list[int]]] = {}
        for which in order:
            mine = which is candidate
            answers = self._ready(which).generate(
                self._groups[number],
                sampling=self._sampling,
                overrides=overrides(which),
                batch=self._batch,
                timeout=self._patience(),
            )
            spent[mine] = max(a["decode_s"] for a in answers)
            texts[mine] = [list(a["token_ids"]) for a in answers]
            self._count(candidate.id, "candidate" if mine else "reference", answers)
        for member, (a, b) in enumerate(zip(texts[False], texts[True], strict=True)):
            if a != b:
                at = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), None)
                at = min(len(a), len(b)) if at is None else at
                raise TokensDiffer(
                    f"prompt {number * self._batch + member} of the search: token {at} is not the "
                    "reference's; this configuration changes what is written"
                )
        if spent[False] <= 0 or spent[True] <= 0:
            return None
        return math.log(spent[False] / spent[True])

    def _count(self, name: str, side: str, answers: Sequence[Mapping[str, Any]]) -> None:
        kept = self.figures.setdefault(name, {}).setdefault(side, Figures())
        for answer in answers:
            kept.rounds += answer["rounds"]
            kept.nodes += answer["nodes"]

    def _patience(self) -> float:
        return max(min(_TRIAL_S, self.deadline - time.monotonic()), 0.5)

    def _ready(self, candidate: Candidate) -> Asked:
        """A worker that has everything compiled that the candidate needs."""
        name = fixed(candidate).id
        if name not in self._workers:
            self._workers[name] = self._start(fixed(candidate))
        worker = self._workers[name]
        if (name, candidate.id) not in self._warm:
            worker.warm(self._batch, overrides(candidate), [self._sampling], self._patience())
            self._warm.add((name, candidate.id))
        return worker

    def _forget(self, candidate: Candidate) -> None:
        """After a process that ended: whichever it was, both start anew."""
        for name in {fixed(candidate).id, fixed(self.reference).id}:
            self._close(name)

    def _close(self, name: str) -> None:
        worker = self._workers.pop(name, None)
        if worker is not None:
            worker.close()
        self._warm = {pair for pair in self._warm if pair[0] != name}
