"""Compiled programs, kept by name, plan and batch: each is compiled once, and its time is known."""

from __future__ import annotations

import dataclasses
import functools
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jetspec_jax.decode import prefill, run_rounds, spec_round
from jetspec_jax.plan import RoundPlan
from jetspec_jax.state import DecodeState
from jetspec_jax.typing import Array


def cache_home() -> Path:
    """The user's cache folder for compiled programs, kernels and measured costs (XDG base
    directories).
    """
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "jetspec-jax"


def use_compilation_cache() -> None:
    """Keeps compiled programs on disk, so that a second start skips XLA. A directory set by the
    caller wins.
    """
    if jax.config.jax_compilation_cache_dir is None:
        jax.config.update("jax_compilation_cache_dir", str(cache_home() / "xla"))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)


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


class Programs:
    """Ahead-of-time compiled `prefill`, `rounds`, `step` (one round with its details) and
    `insert`.
    """

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._compiled: dict[tuple[Any, ...], Any] = {}
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
            self._say(
                f"compiling {name} (batch {batch}, budgets {'/'.join(map(str, plan.budgets))}) ..."
            )
            found = self._functions(name, plan).lower(*args).compile()
            self._compiled[key] = found
            self.seconds += time.perf_counter() - started
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
