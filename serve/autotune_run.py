"""One run of `serve.autotune`: survey the engine, search, judge, print (jax starts here)."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import gc
import json
import random
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from jetspec_jax.autotune import cost_model, explorers, gate, pilot, session, space
from jetspec_jax.autotune.candidate import Candidate
from jetspec_jax.autotune.client import TREE, Worker
from jetspec_jax.autotune.key import DeploymentKey, code_version, key_of
from jetspec_jax.autotune.memory import Memory
from jetspec_jax.autotune.prompts import Prompt, prompts_of, split
from jetspec_jax.autotune.tally import Effort
from jetspec_jax.config import EngineConfig, SamplingParams
from jetspec_jax.errors import InputError
from serve import cli
from serve.autotune import CONTEXT, MAX_TOKENS
from serve.suites import Suite

DEFAULT_SECONDS = 300.0
_PROMPTS = 48  # that explorers measure on, times the batch
_GATE_SHARE, _GATE_MOST = 0.4, 150.0  # of the budget, seconds
_THOROUGH_S = 900.0  # a shorter run measures less before it searches
_GATE_LONG = 300.0  # seconds from which the gate compares more
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


def run(
    args: argparse.Namespace,
    engine: EngineConfig,
    start: Candidate | None,
    names: Sequence[str],
    suites: Sequence[Suite],
    out: Path | None,
    began: float,
) -> int:
    """Survey, then what was asked for. Returns the exit code."""
    cli.say(cli.describe_load(args))
    if args.dry_run or out is None:
        survey = look(args, engine, suites, out)
        return _plan(args, survey, names)
    with session.lock(out):
        return _search(args, engine, start, names, suites, out, began)


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
    key = key_of(llm, batch, CONTEXT, name)
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


def _profile(survey: Survey) -> Any:
    return None if survey.profile is None else survey.profile.to_json()


def searched(survey: Survey) -> tuple[Any, ...]:
    """The space without what changes bits by definition: the gate would refuse it."""
    return tuple(p for p in survey.space if not p.changes_bits)


# ---- the plan ------------------------------------------------------------------------------------


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


def _plan(args: argparse.Namespace, survey: Survey, names: Sequence[str]) -> int:
    parts = [p for n in names for p in explorers.parts(n, searched(survey), survey.order)]
    seconds = args.budget_seconds or DEFAULT_SECONDS
    if args.json:
        document = {
            "key": survey.key.to_json(),
            "figures": survey.figures,
            "profile": _profile(survey),
            "gaps": [dataclasses.asdict(g) for g in survey.gaps],
            "parts": [{"name": p.name, "space": [q.name for q in p.space]} for p in parts],
        }
        print(cli.dump_json(document))
        return 0
    print("\n".join(f"{k}: {v}" for k, v in survey.key.to_json().items()))
    print(
        f"\n{survey.figures['nodes']:.1f} nodes and {survey.figures['tau']:.2f} tokens a round; "
        "where its time is above what it must take:"
    )
    print("\n".join(gap_lines(survey.gaps)))
    print(f"\nplan: {seconds:g} s, searches in this order:")
    for part in parts:
        print(f"{part.name}:")
        for p in part.space:
            text = p.values_text
            print(f"  {p.name} ({text}; now {p.default}): {p.why}")
    return 0


# ---- the search ----------------------------------------------------------------------------------


def _search(
    args: argparse.Namespace,
    engine: EngineConfig,
    start: Candidate | None,
    names: Sequence[str],
    suites: Sequence[Suite],
    out: Path,
    began: float,
) -> int:
    seconds = args.budget_seconds
    if seconds is None and args.trials is None:
        seconds = DEFAULT_SECONDS
    deadline = float("inf") if seconds is None else began + seconds
    memory = Memory(out / "memory.db")
    survey = look(args, engine, suites, out, seconds is None or seconds >= _THOROUGH_S)
    (out / "survey.json").write_text(
        cli.dump_json(
            {
                "key": survey.key,
                "figures": survey.figures,
                "profile": _profile(survey),
                "gaps": [dataclasses.asdict(g) for g in survey.gaps],
            },
            indent=1,
        )
    )
    cli.say("\n".join(gap_lines(survey.gaps)))
    code = code_version(TREE)
    best = memory.best(survey.key)
    # a run goes on from what was accepted here before; another code version judges it anew
    kept = best.candidate if best is not None and best.code == code else Candidate()
    begin = start if start is not None else kept
    identity = {
        "key": survey.key.to_json(),
        "seed": args.seed,
        "start": None if start is None else dict(start.params),
        "explorers": list(names),
        "suite": args.suite,
        "code": code,
    }
    state, resumed = session.open_session(out / "session.json", identity, begin)
    if resumed:
        cli.say(f"going on with the run in {out}, after {state.seconds:.0f} s")
    worker = functools.partial(_worker, args, engine)
    budget = _GATE_MOST if seconds is None else min(_GATE_SHARE * seconds, _GATE_MOST)
    bar = Bar()
    task = pilot.Task(
        key=survey.key,
        space=searched(survey),
        compose=space.params_of,
        order=survey.order,
        prompts=survey.prompts,
        sampling=SamplingParams(max_tokens=MAX_TOKENS),
        start=worker,
        judge=functools.partial(_judge, args, engine, survey, say=bar.say),
        out=out,
        seed=args.seed,
        code=code,
        gate_seconds=budget,
    )
    run_it = pilot.Pilot(
        task, state, say=bar.say, show=bar.show, trials=args.trials, deadline=deadline
    )
    interrupted = False
    try:
        run_it.run(names)
    except KeyboardInterrupt:
        interrupted = True
        bar.say("interrupted; what is finished is kept, the same command goes on from there")
    finally:
        bar.close()
    document = result(state, begin) | {
        "trials": run_it.finished,
        "seconds": round(time.monotonic() - began, 1),
        "interrupted": interrupted,
        "key": survey.key.to_json(),
    }
    for line in summary(document):
        cli.say(line)
    if args.apply and document["accepted"]:
        from serve import autotune_apply

        autotune_apply.install(memory, survey.key)
    if args.json:
        print(cli.dump_json(document))
    else:
        print("\n".join(f"{k} = {json.dumps(v)}" for k, v in document["params"].items()))
    return cli.INTERRUPTED if interrupted else 0


def _worker(args: argparse.Namespace, engine: EngineConfig, candidate: Candidate) -> Worker:
    return Worker(model=args.model, draft=args.draft, candidate=candidate, engine=engine)


def _judge(
    args: argparse.Namespace,
    engine: EngineConfig,
    survey: Survey,
    incumbent: Candidate,
    candidate: Candidate,
    seconds: float,
    say: Callable[[str], None],
) -> Any:
    return gate.judge(
        incumbent,
        candidate,
        suite=survey.suite,
        model=args.model,
        draft=args.draft,
        engine=engine,
        batch=survey.key.batch,
        budget_seconds=seconds,
        # the least that can be accepted (5% to miss one changed token in 2,000), or 1%
        effort=Effort() if seconds > _GATE_LONG else Effort(positions=Effort().least),
        say=say,
    )


def result(state: session.Session, begin: Candidate) -> dict[str, Any]:
    """What a run has come to, from its session."""
    accepted = state.accepted()
    ratio = low = 1.0
    for step in accepted:
        ratio *= step["verdict"]["speed_ratio"]
        low *= step["verdict"]["speed_ratio_low"]
    return {
        "tokens_identical": all(step["verdict"]["tokens_identical"] for step in accepted),
        "speed_ratio": ratio,
        "speed_ratio_low": low,
        "accepted": bool(accepted),
        "params": dict(state.incumbent.params),
        "start": dict(begin.params),
        "verdicts": [
            {
                "params": v["candidate"]["params"],
                "search": v["search"],
                "accepted": v["verdict"]["accepted"],
                "reason": v["verdict"]["reason"],
                "tokens_identical": v["verdict"]["tokens_identical"],
                "speed_ratio": v["verdict"]["speed_ratio"],
                "speed_ratio_low": v["verdict"]["speed_ratio_low"],
                "positions": v["verdict"]["positions"],
            }
            for v in state.verdicts
        ],
    }


def summary(document: Mapping[str, Any]) -> list[str]:
    """A few lines for people."""
    spent = f"{document['trials']} trials, {document['seconds']:.0f} s"
    if not document["accepted"]:
        shown = len(document["verdicts"])
        judged = f"{shown} shown to the gate" if shown else "none was worth the gate's time"
        return [f"no candidate passed ({judged}); the configuration stays as it is; {spent}"]
    words = pilot.describe(Candidate(document["params"]))
    return [
        f"accepted: {words}; {document['speed_ratio']:.3f}x (at least "
        f"{document['speed_ratio_low']:.3f}x), tokens identical on unseen prompts; {spent}"
    ]


class Bar:
    """Progress on stderr: trials of the search that runs, and the best so far."""

    def __init__(self) -> None:
        self._bar: Any = None
        self._part = ""

    def show(self, progress: pilot.Progress) -> None:
        from tqdm import tqdm

        if progress.part != self._part:
            self.close()
            self._part = progress.part
            self._bar = tqdm(
                desc=progress.part, unit="trial", file=sys.stderr, dynamic_ncols=True, initial=0
            )
        self._bar.n = progress.count
        best = progress.best.ratio if progress.best is not None else None
        self._bar.set_postfix_str(f"best {best:.3f}x" if best is not None else "", refresh=True)

    def say(self, line: str) -> None:
        """A line above the bar."""
        if self._bar is None:
            cli.say(line)
        else:
            self._bar.clear()
            cli.say(line)
            self._bar.refresh()

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None
