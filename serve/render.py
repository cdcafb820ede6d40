"""Text for people: accepted tokens in colour, a round's tree, statistics tables. No jax, no numpy
needed."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jetspec_jax.results import RoundTrace  # numpy

RESET, GREEN, DIM, BOLD, YELLOW = "\x1b[0m", "\x1b[32m", "\x1b[2m", "\x1b[1m", "\x1b[33m"
SOURCES = {0: "head", 1: "lookup", 2: "head+lookup"}
PRETTY = {
    "humaneval": "HumanEval",
    "mtbench": "MT-Bench",
    "gsm8k": "GSM8K",
    "math500": "MATH-500",
    "mbpp": "MBPP",
}


def paint(text: str, code: str, colour: bool) -> str:
    return f"{code}{text}{RESET}" if colour and text else text


class AcceptedPainter:
    """Colours the characters that came from drafted-and-accepted tokens in a stream of text.

    The engine's text is the authority (it holds back incomplete characters and possible stop
    strings), but a chunk of it mixes several tokens. `decode_piece` (an IncrementalDecoder step)
    gives each token's own characters; the two streams hold the same characters, so they are matched
    one by one. A mismatch switches the colour off for the rest of the answer and never changes the
    text.

    Args:
        decode_piece: token id -> text that became complete with this token.
        colour: False prints the text as it is.
    """

    def __init__(self, decode_piece: Callable[[int], str], colour: bool) -> None:
        self._decode = decode_piece
        self._colour = colour
        self._pending: collections.deque[tuple[str, bool]] = collections.deque()

    def feed(self, token_ids: Sequence[int], accepted: Sequence[bool]) -> None:
        if self._colour:
            for token, drafted in zip(token_ids, accepted, strict=True):
                self._pending.extend((char, bool(drafted)) for char in self._decode(token))

    def paint(self, text: str) -> str:
        """`text` with the accepted characters in green."""
        if not self._colour:
            return text
        out, run, run_accepted = [], "", False
        for index, char in enumerate(text):
            if not self._pending or self._pending[0][0] != char:
                self._colour = False
                return "".join(out) + paint(run, GREEN, run_accepted) + text[index:]
            accepted = self._pending.popleft()[1]
            if accepted != run_accepted:
                out.append(paint(run, GREEN, run_accepted))
                run, run_accepted = "", accepted
            run += char
        return "".join(out) + paint(run, GREEN, run_accepted)


@dataclasses.dataclass(frozen=True)
class TreeView:
    """One round's tree as plain lists: N nodes, parents before children, node 0 the root."""

    token: Sequence[int]
    parent: Sequence[int]
    score: Sequence[float]
    source: Sequence[int]
    path: Sequence[int]  # accepted nodes, the root first
    bonus: int | None = None  # token the target put after the accepted path


def view_of(trace: RoundTrace) -> TreeView:
    """A `RoundTrace` as a TreeView. The bonus is None where the answer was cut before it."""
    accepted = len(trace.path) - 1
    return TreeView(
        token=[int(x) for x in trace.token],
        parent=[int(x) for x in trace.parent],
        score=[float(x) for x in trace.score],
        source=[int(x) for x in trace.source],
        path=[int(x) for x in trace.path],
        bonus=int(trace.emitted[accepted]) if len(trace.emitted) > accepted else None,
    )


def tree_lines(view: TreeView, piece: Callable[[int], str], colour: bool = False) -> list[str]:
    """Draws a tree with box characters; accepted nodes carry a check mark, so colour is never
    needed to read it.

    Args:
        view: the tree.
        piece: token id -> its text.
        colour: accepted path in green, rejected nodes dim.
    """
    children: dict[int, list[int]] = collections.defaultdict(list)
    for node in range(1, len(view.token)):
        children[view.parent[node]].append(node)
    accepted = set(view.path)
    lines = [f"{paint(repr(piece(view.token[0])), BOLD, colour)} (root)"]
    # An explicit stack: parents are drawn before children, siblings best first.
    stack = [(node, "", node == children[0][-1]) for node in reversed(children[0])]
    while stack:
        node, indent, last = stack.pop()
        took = node in accepted
        mark = "✓" if took else "·"
        label = f"{mark} {piece(view.token[node])!r}"
        note = f"{view.score[node]:.2f} {SOURCES.get(view.source[node], '?')}"
        text = f"{paint(label, GREEN if took else DIM, colour)}  {paint(note, DIM, colour)}"
        lines.append(f"{indent}{'└─' if last else '├─'} {text}")
        below = children[node]
        deeper = indent + ("   " if last else "│  ")
        stack.extend((child, deeper, child == below[-1]) for child in reversed(below))
    if view.bonus is not None:
        lines.append(
            f"the target's own next token: {paint(repr(piece(view.bonus)), YELLOW, colour)}"
        )
    return lines


def number(value: float | None, digits: int = 2, suffix: str = "") -> str:
    """A number for a table; None and non-finite values are "n/a"."""
    if value is None or value - value != 0:
        return "n/a"
    return f"{value:.{digits}f}{suffix}"


def percent(value: float | None) -> str:
    return "n/a" if value is None or value - value != 0 else f"{100 * value:.0f}%"


def key_values(values: Mapping[str, Any], indent: int = 2) -> list[str]:
    """Nested mappings as aligned `key: value` lines (for --plan)."""
    lines = []
    width = max((len(str(k)) for k, v in values.items() if not isinstance(v, Mapping)), default=0)
    for key, value in values.items():
        if isinstance(value, Mapping):
            lines.append(" " * indent + f"{key}:")
            lines += key_values(value, indent + 2)
        else:
            lines.append(" " * indent + f"{key!s:<{width}}  {value}")
    return lines


def pretty(name: str) -> str:
    """A suite's usual spelling."""
    return PRETTY.get(name, name)
