"""Memory and start of `python -m serve.generate`, as a user has them: fresh processes, warm caches.

    python -m serve.footprint --repeats 5

One run per weight mode comes first and is not counted: it compiles kernels and programs and
measures costs, which are kept on disk. Then processes are started in turn: the runtime alone
(imports jax and this package, runs one trivial program, no model), and generation with the bundled
model in each weight mode. Peak memory is the process's maximum resident set as the kernel counted
it, pages of the mapped model file included; a first token is the first byte on stdout, in seconds
since the process was started. Last line of stdout: JSON, {"runtime_rss_mb": {"best", "median"},
"modes": {"stored" | "float32": {"peak_rss_mb", "peak_above_runtime_mb", "first_token_s"}}, ...},
each {"best", "median"}; a MB is 10^6 bytes.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from typing import Any

from jetspec_jax.config import WEIGHTS
from jetspec_jax.errors import ConfigError, JetSpecError
from serve import cli

# Nothing here may import numpy or jax before the measurements are done: a child's maximum resident
# set starts with that of the process that started it (Linux counts it across fork and exec).

PROMPT = "Write a Python function that reverses a string."
RUNTIME = (
    "import jax, jax.numpy, jetspec_jax.engine, serve.job\n"
    "print(jax.jit(lambda x: x + 1)(jax.numpy.ones(8)).sum())"
)


@dataclasses.dataclass(frozen=True)
class Child:
    """One finished process: its peak resident set, and when its first byte of stdout came."""

    peak_mb: float
    first_byte_s: float


def build_parser() -> cli.Parser:
    parser = cli.Parser(
        prog="python -m serve.footprint",
        usage="python -m serve.footprint [flags]",
        description="Peak memory and time to the first token of serve.generate, by weight mode.",
    )
    parser.add_argument(
        "--repeats", type=int, default=3, metavar="N", help="runs of everything (default: 3)"
    )
    parser.add_argument(
        "--max-tokens", type=int, default=64, metavar="N", help="tokens per answer (default: 64)"
    )
    parser.add_argument("--prompt", default=PROMPT, metavar="TEXT", help=f"default: {PROMPT}")
    parser.add_argument("--debug", action="store_true", help="show tracebacks")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns the exit code."""
    return cli.run(lambda args: _run(args, argv), build_parser(), argv)


def _run(args: argparse.Namespace, argv: Sequence[str] | None) -> int:
    for name in ("repeats", "max_tokens"):
        if getattr(args, name) < 1:
            flag = "--" + name.replace("_", "-")
            raise ConfigError(f"{flag} {getattr(args, name)}: give at least 1")
    if not args.prompt.strip():
        raise ConfigError("--prompt is empty; give some text, or leave the flag out")
    load = os.getloadavg()[0]
    commands = {
        weights: generate_command(weights, args.prompt, args.max_tokens) for weights in WEIGHTS
    }
    for weights, command in commands.items():
        with cli.phase(f"warming up, weights {weights} (not counted)"):
            measure(command)
    runtime: list[Child] = []
    runs: dict[str, list[Child]] = {weights: [] for weights in commands}
    for turn in range(args.repeats):
        runtime.append(measure([sys.executable, "-c", RUNTIME]))
        said = [f"runtime {runtime[-1].peak_mb:.0f} MB"]
        for weights, command in commands.items():
            child = measure(command)
            runs[weights].append(child)
            said.append(f"{weights} {child.peak_mb:.0f} MB, {child.first_byte_s:.2f} s")
        cli.say(f"  {turn + 1}/{args.repeats}: {'; '.join(said)}")

    from serve import facts  # starts jax: only now

    document = {
        **summarise(runtime, runs),
        "prompt": args.prompt,
        "max_tokens": args.max_tokens,
        "repeats": args.repeats,
        "hardware": facts.hardware(),
        "load_average_before": round(load, 2),
        "versions": facts.versions(),
        "commit": facts.git_revision(),
        "command": facts.command("serve.footprint", argv),
    }
    _table(document)
    print(cli.dump_json(document))
    return 0


def generate_command(weights: str, prompt: str, max_tokens: int) -> list[str]:
    """What a user types."""
    flags = ["--max-tokens", str(max_tokens), "--weights", weights]
    return [sys.executable, "-m", "serve.generate", prompt, *flags]


def measure(command: Sequence[str]) -> Child:
    """Runs a command to its end.

    Raises:
        JetSpecError: it failed, or printed nothing.
    """
    with tempfile.TemporaryFile() as errors:
        began = time.perf_counter()
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=errors, bufsize=0
        )
        try:
            with process.stdout as out:  # type: ignore[union-attr]  # PIPE above
                first = out.read(1)
                took = time.perf_counter() - began
                while out.read(1 << 16):
                    pass
        except BaseException:
            process.kill()
            process.wait()
            raise
        # wait4, not Popen.wait: it tells what this one child used
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode or not first:
            errors.seek(0)
            lines = errors.read().decode(errors="replace").strip().splitlines() or ["no message"]
            raise JetSpecError(
                f"{' '.join(command[1:3])} ended with status {process.returncode}: {lines[-1]}; "
                "run it by hand"
            )
    unit = 1 if sys.platform == "darwin" else 1024
    return Child(usage.ru_maxrss * unit / 1e6, took)


def summarise(runtime: Sequence[Child], runs: Mapping[str, Sequence[Child]]) -> dict[str, Any]:
    """Best (smallest) and median of every figure."""
    alone = _figures([child.peak_mb for child in runtime], 1)
    found = {}
    for weights, children in runs.items():
        peak = _figures([child.peak_mb for child in children], 1)
        found[weights] = {
            "peak_rss_mb": peak,
            "peak_above_runtime_mb": {key: round(peak[key] - alone[key], 1) for key in peak},
            "first_token_s": _figures([child.first_byte_s for child in children], 3),
        }
    return {"runtime_rss_mb": alone, "modes": found}


def _figures(values: Sequence[float], digits: int) -> dict[str, float]:
    return {
        "best": round(min(values), digits),
        "median": round(statistics.median(values), digits),
    }


def _table(document: Mapping[str, Any]) -> None:
    from serve.report import print_table

    def cell(figures: Mapping[str, float], digits: int) -> str:
        return f"{figures['best']:.{digits}f} / {figures['median']:.{digits}f}"

    rows = [["runtime alone, no model", cell(document["runtime_rss_mb"], 0), "", ""]]
    for weights, got in document["modes"].items():
        rows.append(
            [
                f"generate, weights {'as stored' if weights == 'stored' else weights}",
                cell(got["peak_rss_mb"], 0),
                cell(got["peak_above_runtime_mb"], 0),
                cell(got["first_token_s"], 2),
            ]
        )
    footer = (
        f"{document['hardware']} · best / median of {document['repeats']} · "
        f"{document['max_tokens']} tokens · warm start"
    )
    print_table("footprint", rows, ("", "peak MB", "above runtime MB", "first token s"), footer)


if __name__ == "__main__":
    sys.exit(main())
