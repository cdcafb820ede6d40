"""Compiles every GPU kernel at its named shapes for GPUs that are not there, and judges the result.

    python -m pallas_kernels.gpu_compile                 all kernels
    python -m pallas_kernels.gpu_compile --quick         the subset of CI
    python -m pallas_kernels.gpu_compile --match "tree_attention/mosaic"
    python -m pallas_kernels.gpu_compile --update        and write the committed table

Prints registers, spills, shared memory and tensor-core and bulk-copy instructions of each kernel;
the last line of stdout is JSON. Exit code 1 where a kernel fails to compile, spills, lacks the
instructions it is written for, takes more shared memory than a block has, or is worse than in the
committed table (`gpu_compile.json`). Needs requirements/gpu-compile.txt, no GPU and no driver.
Nothing is timed: that a kernel compiles says nothing about its speed.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import jax

from pallas_kernels import gpu_stats
from pallas_kernels.gpu_cases import GpuCase, all_cases
from pallas_kernels.gpu_stats import KernelStats, ProgramStats
from pallas_kernels.gpu_target import TARGETS, GpuTarget, GpuToolsError

TABLE = Path(__file__).with_name("gpu_compile.json")
_SLACK = 8  # registers that a kernel may grow by before that is a regression


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What came of one case.

    Attributes:
        name: of the case.
        stats: None where it did not compile.
        faults: why it does not pass; empty: it does.
    """

    name: str
    stats: ProgramStats | None
    faults: tuple[str, ...]


def row(stats: ProgramStats) -> dict[str, Any]:
    """What the committed table keeps of a case."""
    return {
        "kernels": [
            {
                "name": k.name,
                "registers": k.registers,
                "shared_bytes": k.shared_bytes,
                "fences": k.fences,
                "instructions": k.instructions,
            }
            for k in _sorted(stats)
        ],
        "device_kernels": stats.device_kernels,
        "temporary_bytes": stats.temporary_bytes,
        "peak_bytes": stats.peak_bytes,
        "loops": stats.loops,
    }


def _sorted(stats: ProgramStats) -> list[KernelStats]:
    return sorted(stats.kernels, key=lambda k: (k.name, k.registers))


def faults(
    stats: ProgramStats, target: GpuTarget, needs: Sequence[str], *, ours: bool = True
) -> list[str]:
    """What is wrong with a program whatever the table says; `ours`: it has a kernel of ours."""
    found = []
    for k in stats.kernels:
        if k.spill_bytes:
            found.append(f"SPILL: {k.name} spills {k.spill_bytes} bytes")
        if k.shared_bytes > target.shared_per_block:
            found.append(
                f"{k.name} takes {k.shared_bytes} bytes of shared memory, "
                f"a block has {target.shared_per_block}"
            )
    if ours and not stats.kernels:
        found.append("no kernel of ours in the program")
    for instruction in needs:
        if not any(k.instructions.get(instruction) for k in stats.kernels):
            found.append(f"no {instruction} in the machine code")
    if stats.host_transfers:
        found.append(f"{stats.host_transfers} transfers to or from the host")
    return found


def regressions(stats: ProgramStats, committed: dict[str, Any] | None) -> list[str]:
    """What is worse than in the committed table."""
    if committed is None:
        return ["not in the committed table: run with --update"]
    now = row(stats)
    if [k["name"] for k in now["kernels"]] != [k["name"] for k in committed["kernels"]]:
        return ["REGRESSION: other kernels than in the committed table"]
    found = []
    for new, old in zip(now["kernels"], committed["kernels"], strict=True):
        if new["registers"] > old["registers"] + _SLACK:
            found.append(f"{new['name']}: {new['registers']} registers, were {old['registers']}")
        if new["shared_bytes"] > old["shared_bytes"]:
            found.append(
                f"{new['name']}: {new['shared_bytes']} bytes of shared memory, "
                f"were {old['shared_bytes']}"
            )
        if new["fences"] < old["fences"]:
            found.append(f"{new['name']}: {new['fences']} fences, were {old['fences']}")
        for name, count in old["instructions"].items():
            if new["instructions"].get(name, 0) < count:
                found.append(
                    f"{new['name']}: {new['instructions'].get(name, 0)} {name}, were {count}"
                )
    for key, unit in (("device_kernels", "device kernels"), ("temporary_bytes", "temporary bytes")):
        if now[key] > committed[key]:
            found.append(f"{now[key]} {unit}, were {committed[key]}")
    return [f"REGRESSION: {text}" for text in found]


def unequal_arithmetic(cases: Sequence[GpuCase], outcomes: Sequence[Outcome]) -> dict[str, str]:
    """Cases whose arithmetic is not that of the first case that promises the same bits."""
    first: dict[str, tuple[str, list[dict[str, int]]]] = {}
    found = {}
    for case, outcome in zip(cases, outcomes, strict=True):
        if not case.same_bits or outcome.stats is None:
            continue
        mine = [k.arithmetic for k in _sorted(outcome.stats)]
        name, theirs = first.setdefault(case.same_bits, (case.name, mine))
        if mine != theirs:
            found[case.name] = f"its arithmetic instructions are not those of {name}"
    return found


def evaluate(case: GpuCase, committed: dict[str, Any] | None) -> Outcome:
    """Compiles and judges one case; a kernel that does not compile is a fault, not an exception."""
    target = TARGETS[case.target]
    try:
        fn, args = case.build()
        _, stats = gpu_stats.compile_for(fn, args, target)
    except GpuToolsError:
        raise
    except Exception as error:  # noqa: BLE001 - any refusal of a compiler is the finding
        text = (str(error).strip().splitlines() or [""])[0]
        return Outcome(case.name, None, (f"FAIL: {type(error).__name__}: {text}",))
    found = faults(stats, target, case.needs, ours=case.form != "xla")
    if committed is not None:
        found += regressions(stats, committed.get(case.name))
    return Outcome(case.name, stats, tuple(found))


def versions() -> dict[str, str]:
    """What machine code depends on beside the source."""
    found = {"jax": jax.__version__}
    for name in ("jax-cuda13-plugin", "nvidia-cuda-nvcc", "triton"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "missing"
    return found


def run(cases: Sequence[GpuCase], table: dict[str, Any] | None) -> list[Outcome]:
    """Compiles and judges the cases, printing a line for each.

    Args:
        cases: what to compile.
        table: the committed table, or None where there is nothing to compare with.
    """
    comparable = table is not None and table["versions"] == versions()
    if table is not None and not comparable:
        print(f"compared with no table: it was written with {table['versions']}", file=sys.stderr)
    outcomes = []
    for case in cases:
        outcome = evaluate(case, table["cases"] if comparable and table else None)
        outcomes.append(outcome)
        _print(outcome)
    unequal = unequal_arithmetic(cases, outcomes)
    for i, outcome in enumerate(outcomes):
        if outcome.name in unequal:
            text = unequal[outcome.name]
            print(f"[FAULT] {outcome.name}: {text}")
            outcomes[i] = dataclasses.replace(outcome, faults=(*outcome.faults, text))
    return outcomes


def _print(outcome: Outcome) -> None:
    seconds = f" ({outcome.stats.compile_s} s)" if outcome.stats else ""
    print(f"[{'FAULT' if outcome.faults else 'ok'}] {outcome.name}{seconds}")
    for k in _sorted(outcome.stats) if outcome.stats else ():
        code = " ".join(f"{name} {count}" for name, count in k.instructions.items())
        print(
            f"    {k.name}: {k.registers} registers, {k.spill_bytes} B spilled, "
            f"{k.shared_bytes} B shared; {code or 'no tensor-core or bulk-copy instruction'}"
        )
    if outcome.stats:
        stats = outcome.stats
        print(
            f"    program: {stats.device_kernels} device kernels, {stats.loops} loops and "
            f"branches, {stats.host_transfers} host transfers, {stats.temporary_bytes} temporary "
            f"bytes, {stats.peak_bytes} bytes at its peak"
        )
    for fault in outcome.faults:
        print(f"    {fault}")
    sys.stdout.flush()


def main(
    argv: list[str] | None = None,
    cases: Sequence[GpuCase] | None = None,
    default_table: Path = TABLE,
) -> int:
    """Command line; the last line of stdout is JSON.

    Args:
        argv: arguments, default those of the process.
        cases: what to compile, default every kernel.
        default_table: their committed table.
    """
    p = argparse.ArgumentParser(
        prog="python -m pallas_kernels.gpu_compile", description=(__doc__ or "").splitlines()[0]
    )
    p.add_argument("--quick", action="store_true", help="the subset that CI compiles")
    p.add_argument("--match", default="", metavar="TEXT", help="cases whose name contains TEXT")
    p.add_argument("--list", action="store_true", help="names of the cases; compiles nothing")
    p.add_argument("--json", type=Path, metavar="FILE", help="everything that was found, as JSON")
    p.add_argument("--table", type=Path, default=default_table, help="the committed table")
    p.add_argument("--update", action="store_true", help="write what was found to the table")
    args = p.parse_args(argv)
    chosen = [
        case
        for case in (all_cases() if cases is None else cases)
        if args.match in case.name and (case.quick or not args.quick)
    ]
    if args.list or not chosen:
        print("\n".join(case.name for case in chosen) or f"no case matches {args.match!r}")
        return 0 if chosen else 1
    table = None
    if args.table.is_file():
        table = json.loads(args.table.read_text(encoding="utf-8"))
    elif not args.update:
        print(f"error: no table {args.table}: write it with --update", file=sys.stderr)
        return 1
    try:
        outcomes = run(chosen, None if args.update else table)
    except GpuToolsError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    bad = [outcome.name for outcome in outcomes if outcome.faults]
    if args.json:
        report = {
            "versions": versions(),
            "cases": {
                o.name: {"faults": o.faults, "stats": o.stats and o.stats.as_json()}
                for o in outcomes
            },
        }
        args.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    if args.update:
        same = table is not None and table["versions"] == versions()
        kept = table["cases"] if same and table else {}
        kept |= {o.name: row(o.stats) for o in outcomes if o.stats and not o.faults}
        text = json.dumps({"versions": versions(), "cases": dict(sorted(kept.items()))}, indent=1)
        args.table.write_text(text + "\n", encoding="utf-8")
    print(json.dumps({"compiled": len(outcomes), "passed": len(outcomes) - len(bad), "bad": bad}))
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
