"""Limits for a command that nobody trusts, and the process that enforces them (`supervisor.py`)."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from jetspec_jax.errors import ConfigError, WorkerError

_SUPERVISOR = Path(__file__).with_name("supervisor.py")
_GRACE_S = 30.0  # for the supervisor to kill and count


@dataclasses.dataclass(frozen=True)
class Limits:
    """What a command and everything it starts may use; None or 0: no limit.

    Attributes:
        seconds: wall time.
        memory_bytes: address space of each process, and resident memory of all together.
        disk_bytes: in all of `disk_folders` together.
        file_bytes: of one file.
        processes: alive at once.
        writable: folders that may be written; None: no restriction. Enforced by Landlock; where
            the kernel has none, `Ending.confined` is False.
        disk_folders: folders whose size counts.
    """

    seconds: float | None = None
    memory_bytes: int | None = None
    disk_bytes: int | None = None
    file_bytes: int | None = None
    processes: int | None = 512
    writable: tuple[Path, ...] | None = None
    disk_folders: tuple[Path, ...] = ()


@dataclasses.dataclass(frozen=True)
class Ending:
    """How a supervised command ended.

    Attributes:
        reason: exit | time | memory | disk | processes | stopped | lost (the supervisor died).
        status: exit code, minus the signal where one ended it; None if it was still running.
        seconds, memory_bytes, disk_bytes: what it used at most.
        left_behind: processes still there after the command had ended (they were killed).
        confined: writes were held to the writable folders by the kernel.
        problem: why the command could not be started, "" if it was.
    """

    reason: str
    status: int | None
    seconds: float
    memory_bytes: int
    disk_bytes: int
    left_behind: int
    confined: bool
    problem: str = ""

    def line(self, what: str) -> str:
        """One line for people: how `what` ended."""
        if self.problem:
            return f"{what} could not be started: {self.problem}"
        if self.reason == "exit":
            if self.status is not None and self.status < 0:
                return f"{what} was ended by {signal.Signals(-self.status).name}"
            shell = ""  # a shell tells of a signal in its own way
            if self.status is not None and 128 < self.status < 128 + signal.NSIG:
                with contextlib.suppress(ValueError):
                    shell = f" ({signal.Signals(self.status - 128).name})"
            return f"{what} ended with status {self.status}{shell}"
        used = {
            "time": f"{self.seconds:.1f} s",
            "memory": f"{self.memory_bytes / 2**20:.0f} MiB",
            "disk": f"{self.disk_bytes / 2**20:.0f} MiB",
        }
        spent = f" ({used[self.reason]} used)" if self.reason in used else ""
        if self.reason in ("stopped", "lost"):
            return f"{what} was stopped" if self.reason == "stopped" else f"{what} was lost"
        return f"{what} passed its {self.reason} limit{spent}"


class Supervised:
    """A running command under limits.

    Args:
        command: program and arguments.
        cwd: where it runs.
        limits: see `Limits`.
        env: whole environment; None: this process's.
        stdin, stdout, stderr: as for subprocess.Popen.

    Raises:
        ConfigError: this is not Linux.
    """

    def __init__(
        self,
        command: Sequence[str],
        cwd: Path,
        limits: Limits,
        *,
        env: Mapping[str, str] | None = None,
        stdin: int | IO[Any] | None = subprocess.DEVNULL,
        stdout: int | IO[Any] | None = None,
        stderr: int | IO[Any] | None = None,
    ) -> None:
        if sys.platform != "linux":
            raise ConfigError(f"platform {sys.platform!r} has no subreaper; run this on Linux")
        alive, self._lifeline = os.pipe()
        self._result, told = os.pipe()
        job = {
            "command": list(command),
            "cwd": str(cwd),
            "lifeline": alive,
            "result": told,
            "seconds": limits.seconds,
            "memory_bytes": limits.memory_bytes,
            "disk_bytes": limits.disk_bytes,
            "file_bytes": limits.file_bytes,
            "processes": limits.processes,
            "writable": None if limits.writable is None else [str(p) for p in limits.writable],
            "disk_folders": [str(p) for p in limits.disk_folders],
        }
        try:
            self.process = subprocess.Popen(
                [sys.executable, "-I", "-S", str(_SUPERVISOR), json.dumps(job)],
                stdin=stdin,
                stdout=stdout,
                stderr=stderr,
                env=env,
                pass_fds=(alive, told),
                start_new_session=True,
            )
        except BaseException:
            os.close(self._lifeline)
            os.close(self._result)
            raise
        finally:
            os.close(alive)
            os.close(told)
        self._started = time.monotonic()
        self.ending: Ending | None = None

    @property
    def running(self) -> bool:
        return self.process.poll() is None

    def stop(self) -> Ending:
        """Kills the command and everything it started."""
        if self.ending is None:
            with contextlib.suppress(OSError):
                os.write(self._lifeline, b"x")
        return self.wait(_GRACE_S)

    def wait(self, seconds: float | None = None) -> Ending:
        """How it ended.

        Args:
            seconds: most time to wait; None: as long as it takes.

        Raises:
            WorkerError: it is still running then.
        """
        if self.ending is not None:
            return self.ending
        try:
            self.process.wait(seconds)
        except subprocess.TimeoutExpired as error:
            raise WorkerError(
                f"{self.process.args!r:.80} is still running after {seconds} s; stop it first"
            ) from error
        os.close(self._lifeline)
        with os.fdopen(self._result) as file:
            ready = select.select([file], [], [], 1.0)[0]
            text = file.read() if ready else ""
        if text:
            self.ending = Ending(**json.loads(text))
        else:
            spent = time.monotonic() - self._started
            self.ending = Ending("lost", None, spent, 0, 0, 0, False)
        return self.ending


def run(
    command: Sequence[str],
    cwd: Path,
    limits: Limits,
    log: Path,
    *,
    env: Mapping[str, str] | None = None,
) -> Ending:
    """Runs a command to its end; what it prints goes to the file `log`."""
    with open(log, "wb") as file:
        supervised = Supervised(command, cwd, limits, env=env, stdout=file, stderr=file)
        try:
            return supervised.wait()
        except BaseException:  # Ctrl-C: what was started must not go on
            supervised.stop()
            raise
