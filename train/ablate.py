"""Ablations: variants of one configuration on equal data and steps, compared on the held-out part.

    python -m train.ablate --config configs/train/smollm2_135m.toml --steps 300 --out report \\
        --variant "published:draft.path_head=none loss.kl=0 loss.ce=1 loss.survival=0" \\
        --variant "markov:draft.path_head=markov" --builders exact,accum_logp

Every variant is the configuration with the settings that follow its name. All of them see the same
batches; each is evaluated with every builder on the same anchors. Results go to ablation.json (kept
after every variant, so a run that is cut off goes on where it ended), ablation.md and ablation.svg.
The last line of stdout is JSON.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jetspec_jax.errors import ConfigError, InputError
from train.cli import make_folder, run_command
from train.config import load_config, to_json
from train.data import Dataset, held_out_batches, load_dataset
from train.evaluate import BUDGETS, evaluate, make_evaluator
from train.train_draft import Trainer

BUILDERS = ("exact", "chain", "accum_logp")  # those that need no settings of their own


def parse_variants(texts: Sequence[str]) -> dict[str, list[str]]:
    """{"name": overrides} of "name:key=value key=value" words; no overrides: the configuration
    itself.

    Raises:
        ConfigError: an empty or repeated name, or a word that is no override.
    """
    found: dict[str, list[str]] = {}
    for text in texts:
        name, _, settings = text.partition(":")
        words = settings.split()
        bad = [w for w in words if "=" not in w]
        if not name.strip() or name in found or bad:
            raise ConfigError(
                f'--variant {text!r} does not fit; write "name:section.key=value ..." with a name '
                "of its own"
            )
        found[name] = words
    return found


def _one(trainer: Trainer, builders: Sequence[str], sequences: int, anchors: int) -> dict[str, Any]:
    started = time.monotonic()
    summary = trainer.run()
    if summary["stopped"] != "steps":
        raise InputError(
            f"stopped by {summary['stopped']} at step {summary['step']} of this variant; run the "
            "same command to go on from there"
        )
    result: dict[str, Any] = {
        "steps": summary["step"],
        "loss": summary["loss"],
        "train_s": round(time.monotonic() - started, 1),
        "parameters": trainer.plan()["parameters"],
    }
    for builder in builders:
        evaluator = make_evaluator(trainer.head, trainer.dtype, builder)
        batches = held_out_batches(trainer.data, trainer.cfg.data, sequences, anchors)
        result[builder] = evaluate(
            evaluator,
            trainer.shipped_params(),
            map(trainer.evaluation_batch, batches),
            trainer.frozen,
            trainer.id_map,
        )
    return result


def table(results: dict[str, Any], builders: Sequence[str]) -> str:
    """Markdown: tau by budget, a row for each variant and builder; the gain is in accepted tokens
    against the first row."""
    head = [f"tau at {b}" for b in BUDGETS]
    lines = [
        "| variant | builder | " + " | ".join(head) + " | accepted at 12 and 64 against row 1 |",
        "|---|---|" + "---:|" * (len(head) + 1),
    ]
    first = None
    for name, result in results.items():
        for builder in builders:
            taus = result[builder]["tree_tau"]
            first = first or taus
            gains = [(taus[b] - 1) / max(first[b] - 1, 1e-9) - 1 for b in ("12", "64")]
            cells = [name, builder, *(f"{taus[str(b)]:.2f}" for b in BUDGETS)]
            lines.append(f"| {' | '.join(cells)} | {gains[0]:+.0%}, {gains[1]:+.0%} |")
    return "\n".join(lines) + "\n"


def plot(results: dict[str, Any], builders: Sequence[str], path: Path) -> None:
    """Tau against budget: a colour for each variant, a line style for each builder."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.2), layout="constrained")
    axes = figure.subplots()
    styles = dict(zip(builders, ("-", "--", ":"), strict=False))
    for number, (name, result) in enumerate(results.items()):
        for builder, style in styles.items():
            taus = [result[builder]["tree_tau"][str(b)] for b in BUDGETS]
            label = name if builder == builders[0] else None
            axes.plot(
                BUDGETS, taus, style, color=f"C{number}", marker="o", markersize=3, label=label
            )
    for builder, style in styles.items():
        axes.plot([], [], style, color="0.4", label=f"builder {builder}")
    axes.set_xscale("log", base=2)
    axes.set_xticks(BUDGETS, [str(b) for b in BUDGETS])
    axes.set_xlabel("budget (tree nodes)")
    axes.set_ylabel("tau, held out, simulated")
    axes.legend(fontsize=8, frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path)


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Trains what `out` does not hold yet, then writes the report."""
    variants = parse_variants(args.variant or ["base:"])
    builders = args.builders.split(",")
    unknown = [b for b in builders if b not in BUILDERS]
    if unknown:
        raise ConfigError(
            f"--builders {args.builders}: {unknown[0]!r} is not known; choose from "
            f"{', '.join(BUILDERS)}"
        )
    out = Path(args.out)
    make_folder(out, "--out")
    file = out / "ablation.json"
    key = {
        "config": to_json(load_config(args.config, args.overrides)),
        "steps": args.steps,
        "builders": builders,
        "held_out": [args.limit, args.anchors],
    }
    stored = json.loads(file.read_text()) if file.is_file() else {"key": key, "results": {}}
    if stored["key"] != key:
        raise ConfigError(f"{file} was made with other settings; give another --out")
    results: dict[str, Any] = stored["results"]
    data: tuple[Any, Dataset] | None = None
    for name, words in variants.items():
        if name in results and results[name]["settings"] == words:
            continue
        fixed = [f"optim.steps={args.steps}", f"run.out={json.dumps(str(out / name))}"]
        fixed += [f"run.eval_every={args.steps}", f"run.save_every={args.steps}"]
        cfg = load_config(args.config, [*args.overrides, *words, *fixed])
        if data is None or data[0] != cfg.data:
            data = (cfg.data, load_dataset(cfg.data))
        trainer = Trainer(cfg, f"train.ablate {name}", data=data[1])
        results[name] = {"settings": words} | _one(trainer, builders, args.limit, args.anchors)
        part = file.with_suffix(".part")
        part.write_text(json.dumps(stored, indent=1) + "\n")
        part.rename(file)
    chosen = {name: results[name] for name in variants}
    text = table(chosen, builders)
    (out / "ablation.md").write_text(text)
    plot(chosen, builders, out / "ablation.svg")
    print(text, file=sys.stderr)
    return {n: {b: r[b]["tree_tau"] for b in builders} for n, r in chosen.items()}


def main(argv: list[str] | None = None) -> int:
    """Command line; the last line of stdout is JSON."""
    p = argparse.ArgumentParser(
        prog="python -m train.ablate", description=(__doc__ or "").splitlines()[0]
    )
    p.add_argument("--config", help="TOML file that the variants change")
    p.add_argument("--variant", action="append", help='"name:section.key=value ..."; repeatable')
    p.add_argument("--builders", default="exact,accum_logp", help="tree builders to evaluate")
    p.add_argument("--steps", type=int, default=300)
    p.add_argument("--limit", type=int, default=64, help="held-out sequences")
    p.add_argument("--anchors", type=int, default=16, help="rounds per sequence")
    p.add_argument("--out", required=True, help="folder for results")
    p.add_argument("overrides", nargs="*", metavar="section.key=value", help="of all variants")
    args = p.parse_intermixed_args(argv)
    return run_command(run, args)


if __name__ == "__main__":
    sys.exit(main())
