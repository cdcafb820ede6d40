"""The search space: what the components declare, as far as it can matter for one engine.

space = search_space(facts_of(llm, batch=1))
params = params_of(space, {"spec.width": 6, "policy.decay": 0.8})  # for a Candidate
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax

from jetspec_jax import engine_tuning, policy_tuning
from jetspec_jax.config import DraftConfig, EngineConfig, SpecConfig
from jetspec_jax.device import cores
from jetspec_jax.drafter import tuning as drafter_tuning
from jetspec_jax.errors import ConfigError
from jetspec_jax.tree import tuning as tree_tuning
from pallas_kernels import dispatch, native, parameters
from pallas_kernels import row_invariant_matmul as rim
from pallas_kernels.parameters import Facts, Parameter

if TYPE_CHECKING:
    from jetspec_jax.engine import LLM

__all__ = ["EngineFacts", "Facts", "Parameter", "facts_of", "params_of", "search_space"]

# Of what a parameter means: raise it where one gets another meaning, or where its value in a tuned
# entry of an older version would be a bad one.
SPACE_VERSION = 1


@dataclasses.dataclass(frozen=True)
class EngineFacts(Facts):
    """What decides which parameters matter for an engine, and what their defaults are.

    Attributes:
        batch: sequences decoded at once.
        spec: the base settings, resolved. engine: the base configuration.
        head: geometry of the loaded draft head.
        budgets: node counts that rounds choose from.
        arithmetic: float | integer, as it runs.
        bitwise: rows do not depend on their company, bit for bit.
    """

    batch: int = 1
    spec: SpecConfig = dataclasses.field(default_factory=SpecConfig)
    engine: EngineConfig = dataclasses.field(default_factory=EngineConfig)
    head: DraftConfig | None = None
    budgets: tuple[int, ...] = (1,)
    arithmetic: str = "float"
    bitwise: bool = False


def _formats(llm: LLM) -> dict[str, set[str]]:
    """Formats of native projections, by the arithmetic that multiplies them."""
    found: dict[str, set[str]] = {"integer": set(), "float": set()}
    head = llm._head
    trees = [llm._target.params] + ([head.params, head.lm_rows] if head is not None else [])
    for leaf in jax.tree.leaves(trees, is_leaf=lambda x: isinstance(x, rim.PackedWeight)):
        if isinstance(leaf, rim.PackedWeight):
            found[leaf.arithmetic].add(leaf.format)
    return found


def facts_of(llm: LLM, batch: int = 1) -> EngineFacts:
    """The facts of a loaded engine; its settings are the base that defaults are taken from."""
    kernels = llm._target.kernels
    formats = _formats(llm)
    native_facts: dict[str, Any] = {}
    if kernels == "cpu":
        with parameters.using(llm.engine.kernel_params):
            native_facts = dataclasses.asdict(native.features())
    here = dispatch.device()
    gpu = next((f for f in ("mosaic_gpu", "triton") if here.allows(f)), "")
    return EngineFacts(
        kernels=kernels,
        cores=cores(),
        integer=tuple(sorted(formats["integer"])),
        floating=tuple(sorted(formats["float"])),
        device=here.kind,
        gpu_form=gpu if kernels == "gpu" else "",
        head_dim=llm.model_config.head_dim,
        batch=batch,
        spec=llm.spec,
        engine=llm.engine,
        head=llm.draft_config,
        budgets=llm.budgets(llm.spec),
        arithmetic=llm.arithmetic,
        bitwise=llm.bitwise,
        **native_facts,
    )


@functools.cache
def declared() -> Mapping[str, Parameter]:
    """Every parameter of every component by its name."""
    own = (tree_tuning, drafter_tuning, policy_tuning, engine_tuning)
    found = {p.name: p for module in own for p in module.PARAMETERS}
    return {**found, **parameters.declared()}


def search_space(facts: EngineFacts) -> tuple[Parameter, ...]:
    """The parameters that can make a difference for this engine, with ranges and defaults that
    hold for it.

    A default is what the base settings do, also where the search itself would not go so far: the
    range then reaches out to it.
    """
    in_force = {"kernel." + name: value for name, value in facts.engine.kernel_params}
    found = []
    for parameter in declared().values():
        if not parameter.applies(facts):
            continue
        here = parameter.narrowed(facts)
        if here.name in in_force:
            here = dataclasses.replace(here, default=in_force[here.name])
        found.append(_reaching(here))
    return tuple(p for p in found if p.kind != "choice" or len(p.choices) > 1)


def _reaching(p: Parameter) -> Parameter:
    if p.takes(p.default):
        return p
    if p.kind == "choice":
        return dataclasses.replace(p, choices=(*p.choices, p.default))
    low, high = (p.default if x is None else x for x in (p.low, p.high))
    return dataclasses.replace(p, low=min(low, p.default), high=max(high, p.default))


def find(name: str, space: Sequence[Parameter]) -> Parameter:
    """The parameter of that name.

    Raises:
        ConfigError: it is not in the space; the message names the nearest that is.
    """
    found = next((p for p in space if p.name == name), None)
    if found is None:
        known = "declared, but cannot matter here" if name in declared() else "not declared"
        hint = parameters.nearest(name, [p.name for p in space])
        raise ConfigError(f"parameter {name!r} is {known}; {hint}")
    return found


def params_of(space: Sequence[Parameter], values: Mapping[str, Any]) -> dict[str, Any]:
    """A candidate's params from values of some of the space: without those that say what happens
    anyway, and with those that must then be said.

    Args:
        space: as `search_space` gives it.
        values: by name. Values of parameters that mean nothing beside the others (`only`) are left
            out.

    Raises:
        ConfigError: a name that is not in the space, or a value that it does not take.
    """
    for name, value in values.items():
        parameter = find(name, space)
        if not parameter.takes(value):
            raise ConfigError(
                f"{name}={value!r} is outside of the space; give {parameter.values_text}"
            )
    whole = {p.name: p.default for p in space} | dict(values)
    meant = {
        p.name: whole[p.name]
        for p in space
        if all(whole.get(other, allowed[0]) in allowed for other, allowed in p.only)
    }
    changed = {p.name for p in space if p.name in meant and meant[p.name] != p.default}
    return {
        p.name: meant[p.name]
        for p in space
        if p.name in meant and (p.name in changed or changed & set(p.with_))
    }
