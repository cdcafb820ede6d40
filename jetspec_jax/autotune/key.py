"""The deployment that a result holds for (pilot.md section 1)."""

from __future__ import annotations

import dataclasses
import hashlib
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jetspec_jax.device import cores, cpu_model
from jetspec_jax.errors import ConfigError

if TYPE_CHECKING:
    from jetspec_jax.engine import LLM

_CORES = re.compile(r", \d+ cores?$")
_SMALL = 0.01  # formats of less than this share of the weights (norms) are not named


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
        given = {f.name: value[f.name] for f in dataclasses.fields(cls)}
        for name, found in given.items():
            whole = name in ("batch", "context")
            if whole and (type(found) is not int or found < 1):
                raise ConfigError(f"{name}={found!r} of a deployment is no whole number from 1")
            if not whole and not isinstance(found, str):
                raise ConfigError(f"{name}={found!r} of a deployment is no text")
        return cls(**given)

    @property
    def regime(self) -> str:
        """single | batch"""
        return "single" if self.batch == 1 else "batch"

    @property
    def device_kind(self) -> str:
        """The device without its number of cores."""
        return _CORES.sub("", self.device)


def _digest(*parts: str | bytes) -> str:
    whole = hashlib.sha256()
    for part in parts:
        whole.update((part.encode() if isinstance(part, str) else part) + b"\0")
    return whole.hexdigest()[:16]


def device_name() -> str:
    """The accelerator's kind, or the CPU's model name and the cores this process may use."""
    import jax  # heavy: keys are compared without it, too

    first = jax.devices()[0]
    if first.platform != "cpu":
        return str(first.device_kind)
    count = cores()
    return f"{cpu_model()}, {count} core{'s' if count != 1 else ''}"


def context_bucket(tokens: int) -> int:
    """The power of two that holds so many cached tokens.

    Raises:
        ConfigError: fewer than one.
    """
    if tokens < 1:
        raise ConfigError(f"context={tokens} is no number of tokens; give at least 1")
    return 1 << (tokens - 1).bit_length()


def _head_digest(llm: LLM) -> str:
    """Geometry and every weight of the draft head: another head drafts other tokens."""
    import jax
    import numpy as np

    head = llm._head
    if head is None:
        return "none"
    leaves = jax.tree.leaves(head.params)
    return _digest(repr(head.config), *(np.asarray(x).tobytes() for x in leaves))


def key_of(llm: LLM, batch: int, context: int, suite: str = "mixed") -> DeploymentKey:
    """The key of what `llm` serves.

    Args:
        llm: the engine.
        batch: sequences decoded at once.
        context: cached tokens, rounded up to a power of two.
        suite: kind of text.

    Raises:
        ConfigError: batch or context below 1.
    """
    if batch < 1:
        raise ConfigError(f"batch={batch} is no number of sequences; give at least 1")
    config, sizes = llm.model_config, llm.weights
    total = sum(sizes.values())
    formats = "+".join(sorted(n for n, size in sizes.items() if size >= _SMALL * total))
    return DeploymentKey(
        batch=batch,
        target=config.name,
        target_family=config.family,
        target_digest=_digest(repr(config), formats),
        drafter=_head_digest(llm),
        device=device_name(),
        kernels=llm._target.kernels,
        weights=formats,
        arithmetic=llm.arithmetic,
        dtype=llm.engine.dtype,
        context=context_bucket(context),
        suite=suite,
    )


# What another value of a field counts, in doublings of batch or context.
_WEIGHTS = {
    "target_digest": 4.0,
    "drafter": 2.0,
    "weights": 2.0,
    "arithmetic": 2.0,
    "dtype": 2.0,
    "device": 1.0,  # another number of cores: another kind is no neighbour
    "suite": 1.0,
    "target": 0.1,
}


def distance(a: DeploymentKey, b: DeploymentKey) -> float:
    """How far a result for one key is from the other, 0 for equal keys.

    Infinite where they have nothing to say to each other: another target family, device kind,
    kind of kernels, or regime (a single request against a batch).
    """
    same = ("target_family", "device_kind", "kernels", "regime")
    if any(getattr(a, name) != getattr(b, name) for name in same):
        return math.inf
    far = sum(w for name, w in _WEIGHTS.items() if getattr(a, name) != getattr(b, name))
    if a.suite != b.suite and "mixed" in (a.suite, b.suite):
        far -= 0.5 * _WEIGHTS["suite"]
    return far + abs(math.log2(a.batch / b.batch)) + 0.5 * abs(math.log2(a.context / b.context))


def code_version(tree: Path) -> str:
    """16 hex digits over the source text of `jetspec_jax` and `pallas_kernels` in a tree."""
    whole = hashlib.sha256()
    for package in ("jetspec_jax", "pallas_kernels"):
        for path in sorted((tree / package).rglob("*")):
            if path.suffix in (".py", ".cc", ".h"):
                whole.update(str(path.relative_to(tree)).encode() + b"\0" + path.read_bytes())
    return whole.hexdigest()[:16]
