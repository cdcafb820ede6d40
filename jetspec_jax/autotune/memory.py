"""What earlier searches found, in one SQLite file: patterns that passed the gate and patterns that
did not (pilot.md section 6).

Every evaluation is a row of its own and rows are never changed, so processes that write at once
lose nothing; the last evaluation of a pattern is the one that counts. A row that came from another
file (`import_`) is a candidate: `best` never returns it until it has been recorded here, after a
gate of our own.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import hashlib
import json
import math
import os
import sqlite3
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from jetspec_jax.autotune.candidate import Candidate, apply
from jetspec_jax.autotune.key import DeploymentKey, distance
from jetspec_jax.config import EngineConfig, SpecConfig
from jetspec_jax.errors import ConfigError, JetSpecError, ModelFileError

VERSION = 1  # of the schema
FORMAT = "jetspec-jax autotune memory"  # of an exported file
_APPLICATION = 0x4A53_5058  # "JSPX" in the file's header: another program's database has another
_BUSY_S = 60.0  # how long a writer waits for another
_SCHEMA = """
CREATE TABLE patterns (
    row INTEGER PRIMARY KEY AUTOINCREMENT,
    id TEXT NOT NULL,
    accepted INTEGER NOT NULL,
    trusted INTEGER NOT NULL,
    document TEXT NOT NULL
)
"""


def _ratio(value: Any) -> bool:
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return value is None or (number and math.isfinite(value) and value > 0)


def _text(value: Any) -> bool:
    return isinstance(value, str)


def _mapping(value: Any) -> bool:
    return isinstance(value, Mapping)


# What the fields of a pattern from a file must be: one of another kind would break every search.
_KINDS: dict[str, Callable[[Any], bool]] = {
    "accepted": lambda value: isinstance(value, bool),
    **dict.fromkeys(("predicted", "measured", "low", "high"), _ratio),
    **dict.fromkeys(("report", "shapes"), _mapping),
    "counter_example": lambda value: value is None or _mapping(value),
    **dict.fromkeys(("code", "when"), _text),
}


@dataclasses.dataclass(frozen=True)
class Pattern:
    """One evaluation of a candidate for a deployment.

    Attributes:
        key: the deployment.
        candidate: what changed.
        accepted: the gate's word.
        predicted: speed ratio against the incumbent that the cost model expected, or None.
        measured, low, high: paired speed ratio and its 95% interval, None where it was not timed.
        report: the gate's verdict as JSON values.
        counter_example: of a rejected pattern that changed a token: the first mismatch.
        code: version of the code it was measured with (`key.code_version`).
        shapes: kernel shapes it ran with, by op.
        when: UTC, ISO 8601; "" = now.
        trusted: recorded here, by our own gate. Set by the memory, never by the caller.
    """

    key: DeploymentKey
    candidate: Candidate
    accepted: bool
    predicted: float | None = None
    measured: float | None = None
    low: float | None = None
    high: float | None = None
    report: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    counter_example: Mapping[str, Any] | None = None
    code: str = ""
    shapes: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    when: str = ""
    trusted: bool = True

    @property
    def id(self) -> str:
        """16 hex digits over deployment and change: evaluations of one pattern share it."""
        text = json.dumps([self.key.to_json(), self.candidate.id], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def to_json(self) -> dict[str, Any]:
        """JSON values, without `trusted`: trust does not travel."""
        names = [f.name for f in dataclasses.fields(self) if f.name != "trusted"]
        values = {name: getattr(self, name) for name in names}
        values |= {"key": self.key.to_json(), "candidate": self.candidate.to_json()}
        return {"id": self.id, **values}

    @classmethod
    def from_json(cls, value: Mapping[str, Any], *, trusted: bool = False) -> Pattern:
        names = {f.name for f in dataclasses.fields(cls)} - {"key", "candidate", "trusted"}
        given = {name: value[name] for name in names if name in value}
        for name, found in given.items():
            if not _KINDS[name](found):
                raise ConfigError(f"{name}={found!r} of a pattern is of the wrong kind")
        key, candidate = (
            DeploymentKey.from_json(value["key"]),
            Candidate.from_json(value["candidate"]),
        )
        return cls(key, candidate, trusted=trusted, **given)


class Memory:
    """The patterns of one file.

    Args:
        path: the SQLite file.
        create: make it where it does not exist (at the first write); else that is an error.

    Raises:
        ModelFileError: a file that is damaged, another program's, or of another version. It is
            left as it is.
    """

    def __init__(self, path: str | Path, *, create: bool = True) -> None:
        self.path, self._create = Path(path), create
        if self.path.exists():
            with self._open():
                pass
        elif not create:
            raise ModelFileError(f"memory {self.path} does not exist; run serve.autotune first")

    # ---- the file --------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _open(self) -> Iterator[sqlite3.Connection]:
        """A connection for one transaction; commits at the end."""
        try:
            if self._create:
                self.path.parent.mkdir(parents=True, exist_ok=True)
            database = sqlite3.connect(self.path, timeout=_BUSY_S, isolation_level=None)
        except (OSError, sqlite3.Error) as error:
            raise ModelFileError(
                f"memory {self.path}: {error}; give a path that can be written"
            ) from error
        try:
            # a killed process loses nothing in WAL; only a power cut may take the last rows
            database.execute("PRAGMA synchronous = NORMAL")
            self._prepare(database)
            database.execute("BEGIN IMMEDIATE" if self._create else "BEGIN")
            yield database
            database.execute("COMMIT")
        except sqlite3.Error as error:
            raise ModelFileError(
                f"memory {self.path} cannot be used ({error}); move it away, a new one is made"
            ) from error
        finally:
            database.close()

    def _prepare(self, database: sqlite3.Connection) -> None:
        """Checks whose file this is before anything is written to it; makes the table."""
        application, version = self._header(database)
        if (application, version) == (0, 0) and not self._tables(database):
            if not self._create:
                raise ModelFileError(f"memory {self.path} is empty; run serve.autotune first")
            self._use_wal(database)
            database.execute("BEGIN IMMEDIATE")
            if not self._tables(database):  # another process may have been here meanwhile
                database.execute(_SCHEMA)
                database.execute("CREATE INDEX patterns_id ON patterns (id)")
                database.execute(f"PRAGMA application_id = {_APPLICATION}")
                database.execute(f"PRAGMA user_version = {VERSION}")
            database.execute("COMMIT")
            application, version = self._header(database)
        if application != _APPLICATION:
            raise ModelFileError(
                f"memory {self.path} is another program's database; give another path"
            )
        if version != VERSION:
            raise ModelFileError(
                f"memory {self.path} has version {version}, and this program reads {VERSION}; "
                "export it with the program that made it, or give another path"
            )
        found = database.execute("PRAGMA quick_check(1)").fetchone()[0]
        if found != "ok":
            raise ModelFileError(
                f"memory {self.path} is damaged ({' '.join(str(found).split())[:120]}); move it "
                "away, a new one is made"
            )

    @staticmethod
    def _header(database: sqlite3.Connection) -> tuple[int, int]:
        ask = lambda name: database.execute(f"PRAGMA {name}").fetchone()[0]  # noqa: E731
        return ask("application_id"), ask("user_version")

    @staticmethod
    def _tables(database: sqlite3.Connection) -> int:
        return database.execute("SELECT count(*) FROM sqlite_schema").fetchone()[0]

    @staticmethod
    def _use_wal(database: sqlite3.Connection) -> None:
        """Readers beside a writer. SQLite does not wait for the lock of this switch by itself."""
        until = time.monotonic() + _BUSY_S
        while True:
            try:
                database.execute("PRAGMA journal_mode = WAL")
                return
            except sqlite3.OperationalError:
                if time.monotonic() > until:
                    raise
                time.sleep(0.01)

    # ---- writing ---------------------------------------------------------------------------------

    def record(self, pattern: Pattern) -> Pattern:
        """Keeps an evaluation that our own gate made, accepted or not; returns it as kept."""
        when = pattern.when or datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        kept = dataclasses.replace(pattern, when=when, trusted=True)
        with self._open() as database:
            self._insert(database, kept)
        return kept

    @staticmethod
    def _insert(database: sqlite3.Connection, pattern: Pattern) -> None:
        text = json.dumps(pattern.to_json(), sort_keys=True, allow_nan=False)
        database.execute(
            "INSERT INTO patterns (id, accepted, trusted, document) VALUES (?, ?, ?, ?)",
            (pattern.id, int(pattern.accepted), int(pattern.trusted), text),
        )

    def import_(self, path: str | Path) -> int:
        """Adds the patterns of an exported file, as candidates; returns how many are new.

        Raises:
            ModelFileError: no such file, or not one of ours; nothing is added then.
        """
        try:
            document = json.loads(Path(path).read_text(encoding="utf-8"))
            if document["format"] != FORMAT or document["version"] != VERSION:
                raise ValueError(f"format {document['format']!r}, version {document['version']!r}")
            patterns = [Pattern.from_json(p) for p in document["patterns"]]
            for pattern in patterns:  # before a search meets them; kernels differ by device
                given = pattern.candidate.params.items()
                known = {k: v for k, v in given if not k.startswith("kernel.")}
                apply(Candidate(known), SpecConfig(), EngineConfig())
        except OSError as error:
            raise ModelFileError(f"{path}: {error.strerror}; give an exported file") from error
        except (ValueError, KeyError, TypeError, JetSpecError) as error:
            raise ModelFileError(
                f"{path} is no exported memory of version {VERSION} "
                f"({' '.join(str(error).split())[:120]}); export it again"
            ) from error
        with self._open() as database:
            known = {(p.id, p.when) for p in self._rows(database)}
            fresh = [p for p in patterns if (p.id, p.when) not in known]
            for pattern in fresh:
                self._insert(database, pattern)
        return len(fresh)

    # ---- reading ---------------------------------------------------------------------------------

    @staticmethod
    def _rows(database: sqlite3.Connection) -> list[Pattern]:
        rows = database.execute("SELECT trusted, document FROM patterns ORDER BY row")
        return [Pattern.from_json(json.loads(text), trusted=bool(t)) for t, text in rows]

    def patterns(self) -> list[Pattern]:
        """Every evaluation, oldest first."""
        if not self.path.exists():
            return []
        with self._open() as database:
            try:
                return self._rows(database)
            except (ValueError, KeyError, TypeError, JetSpecError) as error:
                raise ModelFileError(
                    f"memory {self.path} holds a row that cannot be read ({error}); move it away, "
                    "a new one is made"
                ) from error

    def latest(self) -> list[Pattern]:
        """The last evaluation of each pattern; our own always counts before an imported one."""
        found: dict[str, Pattern] = {}
        for pattern in self.patterns():
            before = found.get(pattern.id)
            if before is None or pattern.trusted or not before.trusted:
                found[pattern.id] = pattern
        return list(found.values())

    def best(self, key: DeploymentKey) -> Pattern | None:
        """The accepted pattern of exactly this key with the largest lower bound of its gain; only
        what was recorded here.
        """
        mine = [p for p in self.latest() if p.key == key and p.accepted and p.trusted]
        return max(mine, key=lambda p: p.low or 0.0, default=None)

    def nearest(self, key: DeploymentKey, count: int = 8) -> list[tuple[float, Pattern]]:
        """Accepted patterns by distance of their key (`key.distance`), then by gain; imported ones
        too. Whoever takes one has a candidate, not a result: it passes the gate again.
        """
        found = [(distance(key, p.key), p) for p in self.latest() if p.accepted]
        near = [(d, p) for d, p in found if math.isfinite(d)]
        return sorted(near, key=lambda item: (item[0], -(item[1].low or 0.0)))[:count]

    def candidates(self, key: DeploymentKey, count: int = 8) -> list[Candidate]:
        """`nearest` as candidates to seed a search with, each once."""
        found: dict[str, Candidate] = {}
        for _, pattern in self.nearest(key, count):
            source = f"memory:{pattern.id}"
            candidate = dataclasses.replace(pattern.candidate, origin=source)
            found.setdefault(candidate.id, candidate)
        return list(found.values())

    def rejected(self, key: DeploymentKey) -> list[Pattern]:
        """Patterns of this key that the gate refused, with their counter-examples."""
        return [p for p in self.latest() if p.key == key and not p.accepted]

    def export(self, path: str | Path) -> int:
        """Writes every evaluation as JSON; returns how many. Written aside, then renamed.

        Raises:
            ModelFileError: the file cannot be written.
        """
        patterns = self.patterns()
        document = {
            "format": FORMAT,
            "version": VERSION,
            "patterns": [p.to_json() for p in patterns],
        }
        target = Path(path)
        part = target.with_name(f"{target.name}.{os.getpid()}.part")
        try:
            part.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
            part.replace(target)
        except OSError as error:
            raise ModelFileError(f"{path}: {error.strerror}; give another path") from error
        return len(patterns)
