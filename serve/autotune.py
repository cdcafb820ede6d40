"""Finds a configuration that decodes faster on this machine, and changes no token.

    python -m serve.autotune --budget-seconds 300 --suite humaneval --out tuned/
    python -m serve.autotune --out tuned/ --report      # what was found, with a plot
    python -m serve.autotune --out tuned/ --apply       # serve.generate uses it from its next start

The run measures the engine, ranks the gaps to its ceilings, searches declared parameters by paired
measurements, and shows the best to the gate, which compares every token with plain decoding on
prompts that the search never saw. `--out` keeps everything: search.db (trials), memory.db
(patterns), session.json (where the run stands), survey.json (profile and gaps). The same command
after Ctrl-C or kill -9 goes on with what is finished.

Exit code 0: the run ended, whether or not something was accepted (that is a result, too: "accepted"
says which). 1: something failed. 2: a flag that cannot be honoured. 130: Ctrl-C; what was found
until then is kept and printed.

With `--json` the last line of stdout is {"tokens_identical", "speed_ratio", "speed_ratio_low",
"accepted", "params", "verdicts", "trials", "seconds", "interrupted", "key", "start"}. The ratio is
against the start of the run: the shipped heuristic, what was accepted here before, or `--start`. Of
several accepted steps ratios and bounds are multiplied. Where nothing was accepted the start stays:
ratio 1, bound 1, and its tokens are its own.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jetspec_jax.config import EngineConfig
from jetspec_jax.errors import ConfigError, InputError
from serve import cli

DEVICES = ("h100", "h200", "rtx-pro-6000")
DEFAULT_EXPLORERS = "builtin:tree,builtin:kernel"
MAX_TOKENS = 64  # of an answer while searching


def build_parser() -> cli.Parser:
    parser = cli.Parser(
        prog="python -m serve.autotune",
        usage="python -m serve.autotune --out DIR [flags]",
        description="Find a faster configuration that changes no token, and remember it.",
        epilog="example: python -m serve.autotune --budget-seconds 300 --suite humaneval "
        "--out tuned/ --apply",
    )
    what = parser.add_argument_group("what to do")
    what.add_argument("--out", metavar="DIR", help="folder of everything that is found")
    what.add_argument(
        "--budget-seconds", type=float, metavar="N", help="time for everything (default: 300)"
    )
    what.add_argument(
        "--trials", type=int, metavar="N", help="finished trials after which each search ends"
    )
    what.add_argument(
        "--explorer",
        action="append",
        metavar="NAME",
        help="builtin:tree, builtin:kernel, builtin:scheduler (comma-separated), or cmd:COMMAND; "
        f"may be repeated (default: {DEFAULT_EXPLORERS}, with a batch builtin:scheduler, too)",
    )
    what.add_argument(
        "--suite",
        default="humaneval,gsm8k,mtbench",
        metavar="A,B",
        help="prompts: humaneval, mtbench, gsm8k or JSON lines files; half of them is the gate's",
    )
    what.add_argument(
        "--batch-size", type=int, default=1, metavar="N", help="sequences decoded at once"
    )
    what.add_argument(
        "--start",
        metavar="FILE_OR_JSON",
        help='begin there instead of at the heuristic, e.g. {"spec.budget": 1}',
    )
    what.add_argument("--seed", type=int, default=0, help="of the search (default: 0)")
    cli.add_model_flags(parser)
    other = parser.add_argument_group("instead of a search")
    other.add_argument(
        "--dry-run", action="store_true", help="print the plan, the gaps and the space, then exit"
    )
    other.add_argument(
        "--report", action="store_true", help="print what --out holds, and draw the search"
    )
    other.add_argument(
        "--check-model", action="store_true", help="cost model: predicted against measured rounds"
    )
    other.add_argument(
        "--device-spec",
        metavar="NAME",
        help=f"with --dry-run: plan for a GPU that is not here ({', '.join(DEVICES)})",
    )
    other.add_argument("--export", metavar="FILE", help="write the memory of --out as JSON")
    other.add_argument(
        "--import",
        dest="import_",
        metavar="FILE",
        help="add an exported memory: as candidates, never trusted",
    )
    output = parser.add_argument_group("output")
    output.add_argument(
        "--apply", action="store_true", help="install what was accepted for serve.generate"
    )
    output.add_argument("--json", action="store_true", help="the result as the last line of stdout")
    output.add_argument("--debug", action="store_true", help="show tracebacks")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns the exit code."""
    return cli.run(_run, build_parser(), argv)


def _run(args: argparse.Namespace) -> int:
    began = time.monotonic()
    _check(args)
    out = None if args.out is None else Path(args.out).expanduser()
    files_only = args.report or args.export is not None or args.import_ is not None
    if args.device_spec is not None:
        from serve import autotune_plan

        return autotune_plan.planned(args)
    if files_only:
        from serve import autotune_report

        return autotune_report.run(args, _existing(out))
    if args.apply and args.budget_seconds is None and args.trials is None:
        from serve import autotune_apply

        return autotune_apply.run(args, _existing(out))
    if args.check_model:
        from serve import autotune_accuracy

        return autotune_accuracy.main([])
    engine = cli.engine_from_args(
        args, **({"max_batch": args.batch_size} if args.batch_size > 32 else {})
    )
    start = _start(args.start)
    names = _explorers(args)
    from serve.suites import load_suites

    suites = load_suites(args.suite)
    if out is not None:
        out = _writable(out)
    from serve import autotune_run

    return autotune_run.run(args, engine, start, names, suites, out, began)


def _check(args: argparse.Namespace) -> None:
    """Everything that flags alone can get wrong."""
    seconds = args.budget_seconds
    if seconds is not None and not (math.isfinite(seconds) and seconds > 0):
        raise ConfigError(f"--budget-seconds {seconds:g}: give a number of seconds above 0")
    for value, flag in ((args.trials, "--trials"), (args.batch_size, "--batch-size")):
        if value is not None and value < 1:
            raise ConfigError(f"{flag} {value}: give at least 1")
    if args.batch_size > 256:
        raise ConfigError(f"--batch-size {args.batch_size}: give at most 256")
    if not 0 <= args.seed < 2**32:
        raise ConfigError(f"--seed {args.seed}: give a whole number from 0 to {2**32 - 1}")
    for text, flag in ((args.out, "--out"), (args.export, "--export")):
        if text is not None and not text.strip():
            raise ConfigError(f"{flag} is empty; give a path, or leave the flag out")
    if args.import_ is not None and not Path(args.import_).expanduser().is_file():
        raise ConfigError(f"--import {args.import_}: no such file; give one that --export wrote")
    modes = {
        "--dry-run": args.dry_run,
        "--report": args.report,
        "--check-model": args.check_model,
        "--export": args.export is not None,
        "--import": args.import_ is not None,
    }
    chosen = [flag for flag, on in modes.items() if on]
    if len(chosen) > 1:
        raise ConfigError(f"{' and '.join(chosen)} exclude each other; give one")
    if chosen and args.apply:
        raise ConfigError(f"--apply does not go with {chosen[0]}; run it alone, or with a search")
    searching = {
        "--budget-seconds": seconds is not None,
        "--trials": args.trials is not None,
        "--explorer": args.explorer is not None and not args.dry_run,
        "--start": args.start is not None and not args.dry_run,
    }
    for flag, on in searching.items():
        if chosen and on:
            raise ConfigError(f"{flag} does not go with {chosen[0]}, which searches nothing")
    if args.device_spec is not None:
        if not args.dry_run:
            raise ConfigError(
                f"--device-spec {args.device_spec} is for planning only; add --dry-run"
            )
        if args.device_spec not in DEVICES:
            raise ConfigError(
                f"--device-spec {args.device_spec}: not known; choose one of {', '.join(DEVICES)}"
            )
        for flag, on in {
            "--explorer": args.explorer is not None,
            "--start": args.start is not None,
            "--draft": args.draft is not None,
        }.items():
            if on:
                raise ConfigError(f"{flag} does not go with --device-spec, which only plans")
        return  # --model names a geometry there
    if args.check_model and (args.model is not None or args.draft is not None):
        raise ConfigError("--check-model is of the bundled model; drop --model and --draft")
    if args.out is None and not (args.dry_run or args.check_model):
        raise ConfigError("--out is missing; give a folder for what is found, e.g. --out tuned/")
    cli.check_path(args.model, "--model")
    cli.check_path(args.draft, "--draft")


def _explorers(args: argparse.Namespace) -> tuple[str, ...]:
    """Names of explorers, in order."""
    from jetspec_jax.autotune import explorers

    default = DEFAULT_EXPLORERS + (",builtin:scheduler" if args.batch_size > 1 else "")
    found: dict[str, None] = {}
    for given in args.explorer or [default]:
        found |= dict.fromkeys(explorers.names(given))
    if not found:
        raise ConfigError("--explorer names none; choose builtin:tree, builtin:kernel, ...")
    if "scheduler" in found and args.batch_size == 1:
        raise ConfigError(
            "--explorer builtin:scheduler schedules several sequences; add --batch-size 2 or more"
        )
    return tuple(found)


def _start(given: str | None) -> Any:
    """The configuration to begin from: {"spec.budget": 1}, or the same in tables by section."""
    from jetspec_jax.autotune.candidate import SECTIONS, Candidate, apply
    from jetspec_jax.config import SpecConfig

    if given is None:
        return None
    flat: dict[str, Any] = {}
    for name, value in cli.load_mapping(given, "--start").items():
        if name in SECTIONS and isinstance(value, dict):
            flat |= {f"{name}.{k}": v for k, v in value.items()}
        else:
            flat[name] = value
    made = Candidate(flat, None, "start")
    apply(made, SpecConfig(), EngineConfig())  # names and values, before anything is loaded
    return made


def _existing(out: Path | None) -> Path:
    if out is None or not out.is_dir():
        raise ConfigError(f"--out {out}: no such folder; give the --out of a run")
    return out


def _writable(out: Path | None) -> Path:
    """Makes the folder now: a search of an hour must not end in "permission denied"."""
    if out is None:
        raise InputError("--out is missing")
    try:
        out.mkdir(parents=True, exist_ok=True)
        (out / "lock").touch()
    except OSError as error:
        raise ConfigError(
            f"--out {out}: {error.strerror}; give a folder that can be written"
        ) from error
    return out


if __name__ == "__main__":
    sys.exit(main())
