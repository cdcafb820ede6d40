"""External explorers, `--explorer "cmd:..."`: any program that gives back a patch.

It runs in a copy of the tracked files, under limits, and can write nowhere else (Landlock). What it
gives back is checked (`patches.py`), applied to a fresh copy, tested and judged there, under limits
again. The user's tree is only ever read; an accepted patch is saved as a file.

    scratch/explorer/work     the explorer's working copy, its current directory
    scratch/explorer/brief.*  what it is told;  scratch/explorer/patch.diff: what it may write
    scratch/git, base, judged our repository, the files as they were, and with the patch

Tests run in one process with the patched code, so a patch that means harm could make them pass; the
gate believes nothing that the other process says and cannot be passed so (`gate.py`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from jetspec_jax.autotune import patches
from jetspec_jax.autotune.brief import Brief
from jetspec_jax.autotune.candidate import Candidate
from jetspec_jax.autotune.key import DeploymentKey, code_version
from jetspec_jax.autotune.memory import Memory, Pattern
from jetspec_jax.autotune.supervise import Ending, Limits, run
from jetspec_jax.autotune.supervisor import landlock_version
from jetspec_jax.autotune.verdict import Verdict
from jetspec_jax.errors import ConfigError, InputError, JetSpecError

PREFIX = "cmd:"
# About the ops that a patch can reach; what tests/ has besides is for people who change the code.
TESTS = (
    "tests/pallas_kernels/test_accept_commit.py",
    "tests/pallas_kernels/test_decoder_stack.py",
    "tests/numerics/test_bitwise.py",
)
_LOG_TAIL = 4_000  # bytes of a log that an attempt keeps
_LEAST_LANDLOCK = 3


@dataclasses.dataclass(frozen=True)
class Budget:
    """What an explorer and the check of its patch may use; each limit holds for either.

    Attributes:
        seconds: of the explorer.
        test_seconds, gate_seconds: of the tests, and of the gate.
        memory_bytes: of all processes together.
        disk_bytes: of everything in the scratch folder that they may write.
        processes: alive at once.
    """

    seconds: float = 600.0
    test_seconds: float = 600.0
    gate_seconds: float = 600.0
    memory_bytes: int = 8 << 30
    disk_bytes: int = 2 << 30
    processes: int = 256


@dataclasses.dataclass(frozen=True)
class Attempt:
    """What came of one explorer.

    Attributes:
        origin: "cmd:..." as given.
        accepted: passed rules, tests and gate.
        stage: where it ended: explorer | patch | tests | gate.
        reason: one line.
        candidate: its patch, None where it gave none that could be read.
        changes: files that the patch touches.
        verdict: the gate's, None where it never came to that.
        seconds: of everything.
        log: the end of what the explorer printed (of the tests, where they failed).
        patch_file: where an accepted patch was saved.
    """

    origin: str
    accepted: bool
    stage: str
    reason: str
    candidate: Candidate | None
    changes: tuple[str, ...]
    verdict: Verdict | None
    seconds: float
    log: str
    patch_file: Path | None = None

    def to_json(self) -> dict[str, Any]:
        values = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        return values | {
            "candidate": None if self.candidate is None else self.candidate.to_json(),
            "verdict": None if self.verdict is None else self.verdict.to_json(),
            "patch_file": None if self.patch_file is None else str(self.patch_file),
            "changes": list(self.changes),
        }


# Candidate, its patched tree, limits and environment of its process, seconds -> verdict.
Judge = Callable[[Candidate, Path, Limits, dict[str, str], float], Verdict]


class _Ended(Exception):
    def __init__(self, stage: str, reason: str, log: str = "") -> None:
        super().__init__(reason)
        self.stage, self.reason, self.log = stage, reason, log


def explore(
    command: str,
    *,
    tree: Path,
    brief: Brief,
    judge: Judge,
    out: Path,
    budget: Budget | None = None,
    tests: Sequence[str] = TESTS,
    say: Callable[[str], None] = lambda _: None,
) -> Attempt:
    """Runs one explorer and decides about its patch.

    Args:
        command: shell command line, with or without "cmd:". {python} stands for this interpreter,
            {brief} for brief.json, {seconds} for the time limit.
        tree: the user's checkout; only read.
        brief: the task.
        judge: the gate with everything but the candidate filled in.
        out: accepted patches go to `out`/patches; scratch folders live in `out`/scratch and are
            removed.
        budget: limits.
        tests: pytest arguments; empty: none.
        say: gets one line per stage.

    Raises:
        ConfigError: this machine cannot confine a process, or the tree is no checkout.
    """
    limits, started = budget or Budget(), time.monotonic()
    line = command.removeprefix(PREFIX).strip()
    if not line:
        raise ConfigError(f"--explorer {command!r} names no command; give cmd:PROGRAM ARGUMENTS")
    if sys.platform != "linux" or landlock_version() < _LEAST_LANDLOCK:
        raise ConfigError(
            "this kernel cannot confine a program to a folder (Landlock, Linux 6.2 or later); "
            "external explorers do not run here, use --explorer builtin:tree"
        )
    (out / "scratch").mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix="explorer-", dir=(out / "scratch").resolve()))
    files = patches.tracked_files(tree)
    modes = _modes(tree, files)
    trial = _Trial(line, tree, files, scratch, brief, limits, tuple(tests), judge, say)
    try:
        trial.everything()
        stage, reason, log, accepted = "gate", trial.reason, trial.log, True
    except _Ended as ended:
        stage, reason, log, accepted = ended.stage, ended.reason, ended.log, False
    finally:
        changed = _restore_modes(tree, modes)
        shutil.rmtree(scratch, ignore_errors=True)
    if changed:  # Landlock does not cover chmod
        accepted, reason = False, f"it changed the mode of {changed[0]} in your tree; put back"
    saved = None
    if accepted and trial.candidate is not None and trial.candidate.patch is not None:
        saved = out / "patches" / f"{trial.candidate.id}.patch"
        saved.parent.mkdir(parents=True, exist_ok=True)
        saved.write_text(trial.candidate.patch, encoding="utf-8", errors="surrogateescape")
    return Attempt(
        origin=f"{PREFIX}{line}",
        accepted=accepted,
        stage=stage,
        reason=reason,
        candidate=trial.candidate,
        changes=tuple(trial.changes),
        verdict=trial.verdict,
        seconds=time.monotonic() - started,
        log=log,
        patch_file=saved,
    )


@dataclasses.dataclass
class _Trial:
    """One explorer from its copy to its verdict."""

    command: str
    tree: Path
    files: list[str]
    scratch: Path
    brief: Brief
    budget: Budget
    tests: tuple[str, ...]
    judge: Judge
    say: Callable[[str], None]
    candidate: Candidate | None = None
    verdict: Verdict | None = None
    changes: list[str] = dataclasses.field(default_factory=list)
    reason: str = ""
    log: str = ""

    def everything(self) -> None:
        """Raises _Ended where the explorer or its patch is no good."""
        home, base, repository = (self.scratch / name for name in ("explorer", "base", "git"))
        patches.copy_tree(self.tree, base, self.files)
        patches.start_repository(repository, base)
        patches.copy_tree(base, home / "work", self.files)
        self.brief.write(home, dataclasses.asdict(self.budget))
        self.say(f"explorer: {self.command}")
        self._run_explorer(home)
        try:
            patch = self._patch(home, repository)
            self.candidate = Candidate({}, patch, f"{PREFIX}{self.command}")
            shutil.rmtree(home)  # nothing of it is used any more, and its disk space counts
            judged = self.scratch / "judged"
            patches.copy_tree(base, judged, self.files)
            changed = patches.apply_checked(repository, judged, patch)
        except (InputError, OSError) as error:
            raise _Ended("patch", f"patch refused: {error}", self.log) from error
        self.changes = [change.path for change in changed]
        self.say(f"explorer: a patch of {', '.join(self.changes)[:200]}")
        self._run_tests(judged)
        self._run_gate(judged)

    def _limits(self, seconds: float, *writable: Path) -> Limits:
        for folder in writable:
            folder.mkdir(parents=True, exist_ok=True)
        return Limits(
            seconds=seconds,
            memory_bytes=self.budget.memory_bytes,
            disk_bytes=self.budget.disk_bytes,
            file_bytes=self.budget.disk_bytes,
            processes=self.budget.processes,
            writable=writable,
            disk_folders=writable,
        )

    def _environment(self, folder: Path) -> dict[str, str]:
        """This process's, with temporary and cached files inside `folder`."""
        places = {"TMPDIR": folder / "tmp", "XDG_CACHE_HOME": folder / "cache"}
        for place in places.values():
            place.mkdir(parents=True, exist_ok=True)
        made = {**os.environ, **{name: str(place) for name, place in places.items()}}
        made.pop("PYTHONPATH", None)
        return made | {"PYTHONDONTWRITEBYTECODE": "1"}

    def _run_explorer(self, home: Path) -> None:
        words = {
            "{python}": sys.executable,
            "{brief}": str(home / "brief.json"),
            "{seconds}": f"{self.budget.seconds:g}",
        }
        line = self.command
        for word, value in words.items():
            line = line.replace(word, value)
        log = self.scratch / "explorer.log"
        ending = run(
            ["/bin/sh", "-c", line],
            home / "work",
            self._limits(self.budget.seconds, home),
            log,
            env=self._environment(home),
        )
        self.log = _tail(log)
        self._check(ending, "explorer", "the explorer")
        if ending.left_behind:
            raise _Ended(
                "explorer",
                f"the explorer left {ending.left_behind} processes behind; they were ended",
                self.log,
            )

    def _check(self, ending: Ending, stage: str, what: str) -> None:
        if not ending.problem and not ending.confined and ending.reason == "exit":
            raise _Ended(stage, f"{what} could not be confined by this kernel", self.log)
        if ending.reason != "exit" or ending.status != 0:
            raise _Ended(stage, ending.line(what), self.log)

    def _patch(self, home: Path, repository: Path) -> str:
        given = home / "patch.diff"
        if given.is_symlink() or given.exists():
            return patches.read_patch(given)
        patch = patches.diff(repository, home / "work")
        if not patch:
            raise InputError("the explorer changed nothing; it had nothing to propose")
        try:
            patch.encode("utf-8")
        except UnicodeEncodeError as error:
            raise InputError("a file of the patch is no UTF-8 text; write text") from error
        return patch

    def _run_tests(self, judged: Path) -> None:
        if not self.tests:
            return
        self.say(f"explorer: testing the patch ({' '.join(self.tests)})")
        scratch = self.scratch / "tests"
        command = [sys.executable, "-B", "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider"]
        log = self.scratch / "tests.log"
        ending = run(
            [*command, *self.tests],
            judged,
            self._limits(self.budget.test_seconds, scratch, judged / ".cache"),
            log,
            env=self._environment(scratch),
        )
        if ending.reason != "exit" or ending.status != 0 or not ending.confined:
            raise _Ended("tests", ending.line("the tests of the patch"), _tail(log))

    def _run_gate(self, judged: Path) -> None:
        self.say("explorer: the gate")
        if self.candidate is None:
            raise _Ended("patch", "there is no patch", self.log)
        scratch = self.scratch / "gate"
        seconds = self.budget.gate_seconds
        limits = self._limits(seconds, scratch)
        try:
            environment = self._environment(scratch)
            self.verdict = self.judge(self.candidate, judged, limits, environment, seconds)
        except JetSpecError as error:
            raise _Ended("gate", f"the gate could not run: {error}", self.log) from error
        self.reason = self.verdict.reason
        if not self.verdict.accepted:
            raise _Ended("gate", self.verdict.reason, self.log)


def record(memory: Memory, key: DeploymentKey, attempt: Attempt, tree: Path) -> Pattern | None:
    """Keeps an attempt, accepted or not; None where there was no patch to keep."""
    if attempt.candidate is None:
        return None
    verdict = attempt.verdict
    return memory.record(
        Pattern(
            key,
            attempt.candidate,
            attempt.accepted,
            measured=None if verdict is None else verdict.speed_ratio,
            low=None if verdict is None else verdict.speed_ratio_low,
            high=None if verdict is None else verdict.speed_ratio_high,
            report={
                "stage": attempt.stage,
                "reason": attempt.reason,
                "verdict": None if verdict is None else verdict.to_json(),
            },
            counter_example=None if verdict is None else verdict.counter_example,
            code=code_version(tree),
        )
    )


def _tail(log: Path) -> str:
    with contextlib.suppress(OSError), open(log, "rb") as file:
        file.seek(max(log.stat().st_size - _LOG_TAIL, 0))
        return file.read().decode("utf-8", "replace")
    return ""


def _modes(tree: Path, files: Sequence[str]) -> dict[Path, int]:
    """Modes of files and of the folders they lie in."""
    paths = {tree / name for name in files}
    paths |= {
        folder for path in paths for folder in path.parents if tree in (folder, *folder.parents)
    }
    return {p: p.lstat().st_mode for p in paths if p.exists() and not p.is_symlink()}


def _restore_modes(tree: Path, modes: dict[Path, int]) -> list[str]:
    """Puts changed modes back; which they were."""
    changed = []
    for path in sorted(modes):  # folders before what is in them
        with contextlib.suppress(FileNotFoundError):
            if path.lstat().st_mode != modes[path]:
                os.chmod(path, modes[path] & 0o7777)
                changed.append(str(path.relative_to(tree)))
    return changed
