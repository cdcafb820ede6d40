"""Everything that only a GPU can show, in one command and one folder.

    make gpu-check                                    # on the GPU machine, from the tree alone
    python -m serve.gpu_check --out gpu-check --wheels wheels --minutes 10

Needs Python 3.12 with JAX for CUDA and no network: packages that the machine lacks (jax-triton,
gguf, hypothesis) are taken from wheels in --wheels. Steps, each a process with a log of its own:

    facts      device, driver, versions, and which optional packages are missing
    tests      pytest -m gpu
    exactness  random weights of a real geometry: the row-invariance probe, and all logits of plain
               and tree decoding compared bit for bit, with drafts that come true and that do not
    run        the bundled model end to end where its file is there, else random weights: tokens
               identical, plain and speculative times
    bench      every op against its XLA reference and its roofline, and the whole round (SYNTHETIC)

A step that fails or runs out of time does not stop the others. summary.json and summary.md say what
held; exit status 1 where something did not. `--rehearse` does, on a CPU, all of it that a CPU can,
so that the day on a GPU is not the first run of this command.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jetspec_jax.errors import ConfigError
from serve import cli

ROOT = Path(__file__).resolve().parent.parent
# Most seconds a step may take, out of ten minutes; the last gets what the others left.
STEPS = {"facts": 30, "tests": 210, "exactness": 150, "run": 90, "bench": 120}
_SUMMARY_LINES = 6  # of a failed step's log


@dataclasses.dataclass(frozen=True)
class Outcome:
    """How a step ended.

    Attributes:
        name: of the step.
        verdict: "held", "failed", or "out of time".
        seconds: wall clock.
        found: the JSON object that the step printed last; empty where it printed none.
        last_lines: end of its log, where it did not hold.
    """

    name: str
    verdict: str
    seconds: float
    found: Mapping[str, Any]
    last_lines: Sequence[str] = ()


def commands(args: argparse.Namespace, out: Path) -> dict[str, list[str]]:
    """The command line of each step."""
    python = [sys.executable, "-m"]
    steps = [*python, "serve.gpu_steps"]
    model = ["--model", args.model] if args.model else []
    rehearse = ["--rehearse"] if args.rehearse else []
    tests = ["pytest", "-q", "-rfE", "-m", "gpu", "-p", "no:cacheprovider"]
    tests += ["--junitxml", str(out / "tests.xml"), "tests"]
    # a CPU can only say that the tests are found and can be imported
    collect = ["pytest", "-q", "--collect-only", "-p", "no:cacheprovider", "tests/pallas_kernels"]
    bench = ["pallas_kernels.bench", "--json", "--svg", str(out / "bench.svg")]
    return {
        "facts": [*steps, "facts"],
        "tests": [*python, *(collect if args.rehearse else tests)],
        "exactness": [*steps, "exactness", *rehearse],
        "run": [*steps, "run", *rehearse, *model],
        "bench": [*python, *bench, *(["--roofline"] if args.rehearse else [])],
    }


def run_step(
    name: str, command: Sequence[str], out: Path, limit_s: float, env: Mapping[str, str]
) -> Outcome:
    """Runs a step to its end or to its limit; its whole process group ends with it."""
    log = out / f"{name}.log"
    started = time.monotonic()
    with log.open("w", encoding="utf-8") as file:
        process = subprocess.Popen(
            command,
            stdout=file,
            stderr=subprocess.STDOUT,
            env=dict(env),
            cwd=ROOT,
            start_new_session=True,
        )
        try:
            code = process.wait(limit_s)
            verdict = "held" if code == 0 else "failed"
        except subprocess.TimeoutExpired:
            verdict = "out of time"
        finally:
            # also what it left behind, and on Ctrl-C
            if process.poll() is None or group_alive(process.pid):
                kill_group(process)
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    found = last_json(lines)
    if found:
        (out / f"{name}.json").write_text(json.dumps(found, indent=1), encoding="utf-8")
    tail = [] if verdict == "held" else [x for x in lines if x.strip()][-_SUMMARY_LINES:]
    return Outcome(name, verdict, time.monotonic() - started, found, tail)


def group_alive(pid: int) -> bool:
    """Whether anything of a process group is left."""
    try:
        os.killpg(pid, 0)
    except OSError:
        return False
    return True


def kill_group(process: subprocess.Popen[Any]) -> None:
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except OSError:
        return
    process.wait()


def last_json(lines: Sequence[str]) -> dict[str, Any]:
    """The last line of a log that is a JSON object."""
    for line in reversed(lines):
        if line.startswith("{"):
            try:
                return json.loads(line)
            except ValueError:
                continue
    return {}


def counted(junit: Path) -> dict[str, int]:
    """Numbers of tests in pytest's report; empty where there is none."""
    try:
        suites = ElementTree.parse(junit).getroot().iter("testsuite")
    except (OSError, ElementTree.ParseError):
        return {}
    names = ("tests", "failures", "errors", "skipped")
    total = dict.fromkeys(names, 0)
    for suite in suites:
        for name in names:
            total[name] += int(suite.get(name, 0))
    return total


def environment(args: argparse.Namespace, out: Path) -> dict[str, str]:
    """Environment of the steps: the tree first on the path, wheels behind it, the GPU asked for.

    Raises:
        ConfigError: no folder of wheels, or pip does not take them.
    """
    path = [str(ROOT)]
    if args.wheels is not None:
        folder = Path(args.wheels).expanduser()
        wheels = sorted(folder.glob("*.whl"))
        if not wheels:
            raise ConfigError(f"--wheels {args.wheels}: no .whl file there; carry some or drop it")
        site = out / "site"
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps"]
        done = subprocess.run(
            [*command, "--upgrade", "--target", str(site), *map(str, wheels)],
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode != 0:
            why = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
            raise ConfigError(f"--wheels {args.wheels}: pip could not install them ({why})")
        path.append(str(site))
    if os.environ.get("PYTHONPATH"):
        path.append(os.environ["PYTHONPATH"])
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(path),
        "PYTHONUNBUFFERED": "1",
        # tests/conftest.py would choose the CPU otherwise
        "JAX_PLATFORMS": "cpu" if args.rehearse else "cuda,cpu",
    }


def summary_page(document: Mapping[str, Any]) -> str:
    """The result as a page of Markdown."""
    facts = document["steps"].get("facts", {}).get("found", {})
    title = "rehearsal on a CPU" if document["rehearsal"] else facts.get("device", "device unknown")
    lines = [f"# GPU check: {title}", ""]
    lines += [f"- {k}: {v}" for k, v in facts.items() if not isinstance(v, (dict, list))]
    lines += ["", "| step | verdict | seconds | found |", "|---|---|---:|---|"]
    for name, step in document["steps"].items():
        short = {
            k: v
            for k, v in step["found"].items()
            if isinstance(v, (bool, int, float, str)) and name != "facts"
        }
        text = ", ".join(
            f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in short.items()
        )
        lines.append(f"| {name} | {step['verdict']} | {step['seconds']:.0f} | {text[:300]} |")
    for name, step in document["steps"].items():
        if step["last_lines"]:
            lines += ["", f"End of {name}.log:", "```", *step["last_lines"], "```"]
    return "\n".join(lines) + "\n"


def build_parser() -> cli.Parser:
    parser = cli.Parser(
        prog="python -m serve.gpu_check",
        usage="python -m serve.gpu_check [flags]",
        description="GPU tests, exactness, an end-to-end run and the kernel bench, on a GPU.",
    )
    parser.add_argument("--out", default="gpu-check", metavar="DIR", help="default: gpu-check")
    parser.add_argument("--wheels", metavar="DIR", help="folder of wheels that the machine lacks")
    parser.add_argument("--model", metavar="PATH", help="model of the run (default: the bundled)")
    parser.add_argument(
        "--minutes", type=float, default=10.0, metavar="N", help="for all steps (default: 10)"
    )
    parser.add_argument(
        "--steps",
        default=",".join(STEPS),
        metavar="STEP,...",
        help=f"default: {','.join(STEPS)}",
    )
    parser.add_argument(
        "--rehearse", action="store_true", help="on a CPU, all of it that a CPU can do"
    )
    parser.add_argument("--debug", action="store_true", help="show tracebacks")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns the exit code."""
    return cli.run(_run, build_parser(), argv)


def _run(args: argparse.Namespace) -> int:
    chosen = args.steps.split(",")
    if unknown := [s for s in chosen if s not in STEPS]:
        raise ConfigError(f"--steps {unknown[0]}: choose from {', '.join(STEPS)}")
    if not 0 < args.minutes < float("inf"):
        raise ConfigError(f"--minutes {args.minutes}: give a time above 0")
    cli.check_path(args.model, "--model")
    out = Path(args.out).expanduser().resolve()
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--out {args.out}: cannot be made ({error.strerror})") from error
    env = environment(args, out)
    if not args.rehearse:
        refuse_without_gpu(env)
    ends = time.monotonic() + 60 * args.minutes
    outcomes: list[Outcome] = []
    for name in chosen:
        left = ends - time.monotonic()
        limit = left if name == chosen[-1] else min(left, STEPS[name] * args.minutes / 10)
        cli.say(f"{name} (at most {max(limit, 0):.0f} s) ...")
        if limit < 1:
            outcomes.append(Outcome(name, "out of time", 0.0, {}))
            continue
        outcome = run_step(name, commands(args, out)[name], out, limit, env)
        if name == "tests" and not args.rehearse:
            outcome = with_counts(outcome, counted(out / "tests.xml"))
        outcomes.append(outcome)
        cli.say(f"{name}: {outcome.verdict} after {outcome.seconds:.0f} s")
        document = write_summary(out, outcomes, args.rehearse)
    document = write_summary(out, outcomes, args.rehearse)
    cli.say(f"results in {out}")
    print(cli.dump_json({k: document[k] for k in ("held", "rehearsal", "verdicts")}))
    return 0 if document["held"] else 1


def refuse_without_gpu(env: Mapping[str, str]) -> None:
    """
    Raises:
        ConfigError: JAX finds no GPU.
    """
    probe = "import jax; print(jax.default_backend())"
    done = subprocess.run(
        [sys.executable, "-c", probe], capture_output=True, text=True, env=dict(env), check=False
    )
    if done.stdout.strip() != "gpu":
        why = (done.stderr.strip().splitlines() or [f"backend {done.stdout.strip()!r}"])[-1][:200]
        raise ConfigError(
            f"no GPU to check: JAX finds none ({why}); run it where `python -c 'import jax; "
            "print(jax.devices())'` shows one, or give --rehearse"
        )


def with_counts(outcome: Outcome, counts: Mapping[str, int]) -> Outcome:
    """Test counts in, and a run that tested nothing does not hold."""
    ran = counts.get("tests", 0) - counts.get("skipped", 0)
    verdict = "failed" if outcome.verdict == "held" and ran < 1 else outcome.verdict
    return dataclasses.replace(outcome, verdict=verdict, found={**outcome.found, **counts})


def write_summary(out: Path, outcomes: Sequence[Outcome], rehearsal: bool) -> dict[str, Any]:
    """Writes summary.json and summary.md, after every step: a machine may be taken away."""
    document = {
        "held": all(o.verdict == "held" for o in outcomes),
        "rehearsal": rehearsal,
        "verdicts": {o.name: o.verdict for o in outcomes},
        "steps": {o.name: cli.plain(o) for o in outcomes},
    }
    (out / "summary.json").write_text(cli.dump_json(document, indent=1), encoding="utf-8")
    (out / "summary.md").write_text(summary_page(document), encoding="utf-8")
    return document


if __name__ == "__main__":
    raise SystemExit(main())
