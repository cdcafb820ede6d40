"""What an external explorer is told: `brief.json` for programs, `brief.md` for people."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jetspec_jax.autotune.patches import ALLOWED, PROTECTED, PROTECTED_NAMES, SUFFIXES
from jetspec_jax.autotune.prompts import Prompt

RULES = (
    "Change source files in the working copy (your current directory), or write a unified diff "
    "against it to ../patch.diff; the file wins where it exists.",
    f"Only files below {' and '.join(ALLOWED)} with the suffix {', '.join(SUFFIXES)} may change.",
    "Read-only: "
    + ", ".join(PROTECTED)
    + ", files named "
    + ", ".join(PROTECTED_NAMES)
    + ". A patch that touches them, adds links, changes file modes or shadows a module is refused.",
    "No answer may change by one token, and no KV row or logit by one bit. The gate checks on "
    "prompts that you do not have.",
    "Whole requests are timed against the present code, in turn, each prompt once.",
    "End by yourself, with status 0, within the limits, and leave no process behind.",
    "Only the folder above your working copy can be written.",
)


@dataclasses.dataclass(frozen=True)
class Brief:
    """The task of one explorer.

    Attributes:
        target: file that the work is about, relative to the tree, "" for a free choice.
        gaps: rows of the gap table, largest first (`cost_model.gap_table`), as JSON values.
        patterns: accepted and rejected patterns from memory, as JSON values.
        prompts: the explorers' half of the prompts.
        deployment: the key, as JSON values.
        engine: what to give `client.Worker`: model, draft, spec, engine, batch, as JSON values.
        tests: what will be run on the patch, pytest arguments.
    """

    target: str = ""
    gaps: Sequence[Mapping[str, Any]] = ()
    patterns: Sequence[Mapping[str, Any]] = ()
    prompts: Sequence[Prompt] = ()
    deployment: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    engine: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    tests: Sequence[str] = ()

    def to_json(self, limits: Mapping[str, Any]) -> dict[str, Any]:
        values = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        values |= {
            "prompts": [{"id": p.id, "messages": list(p.messages)} for p in self.prompts],
            "rules": list(RULES),
            "limits": dict(limits),
            "allowed": list(ALLOWED),
            "protected": [*PROTECTED, *PROTECTED_NAMES],
        }
        return json.loads(json.dumps(values, default=list))

    def text(self, limits: Mapping[str, Any]) -> str:
        """The same as a page of Markdown; the prompts stay in brief.json."""
        lines = [
            "# Make this decoder faster without changing one token",
            "",
            f"Look at: {self.target or 'whatever closes the largest gap'}",
            "",
            "## Rules",
            *[f"- {rule}" for rule in RULES],
            "",
            "## Limits",
            *[f"- {name}: {value}" for name, value in limits.items()],
            "",
            "## Gaps between measured and possible time",
            *_table(self.gaps),
            "",
            "## What earlier rounds found",
            *[f"- {json.dumps(p, sort_keys=True)[:600]}" for p in self.patterns],
            *([] if self.patterns else ["nothing yet"]),
            "",
            "## Measuring",
            f"`../brief.json` has {len(self.prompts)} prompts (`prompts`) and the engine to load "
            "(`engine`). `jetspec_jax.autotune.client.Worker` loads it from the working copy:",
            "",
            "    with Worker(tree=Path.cwd(), model=..., draft=...) as worker:",
            "        ids = worker.encode([p['messages'] for p in brief['prompts']])",
            "        answers = worker.generate(ids, 64)   # token_ids, decode_s, tau",
            "",
            f"Tests that will run: `{' '.join(self.tests) or 'none'}`",
        ]
        return "\n".join(lines) + "\n"

    def write(self, folder: Path, limits: Mapping[str, Any]) -> None:
        """Writes both files into `folder`."""
        document = json.dumps(self.to_json(limits), indent=1)
        (folder / "brief.json").write_text(document + "\n", encoding="utf-8")
        (folder / "brief.md").write_text(self.text(limits), encoding="utf-8")


def _table(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    if not rows:
        return ["not measured"]
    names = list(rows[0])
    lines = ["| " + " | ".join(names) + " |", "|" + "---|" * len(names)]
    return lines + ["| " + " | ".join(_cell(row.get(n)) for n in names) + " |" for row in rows]


def _cell(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
