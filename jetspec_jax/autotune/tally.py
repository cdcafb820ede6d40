"""What a gate's pass has found so far, how much it looks at, and the arithmetic of differences."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

from jetspec_jax.autotune.verdict import positions_for


@dataclasses.dataclass(frozen=True)
class Effort:
    """How much is compared. The defaults miss a fault that changes one token in 2,000 with
    probability 1%, and refuse to accept where the budget allowed less than 5%.

    Attributes:
        positions: wanted, by token forcing.
        least: with fewer no candidate is accepted.
        pairs: timed pairs (of a whole batch each).
        tokens: of an answer, at most.
        logits: prompts whose logits are compared.
        sampled: prompts answered with a temperature.
    """

    positions: int = positions_for(0.01)
    least: int = positions_for(0.05)
    pairs: int = 20
    tokens: int = 128
    logits: int = 4
    sampled: int = 4


class Refused(Exception):
    """Ends the gate with a reason."""


@dataclasses.dataclass
class Found:
    """What has been compared so far."""

    positions: int = 0
    free_tokens: int = 0
    sampled_tokens: int = 0
    rows: int = 0
    logits: int = 0
    bits: bool | None = None
    difference: str = ""  # where bits differ first
    mismatches: list[tuple[str, int, float | None]] = dataclasses.field(default_factory=list)
    before: list[float] = dataclasses.field(default_factory=list)
    after: list[float] = dataclasses.field(default_factory=list)
    speed: tuple[float, float, float] | None = None
    noise: float | None = None
    deviation: float | None = None
    compared: bool = False  # everything that has to be


def differences(a: Sequence[Any], b: Sequence[Any]) -> list[int]:
    """Indices at which two sequences differ; what one of them lacks differs at its end."""
    found = [i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y]
    return found if len(a) == len(b) else [*found, min(len(a), len(b))]


def first(a: Sequence[Any], b: Sequence[Any]) -> int:
    return differences(a, b)[0]


def largest(a: Sequence[Mapping[str, Any]], b: Sequence[Mapping[str, Any]]) -> float:
    """Largest difference of a best logit or of a margin, over all positions; infinite where one
    side has fewer, or no numbers.
    """
    largest = 0.0
    for one, other in zip(a, b, strict=True):
        for name in ("best", "margin"):
            if len(one[name]) != len(other[name]):
                return math.inf
            for x, y in zip(one[name], other[name], strict=True):
                far = abs(x - y) if isinstance(y, float) else math.inf
                largest = far if far > largest or far != far else largest
    return largest
