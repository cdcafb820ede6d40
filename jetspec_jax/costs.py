"""What a round costs on this device, by budget: measured once, kept on disk, used by `policy`.

A wrong table can make decoding slower, never different: every budget gives the same tokens.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import platform
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from jetspec_jax.config import SamplingParams
from jetspec_jax.plan import RoundPlan
from jetspec_jax.policy import Costs, fresh_control
from jetspec_jax.programs import cache_home

if TYPE_CHECKING:
    from jetspec_jax.engine import LLM
    from jetspec_jax.session import Session

_VERSION = 2  # of the file; raise it when rounds change in cost
_PROMPT = 64  # tokens in the cache while measuring
_ROUNDS, _REPEATS = 3, 4
_NEVER = 1e9


def unmeasured(plan: RoundPlan) -> Costs:
    """Costs for plans that have nothing to choose, and before anything is measured: rows in
    proportion.
    """
    rows = np.asarray(plan.budgets, np.float32)
    return Costs(
        jnp.asarray(1 + 0.05 * (rows - 1)), jnp.asarray(0.1 if plan.drafts else 0.0, jnp.float32)
    )


def measure(llm: LLM, plan: RoundPlan, batch: int) -> dict[str, Any]:
    """Seconds of a plain round, of verification by budget, and of drafting (compilation excluded).

    Each budget is forced through the cost table itself, in the program that will run; the minimum
    of a few short runs is taken, since other processes can only add time.
    """
    count = len(plan.budgets)
    with llm.session(plan, batch, unmeasured(plan)) as session:
        session.compile(details=False)
        prompt = [int(i) for i in np.arange(_PROMPT) % llm.model_config.vocab_size]
        limit = llm.capacity
        for slot in range(batch):
            session.admit(slot, prompt, limit, (), SamplingParams(), True)
        plain = _time(session, _forced(0, count), pause=True)
        rounds = [_time(session, _forced(i, count), pause=False) for i in range(count)]
    draft = max(rounds[0] - plain, 0.0) if plan.drafts else 0.0
    verify = {b: max(t - draft, 1e-6) for b, t in zip(plan.budgets, rounds, strict=True)}
    return {"t_plain_s": plain, "t_verify_s": verify, "t_draft_s": draft}


def _forced(index: int, count: int) -> Costs:
    verify = jnp.where(jnp.arange(count) == index, 1.0, _NEVER).astype(jnp.float32)
    return Costs(verify, jnp.zeros((), jnp.float32))


def _time(session: Session, table: Costs, *, pause: bool) -> float:
    session.params = dataclasses.replace(session.params, costs=table)
    best = float("inf")
    for repeat in range(_REPEATS):
        control = fresh_control()
        if pause:
            control = dataclasses.replace(control, cooldown=jnp.asarray(1_000, jnp.int32))
        # every repeat starts at the same context length
        committed = jnp.full_like(session.state.committed, _PROMPT)
        session.state = dataclasses.replace(
            session.state, control=control, committed=committed, cached=committed - 1
        )
        rounds = 1 if repeat == 0 else _ROUNDS  # the first is a warm-up
        started = time.perf_counter()
        session.run(rounds)
        if repeat:
            best = min(best, (time.perf_counter() - started) / rounds)
    return best


def _table(measured: dict[str, Any]) -> Costs:
    plain = measured["t_plain_s"]
    verify = np.asarray(list(measured["t_verify_s"].values()), np.float32) / plain
    # more rows never cost less: a dip is noise
    return Costs(
        jnp.asarray(np.maximum.accumulate(verify)),
        jnp.asarray(measured["t_draft_s"] / plain, jnp.float32),
    )


def _device_key() -> str:
    device = jax.devices()[0]
    cpu = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if device.platform == "cpu" and info.is_file():
        cpu = next(
            (
                x.split(":")[1].strip()
                for x in info.read_text().splitlines()
                if x.startswith("model name")
            ),
            cpu,
        )
    return f"{device.device_kind}|{cpu}|{os.cpu_count()}|jaxlib {jax.__version__}"


def load_or_measure(llm: LLM, plan: RoundPlan, batch: int, say: Callable[[str], None]) -> Costs:
    """The cost table of a plan on this device: from the user's cache folder, or measured now and
    kept there.
    """
    if llm.capacity < 2 * _PROMPT + _REPEATS * _ROUNDS * plan.path_rows:
        return unmeasured(plan)
    key = hashlib.sha256(
        f"{_VERSION}|{_device_key()}|{batch}|{llm.engine}|{plan!r}".encode()
    ).hexdigest()[:24]
    path = cache_home() / "costs" / f"{key}.json"
    try:
        kept = json.loads(path.read_text())
        return _table({**kept, "t_verify_s": {int(b): t for b, t in kept["t_verify_s"].items()}})
    except (OSError, ValueError, KeyError):
        pass  # not measured yet, or not readable: measure
    say("measuring round costs ...")
    measured = measure(llm, plan, batch)
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(f".{os.getpid()}.part")
    part.write_text(json.dumps({**measured, "device": _device_key(), "budgets": plan.budgets}))
    part.replace(path)
    return _table(measured)
