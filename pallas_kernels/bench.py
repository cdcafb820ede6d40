"""Times every GPU op against its XLA reference and its roofline, and the whole round.

    python -m pallas_kernels.bench                    # on a GPU
    python -m pallas_kernels.bench --roofline         # anywhere: computed limits, nothing measured

On a GPU the best of several timings counts, each of a chain of calls replayed as one program
(`bench_gpu`). The round has random weights and a stated acceptance, so its speed-up is labelled
SYNTHETIC. Where there is no GPU it refuses, but for --roofline: bytes, operations and least time of
each op on the named GPUs, and the ceiling of the speed-up that follows (`roofline`).
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pallas_kernels import roofline
from pallas_kernels.geometries import GEOMETRIES, Geometry
from pallas_kernels.gpu_target import TARGETS

TAUS = (4.0, 6.0, 8.0, 10.76)  # algorithm.md section 8: up to MATH-500 at budget 256
DEVICES = ("h100", "h200", "rtx-pro-6000")


class BenchError(RuntimeError):
    """What was asked for cannot be done here. The message is one line."""


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m pallas_kernels.bench", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument(
        "--roofline", action="store_true", help="computed limits only; needs no GPU"
    )
    parser.add_argument(
        "--model", choices=sorted(GEOMETRIES), default="qwen3-8b", help="default: qwen3-8b"
    )
    parser.add_argument(
        "--nodes", type=int, default=64, metavar="N", help="rows verified (default: 64)"
    )
    parser.add_argument(
        "--context", type=int, default=4096, metavar="N", help="cached tokens (default: 4096)"
    )
    parser.add_argument("--batch", type=int, default=1, metavar="B", help="sequences (default: 1)")
    parser.add_argument(
        "--width", type=int, default=8, metavar="W", help="candidates a depth (default: 8)"
    )
    parser.add_argument(
        "--tau",
        default=",".join(f"{t:g}" for t in TAUS),
        metavar="T,...",
        help="tokens a round for which the ceiling is computed, or assumed on a GPU "
        "(default: %(default)s)",
    )
    parser.add_argument("--json", action="store_true", help="last line of stdout is JSON")
    parser.add_argument("--svg", type=Path, metavar="PATH", help="draw the least times")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns the exit code."""
    args = build_parser().parse_args(argv)
    try:
        return _run(args)
    except BenchError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


def _run(args: argparse.Namespace) -> int:
    taus = parse_taus(args.tau)
    for name, most in (("nodes", 256), ("context", 1 << 20), ("batch", 1024), ("width", 64)):
        if not 1 <= getattr(args, name) <= most:
            raise BenchError(f"--{name} {getattr(args, name)}: give 1 to {most}")
    if args.svg is not None and not args.svg.parent.is_dir():
        raise BenchError(f"--svg {args.svg}: its folder does not exist; make it first")
    if args.roofline:
        document = roofline_document(
            GEOMETRIES[args.model], args.nodes, args.context, taus, args.width, args.batch
        )
        print_roofline(document)
    else:
        import jax

        if jax.default_backend() != "gpu":
            raise BenchError(
                f"nothing to time: JAX's backend here is {jax.default_backend()!r}, not a GPU; "
                "run it on one, or give --roofline for computed limits"
            )
        from pallas_kernels import bench_gpu

        document = bench_gpu.run(
            GEOMETRIES[args.model], args.nodes, args.context, taus, args.width, args.batch
        )
        print_measured(document)
    if args.svg is not None:
        draw(document, args.svg)
        print(f"wrote {args.svg}")
    if args.json:
        print(json.dumps(document))
    return 0


def parse_taus(text: str) -> tuple[float, ...]:
    """ "4,6" -> (4.0, 6.0).

    Raises:
        BenchError: no numbers of at least 1.
    """
    try:
        taus = tuple(float(part) for part in text.split(","))
    except ValueError:
        taus = ()
    if not taus or not all(1 <= t <= 256 for t in taus):
        raise BenchError(f"--tau {text}: give numbers from 1 to 256, such as 4,6")
    return taus


def roofline_document(
    g: Geometry, nodes: int, context: int, taus: Sequence[float], width: int, batch: int
) -> dict[str, Any]:
    """Computed limits of a round on every known GPU, as plain data. The rows that commit moves are
    those of the largest tau."""
    work = roofline.round_work(g, nodes, context, max(taus), width, batch)
    plain = roofline.forward_work(g, 1, context, batch)
    devices: dict[str, Any] = {}
    for name in DEVICES:
        target = TARGETS[name]
        phases = {
            phase: roofline.seconds([w for w in work if w.phase == phase], target)
            for phase in roofline.PHASES
        }
        devices[name] = {
            "device": target.name,
            "bandwidth": target.bandwidth,
            "bf16_flops": target.bf16_flops,
            "op_s": {w.op: w.seconds(target) for w in work},
            "bound": {w.op: w.bound(target) for w in work},
            "phase_s": phases,
            "round_s": sum(phases.values()),
            "plain_s": roofline.seconds(plain, target),
            "ceiling": {
                f"{tau:g}": roofline.ceiling(g, target, nodes, context, tau, width, batch)
                for tau in taus
            },
        }
    return {
        "kind": "roofline: computed, not measured",
        "model": g.name,
        "nodes": nodes,
        "context": context,
        "batch": batch,
        "width": width,
        "ops": [dataclasses.asdict(w) for w in work],
        "round_bytes": sum(w.bytes for w in work),
        "round_flops": sum(w.flops for w in work),
        "plain_bytes": sum(w.bytes for w in plain),
        "plain_flops": sum(w.flops for w in plain),
        "devices": devices,
    }


def _subtitle(document: dict[str, Any]) -> str:
    return (
        f"{document['model']} · {document['nodes']} nodes · {document['context']} cached tokens · "
        f"batch {document['batch']} · bf16"
    )


def print_roofline(document: dict[str, Any]) -> None:
    """Tables: least time of each op, then the ceiling of the speed-up."""
    from rich.console import Console
    from rich.table import Table

    devices = document["devices"]
    table = Table(
        title=f"least time of a round, computed: {_subtitle(document)}",
        caption="ms; c: the tensor cores are the limit, else memory",
        title_justify="left",
        caption_justify="left",
    )
    for name in ("op", "calls", "MB", "GFLOP", *devices):
        table.add_column(name, justify="left" if name == "op" else "right")
    for op in document["ops"]:
        times = [
            f"{d['op_s'][op['op']] * 1e3:.3f}{' c' if d['bound'][op['op']] == 'compute' else '  '}"
            for d in devices.values()
        ]
        numbers = (str(op["count"]), f"{op['bytes'] / 1e6:,.2f}", f"{op['flops'] / 1e9:,.2f}")
        table.add_row(op["op"], *numbers, *times)
    table.add_section()
    whole = [f"{d['round_s'] * 1e3:.3f}  " for d in devices.values()]
    sums = (f"{document['round_bytes'] / 1e6:,.2f}", f"{document['round_flops'] / 1e9:,.2f}")
    table.add_row("round", "", *sums, *whole, style="bold")
    plain = [f"{d['plain_s'] * 1e3:.3f}  " for d in devices.values()]
    sums = (f"{document['plain_bytes'] / 1e6:,.2f}", f"{document['plain_flops'] / 1e9:,.2f}")
    table.add_row("plain step (1 row)", "", *sums, *plain)
    console = Console(width=120)
    console.print(table)
    limits = Table(
        title="ceiling of the speed-up: tau x ideal plain step / ideal round", title_justify="left"
    )
    limits.add_column("tau", justify="right")
    for name in devices:
        limits.add_column(name, justify="right")
    for tau in next(iter(devices.values()))["ceiling"]:
        limits.add_row(tau, *(f"{d['ceiling'][tau]:.2f}" for d in devices.values()))
    console.print(limits)


def print_measured(document: dict[str, Any]) -> None:
    """Table of what `bench_gpu.run` timed."""
    from rich.console import Console
    from rich.table import Table

    limits = f"{document['bandwidth'] / 1e12:.2f} TB/s, {document['bf16_flops'] / 1e12:.0f} TFLOP/s"
    table = Table(
        title=f"{document['device']}: {_subtitle(document)}",
        caption=f"ms, best of {document['repeats']}; measured limits {limits}",
        title_justify="left",
        caption_justify="left",
    )
    for name in ("op", "kernel", "ran", "XLA", "least", "least / kernel"):
        table.add_column(name, justify="left" if name in ("op", "ran") else "right")
    for row in document["ops"]:
        share = f"{row['least_s'] / row['kernel_s']:.0%}"
        times = [f"{row[key] * 1e3:.4f}" for key in ("kernel_s", "xla_s", "least_s")]
        table.add_row(row["op"], times[0], row["ran"], times[1], times[2], share)
    console = Console(width=120)
    console.print(table)
    whole = document["round"]
    parts = ", ".join(f"{name} {t * 1e3:.3f}" for name, t in whole["phase_s"].items())
    console.print(f"round, random weights, ms: {parts}; plain step {whole['plain_s'] * 1e3:.3f}")
    for tau, gain in whole["synthetic_speedup"].items():
        console.print(f"SYNTHETIC: at tau {tau} the speed-up would be {gain:.2f}")


def draw(document: dict[str, Any], path: Path) -> None:
    """Bars of the times by op: computed by device, or measured beside least.

    Raises:
        BenchError: matplotlib is not installed.
    """
    try:
        from matplotlib import rc_context
        from matplotlib.figure import Figure
    except ImportError as error:
        raise BenchError(
            "--svg needs matplotlib, which is not installed: pip install 'jetspec-jax[plot]'"
        ) from error
    if "devices" in document:
        title = "Least time of a round by op (computed)"
        names = [op["op"] for op in document["ops"]]
        series = {
            name: [d["op_s"][op] * 1e3 for op in names] for name, d in document["devices"].items()
        }
    else:
        title = f"Time by op, {document['device']}"
        names = [row["op"] for row in document["ops"]]
        series = {
            label: [row[key] * 1e3 for row in document["ops"]]
            for label, key in (("kernel", "kernel_s"), ("XLA", "xla_s"), ("least", "least_s"))
        }
    ink, grey, light = "#1f2937", "#6b7280", "#e5e7eb"
    colours = ("#2563eb", "#f59e0b", "#059669")
    with rc_context({"svg.hashsalt": "jetspec", "font.size": 10}):  # same data, same file
        figure = Figure(figsize=(8.0, 1.3 + 0.42 * len(names)), layout="constrained")
        axis = figure.subplots()
        thick = 0.8 / len(series)
        for i, (label, values) in enumerate(series.items()):
            spots = [y + (i - (len(series) - 1) / 2) * thick for y in range(len(names))]
            axis.barh(spots, values, height=thick, color=colours[i], label=label)
        axis.set_yticks(range(len(names)), names)
        axis.invert_yaxis()
        axis.spines[["top", "right", "left"]].set_visible(False)
        axis.grid(axis="x", color=light)
        axis.set_axisbelow(True)
        axis.set_xlabel("ms", color=grey)
        axis.legend(frameon=False)
        axis.set_title(f"{title}\n{_subtitle(document)}", loc="left", color=ink, fontsize=11)
        figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)


if __name__ == "__main__":
    sys.exit(main())
