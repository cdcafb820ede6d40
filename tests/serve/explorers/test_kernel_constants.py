"""The example explorer: its edits, and what it keeps (workers are fakes)."""

from __future__ import annotations

import pytest

from jetspec_jax.errors import InputError
from serve.explorers import kernel_constants
from serve.explorers.kernel_constants import CONSTANTS, compare, edited, explore, trials
from tests.conftest import ROOT


@pytest.mark.parametrize("constant", CONSTANTS, ids=lambda c: c.name)
def test_every_constant_stands_in_its_source_once(constant):
    text = (ROOT / constant.file).read_text()
    for value in constant.values:
        changed = edited(text, constant.name, value)
        different = [
            a for a, b in zip(text.split("\n"), changed.split("\n"), strict=True) if a != b
        ]
        assert len(different) == 1 and constant.name in different[0]


def test_a_constant_that_is_not_there_is_an_error():
    with pytest.raises(InputError, match="kNothing"):
        edited("constexpr int kOther = 3;", "kNothing", 4)
    with pytest.raises(InputError):
        edited("#define X 1\n#define X 1\n", "X", 4)


def test_the_target_file_comes_first():
    target = CONSTANTS[-1].file
    assert next(trials(target))[0].file == target


class FakeWorker:
    """Decodes in seconds that depend on what its tree held when it was loaded."""

    seconds: dict[int, float]
    wrong: int | None = None

    def __init__(self, tree, **_):
        text = (tree / CONSTANTS[0].file).read_text()
        self.value = int(text.rstrip(";\n").split(" = ")[1])

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def encode(self, conversations):
        return [[i] for i, _ in enumerate(conversations)]

    def warm(self):
        return 0.0

    def generate(self, prompts, max_tokens, overrides):
        token = 9 if self.value == self.wrong else prompts[0][0]
        seconds = self.seconds[self.value] * (1 + 0.01 * prompts[0][0])
        return [{"token_ids": [token], "decode_s": seconds}]


@pytest.fixture
def tree(tmp_path, monkeypatch):
    constant = CONSTANTS[0]
    path = tmp_path / constant.file
    path.parent.mkdir(parents=True)
    path.write_text(f"constexpr int {constant.name} = 12;\n")
    monkeypatch.setattr(kernel_constants, "CONSTANTS", (constant,))
    monkeypatch.setattr(kernel_constants, "Worker", FakeWorker)
    return tmp_path


BRIEF = {"prompts": [{"messages": []}] * 6, "target": ""}


@pytest.mark.parametrize(
    "seconds,wrong,left",
    [
        ({12: 1.0, 6: 0.8, 24: 1.2}, None, 6),  # faster: stays
        ({12: 1.0, 6: 1.1, 24: 1.2}, None, 12),  # slower: put back
        ({12: 1.0, 6: 0.5, 24: 0.9}, 6, 24),  # faster and wrong: put back
    ],
)
def test_only_a_faster_and_equal_edit_stays(tree, monkeypatch, seconds, wrong, left):
    monkeypatch.setattr(FakeWorker, "seconds", seconds, raising=False)
    monkeypatch.setattr(FakeWorker, "wrong", wrong)
    kept = explore(BRIEF, tree, 6, float("inf"))
    assert (tree / CONSTANTS[0].file).read_text() == f"constexpr int kTaskPanels = {left};\n"
    assert kept == ([] if left == 12 else [f"kTaskPanels = {left}"])


def test_without_time_nothing_is_tried(tree, monkeypatch):
    monkeypatch.setattr(FakeWorker, "seconds", {12: 1.0}, raising=False)
    assert explore(BRIEF, tree, 6, 0.0) == []


def test_compare_alternates_and_refuses_other_tokens(tree, monkeypatch):
    monkeypatch.setattr(FakeWorker, "seconds", {12: 1.0}, raising=False)
    same = FakeWorker(tree)
    assert compare(same, same, [[0], [1]], {}) == (1.0, 1.0, 1.0)
