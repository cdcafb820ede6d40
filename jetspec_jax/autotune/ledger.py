"""What a run writes into memory, and what it asks of it: ratios there are against the shipped
heuristic, whatever the incumbent was.
"""

from __future__ import annotations

from typing import Any

from jetspec_jax.autotune.candidate import Candidate
from jetspec_jax.autotune.key import DeploymentKey
from jetspec_jax.autotune.memory import Memory, Pattern


class Ledger:
    """The memory, for one deployment and one version of the code."""

    def __init__(self, memory: Memory, key: DeploymentKey, code: str) -> None:
        self.memory, self.key, self.code = memory, key, code

    def judged(
        self,
        incumbent: Candidate,
        candidate: Candidate,
        verdict: Any,
        predicted: float | None = None,
    ) -> None:
        """Into memory, with the ratio against the shipped heuristic: that is what a lookup
        compares. Bounds of a chain of accepted steps multiply. From another start the chain says
        nothing about the heuristic, so an accepted one is kept in the session alone.
        `predicted` is the cost model's ratio against the incumbent.
        """
        chain = self.chain(incumbent)
        if chain is None and verdict.accepted:
            return
        factors = chain or (1.0, 1.0, 1.0)
        speed = (verdict.speed_ratio, verdict.speed_ratio_low, verdict.speed_ratio_high)
        measured, low, high = (
            None if s is None else s * f for s, f in zip(speed, factors, strict=True)
        )
        self.memory.record(
            Pattern(
                key=self.key,
                candidate=candidate,
                accepted=verdict.accepted,
                predicted=predicted,
                measured=measured,
                low=low,
                high=high,
                report=verdict.to_json() | {"against": incumbent.to_json()},
                counter_example=verdict.counter_example,
                code=self.code,
            )
        )

    def chain(self, candidate: Candidate) -> tuple[float, float, float] | None:
        """Speed of an incumbent against the heuristic: (ratio, low, high); None: not known."""
        if candidate.id == Candidate().id:
            return 1.0, 1.0, 1.0
        known = [
            p
            for p in self.memory.latest()
            if p.key == self.key and p.accepted and p.trusted and p.candidate.id == candidate.id
        ]
        if not known or known[-1].measured is None:
            return None
        last = known[-1]
        return last.measured or 1.0, last.low or 1.0, last.high or 1.0

    def differed(self, candidate: Candidate, text: str) -> None:
        """Keeps a candidate that changed a token on the search's own prompts."""
        self.memory.record(
            Pattern(
                key=self.key,
                candidate=candidate,
                accepted=False,
                report={"reason": text},
                counter_example={"where": text},
                code=self.code,
            )
        )

    def refused(self) -> dict[str, str]:
        """Candidates that changed a token here, by id: never tried again with this code."""
        return {
            p.candidate.id: str(p.report.get("reason", "it changed a token"))
            for p in self.memory.rejected(self.key)
            if p.counter_example is not None and p.code == self.code
        }


def best_configuration(memory: Memory, key: DeploymentKey) -> Pattern | None:
    """The accepted pattern of a deployment with the largest lower bound that is no patch."""
    mine = [
        p
        for p in memory.latest()
        if p.key == key and p.accepted and p.trusted and p.candidate.patch is None
    ]
    return max(mine, key=lambda p: p.low or 0.0, default=None)
