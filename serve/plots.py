"""SVG plots of a benchmark, sized to be read in a README. Data in, files out; no global state."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from serve.render import pretty

INK, GREY, LIGHT = "#1f2937", "#6b7280", "#e5e7eb"
BLUE, ORANGE, GREEN, PURPLE, RED = "#2563eb", "#f59e0b", "#059669", "#7c3aed", "#dc2626"
SERIES = (BLUE, ORANGE, GREEN, PURPLE, RED, "#0891b2", "#be185d")
STYLE: dict[Any, Any] = {
    "font.size": 11,
    "font.family": "sans-serif",
    "text.color": INK,
    "axes.labelcolor": GREY,
    "axes.edgecolor": LIGHT,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "xtick.color": GREY,
    "ytick.color": INK,
    "xtick.major.size": 0,
    "ytick.major.size": 0,
    "grid.color": LIGHT,
    "svg.hashsalt": "jetspec",  # same data, same file
}


def write_plots(
    folder: Path,
    suites: Mapping[str, Mapping[str, Any]],
    facts: str,
    *,
    phases: Mapping[str, Mapping[str, float]] | None = None,
    sweep: Mapping[str, Mapping[int, Mapping[str, Any]]] | None = None,
    suffix: str = ".svg",
) -> list[Path]:
    """Draws every plot that the data allows.

    Args:
        folder: where to; must exist.
        suites: summaries by suite (measure.summarise).
        facts: one line under each title: hardware, dtype, batch, temperature, budget.
        phases: milliseconds of a round by phase, by row name.
        sweep: summaries by suite and budget.
        suffix: file format, ".svg" or ".png".

    Returns:
        The files written.
    """
    drawn: dict[str, Figure] = {}
    with mpl.rc_context(STYLE):
        speed = {name: s for name, s in suites.items() if s["speedup"] is not None}
        if speed:
            drawn["speedup"] = _speedup(speed, facts)
        spoken = {name: s for name, s in suites.items() if s["tau"] is not None}
        if spoken:
            drawn["tau"] = _tau(spoken, facts)
            drawn["acceptance"] = _acceptance(spoken, facts)
            drawn["accepted"] = _accepted(spoken, facts)
        if phases:
            drawn["phases"] = _phases(phases, facts)
        if sweep:
            drawn["sweep"] = _sweep(sweep, facts)
        paths = []
        for name, figure in drawn.items():
            path = folder / f"{name}{suffix}"
            metadata = {"Date": None} if suffix == ".svg" else None
            figure.savefig(path, metadata=metadata, facecolor="white", dpi=120)
            paths.append(path)
    return paths


def _figure(
    title: str, facts: str, rows: float, panels: int = 1, gap: float = 0.0
) -> tuple[Figure, list[Axes]]:
    """A figure with a left-aligned title and the facts under it.

    `rows` is the height of the plot area in inches, `gap` the room above it for panel titles or a
    legend.
    """
    height = rows + gap + 1.45
    figure = Figure(figsize=(8.0, height))
    axes = figure.subplots(1, panels, squeeze=False)[0]
    figure.subplots_adjust(
        left=0.15, right=0.95, top=1 - (0.85 + gap) / height, bottom=0.6 / height, wspace=0.28
    )
    figure.text(0.02, 1 - 0.17 / height, title, fontsize=14, fontweight="bold", va="top")
    figure.text(0.02, 1 - 0.48 / height, facts, fontsize=8.5, color=GREY, va="top")
    return figure, list(axes)


def _bars(axis: Axes, names: Sequence[str], values: Sequence[float], colour: str) -> None:
    spots = range(len(names))
    axis.barh(spots, values, height=0.55, color=colour)
    axis.set_yticks(list(spots), [pretty(n) for n in names])
    axis.invert_yaxis()
    axis.spines["left"].set_visible(False)
    axis.grid(axis="x", linewidth=0.8)


def _speedup(suites: Mapping[str, Mapping[str, Any]], facts: str) -> Figure:
    figure, (axis,) = _figure("Speed-up over plain decoding", facts, 0.55 * len(suites) + 0.35)
    values = [s["speedup"] for s in suites.values()]
    _bars(axis, list(suites), values, BLUE)
    tops = list(values)
    for row, summary in enumerate(suites.values()):
        if summary["speedup_interval"]:
            low, high = summary["speedup_interval"]
            axis.plot([low, high], [row, row], color=INK, linewidth=1.6, solid_capstyle="butt")
            tops[row] = max(values[row], high)
    axis.axvline(1, color=INK, linewidth=1.2, linestyle=(0, (4, 3)))
    span = max(1.1, *tops)
    for row, value in enumerate(values):
        axis.text(tops[row] + 0.015 * span, row, f"{value:.2f}x", va="center", fontweight="bold")
    axis.set_xlim(0, span * 1.12)
    axis.set_xlabel("dashed: plain decoding; line: 95% interval over prompts")
    return figure


def _tau(suites: Mapping[str, Mapping[str, Any]], facts: str) -> Figure:
    figure, (axis,) = _figure("Tokens per verification (τ)", facts, 0.55 * len(suites) + 0.35)
    values = [s["tau"] for s in suites.values()]
    _bars(axis, list(suites), values, GREEN)
    tops = [max(s["tau"], s["tau_max"]) for s in suites.values()]
    for row, s in enumerate(suites.values()):
        axis.plot(
            [s["tau_min"], s["tau_max"]],
            [row, row],
            color=INK,
            linewidth=1.6,
            solid_capstyle="butt",
        )
        axis.text(
            tops[row] + 0.015 * max(tops), row, f"{values[row]:.2f}", va="center", fontweight="bold"
        )
    axis.axvline(1, color=INK, linewidth=1.2, linestyle=(0, (4, 3)))
    axis.set_xlim(0, max(tops) * 1.12)
    axis.set_xlabel("pooled over rounds; dashed: plain decoding; line: lowest to highest prompt")
    return figure


def _acceptance(suites: Mapping[str, Mapping[str, Any]], facts: str) -> Figure:
    figure, (axis,) = _figure("Acceptance by depth", facts, 2.9)
    deepest = 1
    for (name, summary), colour in zip(suites.items(), _colours(len(suites)), strict=True):
        points = [(k + 1, a) for k, a in enumerate(summary["acceptance"]) if a is not None]
        if points:
            xs, ys = zip(*points, strict=True)
            deepest = max(deepest, xs[-1])
            axis.plot(
                xs,
                [100 * y for y in ys],
                color=colour,
                linewidth=2.2,
                marker="o",
                markersize=5,
                label=pretty(name),
            )
    axis.set_xlim(0.8, deepest + 0.2)
    axis.set_ylim(0, 100)
    axis.set_yticks([0, 25, 50, 75, 100], ["0", "25%", "50%", "75%", "100%"])
    axis.xaxis.set_major_locator(MaxNLocator(integer=True))
    axis.grid(axis="y", linewidth=0.8)
    axis.set_xlabel("depth in the tree (rounds accepted that deep / rounds with a node there)")
    axis.legend(frameon=False, loc="upper right")
    return figure


def _accepted(suites: Mapping[str, Mapping[str, Any]], facts: str) -> Figure:
    figure, (axis,) = _figure("Accepted tokens per round", facts, 2.9)
    wide = 0.8 / len(suites)
    top = 0
    for index, ((name, summary), colour) in enumerate(
        zip(suites.items(), _colours(len(suites)), strict=True)
    ):
        hist = summary["accepted_hist"]
        last = max((j for j, n in enumerate(hist) if n), default=0)
        top = max(top, last)
        share = [100 * n / summary["rounds"] for n in hist[: last + 1]]
        axis.bar(
            [j - 0.4 + wide * (index + 0.5) for j in range(last + 1)],
            share,
            wide,
            color=colour,
            label=pretty(name),
        )
    axis.set_xticks(range(top + 1))
    axis.yaxis.set_major_formatter(lambda value, _: f"{value:.0f}%")
    axis.grid(axis="y", linewidth=0.8)
    axis.set_xlabel("drafted tokens accepted in a round (the bonus token comes on top)")
    axis.legend(frameon=False, loc="upper right")
    return figure


def _phases(phases: Mapping[str, Mapping[str, float]], facts: str) -> Figure:
    figure, (axis,) = _figure("Where the time goes", facts, 0.55 * len(phases) + 0.35, gap=0.3)
    order = list(dict.fromkeys(phase for row in phases.values() for phase in row))
    colours = dict(zip(order, (GREY, BLUE, ORANGE, LIGHT, PURPLE, GREEN), strict=False))
    left = [0.0] * len(phases)
    for phase in order:
        widths = [row.get(phase, 0.0) for row in phases.values()]
        axis.barh(
            range(len(phases)), widths, left=left, height=0.55, color=colours[phase], label=phase
        )
        left = [a + b for a, b in zip(left, widths, strict=True)]
    for row, total in enumerate(left):
        axis.text(
            total + 0.01 * max(left),
            row,
            f"{total:.0f} ms" if total >= 10 else f"{total:.2f} ms",
            va="center",
        )
    axis.set_yticks(range(len(phases)), [pretty(n) for n in phases])
    axis.invert_yaxis()
    axis.spines["left"].set_visible(False)
    axis.set_xlim(0, max(left) * 1.13)
    axis.grid(axis="x", linewidth=0.8)
    axis.set_xlabel("milliseconds per plain step, and per speculative round")
    axis.legend(
        frameon=False, ncols=len(order), loc="lower left", bbox_to_anchor=(0, 1.0), borderaxespad=0
    )
    return figure


def _sweep(sweep: Mapping[str, Mapping[int, Mapping[str, Any]]], facts: str) -> Figure:
    figure, (left, right) = _figure(
        "Tree budget: what a larger tree buys", facts, 2.9, panels=2, gap=0.3
    )
    figure.subplots_adjust(left=0.08)
    for (name, budgets), colour in zip(sweep.items(), _colours(len(sweep)), strict=True):
        for axis, key in ((left, "tau"), (right, "speedup")):
            points = sorted((int(b), s[key]) for b, s in budgets.items() if s[key] is not None)
            if points:
                xs, ys = zip(*points, strict=True)
                axis.plot(
                    xs,
                    ys,
                    color=colour,
                    linewidth=2.2,
                    marker="o",
                    markersize=5,
                    label=pretty(name),
                )
    ticks = sorted({int(b) for budgets in sweep.values() for b in budgets})
    for axis, title in (
        (left, "tokens per verification (τ)"),
        (right, "speed-up over plain decoding"),
    ):
        axis.set_xscale("log", base=2)
        axis.set_xticks(ticks, [str(b) for b in ticks])
        axis.minorticks_off()
        axis.set_ylim(bottom=0)
        axis.grid(axis="y", linewidth=0.8)
        axis.set_xlabel("nodes per tree, root included")
        axis.set_title(title, fontsize=11, loc="left", color=INK, pad=8)
        axis.axhline(1, color=INK, linewidth=1.2, linestyle=(0, (4, 3)))
    left.legend(frameon=False, loc="lower right")
    return figure


def _colours(count: int) -> list[str]:
    return [SERIES[i % len(SERIES)] for i in range(count)]
