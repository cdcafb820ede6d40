"""`serve.autotune --apply`: what the gate accepted becomes what `serve.generate` starts with."""

from __future__ import annotations

import argparse
from pathlib import Path

from jetspec_jax.autotune import session, tuned
from jetspec_jax.autotune.candidate import Candidate
from jetspec_jax.autotune.key import DeploymentKey
from jetspec_jax.autotune.ledger import best_configuration
from jetspec_jax.autotune.memory import Memory
from jetspec_jax.autotune.pilot import describe
from jetspec_jax.errors import InputError
from serve import cli, facts


def run(args: argparse.Namespace, out: Path) -> int:
    """Installs the best accepted pattern of the last run's deployment."""
    state = session.read(out / "session.json")
    if state is None:
        raise InputError(f"--out {out}: no run was made there; search first")
    key = DeploymentKey.from_json(state.identity["key"])
    if not (out / "memory.db").exists():  # a run that showed nothing to the gate
        raise nothing(key)
    path = install(Memory(out / "memory.db", create=False), key)
    if args.json:
        print(cli.dump_json({"installed": str(path), "key": key.to_json()}))
    return 0


def nothing(key: DeploymentKey) -> InputError:
    return InputError(
        f"nothing was accepted for {key.target} with batch {key.batch} on {key.suite}; "
        "search longer, or leave --apply out"
    )


def install(memory: Memory, key: DeploymentKey) -> Path:
    """Writes the tuned entry that an engine of this deployment looks up.

    Raises:
        InputError: nothing was accepted for it.
    """
    entry = entry_for(memory, key)
    if entry is None:
        raise nothing(key)
    path = tuned.install(entry)
    cli.say(f"installed {describe(Candidate(entry.params))} ({entry.gain_text}): {path}")
    return path


def keep(memory: Memory, key: DeploymentKey, out: Path) -> None:
    """Writes the entry into `out`, where `serve.generate --tuned DIR` finds it."""
    entry = entry_for(memory, key)
    if entry is not None:
        for old, kept in tuned.readable(out, lambda line: None):
            if kept.key == key:
                old.unlink(missing_ok=True)
        cli.say(f"wrote {tuned.write(entry, out)}")


def entry_for(memory: Memory, key: DeploymentKey) -> tuned.TunedEntry | None:
    """The best accepted configuration of a deployment as an entry; None: there is none."""
    best = best_configuration(memory, key)
    if best is None:
        return None
    # memory's ratios are against the heuristic, the report's against the incumbent of its time
    ratios = {
        "speed_ratio": best.measured,
        "speed_ratio_low": best.low,
        "speed_ratio_high": best.high,
    }
    provenance = {
        "date": best.when,
        "origin": best.candidate.origin,
        "code": best.code,
        "hardware": facts.hardware(),
        "memory": str(memory.path),
        "pattern": best.id,
    }
    return tuned.entry_of(key, best.candidate, {**best.report, **ratios}, provenance)
