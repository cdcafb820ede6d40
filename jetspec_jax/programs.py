"""Compiled programs, kept by name, plan and batch: each is compiled once, and its time is known.

On disk `ProgramStore` keeps whole programs, so that a second start does not even trace.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import os
import pickle
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import serialize_executable

import jetspec_jax
import pallas_kernels
from jetspec_jax.decode import prefill, run_rounds, spec_round
from jetspec_jax.plan import RoundPlan
from jetspec_jax.state import DecodeState
from jetspec_jax.typing import Array
from pallas_kernels import native, parameters


def cache_home() -> Path:
    """The user's cache folder for compiled programs, kernels and measured costs (XDG base
    directories).
    """
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "jetspec-jax"


def insert(state: DecodeState, one: DecodeState, slot: Array) -> DecodeState:
    """`state` with the sequence of `one` (batch 1, same plan) in slot `slot` (int32 [])."""

    def place(whole: Array, part: Array) -> Array:
        return lax.dynamic_update_slice(whole, part, (slot,) + (0,) * (whole.ndim - 1))

    def fields(source: DecodeState) -> dict[str, Any]:
        shared = ("counters", "control")
        return {k: v for k, v in vars(source).items() if k not in shared and v is not None}

    placed = jax.tree.map(place, fields(state), fields(one))
    per_slot = {k: getattr(state.counters, k) for k in ("rounds", "accepted", "had_node", "nodes")}
    fresh = {k: getattr(one.counters, k) for k in per_slot}
    counters = dataclasses.replace(state.counters, **jax.tree.map(place, per_slot, fresh))
    return dataclasses.replace(state, **placed, counters=counters)


@functools.cache
def _code_version() -> str:
    """Hash of everything that decides what a program computes and where its binary runs."""
    digest = hashlib.sha256()
    for package in (jetspec_jax, pallas_kernels):
        for path in sorted(Path(package.__path__[0]).rglob("*")):
            if path.suffix in (".py", ".cc", ".h"):
                digest.update(path.read_bytes())
    flags = os.environ.get("XLA_FLAGS", "")
    for part in (jax.__version__, flags, native.cpu_identity(), str(os.cpu_count())):
        digest.update(part.encode())
    return digest.hexdigest()


_KEEP_S = 30 * 86_400.0  # programs that nothing has loaded for this long are dropped


class ProgramStore:
    """Compiled programs on disk. A file that is missing, damaged or of other code is not there."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def path(self, name: str, plan: RoundPlan, batch: int, args: Any) -> Path:
        """Where a program lies: its name says code, machine, plan and the shapes of its
        arguments.
        """
        leaves, tree = jax.tree.flatten(args)
        device = jax.devices()[0]
        shapes = [(x.shape, x.dtype.name) for x in leaves]
        key = f"{_code_version()}|{device.device_kind}|{name}|{plan!r}|{batch}|{tree}|{shapes}"
        return self._folder / f"{hashlib.sha256(key.encode()).hexdigest()[:32]}.bin"

    def load(self, path: Path, kernels: bool) -> Any:
        """The program, or None. `kernels`: it calls native kernels, which are registered first."""
        try:
            payload = path.read_bytes()
            os.utime(path)
        except OSError:
            return None
        if kernels:
            native.library().register()
        try:
            return serialize_executable.deserialize_and_load(*pickle.loads(payload))
        except Exception:  # noqa: BLE001 - of another build of jaxlib, or cut off: compile it anew
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)
            return None

    def save(self, path: Path, program: Any) -> None:
        """Writes aside and renames; a disk that is full or read-only only costs the next start."""
        part = path.with_suffix(f".{os.getpid()}.part")
        with contextlib.suppress(OSError, ValueError, NotImplementedError):
            path.parent.mkdir(parents=True, exist_ok=True)
            part.write_bytes(pickle.dumps(serialize_executable.serialize(program)))
            part.replace(path)
            for old in self._folder.iterdir():  # programs of older code, and of starts cut short
                if time.time() - old.stat().st_mtime > _KEEP_S:
                    old.unlink()
        with contextlib.suppress(OSError):
            part.unlink(missing_ok=True)


class Programs:
    """Ahead-of-time compiled `prefill`, `rounds`, `step` (one round with its details) and
    `insert`.
    """

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._compiled: dict[tuple[Any, ...], Any] = {}
        # A caller who chose a cache directory for JAX keeps programs there: what comes out of that
        # cache cannot be serialised again (its functions are missing, jaxlib 0.11.2).
        own = jax.config.jax_compilation_cache_dir is not None
        self._store = None if own else ProgramStore(cache_home() / "programs")
        self.seconds = 0.0

    def __len__(self) -> int:
        return len(self._compiled)

    def get(self, name: str, plan: RoundPlan, batch: int, *args: Any) -> Any:
        """The program `name` for these arguments' shapes; compiled at the first call (said, and
        timed).
        """
        key = (name, plan, batch)
        found = self._compiled.get(key)
        if found is None:
            started = time.perf_counter()
            with parameters.using(plan.numerics.kernel_params):
                found = self._load_or_compile(name, plan, batch, args)
            self._compiled[key] = found
            self.seconds += time.perf_counter() - started
        return found

    def _load_or_compile(self, name: str, plan: RoundPlan, batch: int, args: Any) -> Any:
        path = found = None
        if self._store is not None:
            path = self._store.path(name, plan, batch, args)
            found = self._store.load(path, plan.numerics.native)
        if found is None:
            budgets = "/".join(map(str, plan.budgets))
            self._say(f"compiling {name} (batch {batch}, budgets {budgets}) ...")
            found = self._functions(name, plan).lower(*args).compile()
            if self._store is not None and path is not None:
                self._store.save(path, found)
        return found

    @staticmethod
    def _functions(name: str, plan: RoundPlan) -> Any:
        if name == "insert":
            return jax.jit(insert, donate_argnums=(0,))
        function = {"prefill": prefill, "rounds": run_rounds, "step": spec_round}[name]
        # the state is donated: its caches are updated in place
        return jax.jit(functools.partial(function, plan), donate_argnums=(1,))


def int32(value: int) -> Array:
    return jnp.asarray(value, jnp.int32)
