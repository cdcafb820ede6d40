"""An external explorer: tries other compile-time constants of the native kernels.

    python -m serve.autotune --explorer "cmd:{python} -m serve.explorers.kernel_constants {brief}"

Run by `jetspec_jax.autotune.external` in a working copy of the source. It edits one constant in the
C++ text, loads the edited tree in a worker (which compiles it), times it against the unedited code
on the explorers' prompts, A B and B A in turn, and leaves the edit in the working copy where it is
surely faster. What it leaves there is its patch; the gate decides. An agent would do the same with
larger changes.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from jetspec_jax.autotune.client import Worker
from jetspec_jax.config import EngineConfig, SpecConfig
from jetspec_jax.errors import InputError, JetSpecError
from jetspec_jax.intervals import median_ratio
from serve import cli

_RESERVE = 0.25  # share of the time limit that no new trial starts in
_TOKENS = 64  # of an answer


@dataclasses.dataclass(frozen=True)
class Constant:
    """A compile-time constant, `constexpr int NAME = N` or `#define NAME N`, and values to try.

    None of these takes part in a sum: they cut work into pieces and run prefetches ahead.
    """

    file: str
    name: str
    values: tuple[int, ...]


CONSTANTS = (
    Constant("pallas_kernels/draft_head_topk/cpu.cc", "kTaskPanels", (6, 24)),
    Constant("pallas_kernels/verify_head/cpu.cc", "JETSPEC_VERIFY_HEAD_TASK_PANELS", (6, 24)),
    Constant("pallas_kernels/tree_attention/cpu.cc", "JETSPEC_TREE_ATTENTION_LEAD", (32, 128)),
    Constant(
        "pallas_kernels/tree_attention/cpu.cc", "JETSPEC_TREE_ATTENTION_SPLIT_KEYS", (32, 128)
    ),
)


def edited(text: str, name: str, value: int) -> str:
    """Source text with one constant changed.

    Raises:
        InputError: it is not there exactly once.
    """
    pattern = re.compile(rf"(constexpr int {name} = |#define {name} )(\d+)\b")
    if len(pattern.findall(text)) != 1:
        raise InputError(f"constant {name} does not stand in the source once; update CONSTANTS")
    return pattern.sub(lambda m: f"{m[1]}{value}", text)


def trials(target: str) -> Iterator[tuple[Constant, int]]:
    """What to try, the brief's target file first."""
    for constant in sorted(CONSTANTS, key=lambda c: c.file != target):
        for value in constant.values:
            yield constant, value


def compare(
    before: Worker, after: Worker, prompts: Sequence[list[int]], overrides: Mapping[str, Any]
) -> tuple[float, float, float] | None:
    """(ratio, low, high) of decoding times over prompts; None where a token differs."""
    times: dict[str, list[float]] = {"before": [], "after": []}
    for turn, ids in enumerate(prompts):
        tokens = {}
        sides = [("before", before), ("after", after)]
        for name, worker in sides if turn % 2 == 0 else sides[::-1]:
            (answer,) = worker.generate([ids], _TOKENS, overrides=overrides)
            times[name].append(answer["decode_s"])
            tokens[name] = answer["token_ids"]
        if tokens["before"] != tokens["after"]:
            return None
    return median_ratio(times["before"], times["after"])


def explore(brief: Mapping[str, Any], tree: Path, prompts: int, until: float) -> list[str]:
    """Tries constants until the time is up; returns the edits that are left in `tree`."""
    engine = brief.get("engine") or {}

    def load() -> Worker:
        return Worker(
            tree=tree,
            model=engine.get("model"),
            draft=engine.get("draft"),
            spec=SpecConfig.from_mapping(engine.get("spec") or {}),
            engine=EngineConfig.from_mapping(engine.get("engine") or {}),
        )

    kept: list[str] = []
    with load() as before:
        asked = brief["prompts"][:prompts]
        ids = before.encode([p["messages"] for p in asked])
        before.warm()
        for constant, value in trials(str(brief.get("target") or "")):
            if time.monotonic() > until:
                cli.say("no time for another trial")
                break
            path = tree / constant.file
            text = path.read_text(encoding="utf-8")
            found = None
            # the unedited code is loaded already: editing its files does not change it
            path.write_text(edited(text, constant.name, value), encoding="utf-8")
            with contextlib.suppress(JetSpecError), load() as after:
                after.warm()
                found = compare(before, after, ids, {})
            better = found is not None and found[1] > 1.0
            shown = (
                "no good" if found is None else f"{found[0]:.3f} [{found[1]:.3f}, {found[2]:.3f}]"
            )
            cli.say(f"{constant.name} = {value}: {shown}{', kept' if better else ''}")
            if better:
                kept.append(f"{constant.name} = {value}")
            else:
                path.write_text(text, encoding="utf-8")
    return kept


def build_parser() -> cli.Parser:
    parser = cli.Parser(
        prog="python -m serve.explorers.kernel_constants",
        description="Edits compile-time constants of the native kernels where that is faster.",
    )
    parser.add_argument("brief", help="brief.json, as the autotuner writes it")
    parser.add_argument("--prompts", type=int, default=12, help="prompts per trial (default: 12)")
    parser.add_argument("--debug", action="store_true", help="show tracebacks")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns the exit code."""
    return cli.run(_run, build_parser(), argv)


def _run(args: argparse.Namespace) -> int:
    try:
        brief = json.loads(Path(args.brief).read_text(encoding="utf-8"))
        seconds = float(brief["limits"]["seconds"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(f"{args.brief} is no brief ({error}); serve.autotune writes it") from error
    if args.prompts < 2:
        raise InputError(f"--prompts {args.prompts}: give at least 2")
    until = time.monotonic() + (1 - _RESERVE) * seconds
    kept = explore(brief, Path.cwd(), args.prompts, until)
    cli.say(f"left in the working copy: {', '.join(kept) or 'nothing'}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
