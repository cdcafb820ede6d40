"""What a configuration changes against the shipped heuristic, as plain JSON values."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from typing import Any

from jetspec_jax.config import EngineConfig, SpecConfig
from jetspec_jax.errors import ConfigError
from pallas_kernels import parameters

# Fields that are tables of their own sections.
_TABLES = {"spec.policy": "policy.<field>", "engine.kernel_params": "kernel.<op>.<NAME>"}
SECTIONS = ("spec", "engine", "policy", "kernel")


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A change that an explorer proposes.

    Attributes:
        params: dotted name -> JSON value. `spec.width` is a field of SpecConfig,
            `engine.arithmetic` of EngineConfig, `policy.first_credit` of PolicyConfig
            (`SpecConfig.policy`), and `kernel.<op>.<NAME>` a build parameter of a native kernel.
            Empty: the heuristic itself.
        patch: a unified diff against the source tree, or None.
        origin: who proposed it, e.g. "builtin:tree" or "cmd:agent.sh".
    """

    params: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    patch: str | None = None
    origin: str = ""

    def __post_init__(self) -> None:
        for name in self.params:
            section, _, rest = name.partition(".")
            if section not in SECTIONS or not rest:
                raise ConfigError(
                    f"parameter {name!r} of a candidate has no known section; "
                    f"start it with one of {', '.join(s + '.' for s in SECTIONS)}"
                )
            if name in _TABLES:
                raise ConfigError(f"{name} is no parameter of a candidate; give {_TABLES[name]}")

    @property
    def id(self) -> str:
        """16 hex digits of what it changes; who proposed it does not count."""
        text = json.dumps([dict(self.params), self.patch], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def section(self, name: str) -> dict[str, Any]:
        """Parameters of one section, without its prefix."""
        start = name + "."
        return {k[len(start) :]: v for k, v in self.params.items() if k.startswith(start)}

    def to_json(self) -> dict[str, Any]:
        return {"params": dict(self.params), "patch": self.patch, "origin": self.origin}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Candidate:
        return cls(dict(value["params"]), value.get("patch"), value.get("origin", ""))


def tuples(value: Any) -> Any:
    """JSON has no tuples; configurations have no lists."""
    return tuple(tuples(v) for v in value) if isinstance(value, list) else value


def apply(
    candidate: Candidate, spec: SpecConfig, engine: EngineConfig
) -> tuple[SpecConfig, EngineConfig]:
    """The configurations with the candidate's values put in: `spec.*`, `policy.*`, `engine.*`, and
    `kernel.*` into `EngineConfig.kernel_params`.

    Raises:
        ConfigError: a field or kernel parameter that is not there, or a value it does not take.
    """

    def change(base: Any, values: dict[str, Any]) -> Any:
        given = {f.name: getattr(base, f.name) for f in dataclasses.fields(base)}
        return type(base).from_mapping(given | {k: tuples(v) for k, v in values.items()})

    policy = change(spec.policy, candidate.section("policy"))
    changed = change(spec, {"policy": policy} | candidate.section("spec"))
    values = candidate.section("engine")
    if kernel := candidate.section("kernel"):
        try:
            given = parameters.check(dict(engine.kernel_params) | kernel)
        except parameters.ParameterError as error:
            raise ConfigError(str(error)) from error
        values["kernel_params"] = given
    return changed, change(engine, values)
