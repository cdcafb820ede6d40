"""Runs one command that nobody trusts, and leaves nothing of it behind. Started by path, `python -I
supervisor.py JOB`, by `supervise.py`; standard library only, so that it starts in milliseconds.

The command gets limits of the system (address space, file size), may write into named folders only
(Landlock, where the kernel has it), and is watched for what a single process cannot be limited to:
time, memory and number of all its processes together, bytes in its folders. The supervisor is the
*subreaper* of everything that the command starts: a grandchild that called setsid and lost its
parent becomes our child, so it is found and killed like any other.

Sources: prctl(2), PR_SET_CHILD_SUBREAPER; landlock(7).
"""

import contextlib
import ctypes
import json
import os
import resource
import select
import signal
import stat
import sys
import time

_SET_NO_NEW_PRIVS, _SET_CHILD_SUBREAPER = 38, 36  # prctl
_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446  # the same number on every machine
_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR = 1 << 0, 1 << 1, 1 << 2, 1 << 3
_TRUNCATE, _IOCTL = 1 << 14, 1 << 15
# A look at /proc costs milliseconds: more often would slow what is measured.
_POLL_S, _DISK_POLL_S, _KILL_S = 0.25, 0.5, 20.0
_LEAVE_S = 0.5  # for processes to end by themselves after the one that started them
_IGNORED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_PAGE = os.sysconf("SC_PAGE_SIZE")


def _libc():
    return ctypes.CDLL(None, use_errno=True)


def landlock_version():
    """Version of the kernel's Landlock, 0 where there is none."""
    return max(_libc().syscall(_CREATE_RULESET, None, 0, 1), 0)


def confine(folders, files):
    """From here on this process and its children write into `folders` and `files` only.

    Reading stays free. With Landlock 6 or later no signal reaches a process outside either. Returns
    whether the kernel could do it.
    """
    version = landlock_version()
    if version < 3:  # 2 cannot forbid truncation: a file could still be emptied
        return False
    writes = 0
    for bit in range(15 if version < 5 else 16):
        if 1 << bit not in (_EXECUTE, _READ_FILE, _READ_DIR):
            writes |= 1 << bit
    writes &= ~_IOCTL  # terminals and devices; no file is changed by it

    class Ruleset(ctypes.Structure):
        _fields_ = [("fs", ctypes.c_uint64), ("net", ctypes.c_uint64), ("scoped", ctypes.c_uint64)]

    class Beneath(ctypes.Structure):
        _pack_ = 1
        _fields_ = [("access", ctypes.c_uint64), ("fd", ctypes.c_int32)]

    libc = _libc()
    rules = Ruleset(writes, 0, (1 << 1) if version >= 6 else 0)
    ruleset = libc.syscall(_CREATE_RULESET, ctypes.byref(rules), ctypes.sizeof(rules), 0)
    if ruleset < 0:
        return False
    for path, access in [(p, writes) for p in folders] + [
        (p, writes & (_WRITE_FILE | _TRUNCATE)) for p in files
    ]:
        with contextlib.suppress(FileNotFoundError):
            fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
            rule = Beneath(access, fd)
            if libc.syscall(_ADD_RULE, ruleset, 1, ctypes.byref(rule), 0) != 0:
                return False
            os.close(fd)
    if libc.prctl(_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0:
        return False
    done = libc.syscall(_RESTRICT_SELF, ruleset, 0) == 0
    os.close(ruleset)
    return done


def descendants(root):
    """pid -> pages in memory of every living process below `root`, from /proc."""
    parents, pages = {}, {}
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        try:
            with open(f"/proc/{name}/stat") as file:
                fields = file.read().rpartition(")")[2].split()
        except OSError:
            continue
        if fields[0] not in "ZX":
            parents[int(name)], pages[int(name)] = int(fields[1]), int(fields[21])
    found = {}
    for pid in parents:
        at, seen = pid, set()
        while at in parents and at not in seen:
            seen.add(at)
            at = parents[at]
            if at == root:
                found[pid] = pages[pid]
                break
    return found


def folder_bytes(paths):
    """Bytes on disk of everything below `paths`; what vanishes meanwhile does not count."""
    total, waiting = 0, list(paths)
    while waiting:
        try:
            entries = list(os.scandir(waiting.pop()))
        except OSError:
            continue
        for entry in entries:
            try:
                info = entry.stat(follow_symlinks=False)
            except OSError:
                continue
            if stat.S_ISDIR(info.st_mode):
                waiting.append(entry.path)
            total += info.st_blocks * 512
    return total


def kill_all(root):
    """Kills every process below `root` and reaps it. Returns how many there were."""
    killed, until = set(), time.monotonic() + _KILL_S
    while time.monotonic() < until:
        living = descendants(root)
        killed |= set(living)
        for pid in living:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        reap()
        if not living:
            break
        time.sleep(0.005)
    return len(killed)


def reap():
    """pid -> wait status of every child that has ended."""
    ended = {}
    with contextlib.suppress(ChildProcessError):
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                break
            ended[pid] = status
    return ended


def _start(job, result):
    """Forks the command. The child reports a failure of its own over a pipe and never returns."""
    problem, report = os.pipe()
    pid = os.fork()
    if pid:
        os.close(report)
        with os.fdopen(problem) as file:
            return pid, file.read()
    try:
        os.close(problem)
        os.set_inheritable(report, False)
        for fd in (job["lifeline"], result):
            os.close(fd)
        for number in (*_IGNORED, signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores the last two
            signal.signal(number, signal.SIG_DFL)
        os.setsid()
        os.chdir(job["cwd"])
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if job["memory_bytes"]:
            resource.setrlimit(resource.RLIMIT_AS, (job["memory_bytes"],) * 2)
        if job["file_bytes"]:
            resource.setrlimit(resource.RLIMIT_FSIZE, (job["file_bytes"],) * 2)
        if job["writable"] is not None and not confine(job["writable"], ["/dev"]):
            os.write(report, b"unconfined\n")
        os.execvp(job["command"][0], job["command"])
    except BaseException as error:  # noqa: BLE001 - nothing of the parent's code may run here
        os.write(report, f"failed {error}\n".encode())
    finally:
        os._exit(127)


def watch(job, pid, started, wake):
    """Waits for the command or for the first limit that it passes.

    Args:
        job: what was asked for.
        pid: of the command.
        started: time.monotonic() of its start.
        wake: a descriptor that can be read when a child has ended.

    Returns:
        (reason, wait status or None, most bytes in memory, most bytes on disk).
    """
    me, memory, disk, next_disk = os.getpid(), 0, 0, 0.0
    while True:
        status = reap().get(pid)
        now = time.monotonic()
        if job["disk_bytes"] and (now >= next_disk or status is not None):
            disk = max(disk, folder_bytes(job["disk_folders"]))
            next_disk = now + _DISK_POLL_S
        watched = job["memory_bytes"] or job["processes"]
        living = descendants(me) if watched else {}
        memory = max(memory, sum(living.values()) * _PAGE)
        if job["disk_bytes"] and disk > job["disk_bytes"]:
            return "disk", status, memory, disk
        if status is not None:
            return "exit", status, memory, disk
        if job["seconds"] and now - started > job["seconds"]:
            return "time", None, memory, disk
        if job["memory_bytes"] and memory > job["memory_bytes"]:
            return "memory", None, memory, disk
        if job["processes"] and len(living) > job["processes"]:
            return "processes", None, memory, disk
        # Whoever wanted the result closes the lifeline, or dies; a child that ends wakes us, too.
        ready = select.select([job["lifeline"], wake], [], [], _POLL_S)[0]
        if job["lifeline"] in ready:
            return "stopped", None, memory, disk
        if ready:
            os.read(wake, 512)


def main():
    job = json.loads(sys.argv[1])
    result, started = job["result"], time.monotonic()
    _libc().prctl(_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    for number in _IGNORED:
        signal.signal(number, signal.SIG_IGN)  # we end through the lifeline, after the command
    wake, waker = os.pipe()
    for fd in (wake, waker):
        os.set_blocking(fd, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(waker, warn_on_full_buffer=False)
    pid, problem = _start(job, result)
    null = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1, 2):  # the command's ends must be the only ones: readers wait for end of file
        os.dup2(null, fd)
    reason, status, memory, disk = watch(job, pid, started, wake)
    until = time.monotonic() + (_LEAVE_S if reason == "exit" else 0.0)
    while time.monotonic() < until and descendants(os.getpid()):
        time.sleep(0.01)
        reap()
    stray = kill_all(os.getpid())
    document = {
        "reason": reason,
        "status": None if status is None else os.waitstatus_to_exitcode(status),
        "seconds": time.monotonic() - started,
        "memory_bytes": memory,
        "disk_bytes": disk,
        "left_behind": stray if reason == "exit" else 0,
        "confined": job["writable"] is not None and "unconfined" not in problem,
        "problem": problem.partition("failed ")[2].strip(),
    }
    with contextlib.suppress(OSError):
        os.write(result, json.dumps(document).encode())


if __name__ == "__main__":
    main()
