"""Names of the machine that measurements are filed under. Imports nothing heavy."""

from __future__ import annotations

import concurrent.futures
import os
import platform
import time
from pathlib import Path


def cpu_model() -> str:
    """The processor's marketing name, or what the platform module knows where /proc is absent."""
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.lower().startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def cores() -> int:
    """Cores this process may use (a container often has fewer than the machine)."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def read_bandwidth(size: int = 512 << 20) -> float:
    """Bytes per second that this machine reads, best of six passes of one numpy thread per core.

    Args:
        size: bytes; beyond any cache.
    """
    import numpy as np  # heavy for a module that command lines read first

    halves = np.array_split(np.ones(size // 4, np.float32), cores())
    best = float("inf")
    with concurrent.futures.ThreadPoolExecutor(len(halves)) as pool:
        for _ in range(6):
            began = time.perf_counter()
            list(pool.map(np.max, halves))
            best = min(best, time.perf_counter() - began)
    return sum(h.nbytes for h in halves) / best
