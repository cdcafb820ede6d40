"""What a round costs on this device, by budget: measured once, kept on disk, used by `policy`.

A wrong table can make decoding slower, never different: every budget gives the same tokens.
"""

from __future__ import annotations

import contextlib
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

from jetspec_jax.config import MAX_LOSS, PolicyConfig, SamplingParams
from jetspec_jax.plan import RoundPlan
from jetspec_jax.policy import Costs, fresh_control
from jetspec_jax.programs import cache_home

if TYPE_CHECKING:
    from jetspec_jax.engine import LLM
    from jetspec_jax.session import Session

_VERSION = 6  # of the file; raise it when rounds change in cost
# Tokens in the cache while measuring, where the capacity allows: attention is part of what a node
# costs.
_PROMPT, _LEAST_PROMPT = 256, 64
_ROUNDS, _TURNS = 2, 6
_LONG_S = 0.1  # rounds this long are timed one at a time
NEVER = 1e9  # stands in a table for a budget that is not worth timing
# Drafts in every round that is not paused by `_time` itself, whatever a round costs.
_FREE = PolicyConfig(first_pause=0, longest_pause=0, first_loss=MAX_LOSS, most_loss=MAX_LOSS)


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

    Each budget is forced through the cost table itself, in the program that will run. All are timed
    in turns, so that another process that slows the machine for a while slows all of them, and the
    minimum over the turns is taken. One sequence times every budget (kernels have steps of their
    own, such as groups of 8 rows); a batch, whose rounds are longer, times powers of two and the
    largest, and what lies between is interpolated. A budget that costs more plain steps than it can
    commit tokens never pays: neither it nor a larger one is timed (`NEVER`).
    """
    count = len(plan.budgets)
    indices = [
        i for i, n in enumerate(plan.budgets) if batch == 1 or not n & (n - 1) or i + 1 == count
    ]
    tokens = prompt_tokens(llm.capacity)
    with llm.session(plan, batch, unmeasured(plan), _FREE) as session:
        session.compile(details=False)
        prompt = prompt_for(plan, tokens)
        limit = llm.capacity
        sampling = SamplingParams(temperature=1.0 if plan.sampled else 0.0)
        for slot in range(batch):
            session.admit(slot, prompt, limit, (), sampling, True)
        plain, timed = float("inf"), dict.fromkeys(indices, float("inf"))
        for turn in range(1 + _TURNS):
            # The first turn warms up. What lookup finds, it finds in the first round.
            once = turn == 0 or plain > _LONG_S or not plan.uses_head
            rounds = 1 if once else _ROUNDS
            plain = min(plain, _time(session, _forced(0, count), rounds, tokens, pause=True))
            for i in list(timed):
                spent = _time(session, _forced(i, count), rounds, tokens, pause=False)
                timed[i] = min(timed[i], spent)
                if timed[i] > plain * (plan.depth + 1) + timed[0]:
                    timed = {j: t for j, t in timed.items() if j <= i}
                    break
    draft = max(timed[0] - plain, 0.0) if plan.drafts else 0.0
    verify = np.interp(
        plan.budgets,
        [plan.budgets[i] for i in timed],
        [max(t - draft, 1e-6) for t in timed.values()],
        right=NEVER,
    )
    return {
        "t_plain_s": plain,
        "t_verify_s": dict(zip(plan.budgets, verify.tolist(), strict=True)),
        "t_draft_s": draft,
    }


def prompt_for(plan: RoundPlan, tokens: int) -> list[int]:
    """Ids of the text that is timed. A head drafts from any; for lookup alone the last tokens stand
    there many times before, always followed by something else, so that its trees are full."""
    vocab = plan.model.vocab_size
    if plan.uses_head:
        return [i % vocab for i in range(tokens)]
    same, every = plan.spec.lookup_ngram, plan.spec.lookup_ngram + plan.depth + 1
    back = [tokens - 1 - i for i in range(tokens)]
    return [
        b % every if b % every < same else same + i % (vocab - same) for i, b in enumerate(back)
    ]


def prompt_tokens(capacity: int) -> int:
    """Cached tokens while costs are measured."""
    return max(_LEAST_PROMPT, min(_PROMPT, capacity // 4))


def _forced(index: int, count: int) -> Costs:
    verify = jnp.where(jnp.arange(count) == index, 1.0, NEVER).astype(jnp.float32)
    return Costs(verify, jnp.zeros((), jnp.float32))


def _time(session: Session, table: Costs, rounds: int, tokens: int, *, pause: bool) -> float:
    """Seconds of a round under a forced budget, from the same context length every time."""
    session.params = dataclasses.replace(session.params, costs=table)
    control = fresh_control(session.policy)
    if pause:
        control = dataclasses.replace(control, cooldown=jnp.asarray(1_000, jnp.int32))
    committed = jnp.full_like(session.state.committed, tokens)
    session.state = dataclasses.replace(
        session.state, control=control, committed=committed, cached=committed - 1
    )
    started = time.perf_counter()
    session.run(rounds)
    return (time.perf_counter() - started) / rounds


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
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return f"{device.device_kind}|{cpu}|{cores}|jaxlib {jax.__version__}"


def load_or_measure(llm: LLM, plan: RoundPlan, batch: int, say: Callable[[str], None]) -> Costs:
    """The cost table of a plan on this device: from the user's cache folder, or measured now and
    kept there.
    """
    if llm.capacity < 2 * _LEAST_PROMPT + _ROUNDS * plan.path_rows:
        return unmeasured(plan)
    key = hashlib.sha256(
        f"{_VERSION}|{_device_key()}|{batch}|{llm.engine}|{llm.weights}|{plan!r}".encode()
    ).hexdigest()[:24]
    path = cache_home() / "costs" / f"{key}.json"
    kept = _read(path, plan.budgets)
    if kept is not None:
        return _table(kept)
    say("measuring round costs ...")
    measured = measure(llm, plan, batch)
    part = path.with_suffix(f".{os.getpid()}.part")
    with contextlib.suppress(OSError):  # not kept: the next start measures again
        path.parent.mkdir(parents=True, exist_ok=True)
        part.write_text(json.dumps({**measured, "device": _device_key(), "budgets": plan.budgets}))
        part.replace(path)
    return _table(measured)


def _read(path: Path, budgets: tuple[int, ...]) -> dict[str, Any] | None:
    """What was measured; None where there is no file, or not one with a sane time for every
    budget: a table that is wrong silently makes decoding slow.
    """
    try:
        kept = json.loads(path.read_text())
        verify = {int(b): float(t) for b, t in kept["t_verify_s"].items()}
        found = {
            "t_plain_s": float(kept["t_plain_s"]),
            "t_verify_s": verify,
            "t_draft_s": float(kept["t_draft_s"]),
        }
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    times = (found["t_plain_s"], *verify.values())
    sane = all(0 < t < float("inf") for t in times) and 0 <= found["t_draft_s"] < float("inf")
    return found if sane and tuple(verify) == budgets else None
