"""Benchmark of speculative against plain decoding on prompt suites.

    python -m serve.bench --suite humaneval,gsm8k,mtbench --limit 20 --max-tokens 128 --out report/

Every prompt is decoded plainly and speculatively on the same engine, one after the other in
alternating order (A B, then B A), after a warm-up that is not counted. Progress and the table go to
stderr; the last line of stdout is JSON: {"suites": {name: {"speedup", "tau", "identical", ...}},
"facts": {...}}. With `--out` a folder gets results.json (the same, with per-budget results of
`--sweep-budget` under "sweep" and step costs under "costs"), per_prompt.csv, report.md and SVG
plots. Exit code 1 if any prompt's tokens differ from plain decoding.

Fields of a suite: prompts, speedup (sum of plain / sum of speculative decode seconds; prefill and
compilation apart), speedup_interval (bootstrap 95% over prompts), speedup_of_medians, speedup_min
(worst prompt), tau (pooled), tau_median/min/max (over prompts), identical (bool), identical_share,
first_different ({"id", "token"} or null), acceptance (per depth), accepted_hist, rounds,
nodes_per_round, plain_tok_s, spec_tok_s, plain_ttft_s, spec_ttft_s, plain_decode_s, spec_decode_s,
spec_prefill_s, tokens, compile_s, round_ms.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jetspec_jax.config import SpecConfig
from jetspec_jax.errors import ConfigError, InputError
from serve import cli

MAIN = "spec"
OFF = SpecConfig(mode="off")


def build_parser() -> cli.Parser:
    parser = cli.Parser(
        prog="python -m serve.bench",
        usage="python -m serve.bench [flags]",
        description="Measure speculative against plain decoding on prompt suites.",
        epilog="example: python -m serve.bench --suite humaneval,gsm8k,mtbench --limit 20 "
        "--out report/",
    )
    what = parser.add_argument_group("what to measure")
    what.add_argument(
        "--suite",
        default="humaneval,mtbench,gsm8k",
        metavar="A,B",
        help="humaneval, mtbench, gsm8k, a JSON lines path, or label=path (default: the three)",
    )
    what.add_argument(
        "--limit", type=int, metavar="N", help="prompts per suite, evenly spread (default: all)"
    )
    what.add_argument(
        "--batch", type=int, default=1, metavar="N", help="prompts decoded together (default: 1)"
    )
    what.add_argument(
        "--repeat",
        type=int,
        default=1,
        metavar="N",
        help="runs per prompt and mode; times are medians",
    )
    what.add_argument("--sweep-budget", metavar="1,4,8", help="measure these tree budgets, too")
    what.add_argument(
        "--chat-template-kwargs", metavar="JSON", help='e.g. {"enable_thinking": false}'
    )
    cli.add_model_flags(parser)
    cli.add_spec_flags(parser)
    cli.add_tuned_flag(parser)
    cli.add_sampling_flags(parser, max_tokens=128)
    output = parser.add_argument_group("output")
    output.add_argument(
        "--out",
        metavar="DIR",
        help="write results.json, per_prompt.csv, report.md and SVG plots here",
    )
    output.add_argument(
        "--json", action="store_true", help="print the whole document instead of the summary line"
    )
    output.add_argument("--debug", action="store_true", help="show tracebacks")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns the exit code."""
    return cli.run(lambda args: _run(args, argv), build_parser(), argv)


def parse_budgets(text: str | None) -> list[int]:
    """ "1,4,8" -> [1, 4, 8], ascending. Raises ConfigError for anything else."""
    try:
        budgets = sorted({int(word) for word in (text or "").split(",") if word.strip()})
    except ValueError as error:
        raise ConfigError(f"--sweep-budget {text!r}: give whole numbers like 1,4,8,16") from error
    if (text is not None and not budgets) or any(b < 1 for b in budgets):
        raise ConfigError(f"--sweep-budget {text!r}: give node counts of at least 1, like 1,4,8,16")
    return budgets


def variants_of(spec: SpecConfig, budgets: Sequence[int]) -> dict[str, SpecConfig]:
    """The measured configuration, and one of mode "tree" (a fixed budget) per swept budget."""
    mode = "tree" if spec.mode == "auto" else spec.mode
    swept = {f"budget {b}": dataclasses.replace(spec, mode=mode, budget=b) for b in budgets}
    return {MAIN: spec, **swept}


def warm_up(llm: Any, variants: Mapping[str, SpecConfig], batch: int) -> float:
    """Compiles every program that will be timed. Returns seconds."""
    with cli.phase("compiling (not counted)"):
        return sum(float(llm.warmup(batch=batch, spec=spec)) for spec in (OFF, *variants.values()))


def measured_costs(llm: Any, spec: SpecConfig, batch: int) -> dict[str, Any]:
    """Seconds of a plain step (from plain decoding itself), of drafting, and of verification."""
    costs = llm.measure_costs(batch=batch, spec=spec)
    return {**costs, "t_plain_s": llm.measure_costs(batch=batch, spec=OFF)["t_plain_s"]}


def header(args: argparse.Namespace, llm: Any, engine: Any, command: str) -> dict[str, Any]:
    """What the numbers were taken on. Budget "auto": the engine chooses it round by round."""
    from serve import facts  # starts jax

    budget = getattr(llm.spec, "budget", None)
    return {
        "command": command,
        "model": args.model or cli.BUNDLED,
        "draft": cli.head_name(args, llm),
        "hardware": facts.hardware(),
        "dtype": engine.dtype,
        "batch": args.batch,
        "temperature": args.temperature,
        "budget": "auto" if budget is None or llm.spec.mode == "auto" else budget,
        "max_tokens": args.max_tokens,
        "limit": args.limit,
        "repeat": args.repeat,
        "spec": {k: v for k, v in cli.plain(llm.spec).items() if v is not None},
        "engine": cli.plain(llm.engine),
        "tuned": llm.tuned.to_json(),
        "versions": facts.versions(),
        "commit": facts.git_revision(),
    }


def _run(args: argparse.Namespace, argv: Sequence[str] | None) -> int:
    from serve.suites import load_suites

    if args.batch < 1 or args.repeat < 1:
        raise ConfigError(f"--batch {args.batch} --repeat {args.repeat}: give at least 1 for both")
    spec, sampling = cli.spec_from_args(args), cli.sampling_from_args(args)
    if not spec.enabled:
        raise ConfigError(
            "nothing to compare with --spec off or --drafter none: plain decoding is "
            "measured anyway"
        )
    if args.logprobs is not None:
        raise ConfigError("--logprobs is not part of the benchmark; drop it")
    engine = cli.engine_from_args(args, **({"max_batch": args.batch} if args.batch > 32 else {}))
    kwargs = cli.parse_json_object(args.chat_template_kwargs or "{}", "--chat-template-kwargs")
    budgets = parse_budgets(args.sweep_budget)
    cli.check_path(args.model, "--model")
    cli.check_path(args.draft, "--draft")
    cli.check_tuned(args.tuned)
    out = _writable(args.out)
    suites = load_suites(args.suite, args.limit)
    cli.say(cli.describe_load(args))
    llm = cli.load_llm(args, spec, engine)

    from serve import facts, measure, report  # numpy, matplotlib, after the first line

    variants = variants_of(spec, budgets)
    compile_s = warm_up(llm, variants, args.batch)
    counts = ", ".join(f"{s.name} {len(s.prompts)} of {s.total}" for s in suites)
    cli.say(
        f"measuring {counts}; {1 + len(variants)} runs per prompt, up to {args.max_tokens} tokens"
    )
    rows, interrupted = _measure_all(llm, suites, variants, sampling, args, kwargs)
    if not rows:
        raise InputError("interrupted before the first prompt was measured")

    by_suite = {s.name: [row for row in rows if row.suite == s.name] for s in suites}
    by_suite = {name: part for name, part in by_suite.items() if part}
    document: dict[str, Any] = {
        "version": 1,
        "facts": header(args, llm, engine, facts.command("serve.bench", argv)),
        "suites": {name: measure.summarise(part, MAIN) for name, part in by_suite.items()},
        "sweep": {
            name: {b: measure.summarise(part, f"budget {b}") for b in budgets}
            for name, part in by_suite.items()
            if budgets
        },
        "costs": None if interrupted or not out else measured_costs(llm, spec, args.batch),
        "compile_s": compile_s,
        "interrupted": interrupted,
    }
    line = report.facts_line(document["facts"])
    report.print_table(
        "speculative against plain decoding",
        [report.cells(n, s) for n, s in document["suites"].items()],
        report.COLUMNS,
        line,
    )
    if out is not None:
        for path in report.write_report(out, document, rows):
            cli.say(f"wrote {path}")
    short = {
        "suites": document["suites"],
        "facts": document["facts"],
        "compile_s": compile_s,
        "interrupted": interrupted,
    }
    print(cli.dump_json(document if args.json else short))
    if interrupted:
        return cli.INTERRUPTED
    return 0 if all(row.identical(v) for row in rows for v in row.variants) else 1


def _measure_all(
    llm: Any,
    suites: Sequence[Any],
    variants: Mapping[str, SpecConfig],
    sampling: Any,
    args: argparse.Namespace,
    kwargs: Mapping[str, Any],
) -> tuple[list[Any], bool]:
    """(rows, interrupted). Ctrl-C keeps every prompt that is complete."""
    from tqdm import tqdm

    from serve import measure

    rows: list[Any] = []
    with tqdm(
        total=sum(len(s.prompts) for s in suites),
        unit="prompt",
        file=sys.stderr,
        dynamic_ncols=True,
        mininterval=0.5,
    ) as bar:

        def advance(prompts: int) -> None:
            bar.update(prompts)

        try:
            for suite in suites:
                bar.set_description(suite.name)
                for start in range(0, len(suite.prompts), args.batch):
                    part = suite.prompts[start : start + args.batch]
                    made = measure.measure(
                        llm,
                        suite.name,
                        part,
                        variants,
                        sampling,
                        batch=args.batch,
                        repeat=args.repeat,
                        template_kwargs=kwargs or None,
                        first_group=start // args.batch,
                        done=advance,
                    )
                    rows += made
                    bar.set_postfix_str(_running(rows))
        except KeyboardInterrupt:
            return rows, True
    return rows, False


def _running(rows: Sequence[Any]) -> str:
    """Speed-up so far, for the progress bar."""
    spec = sum(row.variants[MAIN].decode_s for row in rows)
    return f"{sum(row.plain.decode_s for row in rows) / spec:.2f}x" if spec > 0 else ""


def _writable(out: str | None) -> Path | None:
    """Makes the folder now: a benchmark of an hour must not end in "permission denied"."""
    if out is None:
        return None
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError(
            "--out draws plots with matplotlib, which is not installed; "
            "run: pip install 'jetspec-jax[plot]'"
        )
    path = Path(out).expanduser()
    try:
        path.mkdir(parents=True, exist_ok=True)
        (path / "results.json").touch()
    except OSError as error:
        raise ConfigError(
            f"--out {out}: {error.strerror}; give a folder that can be written"
        ) from error
    return path


if __name__ == "__main__":
    sys.exit(main())
