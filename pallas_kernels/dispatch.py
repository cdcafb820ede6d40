"""Choice of an implementation, by device, and one log line that says which and why.

`cpu` is the native kernel, `mosaic_gpu` the Pallas kernel for Hopper, `triton` the kernel for other
NVIDIA GPUs, `xla` the reference. "auto" takes the first that this device and these operands allow;
every other name insists. Inside of `strict()` "auto" may not end at the reference.
"""

import contextlib
import contextvars
import dataclasses
import functools
import logging
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal, get_args

import jax

from pallas_kernels.gpu_target import TARGETS
from pallas_kernels.native import KernelError

Implementation = Literal["auto", "cpu", "mosaic_gpu", "triton", "xla"]
_logger = logging.getLogger("pallas_kernels")
_strict: contextvars.ContextVar[bool] = contextvars.ContextVar("strict", default=False)
_NEEDS = {
    "cpu": "JAX's cpu backend",
    "mosaic_gpu": "a Hopper GPU (compute capability 9.0)",
    "triton": "an NVIDIA GPU of compute capability 8.0 or later",
}


_taken: contextvars.ContextVar[list[tuple[str, str]] | None] = contextvars.ContextVar(
    "taken", default=None
)


@contextlib.contextmanager
def recorded() -> Iterator[list[tuple[str, str]]]:
    """The (op, form) of every choice made inside, in order: what a traced program will run."""
    taken: list[tuple[str, str]] = []
    token = _taken.set(taken)
    try:
        yield taken
    finally:
        _taken.reset(token)


def _log(op: str, chosen: str, reason: str, level: int = logging.INFO) -> None:
    taken = _taken.get()
    if taken is not None:
        taken.append((op, chosen))
    _log_once(op, chosen, reason, level)


@functools.cache
def _log_once(op: str, chosen: str, reason: str, level: int = logging.INFO) -> None:
    _logger.log(level, "%s: %s (%s)", op, chosen, reason)


@dataclasses.dataclass(frozen=True)
class Device:
    """What programs are compiled for at this place.

    Attributes:
        platform: "cpu", "gpu" or another of JAX's names.
        kind: the device's name as JAX reports it.
        capability: compute capability of an NVIDIA GPU, else None.
    """

    platform: str
    kind: str
    capability: tuple[int, int] | None = None

    def allows(self, form: str) -> bool:
        """Whether a kernel of that form can run here at all."""
        if form == "cpu":
            return self.platform == "cpu"
        if form == "mosaic_gpu":
            return self.capability == (9, 0)
        if form == "triton":
            return self.capability is not None and self.capability >= (8, 0)
        return form == "xla"


def device() -> Device:
    """The GPU that `gpu_target.on_abstract` names, else JAX's default device."""
    mesh: Any = jax.sharding.get_abstract_mesh()
    abstract = mesh.abstract_device
    if abstract is not None and abstract.platform == "gpu":
        known = {target.name: target.capability for target in TARGETS.values()}
        return Device("gpu", abstract.device_kind, known.get(abstract.device_kind))
    return _default_device(jax.default_backend())


@functools.cache
def _default_device(platform: str) -> Device:
    first: Any = jax.devices(platform)[0]
    written = getattr(first, "compute_capability", None)  # "9.0"; GPUs only
    capability = None
    if platform == "gpu" and written:
        major, _, minor = str(written).partition(".")
        capability = (int(major), int(minor or 0))
    return Device(platform, first.device_kind, capability)


@contextlib.contextmanager
def strict() -> Iterator[None]:
    """Context in which "auto" raises rather than take the reference for an op that has a kernel
    for this kind of device.
    """
    token = _strict.set(True)
    try:
        yield
    finally:
        _strict.reset(token)


def _check_name(implementation: str) -> None:
    if implementation not in get_args(Implementation):
        raise KernelError(
            f"unknown kernel implementation {implementation!r}: use one of "
            f"{', '.join(get_args(Implementation))}"
        )


def select(
    op: str, implementation: str, forms: Mapping[str, Callable[[], object]]
) -> Literal["cpu", "mosaic_gpu", "triton", "xla"]:
    """Resolves `implementation` for one call.

    Args:
      op: name for the log line.
      implementation: "auto", or a form to insist on.
      forms: the op's kernels in the order "auto" tries them. Each value builds or checks its
        kernel for the call at hand and raises `KernelError` where it cannot serve it. "xla" needs
        no entry: it can always serve.

    Returns:
      The form to run.

    Raises:
      KernelError: unknown name; a form insisted on that is not there, not for this device or not
        for this call; in `strict()`, no kernel for this call. It names every failure.
    """
    _check_name(implementation)
    here = device()
    if implementation == "xla":
        _log(op, "xla", "requested")
        return "xla"
    if implementation != "auto":
        if implementation not in forms:
            have = ", ".join(("auto", *forms, "xla"))
            raise KernelError(f"{op} has no implementation {implementation!r}: use one of {have}")
        try:
            if not here.allows(implementation):
                raise KernelError(f"it needs {_NEEDS[implementation]}, not {here.kind!r}")
            forms[implementation]()
        except KernelError as error:
            raise KernelError(
                f"{op}: implementation {implementation!r} is not available: {error}; "
                "use 'auto' or 'xla'"
            ) from error
        _log(op, implementation, "requested")
        return implementation  # pyright: ignore[reportReturnType]
    failures = []
    for form, check in forms.items():
        if not here.allows(form):
            continue
        try:
            check()
        except KernelError as error:
            failures.append(f"{form}: {error}")
            continue
        _log(op, form, "; ".join([f"first that {here.kind} allows", *failures]))
        return form  # pyright: ignore[reportReturnType]
    if failures:
        if _strict.get():
            raise KernelError(f"{op}: no kernel for this call: {'; '.join(failures)}")
        _log(op, "xla", "; ".join(failures), logging.WARNING)
    else:
        _log(op, "xla", f"no kernel for {here.kind}")
    return "xla"


def choose(
    op: str, implementation: str, load_native: Callable[[], object]
) -> Literal["cpu", "xla"]:
    """Resolves `implementation` for one op that has a native kernel only.

    Args:
      op: name for the log line.
      implementation: "auto" takes the native kernel where it can be built, else XLA; "cpu" insists;
        "xla" never touches the compiler.
      load_native: builds and loads the native kernel, raising `KernelError` where that is
        impossible.

    Returns:
      "cpu" or "xla".

    Raises:
      KernelError: unknown name, "cpu" on a machine that cannot build the kernel, or a GPU form.
    """
    _check_name(implementation)
    if implementation in ("mosaic_gpu", "triton"):
        raise KernelError(
            f"{op} has no implementation {implementation!r}: use one of auto, cpu, xla"
        )
    if implementation == "xla":
        _log(op, "xla", "requested")
        return "xla"
    try:
        load_native()
    except KernelError as error:
        if implementation == "cpu":
            raise KernelError(
                f"{op}: implementation 'cpu' is not available: {error}; use 'auto' or 'xla'"
            ) from error
        # a warning reaches stderr without any logging set-up: slower than asked for is no secret
        _log(op, "xla", f"native kernel not available: {error}", logging.WARNING)
        return "xla"
    _log(op, "cpu", "requested" if implementation == "cpu" else "native kernel available")
    return "cpu"
