"""What the training commands share: the result as the last line of stdout, faults as one line."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from typing import Any

from jetspec_jax.errors import JetSpecError


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
