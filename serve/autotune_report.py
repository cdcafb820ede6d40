"""`serve.autotune --report`, `--export` and `--import`: from a run's files, without a model."""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jetspec_jax.autotune import cost_model, search, session
from jetspec_jax.autotune.candidate import Candidate
from jetspec_jax.autotune.memory import Memory, Pattern
from jetspec_jax.autotune.pilot import describe
from jetspec_jax.errors import ConfigError
from serve import cli


def run(args: argparse.Namespace, out: Path) -> int:
    """What the flags ask of the files in `out`."""
    if args.export is not None:
        count = Memory(out / "memory.db", create=False).export(args.export)
        cli.say(f"wrote {count} patterns to {args.export}")
        return _json(args, {"exported": count})
    if args.import_ is not None:
        count = Memory(out / "memory.db").import_(args.import_)
        cli.say(f"{count} patterns are new; each has to pass the gate here before it is used")
        return _json(args, {"imported": count})
    return _report(args, out)


def _json(args: argparse.Namespace, document: Mapping[str, Any]) -> int:
    if args.json:
        print(cli.dump_json(document))
    return 0


def _report(args: argparse.Namespace, out: Path) -> int:
    state = session.read(out / "session.json")
    if state is None:
        raise ConfigError(f"--out {out}: no run was made there; search first")
    patterns = Memory(out / "memory.db").latest()
    studies = search.studies(out / "search.db")
    gaps = _gaps(out / "survey.json")
    text = page(state, gaps, studies, patterns)
    plot = None
    if any(trials for _, trials in studies.values()):
        if importlib.util.find_spec("matplotlib") is None:
            raise ConfigError(
                "--report draws the search with matplotlib, which is not installed; "
                "run: pip install 'jetspec-jax[autotune]'"
            )
        plot = draw(out / "history.svg", state, studies)
        text += "\n![Speed of every trial against its reference](history.svg)\n"
    (out / "report.md").write_text(text, encoding="utf-8")
    print(text)
    for path in (out / "report.md", plot):
        if path is not None:
            cli.say(f"wrote {path}")
    return _json(
        args,
        {
            "accepted": [p.to_json() for p in patterns if p.accepted],
            "rejected": [p.to_json() for p in patterns if not p.accepted],
            "trials": {name: len(trials) for name, (_, trials) in studies.items()},
            "session": state.identity,
            "verdicts": state.verdicts,
        },
    )


def _gaps(path: Path) -> list[cost_model.Gap]:
    try:
        return [cost_model.Gap(**g) for g in json.loads(path.read_text())["gaps"]]
    except FileNotFoundError:
        return []
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path} cannot be read ({error}); move it away, and search") from error


def page(
    state: session.Session,
    gaps: Sequence[cost_model.Gap],
    studies: Mapping[str, tuple[Mapping[str, Any], list[search.Finished]]],
    patterns: Sequence[Pattern],
) -> str:
    """The whole report as Markdown."""
    from serve.autotune_survey import gap_lines

    key = state.identity["key"]
    lines = [
        "# What the autotuner found",
        "",
        f"{key['target']} on {key['device']}, {key['weights']} weights, {key['arithmetic']} sums, "
        f"batch {key['batch']}, suite {key['suite']}; seed {state.identity['seed']}; "
        f"{state.seconds:.0f} s so far, {'ended' if state.done else 'not ended'}.",
        "",
        f"In force now: {describe(state.incumbent)}.",
        "",
        "## Gaps",
        "",
        *(["```", *gap_lines(gaps), "```"] if gaps else ["No survey was kept."]),
        "",
        "## Searches",
        "",
        "| search | trials | pruned | refused | best | seconds | parameters of the best |",
        "|---|---:|---:|---:|---:|---:|---|",
    ]
    for facts, trials in studies.values():
        whole = [t for t in trials if t.ratio is not None and not t.pruned]
        best = max(whole, key=lambda t: t.ratio or 0, default=None)
        here = facts.get("here", {})
        moved = {} if best is None else best.params
        changed = {k: v for k, v in moved.items() if k not in here or here[k] != v}
        lines.append(
            f"| {facts.get('part', '?')} | {len(trials)} | {sum(t.pruned for t in trials)} | "
            f"{sum(bool(t.note) for t in trials)} | "
            f"{'n/a' if best is None else f'{best.ratio:.3f}x'} | "
            f"{math.fsum(t.seconds for t in trials):.0f} | {_words(changed)} |"
        )
    lines += ["", "## Verdicts of the gate", ""]
    for step in state.verdicts:
        verdict = step["verdict"]
        speed = verdict["speed_ratio"]
        timed = (
            "not timed"
            if speed is None
            else f"{speed:.3f}x [{verdict['speed_ratio_low']:.3f}, "
            f"{verdict['speed_ratio_high']:.3f}]"
        )
        lines.append(
            f"- **{'accepted' if verdict['accepted'] else 'refused'}** "
            f"{describe(Candidate.from_json(step['candidate']))} ({step['search']}, measured "
            f"{step['measured']:.3f}x): {timed}; {verdict['positions']} positions compared; "
            f"{verdict['reason']}"
        )
    if not state.verdicts:
        lines.append("None yet.")
    for title, wanted in (("Accepted patterns", True), ("Rejected patterns", False)):
        lines += ["", f"## {title}", ""]
        chosen = [p for p in patterns if p.accepted == wanted]
        lines += [_pattern(p) for p in chosen] or ["None."]
    return "\n".join(lines) + "\n"


def _words(params: Mapping[str, Any]) -> str:
    return describe(Candidate(params)) if params else "as the start"


def _pattern(p: Pattern) -> str:
    speed = "" if p.measured is None else f", {p.measured:.3f}x [{p.low:.3f}, {p.high:.3f}]"
    if p.predicted is not None:
        speed += f" (predicted {p.predicted:.3f}x against its incumbent)"
    counter = "" if p.counter_example is None else f"; counter-example {p.counter_example}"
    origin = "" if p.trusted else "; imported, not judged here"
    reason = "" if p.accepted else f": {p.report.get('reason', '')}"
    return f"- {p.id} {describe(p.candidate)}{speed}, {p.when}{origin}{counter}{reason}"


def draw(
    path: Path,
    state: session.Session,
    studies: Mapping[str, tuple[Mapping[str, Any], list[search.Finished]]],
) -> Path:
    """The search history: every trial's speed against its reference, and what the gate said."""
    import matplotlib as mpl
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    from serve import plots

    with mpl.rc_context(plots.STYLE):
        key = state.identity["key"]
        facts = f"{key['target']} · {key['device']} · batch {key['batch']} · {key['suite']}"
        figure, (axis,) = plots._figure("Search history", facts, 3.4, gap=0.35)
        at, best_x, best_y = 0, [0.0], [1.0]
        for (info, trials), colour in zip(
            studies.values(), plots._colours(len(studies)), strict=True
        ):
            points = [(at + i + 1, t) for i, t in enumerate(trials)]
            for hollow in (False, True):
                shown = [(x, t.ratio) for x, t in points if t.ratio and t.pruned == hollow]
                axis.scatter(
                    [x for x, _ in shown],
                    [y for _, y in shown],
                    s=26,
                    color="none" if hollow else colour,
                    edgecolors=colour,
                    linewidths=1.1,
                    label=None if hollow else str(info.get("part", "?")),
                    zorder=3,
                )
            refused = [x for x, t in points if t.note]
            if refused:
                axis.scatter(refused, [0.995] * len(refused), marker="x", s=24, color=plots.RED)
            top = 1.0
            for x, t in points:
                if t.ratio and not t.pruned:
                    top = max(top, t.ratio)
                best_x.append(x)
                best_y.append(top)
            at += len(trials)
        axis.step(best_x, best_y, where="post", color=plots.GREY, linewidth=1.2, zorder=2)
        axis.axhline(1, color=plots.INK, linewidth=1.1, linestyle=(0, (4, 3)))
        axis.set_xlim(0, at + 1)
        axis.xaxis.set_major_locator(MaxNLocator(integer=True))
        axis.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:.2f}x"))
        axis.grid(axis="y", linewidth=0.8)
        axis.set_xlabel("trial; filled: all prompts, hollow: pruned, x: refused; line: best so far")
        axis.legend(frameon=False, loc="lower left", bbox_to_anchor=(0, 1), ncols=4, fontsize=9)
        figure.savefig(
            path,
            metadata={"Date": None} if path.suffix == ".svg" else None,
            facecolor="white",
            dpi=120,
        )
    return path
