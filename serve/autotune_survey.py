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
    profile: cost_model.Profile | None  # None: not measured, a short run
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
    """Loads the engine and lets it go again: searches run in processes. Its phases are measured
    where it is to be thorough, unless `out` has them, of this very deployment.
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
    kept = _kept(out, key)
    figures: dict[str, float] = {}
    gaps: tuple[cost_model.Gap, ...] = ()
    profile: cost_model.Profile | None = None
    if kept is not None:
        profile, gaps, figures = kept
    elif thorough:
        with cli.phase("measuring the phases of a round"):
            profile, figures = measure_profile(llm, batch), _figures(llm, batch, prompts)
        nodes, tau = max(round(figures["nodes"]), 1), figures["tau"]
        gaps = tuple(cost_model.gap_table(profile, nodes, tau))
    found = Survey(
        key,
        space.search_space(space.facts_of(llm, batch)),
        profile,
        gaps,
        figures,
        seen,
        fitting,
        prompts,
    )
    del llm
    gc.collect()
    return found


def _figures(llm: Any, batch: int, prompts: Sequence[Sequence[int]]) -> dict[str, float]:
    """Tokens and nodes of a round, on some of the search's prompts."""
    sampling = SamplingParams(max_tokens=MAX_TOKENS)
    answers = llm.generate([list(p) for p in prompts[: max(4, batch)]], sampling, group=batch)
    rounds = max(sum(a.spec.rounds for a in answers), 1)
    return {
        "tau": 1 + sum(a.spec.accepted for a in answers) / rounds,
        "nodes": sum(a.spec.nodes for a in answers) / rounds,
    }


def _kept(
    out: Path | None, key: DeploymentKey
) -> tuple[cost_model.Profile, tuple[cost_model.Gap, ...], dict[str, float]] | None:
    """What an earlier run measured; None where there is none, or not of this deployment."""
    path = None if out is None else out / "survey.json"
    if path is None or not path.exists():
        return None
    try:
        kept = json.loads(path.read_text())
        if kept["key"] != key.to_json() or kept["profile"] is None:
            return None
        gaps = tuple(cost_model.Gap(**g) for g in kept["gaps"])
        return cost_model.Profile.from_json(kept["profile"]), gaps, kept["figures"]
    except (OSError, ValueError, KeyError, TypeError, InputError) as error:
        cli.say(f"{path} cannot be read ({error}); measured again")
        return None


def save(survey: Survey, out: Path) -> None:
    """Keeps it for reports and later runs."""
    document = {
        "key": survey.key,
        "figures": survey.figures,
        "profile": None if survey.profile is None else survey.profile.to_json(),
        "gaps": [dataclasses.asdict(g) for g in survey.gaps],
    }
    (out / "survey.json").write_text(cli.dump_json(document, indent=1))


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
