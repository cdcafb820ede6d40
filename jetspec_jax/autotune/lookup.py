"""What an engine starts with: the tuned entry of its deployment, the nearest one, or the heuristic.

Order: what the user gives explicitly > the entry of this deployment > the nearest entry > the
heuristic. Explicit wins field by field. A field counts as given where `from_mapping` got it (the
command line and config files go through it) or where its value is not the default; so a default
that is passed to a constructor by hand reads as "not given" (`LLM(tuned="off")` uses no entry).

An entry of this very deployment may hold everything. From a nearby one only `spec.*` and
`policy.*` are taken: trees and policies change no token whatever they are.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from jetspec_jax.autotune.candidate import Candidate, apply
from jetspec_jax.autotune.key import DeploymentKey, distance
from jetspec_jax.autotune.tuned import (
    Say,
    TunedEntry,
    read,
    readable,
    shipped_home,
    tuned_home,
)
from jetspec_jax.config import EngineConfig, SpecConfig, explicit
from jetspec_jax.errors import ConfigError

OFF = "off"
# Entries further away than this say nothing here (`key.distance`): another core count (1), kind of
# text (1), weight format (2) or a batch up to 8 times as large may, another model (4) may not.
FARTHEST = 3.0
_LOSSLESS = ("spec.", "policy.")


@dataclasses.dataclass(frozen=True)
class Choice:
    """What an engine starts with, and why.

    Attributes:
        entry: None: the heuristic.
        exact: the entry is of this very deployment.
        params: those of the entry that are in use; explicit settings have been taken out.
        overruled: those that explicit settings won over.
        reason: one line.
    """

    entry: TunedEntry | None
    exact: bool
    params: Mapping[str, Any]
    overruled: tuple[str, ...]
    reason: str

    def to_json(self) -> dict[str, Any]:
        return {
            "entry": None if self.entry is None else self.entry.id,
            "date": None if self.entry is None else self.entry.provenance["date"],
            "exact": self.exact,
            "params": dict(self.params),
            "overruled": list(self.overruled),
            "reason": self.reason,
        }


def heuristic(reason: str) -> Choice:
    """No entry."""
    return Choice(None, False, {}, (), reason)


def _short(name: str) -> str:
    section, _, rest = name.partition(".")
    return rest if section in ("spec", "engine", "policy") else name


def _given_names(spec: SpecConfig, engine: EngineConfig) -> set[str]:
    kernel = {f"kernel.{name}" for name, _ in engine.kernel_params}
    sections = (("spec", spec), ("policy", spec.policy), ("engine", engine))
    return kernel | {f"{s}.{name}" for s, config in sections for name in explicit(config)}


def looked_up(spec: SpecConfig) -> bool:
    """Whether entries are for such settings."""
    return spec.enabled and spec.mode == "auto"


def choose(
    entries: Iterable[TunedEntry], key: DeploymentKey, spec: SpecConfig, engine: EngineConfig
) -> Choice:
    """The entry for a deployment, and what of it is used beside explicit settings.

    Args:
        entries: in the order of preference among equals.
        key: of the deployment under the given settings.
        spec: as given. Another mode than auto is an experiment of its own: no entry is used.
        engine: as given.
    """
    if not looked_up(spec):
        return heuristic("heuristic: entries are for mode auto")
    near = [entry for entry in entries if distance(entry.key, key) <= FARTHEST]
    if not near:
        return heuristic("heuristic: no tuned entry for this deployment")
    # one of this deployment, even if it was measured on another kind of text, before any neighbour
    best = min(near, key=lambda e: (not _same(e.key, key), distance(e.key, key)))
    exact = _same(best.key, key)
    given = _given_names(spec, engine)
    usable = {k: v for k, v in best.params.items() if exact or k.startswith(_LOSSLESS)}
    params = {k: v for k, v in usable.items() if k not in given}
    overruled = tuple(k for k in usable if k in given)
    what = ", ".join(f"{_short(k)} {v}" for k, v in params.items()) or "nothing left to change"
    where = (
        "for this deployment"
        if exact
        else f"of the nearest deployment ({_difference(best.key, key)})"
    )
    reason = (
        f"tuned entry {best.id[:8]} of {best.provenance['date'][:10]} {where}: {what}, "
        f"{best.gain_text}"
    )
    if overruled:
        reason += f"; given explicitly: {', '.join(map(_short, overruled))}"
    left = len(best.params) - len(usable)
    if left:
        reason += f"; {left} not lossless by construction, so not taken from there"
    return Choice(best, exact, params, overruled, reason)


def _same(a: DeploymentKey, b: DeploymentKey) -> bool:
    """Whether two keys are of one deployment: length and kind of text, on which a result was
    measured, are no part of it.
    """
    return dataclasses.replace(a, context=b.context, suite=b.suite) == b


def _difference(there: DeploymentKey, here: DeploymentKey) -> str:
    fields = (f.name for f in dataclasses.fields(DeploymentKey))
    odd = [n for n in fields if getattr(there, n) != getattr(here, n)]
    shown = [n for n in odd if not n.endswith("digest")]
    return ", ".join(f"{n} {getattr(there, n)}" for n in shown) or ", ".join(odd)


def merged(
    choice: Choice, spec: SpecConfig, engine: EngineConfig
) -> tuple[SpecConfig, EngineConfig]:
    """The settings with a choice put in; what counts as given stays what it was."""
    if not choice.params:
        return spec, engine
    return apply(Candidate(choice.params), spec, engine)


class Lookup:
    """The entries that an engine may start with.

    Args:
        where: None for the user's folder and the shipped entries, "off", a folder, or one file.
        say: gets a line for every entry that cannot be used.

    Raises:
        ConfigError: a path that is not there, or a file that cannot be used.
    """

    def __init__(self, where: str | Path | None, say: Say) -> None:
        self.off = where is not None and str(where) == OFF
        self.file: Path | None = None
        self.entries: tuple[TunedEntry, ...] = ()
        if self.off:
            return
        if where is None:
            folders = [f for f in (tuned_home(), shipped_home()) if f.is_dir()]
        else:
            path = Path(where).expanduser()
            if path.is_file():
                self.file, self.entries = path, (read(path),)
                return
            if not path.is_dir():
                raise ConfigError(
                    f"tuned {str(where)!r}: no such file or folder; give one of serve.autotune, "
                    f"or {OFF}"
                )
            folders = [path]
        found: list[TunedEntry] = []
        for folder in folders:
            mine = [entry for _, entry in readable(folder, say)]
            found += sorted(mine, key=lambda e: e.provenance["date"], reverse=True)
        self.entries = tuple(found)

    def choose(self, key: DeploymentKey, spec: SpecConfig, engine: EngineConfig) -> Choice:
        """As `choose`; a single file that was asked for must have something to say.

        Raises:
            ConfigError: the file is for another deployment.
        """
        if self.off:
            return heuristic("off: heuristic")
        if self.file is not None and looked_up(spec):
            there = self.entries[0].key  # batches of other sizes may come, too
            if distance(there, dataclasses.replace(key, batch=there.batch)) > FARTHEST:
                raise ConfigError(
                    f"tuned entry {self.file} is of another deployment "
                    f"({_difference(there, key)}); give another, or {OFF}"
                )
        return choose(self.entries, key, spec, engine)


class Tuned:
    """The tuned side of one engine: what was chosen for each batch, said once.

    Args:
        lookup: where entries come from.
        engine: the configuration as given.
        key: makes the key of the engine under the given configuration, batch 1; asked for only
            where there are entries.
        say: gets one line for every choice.
    """

    def __init__(
        self,
        lookup: Lookup | None = None,
        engine: EngineConfig | None = None,
        key: Callable[[], DeploymentKey] | None = None,
        say: Say = lambda _: None,
    ) -> None:
        self._lookup = lookup or Lookup(OFF, say)
        self._engine = engine or EngineConfig()
        self._say, self._told = say, set[str]()
        self._key = key() if key is not None and self._lookup.entries else None
        self.chosen = heuristic(
            "off: heuristic"
            if self._lookup.off
            else "heuristic: no tuned entry for this deployment"
        )

    def _choose(self, spec: SpecConfig, batch: int) -> Choice:
        if self._key is None:
            return self.chosen
        key = dataclasses.replace(self._key, batch=batch)
        found = self._lookup.choose(key, spec, self._engine)
        if looked_up(spec):
            self._tell(found.reason)
        return found

    def _tell(self, line: str) -> None:
        if line not in self._told:
            self._told.add(line)
            self._say(line)

    def engine(self, spec: SpecConfig, batch: int) -> EngineConfig:
        """The engine's configuration for `batch` sequences; `chosen` is then that choice."""
        self.chosen = self._choose(spec, batch)
        return merged(self.chosen, spec, self._engine)[1]

    def resolve(
        self, spec: SpecConfig, batch: int, heuristics: Callable[[SpecConfig], SpecConfig]
    ) -> SpecConfig:
        """`spec` filled by the choice for `batch`, then by the heuristic.

        Args:
            spec: as given.
            batch: sequences decoded together.
            heuristics: fills what is left open; raises ConfigError for what cannot be honoured.
        """
        found = self._choose(spec, batch)
        if not found.params:
            return heuristics(spec)
        try:
            return heuristics(merged(found, spec, self._engine)[0])
        except ConfigError as error:
            made = heuristics(spec)  # where this fails, too, it is not the entry's fault
            self._tell(f"tuned entry not used beside what was given: {error}")
            return made
