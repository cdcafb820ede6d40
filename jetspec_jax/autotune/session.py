"""What a run of the autotuner has reached, on disk: the same command goes on from there."""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from jetspec_jax.autotune.candidate import Candidate
from jetspec_jax.errors import ConfigError

VERSION = 1


@dataclasses.dataclass
class Session:
    """One run's state; every change is written at once, aside and renamed.

    Attributes:
        identity: what the run is about (deployment, seed, start, explorers, suite): a session of
            another identity is not gone on with.
        incumbent: the configuration that has to be beaten now.
        ended: names of the searches that are done, with why they ended.
        known: candidate id -> log speed ratio of patterns tried before any search.
        verdicts: of the gate, in order: {"candidate", "incumbent", "search", "measured",
            "in_time", "verdict"}.
        attempts: of external explorers (`external.Attempt.to_json`), in order.
        seconds: spent, over all processes.
        done: the run came to its end.
    """

    path: Path
    identity: Mapping[str, Any]
    incumbent: Candidate
    ended: dict[str, str] = dataclasses.field(default_factory=dict)
    known: dict[str, float] = dataclasses.field(default_factory=dict)
    verdicts: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    attempts: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    seconds: float = 0.0
    done: bool = False

    def judged(self, candidate: Candidate, against: Candidate) -> bool:
        """Whether the gate has spoken about a candidate against that incumbent in this run. Where
        its time ended before its work did, it has not.
        """
        pair = (candidate.id, against.id)
        return any(
            (Candidate.from_json(v["candidate"]).id, Candidate.from_json(v["incumbent"]).id) == pair
            for v in self.verdicts
            if v["in_time"]
        )

    def accepted(self) -> list[dict[str, Any]]:
        return [v for v in self.verdicts if v["verdict"]["accepted"]]

    def save(self) -> None:
        document = {
            "version": VERSION,
            "identity": dict(self.identity),
            "incumbent": self.incumbent.to_json(),
            "ended": self.ended,
            "known": self.known,
            "verdicts": self.verdicts,
            "attempts": self.attempts,
            "seconds": self.seconds,
            "done": self.done,
        }
        part = self.path.with_suffix(f".{os.getpid()}.part")
        part.write_text(json.dumps(document, indent=1) + "\n")
        part.replace(self.path)


def read(path: Path) -> Session | None:
    """The session in a file; None where there is none.

    Raises:
        ConfigError: a file that is no session of this version.
    """
    if not path.exists():
        return None
    try:
        kept = json.loads(path.read_text())
        if kept["version"] != VERSION:
            raise ValueError(f"version {kept['version']!r}")
        return Session(
            path,
            kept["identity"],
            Candidate.from_json(kept["incumbent"]),
            dict(kept["ended"]),
            dict(kept["known"]),
            list(kept["verdicts"]),
            list(kept["attempts"]),
            float(kept["seconds"]),
            bool(kept["done"]),
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"{path} is no session of this version ({error}); move it away, or give another --out"
        ) from error


def open_session(path: Path, identity: Mapping[str, Any], start: Candidate) -> tuple[Session, bool]:
    """(session, whether it goes on with an interrupted one). A run that has come to its end, or is
    about something else, is followed by a new one; what it found is in memory and in its studies.
    """
    kept = read(path)
    plain = json.loads(json.dumps(dict(identity)))
    if kept is not None and not kept.done and kept.identity == plain:
        return kept, True
    fresh = Session(path, plain, start)
    fresh.save()
    return fresh, False


@contextlib.contextmanager
def lock(folder: Path) -> Iterator[None]:
    """One autotuner a folder; the lock ends with the process, however it ends.

    Raises:
        ConfigError: another process has it.
    """
    with (folder / "lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise ConfigError(
                f"--out {folder}: another autotuner works there; wait for it, or give another --out"
            ) from error
        yield
