"""What the training commands share: the result as the last line of stdout, faults as one line."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from jetspec_jax.errors import ConfigError, JetSpecError


def run_command(
    run: Callable[[argparse.Namespace], dict[str, Any]], args: argparse.Namespace
) -> int:
    """Prints `run(args)` as JSON; what a user can cause goes to stderr in one line. Returns the
    exit code."""
    try:
        print(json.dumps(run(args)))
    except JetSpecError as err:
        print(f"error: {err}", file=sys.stderr)
        return err.exit_code
    return 0


def make_folder(path: Path, flag: str) -> Path:
    """The folder, made where it is not there.

    Raises:
        ConfigError: it cannot be made; names the flag.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as err:
        raise ConfigError(
            f"{flag} {path}: cannot be made ({err.strerror or err}); give a folder"
        ) from err
    return path
