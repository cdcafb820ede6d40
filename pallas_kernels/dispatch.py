"""Choice of an implementation: `auto`, `cpu` (native) or `xla`; one log line says which and why."""

import functools
import logging
from collections.abc import Callable
from typing import Literal, get_args

from pallas_kernels.native import KernelError

Implementation = Literal["auto", "cpu", "xla"]
_logger = logging.getLogger("pallas_kernels")


@functools.cache
def _log_once(op: str, chosen: str, reason: str, level: int = logging.INFO) -> None:
    _logger.log(level, "%s: %s (%s)", op, chosen, reason)


def choose(
    op: str, implementation: str, load_native: Callable[[], object]
) -> Literal["cpu", "xla"]:
    """Resolves `implementation` for one op on this machine.

    Args:
      op: name for the log line.
      implementation: "auto" takes the native kernel where it can be built, else XLA; "cpu" insists;
        "xla" never touches the compiler.
      load_native: builds and loads the native kernel, raising `KernelError` where that is
        impossible.

    Returns:
      "cpu" or "xla".

    Raises:
      KernelError: unknown name, or "cpu" on a machine that cannot build the kernel.
    """
    if implementation not in get_args(Implementation):
        raise KernelError(
            f"unknown kernel implementation {implementation!r}: use one of "
            f"{', '.join(get_args(Implementation))}"
        )
    if implementation == "xla":
        _log_once(op, "xla", "requested")
        return "xla"
    try:
        load_native()
    except KernelError as error:
        if implementation == "cpu":
            raise KernelError(
                f"{op}: implementation 'cpu' is not available: {error}; use 'auto' or 'xla'"
            ) from error
        # a warning reaches stderr without any logging set-up: slower than asked for is no secret
        _log_once(op, "xla", f"native kernel not available: {error}", logging.WARNING)
        return "xla"
    _log_once(op, "cpu", "requested" if implementation == "cpu" else "native kernel available")
    return "cpu"
