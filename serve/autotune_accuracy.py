"""How well the autotuner's cost model predicts: rounds of many configurations, predicted and timed.

    python -m serve.autotune_accuracy

For each weight format and drafter a profile is measured (`autotune.profile`, batch 1, synthetic
text) and the round of every budget and batch is predicted from it alone. Then rounds on real
prompts are timed, all configurations in turn. Last line of stdout: JSON.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
from collections.abc import Sequence
from typing import Any

from jetspec_jax.config import WEIGHTS, SpecConfig
from jetspec_jax.errors import ConfigError
from serve import cli

DRAFTERS = ("head", "hybrid", "lookup")
HEAD_DEPTH, DEPTH = 4, 7
CAPACITY = 1_024


@dataclasses.dataclass(frozen=True)
class Row:
    """One configuration. Seconds of a round; `nodes` is the mean a sequence that were verified."""

    weights: str
    drafter: str
    budget: int
    batch: int
    nodes: float
    predicted: float
    measured: float

    @property
    def error(self) -> float:
        """Signed, relative to the measured time."""
        return self.predicted / self.measured - 1


def build_parser() -> cli.Parser:
    parser = cli.Parser(
        prog="python -m serve.autotune_accuracy",
        usage="python -m serve.autotune_accuracy [flags]",
        description="Predicted against measured rounds of the autotuner's cost model.",
    )
    parser.add_argument(
        "--budgets", default="4,12", metavar="N,...", help="tree nodes (default: 4,12)"
    )
    parser.add_argument(
        "--batches", default="1,4", metavar="N,...", help="sequences at once (default: 1,4)"
    )
    parser.add_argument(
        "--drafters",
        default=",".join(DRAFTERS),
        metavar="D,...",
        help="default: head,hybrid,lookup",
    )
    parser.add_argument(
        "--weights", default="stored,float32", metavar="W,...", help="default: stored,float32"
    )
    parser.add_argument(
        "--rounds", type=int, default=12, metavar="N", help="rounds of a timing (default: 12)"
    )
    parser.add_argument(
        "--repeats", type=int, default=5, metavar="N", help="timings, the least counts (default: 5)"
    )
    parser.add_argument("--profiles", metavar="DIR", help="write the measured profiles there")
    parser.add_argument("--debug", action="store_true", help="show tracebacks")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns the exit code."""
    return cli.run(lambda args: _run(args, argv), build_parser(), argv)


def numbers(text: str, flag: str) -> list[int]:
    """ "1,12" -> [1, 12]."""
    try:
        found = [int(part) for part in text.split(",")]
    except ValueError:
        found = []
    if not found or min(found) < 1 or max(found) > 64:
        raise ConfigError(f"{flag} {text}: give numbers from 1 to 64, such as 4,12")
    return found


def words(text: str, known: Sequence[str], flag: str) -> list[str]:
    """ "head,lookup" -> ["head", "lookup"], all of them known."""
    found = text.split(",")
    for word in found:
        if word not in known:
            raise ConfigError(f"{flag} {text}: {word!r} is not one of {', '.join(known)}")
    return found


def _run(args: argparse.Namespace, argv: Sequence[str] | None) -> int:
    budgets = numbers(args.budgets, "--budgets")
    batches = numbers(args.batches, "--batches")
    drafters = words(args.drafters, DRAFTERS, "--drafters")
    formats = words(args.weights, WEIGHTS, "--weights")
    if args.rounds < 1 or args.repeats < 1:
        raise ConfigError("--rounds and --repeats: give at least 1")
    out = None
    if args.profiles is not None:
        from pathlib import Path

        out = Path(args.profiles)
        out.mkdir(parents=True, exist_ok=True)
    import json

    from jetspec_jax import EngineConfig
    from jetspec_jax.autotune.profile import measure_device, measure_profile
    from serve import facts

    hardware = measure_device()
    rows: list[Row] = []
    for weights in formats:
        engine = EngineConfig(weights=weights, capacity=CAPACITY)
        cli.say(f"weights {weights}")
        import jetspec_jax

        llm = jetspec_jax.LLM(engine=engine, tuned="off")
        found = {}
        for drafter in drafters:
            spec = _spec(drafter, None)
            with cli.phase(f"profile of {drafter}"):
                found[drafter] = measure_profile(llm, 1, spec, hardware=hardware)
            if out is not None:
                path = out / f"{weights}-{drafter}.json"
                path.write_text(json.dumps(found[drafter].to_json(), indent=1) + "\n")
        with cli.phase("timing rounds"):
            rows += measure_rows(llm, weights, found, budgets, batches, args.rounds, args.repeats)
        # at once: a run that is cut off later keeps what it has
        _print([r for r in rows if r.weights == weights], facts.hardware())
    errors = [abs(r.error) for r in rows]
    print(
        cli.dump_json(
            {
                "rows": [dataclasses.asdict(r) | {"error": r.error} for r in rows],
                "median_error": statistics.median(errors),
                "worst_error": max(errors),
                "hardware": facts.hardware(),
                "versions": facts.versions(),
                "commit": facts.git_revision(),
                "command": facts.command("serve.autotune_accuracy", argv),
            }
        )
    )
    return 0


def _spec(drafter: str, budget: int | None) -> SpecConfig:
    deep = None if drafter == "lookup" else HEAD_DEPTH
    return SpecConfig(mode="tree", drafter=drafter, depth=DEPTH, head_depth=deep, budget=budget)


def measure_rows(
    llm: Any,
    weights: str,
    profiles: dict[str, Any],
    budgets: Sequence[int],
    batches: Sequence[int],
    rounds: int,
    repeats: int,
) -> list[Row]:
    """Every drafter x budget x batch, timed in turns, and what its profile predicts."""
    from jetspec_jax.autotune.cost_model import at_batch, predict_round
    from serve.suites import load_suite

    texts = [llm.encode(list(p.messages)) for p in load_suite("humaneval", max(batches)).prompts]
    keys = [(d, b, n) for d in profiles for b in budgets for n in batches]
    times: dict[Any, list[float]] = {key: [] for key in keys}
    nodes: dict[Any, float] = {}
    for turn in range(1 + repeats):
        for key in keys:
            drafter, budget, batch = key
            spent, nodes[key] = time_rounds(llm, _spec(drafter, budget), texts[:batch], rounds)
            if turn:  # the first turn compiles and warms up
                times[key].append(spent)
    rows = []
    for key in keys:
        drafter, budget, batch = key
        profile = dataclasses.replace(at_batch(profiles[drafter], batch), rounds_per_call=rounds)
        predicted = predict_round(profile, nodes[key])
        measured = min(times[key])  # as profiles take the least of their turns
        rows.append(Row(weights, drafter, budget, batch, nodes[key], predicted, measured))
    return rows


def time_rounds(
    llm: Any, spec: SpecConfig, prompts: Sequence[Sequence[int]], rounds: int
) -> tuple[float, float]:
    """(seconds of a round, mean verified nodes a sequence) of one call of `rounds` rounds."""
    from jetspec_jax import SamplingParams

    batch = len(prompts)
    plan = llm.plan_for(llm.resolve(spec))
    with llm.session(plan, batch) as session:
        for slot, ids in enumerate(prompts):
            session.admit(slot, list(ids), llm.capacity, (), SamplingParams(), True)
        session.run(1)  # the program is there, the caches are warm
        before, started = int(session.state.counters.nodes.sum()), session.decode_s
        session.run(rounds)
        spent = (session.decode_s - started) / rounds
        verified = (int(session.state.counters.nodes.sum()) - before) / (rounds * batch)
    return spent, verified


def _print(rows: Sequence[Row], hardware: str) -> None:
    from rich.console import Console
    from rich.table import Table

    errors = [abs(r.error) for r in rows]
    table = Table(
        title="a round, predicted and measured, ms",
        caption=f"{hardware} · median error {statistics.median(errors):.0%}, "
        f"worst {max(errors):.0%}",
        title_justify="left",
        caption_justify="left",
    )
    for name in (
        "weights",
        "drafter",
        "budget",
        "batch",
        "nodes",
        "predicted",
        "measured",
        "error",
    ):
        table.add_column(name, justify="left" if name in ("weights", "drafter") else "right")
    for r in rows:
        table.add_row(
            *(r.weights, r.drafter, str(r.budget), str(r.batch), f"{r.nodes:.1f}"),
            *(f"{r.predicted * 1e3:.2f}", f"{r.measured * 1e3:.2f}", f"{r.error:+.0%}"),
        )
    Console().print(table)


if __name__ == "__main__":
    raise SystemExit(main())
