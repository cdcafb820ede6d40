"""Tuned entries: what a gate has accepted for one deployment, as a JSON document.

`lookup` finds them again when an engine starts.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import jax

from jetspec_jax.autotune.candidate import Candidate, apply
from jetspec_jax.autotune.key import DeploymentKey
from jetspec_jax.autotune.space import SPACE_VERSION, declared
from jetspec_jax.config import EngineConfig, SpecConfig
from jetspec_jax.errors import ConfigError
from jetspec_jax.programs import cache_home
from pallas_kernels import parameters

FORMAT = 1  # of the document
_FIELDS = ("version", "id", "key", "params", "verdict", "provenance", "versions")
_NUMBERS = ("speed_ratio", "speed_ratio_low", "speed_ratio_high")

Say = Callable[[str], None]


@dataclasses.dataclass(frozen=True)
class TunedEntry:
    """An accepted configuration.

    Attributes:
        key: the deployment that it was measured on.
        params: as `Candidate.params`.
        verdict: of the gate: accepted, tokens_identical, speed_ratio, speed_ratio_low,
            speed_ratio_high and what else the summary says.
        provenance: date (ISO 8601), origin, command, hardware and the like.
        versions: "space" (`space.SPACE_VERSION`) and those of packages.
    """

    key: DeploymentKey
    params: Mapping[str, Any]
    verdict: Mapping[str, Any]
    provenance: Mapping[str, Any]
    versions: Mapping[str, Any]

    @property
    def id(self) -> str:
        """16 hex digits of everything in it: a document that was edited or cut off shows."""
        whole = {k: v for k, v in self._document().items() if k != "id"}
        return hashlib.sha256(json.dumps(whole, sort_keys=True).encode()).hexdigest()[:16]

    def _document(self) -> dict[str, Any]:
        return {
            "version": FORMAT,
            "key": self.key.to_json(),
            "params": dict(self.params),
            "verdict": dict(self.verdict),
            "provenance": dict(self.provenance),
            "versions": dict(self.versions),
        }

    def to_json(self) -> dict[str, Any]:
        return {**self._document(), "id": self.id}

    @property
    def gain_text(self) -> str:
        """ "1.07x (1.03 to 1.11)"."""
        ratio, low, high = (float(self.verdict[name]) for name in _NUMBERS)
        return f"{ratio:.2f}x ({low:.2f} to {high:.2f})"


def entry_of(
    key: DeploymentKey,
    candidate: Candidate,
    verdict: Mapping[str, Any],
    provenance: Mapping[str, Any],
) -> TunedEntry:
    """An entry from what the gate accepted.

    Args:
        key: of the base configuration, as `key_of` gives it for an engine without tuned values.
        candidate: what was accepted; a patch cannot be applied at run time.
        verdict: `Verdict.to_json()`.
        provenance: "date" at least.

    Raises:
        ConfigError: a patch, a verdict that accepts nothing, or params that are not declared.
    """
    if candidate.patch is not None:
        raise ConfigError(
            f"candidate {candidate.id} is a patch of the source; apply it there, it cannot be tuned"
        )
    versions = {"space": SPACE_VERSION, "jax": jax.__version__}
    entry = TunedEntry(key, dict(candidate.params), dict(verdict), dict(provenance), versions)
    _check(entry)
    return entry


def _check(entry: TunedEntry) -> None:
    """Raises ConfigError, without the name of a file: an entry that must not be used."""
    if entry.versions.get("space") != SPACE_VERSION:
        raise ConfigError(
            f"it is of version {entry.versions.get('space')!r} of the parameters, this code has "
            f"{SPACE_VERSION}; run serve.autotune again"
        )
    for name in ("accepted", "tokens_identical"):
        if entry.verdict.get(name) is not True:
            raise ConfigError(f"its verdict has {name}={entry.verdict.get(name)!r}; it is not used")
    for name in _NUMBERS:
        value = entry.verdict.get(name)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < 1e6:
            raise ConfigError(f"its verdict has {name}={value!r}, no ratio; it is not used")
    if not isinstance(entry.provenance.get("date"), str):
        raise ConfigError("its provenance has no date; it is not used")
    known = declared()
    for name, value in entry.params.items():
        if name not in known:
            raise ConfigError(
                f"unknown parameter {name!r}; {parameters.nearest(name, list(known))}"
            )
        if name.startswith("kernel.") and not known[name].takes(value):
            raise ConfigError(f"{name}={value!r} is not one of {known[name].values_text}")
    apply(Candidate(entry.params), SpecConfig(), EngineConfig())


def read(path: Path) -> TunedEntry:
    """An entry from its file.

    Raises:
        ConfigError: a file that is not there, damaged, of another version, or with fields or
            parameters that this code does not know; one line that names the file.
    """
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(document, dict):
            raise ConfigError("it is no JSON object")
        unknown = sorted(document.keys() ^ set(_FIELDS))
        if unknown:
            kind = "unknown" if unknown[0] in document else "missing"
            raise ConfigError(f"{kind} field {unknown[0]!r}")
        if document["version"] != FORMAT:
            raise ConfigError(
                f"it is of format {document['version']!r}, this code reads {FORMAT}; "
                "run serve.autotune again"
            )
        names = {f.name for f in dataclasses.fields(DeploymentKey)}
        if not isinstance(document["key"], dict) or document["key"].keys() != names:
            raise ConfigError("its key does not have the fields of a deployment")
        parts = {name: document[name] for name in ("params", "verdict", "provenance", "versions")}
        if not all(isinstance(part, dict) for part in parts.values()):
            raise ConfigError("its parts are no JSON objects")
        entry = TunedEntry(DeploymentKey.from_json(document["key"]), **parts)
        if entry.id != document["id"]:
            raise ConfigError("its content is not what was written; run serve.autotune again")
        _check(entry)
    except OSError as error:
        raise ConfigError(f"tuned entry {path}: {error.strerror}; give another") from error
    except (ValueError, RecursionError) as error:  # of json and of UTF-8
        raise ConfigError(f"tuned entry {path}: not JSON; delete it") from error
    except ConfigError as error:
        raise ConfigError(f"tuned entry {path}: {error}") from error
    return entry


def tuned_home() -> Path:
    """Where `serve.autotune --apply` installs entries, and where engines look for them."""
    return cache_home() / "tuned"


def shipped_home() -> Path:
    """Entries that come with this package."""
    return Path(__file__).parent.parent / "assets" / "tuned"


def write(entry: TunedEntry, folder: Path) -> Path:
    """Keeps an entry as `tuned-<id>.json`; written aside and renamed.

    Raises:
        ConfigError: a folder that cannot be written.
    """
    path = folder / f"tuned-{entry.id}.json"
    part = path.with_suffix(f".{os.getpid()}.part")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        part.write_text(json.dumps(entry.to_json(), indent=2, sort_keys=True) + "\n")
        part.replace(path)
    except OSError as error:
        raise ConfigError(
            f"tuned entry {path}: {error.strerror}; give a folder that can be written"
        ) from error
    return path


def install(entry: TunedEntry, folder: Path | None = None) -> Path:
    """Makes an entry the one that engines of its deployment start with; what was installed for the
    same key goes.

    Raises:
        ConfigError: as `write`.
    """
    home = folder or tuned_home()
    path = write(entry, home)
    for old, kept in readable(home, lambda _: None):
        if kept.key == entry.key and old != path:
            old.unlink(missing_ok=True)
    return path


def readable(folder: Path, say: Say) -> Iterable[tuple[Path, TunedEntry]]:
    """The entries of a folder that can be used; `say` gets a line for each of the others."""
    for path in sorted(folder.glob("tuned-*.json")):
        try:
            yield path, read(path)
        except ConfigError as error:
            say(f"{error} (not used)")
