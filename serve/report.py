"""A benchmark's results for people and programs: console table, report.md, per_prompt.csv,
results.json."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from serve import cli
from serve.measure import Row
from serve.render import number, percent, pretty

Summary = Mapping[str, Any]
COLUMNS = (
    "suite",
    "prompts",
    "speed-up",
    "95% interval",
    "of medians",
    "τ",
    "τ per prompt",
    "identical",
    "plain tok/s",
    "spec tok/s",
    "first token",
)
CSV_FIELDS: tuple[str, ...] = (
    "suite",
    "id",
    "variant",
    "prompt_tokens",
    "answer_tokens",
    "identical",
    "first_difference",
    "speedup",
    "tau",
    "rounds",
    "plain_decode_s",
    "spec_decode_s",
    "plain_tok_s",
    "spec_tok_s",
    "prefill_s",
    "ttft_s",
    "compile_s",
    "batch_group",
)
PLOTS = {
    "speedup": "Speed-up over plain decoding",
    "tau": "Tokens per verification",
    "acceptance": "Acceptance by depth",
    "accepted": "Accepted tokens per round",
    "phases": "Where the time goes",
    "sweep": "Tree budget",
}


def facts_line(facts: Mapping[str, Any]) -> str:
    """The line every table and plot carries: hardware, dtype, batch, temperature, budget, answer
    length."""
    tuned = facts.get("tuned") or {}  # documents of before had none
    entry = f" · tuned entry {tuned['entry'][:8]}" if tuned.get("entry") else ""
    return (
        f"{facts['hardware']} · {facts['dtype']} · batch {facts['batch']} · temperature "
        f"{facts['temperature']:g} · "
        f"budget {facts['budget']} · up to {facts['max_tokens']} tokens{entry}"
    )


def cells(name: str, summary: Summary) -> list[str]:
    """One table row, in the order of COLUMNS."""
    interval = summary["speedup_interval"]
    odd = summary["first_different"]
    spread = f"{number(summary['tau_min'])}-{number(summary['tau_max'])}"
    return [
        pretty(name),
        str(summary["prompts"]),
        number(summary["speedup"], 2, "x"),
        f"{interval[0]:.2f}-{interval[1]:.2f}" if interval else "n/a",
        number(summary["speedup_of_medians"], 2, "x"),
        number(summary["tau"]),
        spread if summary["tau_min"] is not None else "n/a",
        percent(summary["identical_share"])
        + (f" ({odd['id']}, token {odd['token']})" if odd else ""),
        number(summary["plain_tok_s"], 1),
        number(summary["spec_tok_s"], 1),
        number(summary["spec_ttft_s"], 2, " s"),
    ]


def print_table(
    title: str, rows: Sequence[Sequence[str]], columns: Sequence[str], footer: str
) -> None:
    """A rich table on stderr: stdout belongs to the JSON line."""
    from rich.console import Console
    from rich.table import Table

    console = Console(stderr=True)
    if not console.is_terminal:
        console.width = 160  # a file or a pipe has no width of its own; 80 would break every cell
    table = Table(
        title=title,
        title_justify="left",
        title_style="bold",
        header_style="bold",
        caption=footer,
        caption_justify="left",
    )
    for index, column in enumerate(columns):
        table.add_column(column, justify="left" if index == 0 else "right")
    for row in rows:
        table.add_row(*row)
    console.print(table)


def markdown_table(rows: Sequence[Sequence[str]], columns: Sequence[str]) -> list[str]:
    escape = lambda text: text.replace("|", "\\|")  # noqa: E731
    lines = ["| " + " | ".join(columns) + " |", "|---" + "|---:" * (len(columns) - 1) + "|"]
    return lines + ["| " + " | ".join(escape(cell) for cell in row) + " |" for row in rows]


def csv_rows(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """One record per prompt and variant."""
    out = []
    for row in rows:
        for variant, sample in row.variants.items():
            out.append(
                {
                    "suite": row.suite,
                    "id": row.id,
                    "variant": variant,
                    "prompt_tokens": row.prompt_tokens,
                    "answer_tokens": len(sample.token_ids),
                    "identical": row.identical(variant),
                    "first_difference": row.first_difference[variant],
                    "speedup": row.speedup(variant),
                    "tau": sample.stats.tau,
                    "rounds": sample.stats.rounds,
                    "plain_decode_s": row.plain.decode_s,
                    "spec_decode_s": sample.decode_s,
                    "plain_tok_s": row.plain.tok_s,
                    "spec_tok_s": sample.tok_s,
                    "prefill_s": sample.prefill_s,
                    "ttft_s": sample.ttft_s,
                    "compile_s": sample.compile_s,
                    "batch_group": row.group,
                }
            )
    return out


def write_csv(path: Path, rows: Sequence[Row]) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, CSV_FIELDS)
        writer.writeheader()
        writer.writerows(csv_rows(rows))


def markdown(document: Mapping[str, Any], plots: Sequence[Path]) -> str:
    """report.md: the table, what the numbers mean, the plots, and the command."""
    facts, suites, sweep = document["facts"], document["suites"], document.get("sweep") or {}
    lines = [
        "# Benchmark: speculative against plain decoding",
        "",
        f"`{facts['command']}`",
        "",
        facts_line(facts),
        "",
    ]
    lines += [
        f"Model: {facts['model']}; draft head: {facts['draft'] or 'none'}; speculation: "
        f"`{cli.dump_json(facts['spec'])}`.",
        "",
        f"Tuned values: {(facts.get('tuned') or {}).get('reason', 'none')}.",
        "",
    ]
    lines += markdown_table([cells(name, s) for name, s in suites.items()], COLUMNS)
    lines += [
        "",
        "Speed-up: seconds of plain decoding / seconds of speculative decoding, summed over "
        "prompts that were decoded "
        "both ways one after the other on the same engine, in alternating order; prefill "
        "and compilation apart. The "
        "interval is a bootstrap over prompts. τ: tokens per verification, pooled over "
        "rounds. Identical: share of "
        "prompts with the same token ids both ways.",
        "",
        "| suite | acceptance at depth 1, 2, ... | nodes per round | ms per round | prefill "
        "s | compile s |",
        "|---|---|---:|---:|---:|---:|",
    ]
    for name, s in suites.items():
        depths = " ".join(percent(a) for a in s["acceptance"]) or "n/a"
        lines.append(
            f"| {pretty(name)} | {depths} | {number(s['nodes_per_round'], 1)} | "
            f"{number(s['round_ms'], 1)} | "
            f"{number(s['spec_prefill_s'], 1)} | {number(s['compile_s'], 1)} |"
        )
    for name, budgets in sweep.items():
        lines += ["", f"## {pretty(name)} by tree budget", ""]
        rows = [
            [str(b), number(s["speedup"], 2, "x"), number(s["tau"]), percent(s["identical_share"])]
            for b, s in budgets.items()
        ]
        lines += markdown_table(rows, ("budget", "speed-up", "τ", "identical"))
    if document.get("costs"):
        lines += ["", "Measured costs of a step: " + _costs_line(document["costs"]) + "."]
    lines.append("")
    for path in plots:
        lines += [f"![{PLOTS[path.stem]}]({path.name})", ""]
    lines.append(
        "Versions: "
        + ", ".join(f"{k} {v}" for k, v in facts["versions"].items())
        + f"; commit {facts['commit']}."
    )
    return "\n".join(lines) + "\n"


def _costs_line(costs: Mapping[str, Any]) -> str:
    verify = ", ".join(f"{n} nodes {1e3 * s:.1f} ms" for n, s in costs["t_verify_s"].items())
    return (
        f"plain {1e3 * costs['t_plain_s']:.1f} ms, draft {1e3 * costs['t_draft_s']:.1f} "
        f"ms, verify {verify}"
    )


def phases_of(
    suites: Mapping[str, Summary], costs: Mapping[str, Any]
) -> dict[str, dict[str, float]]:
    """Milliseconds of a mean round by phase: draft and verify as measured alone, the rest is what
    the round took more.

    The verify time is interpolated at the suite's mean number of nodes; a round that skipped
    drafting makes the remainder negative, which is cut at 0.
    """
    import numpy as np

    plain = 1e3 * costs["t_plain_s"]
    measured = sorted(
        {1: costs["t_plain_s"], **{int(n): s for n, s in costs["t_verify_s"].items()}}.items()
    )
    at, seconds = [n for n, _ in measured], [s for _, s in measured]
    phases = {"plain step": {"plain step": plain}}
    for name, s in suites.items():
        if s["round_ms"] is not None:
            verify = 1e3 * float(np.interp(s["nodes_per_round"], at, seconds))
            draft = 1e3 * (costs["t_draft_s"] or 0.0)
            phases[name] = {
                "draft": draft,
                "verify": verify,
                "rest": max(0.0, s["round_ms"] - draft - verify),
            }
    return phases


def write_report(folder: Path, document: Mapping[str, Any], rows: Sequence[Row]) -> list[Path]:
    """Writes everything into `folder` (made if needed) and returns the paths.

    Args:
        folder: the --out directory.
        document: facts, suites, sweep, costs (the schema of results.json is in serve.bench).
        rows: per prompt.
    """
    from serve.plots import write_plots  # matplotlib: an extra, and seconds to import

    folder.mkdir(parents=True, exist_ok=True)
    phases = phases_of(document["suites"], document["costs"]) if document.get("costs") else None
    plots = write_plots(
        folder,
        document["suites"],
        facts_line(document["facts"]),
        phases=phases,
        sweep=document.get("sweep") or None,
    )
    write_csv(folder / "per_prompt.csv", rows)
    (folder / "report.md").write_text(markdown(document, plots), encoding="utf-8")
    (folder / "results.json").write_text(cli.dump_json(document, indent=2) + "\n", encoding="utf-8")
    return [folder / "results.json", folder / "per_prompt.csv", folder / "report.md", *plots]
