"""The built-in explorers: which declared parameters each searches, in which order, and where it
begins.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

from jetspec_jax.autotune.candidate import Candidate
from jetspec_jax.autotune.search import Declared
from jetspec_jax.errors import ConfigError

COMMAND = "cmd:"  # an external explorer, by its command line
BUILTIN = ("tree", "kernel", "scheduler")
# Single moves of the tree's parameters, in this order; the rest is left to sampling. What proposes
# other tokens comes before what only chooses among them.
_LEVERAGE = (
    "spec.lookup_ngram",
    "spec.head_depth",
    "spec.lookup_branches",
    "policy.first_credit",
    "spec.width",
    "policy.trust_high",
    "policy.trust_decay",
    "spec.path_head",
    "spec.budget",
    "policy.first_pause",
    "spec.drafter",
)
_FINE = 8  # whole numbers with more values than this are halved and doubled
_SCHEDULER = ("engine.prefill_chunk", "engine.attention_chunk", "engine.max_batch")


Compose = Callable[[Sequence[Any], Mapping[str, Any]], Mapping[str, Any]]  # space.params_of


class Known(Declared, Protocol):
    """A declared parameter with what the shipped heuristic does."""

    @property
    def default(self) -> Any: ...


@dataclasses.dataclass(frozen=True)
class Part:
    """One search of an explorer.

    Attributes:
        explorer: "tree", "kernel" or "scheduler".
        name: of the study, e.g. "kernel.decoder_stack".
        space: parameters.
        ahead: candidates that are loaded side by side before they are measured.
        weight: share of the time, against the other parts.
    """

    explorer: str
    name: str
    space: tuple[Any, ...]
    ahead: int = 1
    weight: float = 1.0


def names(text: str) -> tuple[str, ...]:
    """ "builtin:tree,builtin:kernel" -> ("tree", "kernel"), each once; "cmd:..." stays as it is.

    Raises:
        ConfigError: an explorer that is not there.
    """
    found: dict[str, None] = {}
    if text.strip().startswith(COMMAND):
        if not text.strip().removeprefix(COMMAND).strip():
            raise ConfigError(f"explorer {text!r} names no command; give cmd:PROGRAM ARGUMENTS")
        return (text.strip(),)
    for word in filter(None, (w.strip() for w in text.split(","))):
        kind, _, name = word.partition(":")
        if kind != "builtin" or name not in BUILTIN:
            raise ConfigError(
                f"explorer {word!r} is not known; choose one of "
                f"{', '.join('builtin:' + b for b in BUILTIN)}, or cmd:COMMAND"
            )
        found[name] = None
    return tuple(found)


def belongs(name: str) -> str:
    """The explorer that searches a parameter."""
    if name in _SCHEDULER:
        return "scheduler"
    return "tree" if name.partition(".")[0] in ("spec", "policy") else "kernel"


def parts(
    explorer: str, space: Sequence[Known], order: Sequence[str] = (), *, ahead: int = 2
) -> list[Part]:
    """The searches of an explorer over declared parameters.

    The kernel explorer has a search for each op, the one with the largest gap first, so that a
    short budget goes where most is to be gained; then one for the engine's own choices (formats,
    arithmetic), which need another load, too.

    Args:
        explorer: one of BUILTIN.
        space: everything that applies to the deployment.
        order: ops by gap, largest first (`cost_model.gap_table`).
        ahead: kernels to build at once.
    """
    mine = [p for p in space if belongs(p.name) == explorer]
    if not mine:
        return []
    if explorer != "kernel":
        weight = 3.0 if explorer == "tree" else 1.0
        return [Part(explorer, explorer, tuple(mine), 1, weight)]
    groups: dict[str, list[Known]] = {}
    for p in mine:
        section, _, rest = p.name.partition(".")
        groups.setdefault(rest.partition(".")[0] if section == "kernel" else "engine", []).append(p)
    place = {op: i for i, op in enumerate(order)}
    ops = sorted((g for g in groups if g != "engine"), key=lambda g: place.get(g, len(place)))
    ranked = [*ops, *(["engine"] if "engine" in groups else [])]
    return [Part("kernel", f"kernel.{g}", tuple(groups[g]), ahead) for g in ranked]


def values(space: Iterable[Known], candidate: Candidate) -> dict[str, Any]:
    """What a candidate means for every parameter of a space."""
    return {p.name: candidate.params.get(p.name, p.default) for p in space}


def candidate_of(
    space: Sequence[Known],
    base: Candidate,
    params: Mapping[str, Any],
    origin: str,
    compose: Compose,
) -> Candidate:
    """`base` with parameters set, written so that equal configurations have equal ids.

    What the base sets outside of the space (a value that is not declared) stays as it is, where
    `params` do not set it.
    """
    declared = {p.name: p for p in space}
    odd = {
        k: v
        for k, v in base.params.items()
        if k not in params and not (k in declared and holds(declared[k], v))
    }
    inside = {k: v for k, v in base.params.items() if k in declared and k not in odd}
    return Candidate({**odd, **compose(space, {**inside, **params})}, base.patch, origin)


def holds(p: Known, value: Any) -> bool:
    """Whether a declared parameter takes a value."""
    if p.kind == "choice":
        return any(type(value) is type(c) and value == c for c in p.choices)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    return (p.low or 0) <= value <= (p.high or 0)


def first(space: Sequence[Known], base: Candidate, seeds: Sequence[Candidate]) -> list[dict]:
    """Parameter sets to begin with: what memory knows, then each parameter moved alone, one step
    down and one up from where it is. A search whose differences are of the size of its noise
    learns more from single moves than from random points.
    """
    here = {
        p.name: v if holds(p, v := base.params.get(p.name, p.default)) else p.default for p in space
    }
    place = {name: i for i, name in enumerate(_LEVERAGE)}
    found = [values(space, Candidate({**base.params, **s.params})) for s in seeds if not s.patch]
    moved = [p for p in space if p.name in place or p.name.startswith(("kernel.", "engine."))]
    for p in sorted(moved, key=lambda p: place.get(p.name, len(place))):
        found += [here | {p.name: value} for value in _moves(p, here[p.name])]
    return [params for params in found if params != here]


def _moves(p: Known, value: Any) -> list[Any]:
    if p.kind == "choice":
        options = list(p.choices)
        if value not in options:
            return options[:2]
        if len(options) > 2 and all(isinstance(o, (int, float)) or o is None for o in options):
            at = options.index(value)  # ordered: the neighbours
            return [options[i] for i in (at - 1, at + 1) if 0 <= i < len(options)]
        return [o for o in options if o != value][:3]
    low, high = p.low or 0, p.high or 0
    if value is None:
        return [(low + high) // 2 if p.kind == "int" else (low + high) / 2]
    if p.kind == "int":
        far = p.log or high - low > _FINE  # one of many is no move that could be seen
        steps = (value // 2, value * 2) if far else (value - 1, value + 1)
    else:
        width = (high - low) / 4
        steps = (value / 2, value * 2) if p.log else (value - width, value + width)
    clipped = [min(max(s, low), high) for s in steps]
    return [int(c) if p.kind == "int" else c for c in clipped if c != value]
