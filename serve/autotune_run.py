"""One run of `serve.autotune`: survey the engine, search, judge, print (jax starts here)."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from jetspec_jax.autotune import explorers, external, gate, ledger, pilot, session, space
from jetspec_jax.autotune.brief import Brief
from jetspec_jax.autotune.candidate import Candidate
from jetspec_jax.autotune.client import TREE, Worker
from jetspec_jax.autotune.cost_model import predict_round
from jetspec_jax.autotune.key import code_version
from jetspec_jax.autotune.memory import Memory
from jetspec_jax.autotune.pairs import Figures
from jetspec_jax.autotune.tally import Effort
from jetspec_jax.autotune.verdict import Verdict
from jetspec_jax.config import EngineConfig, SamplingParams
from serve import autotune_survey, cli
from serve.autotune import MAX_TOKENS
from serve.autotune_survey import Survey
from serve.suites import Suite

DEFAULT_SECONDS = 300.0
# Of the budget, and seconds: 170 s for 7,031 positions of the bundled model on 2 quiet cores
_GATE_SHARE, _GATE_MOST = 0.6, 190.0
_THOROUGH_S = 900.0  # a shorter run measures less before it searches
_PAIRS = 40  # that a gate times
_GATE_LONG = 300.0  # seconds from which the gate compares more


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
        survey = autotune_survey.look(args, engine, suites, out)
        if out is not None:
            autotune_survey.save(survey, out)
        return _plan(args, survey, names)
    with session.lock(out):
        return _search(args, engine, start, names, suites, out, began)


# ---- the plan ------------------------------------------------------------------------------------


def _plan(args: argparse.Namespace, survey: Survey, names: Sequence[str]) -> int:
    builtin = [n for n in names if not n.startswith(explorers.COMMAND)]
    parts = [
        p
        for n in builtin
        for p in explorers.parts(n, autotune_survey.searched(survey), survey.order)
    ]
    seconds = args.budget_seconds or DEFAULT_SECONDS
    if args.json:
        document = {
            "key": survey.key.to_json(),
            "figures": survey.figures,
            "profile": survey.profile.to_json() if survey.profile is not None else None,
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
    print("\n".join(autotune_survey.gap_lines(survey.gaps)))
    print(f"\nplan: {seconds:g} s, searches in this order:")
    for part in parts:
        print(f"{part.name}:")
        for p in part.space:
            text = p.values_text
            print(f"  {p.name} ({text}; now {p.default}): {p.why}")
    print("\n".join(n for n in names if n not in builtin))
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
    survey = autotune_survey.look(
        args, engine, suites, out, seconds is None or seconds >= _THOROUGH_S
    )
    autotune_survey.save(survey, out)
    if survey.gaps:
        cli.say("\n".join(autotune_survey.gap_lines(survey.gaps)))
    else:
        cli.say(
            f"a run of less than {_THOROUGH_S:.0f} s measures no gaps; --dry-run --out {out} does"
        )
    code = code_version(TREE)
    best = ledger.best_configuration(memory, survey.key)
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
        space=autotune_survey.searched(survey),
        compose=space.params_of,
        order=survey.order,
        prompts=survey.prompts,
        sampling=SamplingParams(max_tokens=MAX_TOKENS),
        start=worker,
        judge=functools.partial(_judge, args, engine, survey, out, say=bar.say),
        out=out,
        seed=args.seed,
        code=code,
        gate_seconds=budget,
        predict=functools.partial(_predict, survey),
        external=functools.partial(_explore, args, engine, survey, out, memory, say=bar.say),
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
    from serve import autotune_apply

    if state.accepted():
        autotune_apply.keep(memory, survey.key, out)
    if args.apply:
        if ledger.best_configuration(memory, survey.key) is None:
            cli.say("--apply: nothing was accepted against the heuristic, nothing is installed")
        else:
            autotune_apply.install(memory, survey.key)
    if args.json:
        print(cli.dump_json(document))
    else:
        print("\n".join(f"{k} = {json.dumps(v)}" for k, v in document["params"].items()))
    return cli.INTERRUPTED if interrupted else 0


def _predict(survey: Survey, reference: Figures, candidate: Figures) -> float | None:
    """Speed ratio by rounds and nodes alone: what the clock says should not be far from it."""
    if survey.profile is None or not (reference.rounds and candidate.rounds):
        return None
    spent = [
        f.rounds * predict_round(survey.profile, max(f.nodes / f.rounds, 1.0))
        for f in (reference, candidate)
    ]
    return spent[0] / spent[1]


def _worker(args: argparse.Namespace, engine: EngineConfig, candidate: Candidate) -> Worker:
    return Worker(model=args.model, draft=args.draft, candidate=candidate, engine=engine)


def _judge(
    args: argparse.Namespace,
    engine: EngineConfig,
    survey: Survey,
    out: Path,
    incumbent: Candidate,
    candidate: Candidate,
    seconds: float,
    say: Callable[[str], None],
) -> Any:
    verdict = gate.judge(
        incumbent,
        candidate,
        suite=survey.suite,
        model=args.model,
        draft=args.draft,
        engine=engine,
        batch=survey.key.batch,
        budget_seconds=seconds,
        # the least that can be accepted (5% to miss one changed token in 2,000), or 1%; more pairs
        # than by default, since what is left to find over the heuristic is some percent
        effort=Effort(
            positions=Effort().positions if seconds > _GATE_LONG else Effort().least,
            pairs=_PAIRS,
        ),
        say=say,
    )
    keep_page(out, verdict)
    return verdict


def keep_page(out: Path, verdict: Verdict) -> None:
    """The verdict as a page of text, `verdict-<candidate>.txt`; as JSON it is in session.json and
    memory.db. A candidate that is judged again has the last page.
    """
    (out / f"verdict-{verdict.candidate}.txt").write_text(verdict.text() + "\n", encoding="utf-8")


def _explore(
    args: argparse.Namespace,
    engine: EngineConfig,
    survey: Survey,
    out: Path,
    memory: Memory,
    command: str,
    incumbent: Candidate,
    seconds: float,
    say: Callable[[str], None],
) -> external.Attempt:
    """An external explorer against the incumbent; a third of the time each for its own work, its
    tests and the gate.
    """

    def judge(
        candidate: Candidate, tree: Path, limits: Any, env: Mapping[str, str], left: float
    ) -> Any:
        verdict = gate.judge(
            incumbent,
            candidate,
            suite=survey.suite,
            model=args.model,
            draft=args.draft,
            engine=engine,
            tree=tree,
            batch=survey.key.batch,
            budget_seconds=left,
            limits=limits,
            env=env,
            say=say,
        )
        keep_page(out, verdict)
        return verdict

    attempt = external.explore(
        command,
        tree=TREE,
        brief=Brief(
            gaps=[dataclasses.asdict(g) for g in survey.gaps],
            patterns=[p.to_json() for p in memory.latest()],
            prompts=survey.seen,
            deployment=survey.key.to_json(),
            engine={
                "model": args.model,
                "draft": args.draft,
                "engine": dataclasses.asdict(engine),
                "batch": survey.key.batch,
            },
            tests=external.TESTS,
        ),
        judge=judge,
        out=out,
        budget=external.Budget(seconds / 3, seconds / 3, seconds / 3),
        say=say,
    )
    external.record(memory, survey.key, attempt, TREE)
    return attempt


def result(state: session.Session, begin: Candidate) -> dict[str, Any]:
    """What a run has come to, from its session."""
    accepted = state.accepted()
    ratio = low = 1.0
    for step in accepted:
        ratio *= step["verdict"]["speed_ratio"]
        low *= step["verdict"]["speed_ratio_low"]
    patches = [a for a in state.attempts if a["accepted"]]
    patch = max(patches, key=lambda a: a["verdict"]["speed_ratio_low"], default=None)
    if patch is not None:
        ratio *= patch["verdict"]["speed_ratio"]
        low *= patch["verdict"]["speed_ratio_low"]
        accepted = [*accepted, patch]
    return {
        "tokens_identical": all(step["verdict"]["tokens_identical"] for step in accepted),
        "speed_ratio": ratio,
        "speed_ratio_low": low,
        "accepted": bool(accepted),
        "params": dict(state.incumbent.params),
        "patch": None if patch is None else str(patch["patch_file"]),
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
        judged = f"{shown} shown to the gate" if shown else "none was shown to the gate"
        return [f"no candidate passed ({judged}); the configuration stays as it is; {spent}"]
    words = pilot.describe(Candidate(document["params"]))
    if document["patch"] is not None:
        words += f", and the patch {document['patch']}, which is yours to apply (git apply)"
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
