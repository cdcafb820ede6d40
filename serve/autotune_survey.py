"""What `serve.autotune` learns of an engine before it searches: deployment, space, phases, gaps."""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jetspec_jax.autotune import cost_model, space
from jetspec_jax.autotune.key import DeploymentKey, key_of
from jetspec_jax.autotune.prompts import Prompt, prompts_of, split
from jetspec_jax.config import EngineConfig, SamplingParams
from jetspec_jax.errors import InputError
from serve import cli
from serve.autotune import MAX_TOKENS
from serve.suites import Suite

_PROMPTS = 48  # that explorers measure on, times the batch
# Kernels in which a phase of a round spends its time, for the order of searches.
_KERNELS = {
    "verify": ("row_invariant_matmul", "tree_attention", "verify_head", "threads"),
    "draft": ("row_invariant_matmul", "tree_attention", "threads"),
    "tree": (),
    "accept": (),
    "commit": ("threads",),
    "host": ("threads",),
    "tau": (),
}


@dataclasses.dataclass(frozen=True)
class Survey:
    """What was learnt of the engine before any search."""

    key: DeploymentKey
    space: tuple[Any, ...]
    profile: cost_model.Profile | None  # None: fakes of tests have none
    gaps: tuple[cost_model.Gap, ...]
    figures: Mapping[str, float]  # tau and nodes of a round, as measured on some prompts
    seen: tuple[Prompt, ...]
    suite: tuple[Prompt, ...]  # all that fit, both halves
    prompts: tuple[tuple[int, ...], ...]  # ids that explorers measure on

    @property
    def order(self) -> tuple[str, ...]:
        """Ops by the gap of the phases that they work in, largest first."""
        return tuple(dict.fromkeys(op for gap in self.gaps for op in _KERNELS.get(gap.phase, ())))


def look(
    args: argparse.Namespace,
    engine: EngineConfig,
    suites: Sequence[Suite],
    out: Path | None,
    thorough: bool = True,
) -> Survey:
    """Loads the engine, measures its phases (unless `out` has them, of this very deployment; all
    of them where it is to be thorough), and lets it go again: searches run in processes.
    """
    from jetspec_jax.autotune.profile import measure_profile
    from jetspec_jax.config import SpecConfig

    llm = cli.load_llm(args, SpecConfig(), engine)
    batch = args.batch_size
    name = suites[0].name if len(suites) == 1 else "mixed"
    whole = [p for s in suites for p in prompts_of(s.prompts, f"{s.name}/")]
    room = llm.capacity - MAX_TOKENS - 1
    ids = {p.digest: tuple(llm.tokenizer.chat([dict(m) for m in p.messages])) for p in whole}
    fitting = tuple(p for p in whole if len(ids[p.digest]) < room)
    seen, unseen = split(fitting)
    if len(seen) < 2 * batch or len(unseen) < 2 * batch:
        raise InputError(
            f"--suite {args.suite}: {len(seen)} prompts to search on and {len(unseen)} for the "
            f"gate are too few for batch {batch}; give a larger suite"
        )
    order = list(seen)
    random.Random(args.seed).shuffle(order)
    chosen = [order[i % len(order)] for i in range(max(_PROMPTS * batch, batch))][: len(order)]
    prompts = tuple(ids[p.digest] for p in chosen)
    key = key_of(llm, batch, llm.capacity, name)  # as an engine asks for it at its start
    profile = _kept_profile(out, key)
    with cli.phase("compiling"):
        llm.warmup(batch)
    if profile is None:
        with cli.phase("measuring the phases of a round"):
            profile = measure_profile(llm, batch) if thorough else _short_profile(llm, batch)
    with cli.phase("measuring tau"):
        sampling = SamplingParams(max_tokens=MAX_TOKENS)
        answers = llm.generate([list(p) for p in prompts[: max(4, batch)]], sampling, group=batch)
    rounds = max(sum(a.spec.rounds for a in answers), 1)
    tau = 1 + sum(a.spec.accepted for a in answers) / rounds
    nodes = sum(a.spec.nodes for a in answers) / rounds
    found = Survey(
        key,
        space.search_space(space.facts_of(llm, batch)),
        profile,
        tuple(
            cost_model.gap_table(profile, max(round(nodes), 1), tau) if profile is not None else ()
        ),
        {"tau": tau, "nodes": nodes},
        seen,
        fitting,
        prompts,
    )
    del llm
    gc.collect()
    return found


def _short_profile(llm: Any, batch: int) -> cost_model.Profile:
    """Verification and drafting alone, in programs that are compiled anyway: some seconds, where
    the phases one by one are most of a minute. What is not measured apart counts as no gap.
    """
    from jetspec_jax import costs
    from jetspec_jax.autotune.profile import measure_device, shape_of

    timed = llm.measure_costs(batch)
    plain = timed["t_plain_s"]
    verify = {n: t for n, t in timed["t_verify_s"].items() if t < costs.NEVER / 2}
    return cost_model.Profile(
        device=measure_device(),
        shape=shape_of(llm, llm.plan_for(llm.spec)),
        label="short: tree, acceptance and commit are in the others",
        batch=batch,
        context=costs.prompt_tokens(llm.capacity),
        plain_s=plain,
        verify_s={**verify, 1: plain},
        draft_s=timed["t_draft_s"],
        tree_s=0.0,
        accept_s=0.0,
        commit_s=0.0,
        host_s=0.0,
    )


def _kept_profile(out: Path | None, key: DeploymentKey) -> cost_model.Profile | None:
    """The profile of an earlier run; None where there is none, or not one of this deployment."""
    path = None if out is None else out / "survey.json"
    if path is None or not path.exists():
        return None
    try:
        kept = json.loads(path.read_text())
        if kept["key"] != key.to_json():
            return None
        return None if kept["profile"] is None else cost_model.Profile.from_json(kept["profile"])
    except (OSError, ValueError, KeyError, TypeError, InputError) as error:
        cli.say(f"{path} cannot be read ({error}); measured again")
        return None


def profile_json(survey: Survey) -> Any:
    return None if survey.profile is None else survey.profile.to_json()


def searched(survey: Survey) -> tuple[Any, ...]:
    """The space without what changes bits by definition: the gate would refuse it."""
    return tuple(p for p in survey.space if not p.changes_bits)


def gap_lines(gaps: Sequence[cost_model.Gap]) -> list[str]:
    """The gap table as text."""
    lines = [f"{'phase':10} {'measured':>10} {'ceiling':>10} {'share':>7} {'if closed':>9}"]
    for gap in gaps:
        unit = (lambda x: f"{x:.2f}") if gap.phase == "tau" else (lambda x: f"{1e3 * x:.3f} ms")
        mark = " (planned)" if gap.planned else ""
        lines.append(
            f"{gap.phase:10} {unit(gap.measured):>10} {unit(gap.ceiling):>10} {gap.share:7.1%} "
            f"{gap.speedup:8.2f}x{mark}"
        )
    return lines
