"""The memory: nothing lost between processes, nothing trusted from elsewhere, no file destroyed."""

import dataclasses
import json
import sqlite3
import subprocess
import sys

import pytest

from jetspec_jax.autotune.memory import FORMAT, Memory
from jetspec_jax.errors import ModelFileError
from tests.autotune.samples import KEY, pattern
from tests.conftest import ROOT


def test_a_pattern_comes_back_as_it_was(tmp_path):
    memory = Memory(tmp_path / "sub" / "memory.db")
    kept = memory.record(pattern())
    assert kept.when.startswith("20") and kept.trusted
    assert Memory(memory.path).patterns() == [kept]
    assert memory.best(KEY) == kept


def test_best_takes_the_largest_lower_bound_of_this_key_only(tmp_path):
    memory = Memory(tmp_path / "memory.db")
    for made in (
        pattern(2, low=1.2),
        pattern(3, low=1.4),
        pattern(4, low=9.0, accepted=False),
        pattern(5, low=8.0, context=512),
    ):
        memory.record(made)
    best = memory.best(KEY)
    assert best is not None and best.candidate.params == {"spec.width": 3}
    assert memory.best(dataclasses.replace(KEY, context=1024)) is None


def test_the_last_evaluation_counts(tmp_path):
    memory = Memory(tmp_path / "memory.db")
    memory.record(pattern())
    memory.record(pattern(accepted=False))
    assert memory.best(KEY) is None
    assert [p.counter_example["position"] for p in memory.rejected(KEY)] == [7]
    assert len(memory.patterns()) == 2  # history stays


def test_nearest_key_seeds_and_never_answers(tmp_path):
    memory = Memory(tmp_path / "memory.db")
    memory.record(pattern(2, context=1024))
    memory.record(pattern(3, context=512))
    memory.record(pattern(4, target_family="llama"))
    assert [p.candidate.params["spec.width"] for _, p in memory.nearest(KEY)] == [3, 2]
    seeds = memory.candidates(KEY)
    assert [c.params["spec.width"] for c in seeds] == [3, 2]
    assert all(c.origin.startswith("memory:") for c in seeds)
    assert memory.best(KEY) is None


def test_what_was_imported_is_a_candidate_until_our_gate_has_spoken(tmp_path):
    there, here = Memory(tmp_path / "there.db"), Memory(tmp_path / "here.db")
    there.record(pattern())
    assert there.export(tmp_path / "out.json") == 1
    assert here.import_(tmp_path / "out.json") == 1
    assert here.import_(tmp_path / "out.json") == 0  # the same again is nothing new
    assert here.best(KEY) is None
    (found,) = here.nearest(KEY)
    assert found[0] == 0.0 and not found[1].trusted
    here.record(found[1])
    best = here.best(KEY)
    assert best is not None and best.trusted


def test_an_import_never_overrules_our_own_verdict(tmp_path):
    there, here = Memory(tmp_path / "there.db"), Memory(tmp_path / "here.db")
    here.record(pattern(accepted=False))
    there.record(dataclasses.replace(pattern(), when="2030-01-01T00:00:00+00:00"))
    there.export(tmp_path / "out.json")
    here.import_(tmp_path / "out.json")
    assert here.nearest(KEY) == [] and len(here.rejected(KEY)) == 1


def test_trust_cannot_be_written_into_an_exported_file(tmp_path):
    here = Memory(tmp_path / "here.db")
    row = {**pattern().to_json(), "trusted": True}
    (tmp_path / "forged.json").write_text(
        json.dumps({"format": FORMAT, "version": 1, "patterns": [row]})
    )
    here.import_(tmp_path / "forged.json")
    assert here.best(KEY) is None


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        '{"format": "other", "version": 1, "patterns": []}',
        '{"format": "jetspec-jax autotune memory", "version": 9, "patterns": []}',
        '{"format": "jetspec-jax autotune memory", "version": 1, "patterns": [{"id": 1}]}',
    ],
)
def test_a_file_that_is_no_export_adds_nothing(tmp_path, text):
    memory = Memory(tmp_path / "memory.db")
    (tmp_path / "in.json").write_text(text)
    with pytest.raises(ModelFileError, match="export it again") as caught:
        memory.import_(tmp_path / "in.json")
    assert "\n" not in str(caught.value)
    assert memory.patterns() == []


def foreign(path, version: int | None = None) -> None:
    if version is not None:
        Memory(path).record(pattern())
    with sqlite3.connect(path) as database:
        if version is None:
            database.execute("CREATE TABLE cats (name)")
        else:
            database.execute(f"PRAGMA user_version = {version}")
    database.close()


def damaged(path) -> None:
    memory = Memory(path)
    for width in range(2, 60):
        memory.record(pattern(width))
    content = bytearray(path.read_bytes())
    for at in range(4096, len(content)):
        content[at] = at * 7 % 251
    path.write_bytes(content)


@pytest.mark.parametrize(
    "make,says",
    [
        (lambda p: p.write_bytes(b"no database at all, but long enough for one" * 9), "memory"),
        (lambda p: foreign(p), "another program"),
        (lambda p: foreign(p, 99), "version 99"),
        (damaged, "memory"),
    ],
    ids=["noise", "foreign", "version", "damaged"],
)
def test_a_file_that_is_no_good_is_one_line_and_stays_as_it_was(tmp_path, make, says):
    path = tmp_path / "memory.db"
    make(path)
    before = path.read_bytes()
    with pytest.raises(ModelFileError, match=says) as caught:
        Memory(path).record(pattern())
    assert "\n" not in str(caught.value)
    with pytest.raises(ModelFileError, match=says):
        Memory(path, create=False)
    assert path.read_bytes() == before


def test_a_file_that_must_be_there_is_not_made(tmp_path):
    with pytest.raises(ModelFileError, match=r"does not exist; run serve\.autotune first"):
        Memory(tmp_path / "none.db", create=False)
    assert not (tmp_path / "none.db").exists()


WRITER = """
import sys
from pathlib import Path
from jetspec_jax.autotune.memory import Memory
from tests.autotune.samples import pattern
first = int(sys.argv[2])
memory = Memory(Path(sys.argv[1]))
print("ready", flush=True)
sys.stdin.readline()
for width in range(first, first + 25):
    memory.record(pattern(width))
"""


def test_two_processes_at_once_lose_nothing(tmp_path):
    path = tmp_path / "memory.db"
    writers = [
        subprocess.Popen(
            [sys.executable, "-c", WRITER, str(path), str(first)],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for first in (100, 200)
    ]
    for writer in writers:
        assert writer.stdout.readline() == "ready\n"  # the file itself is made in the race
    for writer in writers:
        writer.stdin.write("go\n")
        writer.stdin.flush()
    for writer in writers:
        writer.communicate()
        assert writer.returncode == 0
    widths = sorted(p.candidate.params["spec.width"] for p in Memory(path).patterns())
    assert widths == [*range(100, 125), *range(200, 225)]


@pytest.mark.parametrize(
    "change",
    [
        {"low": "fast"},
        {"measured": float("nan")},
        {"accepted": "yes"},
        {"key": {"batch": 0}},
        {"key": {"batch": "one"}},
        {"key": {"device": 5}},
        {"candidate": {"params": {"spec.nonsense": 1}}},
        {"report": []},
    ],
    ids=str,
)
def test_an_export_with_values_of_the_wrong_kind_adds_nothing(tmp_path, change):
    """One such row would end every later search of the folder."""
    there = Memory(tmp_path / "there.db")
    there.record(pattern())
    there.export(tmp_path / "out.json")
    document = json.loads((tmp_path / "out.json").read_text())
    row = document["patterns"][0]
    for name, value in change.items():
        row[name] = {**row[name], **value} if isinstance(value, dict) else value
    (tmp_path / "out.json").write_text(json.dumps(document))
    here = Memory(tmp_path / "here.db")
    with pytest.raises(ModelFileError, match="export it again"):
        here.import_(tmp_path / "out.json")
    assert here.patterns() == []
