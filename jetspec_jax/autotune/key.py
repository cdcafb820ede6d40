"""The deployment that a result holds for (pilot.md section 1)."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any


@dataclasses.dataclass(frozen=True)
class DeploymentKey:
    """Every result, pattern and tuned value hangs on one of these.

    Attributes:
        batch: sequences decoded at once; 1 is the single-request regime.
        target: name of the target model.
        target_family: as in ModelConfig.family.
        target_digest: 16 hex digits over the target's geometry and weight formats.
        drafter: digest of the draft head's geometry and weights, or "none".
        device: device kind; on CPU the model name and the number of cores in use.
        kernels: cpu | gpu | xla.
        weights: formats of the projections, e.g. "q4_1+q8_0".
        arithmetic: float | integer.
        dtype: of activations.
        context: bucket of cached tokens, a power of two.
        suite: kind of text the result was measured on, "mixed" for all.
    """

    batch: int
    target: str
    target_family: str
    target_digest: str
    drafter: str
    device: str
    kernels: str
    weights: str
    arithmetic: str
    dtype: str
    context: int
    suite: str

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> DeploymentKey:
        return cls(**{f.name: value[f.name] for f in dataclasses.fields(cls)})
