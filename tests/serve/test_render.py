"""Drawing: a tree is readable without colour, and colour never changes the text."""

from __future__ import annotations

import re

from serve.render import AcceptedPainter, TreeView, key_values, number, percent, tree_lines

VIEW = TreeView(
    token=[1, 2, 3, 4, 5],
    parent=[-1, 0, 0, 1, 3],
    score=[0.0, -0.1, -1.0, -0.5, -0.75],
    source=[0, 0, 1, 2, 0],
    path=[0, 1, 3],
    bonus=7,
)


def piece(token: int) -> str:
    return {1: "root", 2: "a", 3: "b", 4: "a1", 5: "a\n", 7: "next"}[token]


def test_tree_lines() -> None:
    assert tree_lines(VIEW, piece) == [
        "'root' (root)",
        "├─ ✓ 'a'  -0.10 head",
        "│  └─ ✓ 'a1'  -0.50 head+lookup",
        "│     └─ · 'a\\n'  -0.75 head",
        "└─ · 'b'  -1.00 lookup",
        "the target's own next token: 'next'",
    ]
    coloured = tree_lines(VIEW, piece, colour=True)
    assert [re.sub(r"\x1b\[\d+m", "", line) for line in coloured] == tree_lines(VIEW, piece)
    assert "\x1b[32m✓ 'a1'\x1b[0m" in coloured[2]


def test_a_root_alone() -> None:
    view = TreeView([1], [-1], [0.0], [0], [0], None)
    assert tree_lines(view, piece) == ["'root' (root)"]


def test_painter_colours_accepted_characters() -> None:
    painter = AcceptedPainter(piece, colour=True)
    painter.feed([2, 4, 7], [True, True, False])
    assert painter.paint("aa") == "\x1b[32maa\x1b[0m"  # a chunk may end inside a token
    assert painter.paint("1ne") == "\x1b[32m1\x1b[0mne"
    assert painter.paint("xt") == "xt"


def test_painter_never_changes_the_text() -> None:
    painter = AcceptedPainter(piece, colour=True)
    painter.feed([2, 4], [True, False])
    text = painter.paint("aZ") + painter.paint("a1")  # not what the tokens say
    assert re.sub(r"\x1b\[\d+m", "", text) == "aZa1"
    assert text.endswith("Za1")
    silent = AcceptedPainter(piece, colour=False)
    silent.feed([2], [True])
    assert silent.paint("a") == "a"


def test_numbers() -> None:
    assert number(None) == number(float("nan")) == percent(None) == "n/a"
    assert number(1.005, 1, "x") == "1.0x" and percent(0.456) == "46%"
    assert key_values({"a": 1, "long": {"b": 2}}, 0) == ["a  1", "long:", "  b  2"]
