"""What can be tuned: the form in which a component declares it, and the values that are in force.

A component declares its parameters beside its code (`<op>/tuning.py` here; the decoder's own in
`jetspec_jax`), each with the value that the code takes by itself. Kernel parameters are named
`kernel.<op>.<NAME>`. In capitals they are build parameters of the native kernels: the macro
`JETSPEC_<OP>_<NAME>` of the C++ source, a choice of speed that changes no bit. In small letters
they are values of a GPU kernel's table (`tuned.py`).
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import difflib
import functools
import importlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

Values = tuple[tuple[str, int], ...]  # ("<op>.<NAME>", value), by name
Setup = Literal["none", "program", "engine", "build"]

# What a trial whose value is new waits for, in seconds by order of magnitude (not a measurement; it
# depends on the machine and the model): nothing, as it is data of a running program; programs to
# compile; a model to load, too; kernels to compile, too.
SETUP_SECONDS: Mapping[Setup, float] = {"none": 0.0, "program": 4.0, "engine": 7.0, "build": 18.0}

_PREFIX = "kernel."
_DECLARING = (
    "pallas_kernels.threads",
    "pallas_kernels.row_invariant_matmul.tuning",
    "pallas_kernels.tree_attention.tuning",
    "pallas_kernels.verify_head.tuning",
)


class ParameterError(ValueError):
    """A parameter that no component declares, or a value that it does not take. One line."""


@dataclasses.dataclass(frozen=True)
class Facts:
    """What decides which kernel parameters matter on a device.

    Attributes:
        kernels: cpu (native) | gpu | xla.
        cores: that may be used.
        form: vector form of the native kernels: 3 AVX-512, 2 AVX2, 1 NEON, 0 portable or none.
        vnni: integer dot products of AVX-512 are used.
        tiles: the process may use AMX tiles.
        integer: formats whose weights are multiplied in integers, e.g. ("q4_1", "q8_0").
        floating: formats multiplied in fused multiply-adds; "f32" is one of them.
        device: kind of device, as JAX names it.
        gpu_form: "mosaic_gpu" or "triton" where GPU kernels run, else "".
        head_dim: of attention.
    """

    kernels: str
    cores: int = 1
    form: int = 0
    vnni: bool = False
    tiles: bool = False
    integer: tuple[str, ...] = ()
    floating: tuple[str, ...] = ()
    device: str = ""
    gpu_form: str = ""
    head_dim: int = 0


def _always(_: Any) -> bool:
    return True


@dataclasses.dataclass(frozen=True)
class Parameter:
    """One value that can be tuned.

    Attributes:
        name: dotted, as in a candidate: "spec.width", "kernel.tree_attention.LEAD".
        kind: "choice" takes one of `choices`, "int" and "float" a number from `low` to `high`.
        default: what the code does where nothing is given.
        why: what it trades, in a line.
        choices: of kind "choice"; None stands for "left open".
        low: smallest value. high: largest value, included.
        log: search on a logarithmic scale.
        applies: whether it can make a difference, by facts.
        here: fields that depend on the facts (range, default), put in by `narrowed`.
        changes_bits: logits may differ in their last bits; nothing else may change a bit.
        setup: what a trial with a new value waits for (`SETUP_SECONDS`).
        only: it means something only where these parameters have one of these values.
        with_: parameters whose change changes what leaving this one out means; it is then written
            out at its default, too.
    """

    name: str
    kind: Literal["choice", "int", "float"]
    default: Any
    why: str
    choices: tuple[Any, ...] = ()
    low: float | None = None
    high: float | None = None
    log: bool = False
    applies: Callable[[Any], bool] = _always
    here: Callable[[Any], Mapping[str, Any]] | None = None
    changes_bits: bool = False
    setup: Setup = "program"
    only: tuple[tuple[str, tuple[Any, ...]], ...] = ()
    with_: tuple[str, ...] = ()

    @property
    def setup_s(self) -> float:
        """Seconds, roughly, before a trial with a new value can be measured."""
        return SETUP_SECONDS[self.setup]

    def narrowed(self, facts: Any) -> Parameter:
        """With the range and default that hold under these facts."""
        if self.here is None:
            return self
        return dataclasses.replace(self, **self.here(facts), here=None)

    def takes(self, value: Any) -> bool:
        """Whether `value` is one of those declared. True and 1 are not the same."""
        if self.kind == "choice":
            return any(type(value) is type(c) and value == c for c in self.choices)
        number = isinstance(value, int) or (self.kind == "float" and isinstance(value, float))
        if not number or isinstance(value, bool) or self.low is None or self.high is None:
            return False
        return self.low <= value <= self.high

    @property
    def values_text(self) -> str:
        """The values that it takes, in words."""
        if self.kind == "choice":
            return ", ".join(map(str, self.choices))
        return f"{self.low:g} to {self.high:g}"


def build_parameter(
    op: str,
    name: str,
    default: int,
    choices: Sequence[int],
    why: str,
    applies: Callable[[Facts], bool] = _always,
    here: Callable[[Facts], Mapping[str, Any]] | None = None,
) -> Parameter:
    """A build parameter of the native kernels: macro `JETSPEC_<OP>_<NAME>`."""

    def native(facts: Facts) -> bool:
        return facts.kernels == "cpu" and applies(facts)

    full = f"{_PREFIX}{op}.{name}"
    return Parameter(
        full, "choice", default, why, tuple(choices), applies=native, here=here, setup="build"
    )


def gpu_parameter(
    op: str,
    name: str,
    default: int,
    choices: Sequence[int],
    why: str,
    forms: Sequence[str],
    *,
    changes_bits: bool = False,
    here: Callable[[Facts], Mapping[str, Any]] | None = None,
) -> Parameter:
    """A value of a GPU kernel's table (`tuned.lookup`)."""

    def on_gpu(facts: Facts) -> bool:
        return facts.kernels == "gpu" and facts.gpu_form in forms

    return Parameter(
        f"{_PREFIX}{op}.{name}",
        "choice",
        default,
        why,
        tuple(choices),
        applies=on_gpu,
        here=here,
        changes_bits=changes_bits,
        setup="program",
    )


@functools.cache
def declared() -> Mapping[str, Parameter]:
    """Every kernel parameter by its full name."""
    modules = [importlib.import_module(name) for name in _DECLARING]
    return {p.name: p for module in modules for p in module.PARAMETERS}


def nearest(name: str, names: Sequence[str]) -> str:
    """ "did you mean ...?" for a name that is not among `names`."""
    near = difflib.get_close_matches(name, names, 1, 0.4)
    return f"did you mean {near[0]!r}?" if near else f"known: {', '.join(names)}"


def check(values: Mapping[str, Any]) -> Values:
    """Values of kernel parameters, named "<op>.<NAME>", in the order of their names.

    Raises:
        ParameterError: a name that no op declares, or a value that it does not take.
    """
    known = declared()
    for name, value in values.items():
        parameter = known.get(_PREFIX + name)
        if parameter is None:
            names = [n.removeprefix(_PREFIX) for n in known]
            raise ParameterError(f"unknown kernel parameter {name!r}; {nearest(name, names)}")
        if not parameter.takes(value):
            raise ParameterError(
                f"kernel parameter {name}={value!r} is not one of its values; "
                f"use one of {parameter.values_text}"
            )
    return tuple(sorted(values.items()))


_in_force: contextvars.ContextVar[Values] = contextvars.ContextVar("parameters", default=())


def in_force() -> Values:
    """The kernel parameters that `using` set, for what is built or traced here."""
    return _in_force.get()


@contextlib.contextmanager
def using(values: Values) -> Iterator[None]:
    """Kernels that are built and programs that are traced inside take these values.

    Args:
        values: what `check` returned, or () for the defaults.
    """
    token = _in_force.set(values)
    try:
        yield
    finally:
        _in_force.reset(token)


def is_build(name: str) -> bool:
    """Whether "<op>.<NAME>" is a build parameter of the native kernels."""
    return name.rpartition(".")[2].isupper()


def build_flags(values: Values) -> tuple[str, ...]:
    """Compiler flags for the build parameters among `values`."""
    return tuple(
        f"-DJETSPEC_{name.replace('.', '_').upper()}={value}"
        for name, value in values
        if is_build(name)
    )


def table_values(op: str) -> dict[str, int]:
    """Values in force of an op's GPU table."""
    start = op + "."
    return {
        name.removeprefix(start): value
        for name, value in in_force()
        if name.startswith(start) and not is_build(name)
    }
