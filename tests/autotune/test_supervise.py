"""Limits, and what is left of a command: nothing."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

from jetspec_jax.autotune.supervise import Limits, Supervised, run
from jetspec_jax.autotune.supervisor import landlock_version
from jetspec_jax.errors import WorkerError
from tests.conftest import ROOT

SLEEP = [sys.executable, "-S", "-c", "import time; print('up', flush=True); time.sleep(300)"]


def python(code: str, tmp_path, limits: Limits | None = None):
    ending = run([sys.executable, "-S", "-c", code], tmp_path, limits or Limits(), tmp_path / "log")
    return ending, (tmp_path / "log").read_text()


def alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


def test_a_command_that_ends_is_reported_with_its_status(tmp_path):
    ending, log = python("print('hello'); raise SystemExit(7)", tmp_path)
    assert (ending.reason, ending.status, ending.left_behind) == ("exit", 7, 0)
    assert log == "hello\n" and ending.line("it") == "it ended with status 7"
    assert not ending.confined  # nobody asked for it


def test_a_signal_is_named_and_default_signals_are_back(tmp_path):
    ending, _ = python("import os; os.kill(os.getpid(), 15)", tmp_path)
    assert ending.status == -signal.SIGTERM and "SIGTERM" in ending.line("it")


def test_a_program_that_is_not_there_is_told(tmp_path):
    ending = run(["/no/such/program"], tmp_path, Limits(), tmp_path / "log")
    assert "No such file" in ending.problem and "could not be started" in ending.line("it")


def test_time_limit(tmp_path):
    started = time.monotonic()
    ending = run(SLEEP, tmp_path, Limits(seconds=0.5), tmp_path / "log")
    assert ending.reason == "time" and ending.status is None
    assert time.monotonic() - started < 30


def test_file_size_limit(tmp_path):
    code = "open('big', 'wb').write(bytes(1 << 20))"
    ending, _ = python(code, tmp_path, Limits(file_bytes=1 << 16))
    assert ending.status != 0 and (tmp_path / "big").stat().st_size <= 1 << 16


def test_stop_ends_every_descendant(tmp_path):
    code = (
        "import os, time\n"
        "pids = []\n"
        "for _ in range(3):\n"
        "    pid = os.fork()\n"
        "    if pid == 0:\n"
        "        os.setsid()\n"
        "        time.sleep(300)\n"
        "    pids.append(pid)\n"
        "print(*pids, os.getpid(), flush=True)\n"
        "time.sleep(300)\n"
    )
    supervised = Supervised(
        [sys.executable, "-S", "-c", code], tmp_path, Limits(), stdout=subprocess.PIPE
    )
    pids = [int(p) for p in supervised.process.stdout.readline().split()]
    assert all(map(alive, pids))
    with pytest.raises(WorkerError, match="still running"):
        supervised.wait(0.05)
    assert supervised.stop().reason == "stopped"
    assert not any(map(alive, pids))
    supervised.process.stdout.close()


PARENT = """
import subprocess, sys, time
from pathlib import Path
from jetspec_jax.autotune.supervise import Limits, Supervised
code = "import os, time; print(os.getpid(), flush=True); time.sleep(300)"
made = Supervised([sys.executable, "-S", "-c", code], Path("."), Limits(), stdout=subprocess.PIPE)
print(int(made.process.stdout.readline()), flush=True)
time.sleep(300)
"""


def test_kill_9_of_whoever_asked_ends_the_command(tmp_path):
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    pid = int(parent.stdout.readline())
    assert alive(pid)
    parent.kill()
    parent.communicate()
    until = time.monotonic() + 20
    while alive(pid) and time.monotonic() < until:
        time.sleep(0.05)
    assert not alive(pid)


@pytest.mark.skipif(landlock_version() < 3, reason="this kernel has no Landlock (Linux 6.2)")
def test_writes_are_held_to_the_writable_folders(tmp_path):
    (tmp_path / "in").mkdir()
    (tmp_path / "kept").write_text("kept")
    code = (
        "import os\n"
        "open('in/new', 'w').write('x')\n"
        "os.rename('in/new', 'in/newer')\n"
        "open('/dev/null', 'w').write('x')\n"
        "for act in (lambda: open('out', 'w'), lambda: os.truncate('kept', 0),\n"
        "            lambda: os.remove('kept'), lambda: os.rename('in/newer', 'newer'),\n"
        "            lambda: os.mkdir('folder'), lambda: os.symlink('kept', 'link'),\n"
        "            lambda: os.link('kept', 'in/kept')):\n"
        "    try:\n"
        "        act()\n"
        "        raise SystemExit('written')\n"
        "    except OSError:\n"
        "        pass\n"
    )
    ending, log = python(code, tmp_path, Limits(writable=(tmp_path / "in",)))
    assert ending.status == 0 and ending.confined, log
    assert (tmp_path / "kept").read_text() == "kept"
    assert sorted(os.listdir(tmp_path / "in")) == ["newer"]
