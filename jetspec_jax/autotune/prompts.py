"""Two disjoint halves of any prompt set: explorers measure on one, the gate accepts on the other.

Which half a prompt is in depends on its text alone, so a prompt that stands in two suites, or twice
in one, is never in both. Which prompts of its half the gate takes is drawn with a seed made after
the candidate is fixed.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import random
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from jetspec_jax.errors import InputError


@dataclasses.dataclass(frozen=True)
class Prompt:
    """One conversation to answer. `id` names it in reports."""

    id: str
    messages: tuple[Mapping[str, Any], ...]

    @property
    def digest(self) -> str:
        """Of the text, whatever its white space and case."""
        parts = [[m.get("role"), " ".join(str(m.get("content")).split())] for m in self.messages]
        return hashlib.sha256(json.dumps(parts).casefold().encode()).hexdigest()


def prompts_of(items: Iterable[Any], prefix: str = "") -> tuple[Prompt, ...]:
    """Prompts from anything with `id` and `messages` (`serve.suites.SuitePrompt`); ids get the
    prefix, such as the suite's name.
    """
    return tuple(Prompt(f"{prefix}{item.id}", tuple(item.messages)) for item in items)


def split(prompts: Sequence[Prompt]) -> tuple[tuple[Prompt, ...], tuple[Prompt, ...]]:
    """(seen, unseen): for explorers, and for the gate. Each text once."""
    once = {prompt.digest: prompt for prompt in reversed(prompts)}
    unique = [p for p in prompts if once.pop(p.digest, None) is not None]
    halves: tuple[list[Prompt], list[Prompt]] = ([], [])
    for prompt in unique:
        halves[int(prompt.digest[-1], 16) % 2].append(prompt)
    return tuple(halves[0]), tuple(halves[1])


def draw(unseen: Sequence[Prompt], candidate: str, nonce: str) -> list[Prompt]:
    """The gate's prompts in the order it takes them.

    Args:
        unseen: the gate's half.
        candidate: id of the candidate, which is fixed by now.
        nonce: text that nobody knew before the candidate was fixed.

    Raises:
        InputError: there are none.
    """
    if not unseen:
        raise InputError("no prompts are left for the gate; give a suite with more prompts")
    order = list(unseen)
    random.Random(hashlib.sha256(f"{candidate}|{nonce}".encode()).digest()).shuffle(order)
    return order
