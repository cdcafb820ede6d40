"""What a measurement was taken on: no number of this project is printed without it."""

from __future__ import annotations

import importlib.metadata
import platform
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jetspec_jax.device import cores, cpu_model

PACKAGES = ("jetspec-jax", "jax", "jaxlib", "numpy")


def device() -> str:
    """The accelerator jax computes on, "" for a CPU. Call it only after the engine is up: it starts
    jax."""
    import jax  # heavy

    first = jax.devices()[0]
    return "" if first.platform == "cpu" else f"{len(jax.devices())} x {first.device_kind}"


def hardware() -> str:
    """One phrase for table headers, e.g. "Intel(R) Xeon(R) CPU @ 2.60GHz, 2 cores"."""
    where = f"{cpu_model()}, {cores()} core{'s' if cores() != 1 else ''}"
    accelerator = device()
    return f"{accelerator} (host {where})" if accelerator else where


def versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue  # jetspec-jax itself, when run from a checkout that is not installed
    return found


def git_revision() -> str | None:
    """Commit of the checkout this file lies in, "+changes" when it is not clean; None outside a
    checkout."""
    root = str(Path(__file__).resolve().parent)
    ask: dict[str, Any] = {
        "capture_output": True,
        "text": True,
        "timeout": 5,
        "check": True,
        "cwd": root,
    }
    try:
        revision = subprocess.run(["git", "rev-parse", "--short", "HEAD"], **ask).stdout.strip()
        dirty = subprocess.run(["git", "status", "--porcelain", "-uno"], **ask).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None
    return revision + ("+changes" if dirty else "")


def command(module: str, argv: Sequence[str] | None) -> str:
    """The command line that makes this result again."""
    return shlex.join(["python", "-m", module, *(sys.argv[1:] if argv is None else argv)])
