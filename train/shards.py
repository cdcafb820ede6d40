"""Conversations that are being written, and their shards: the format that `train.data` reads."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jetspec_jax.errors import InputError
from jetspec_jax.text import Tokenizer

Message = dict[str, str]
REFUSED = "the chat template renders the written answers with other tokens"


def split_turns(messages: Sequence[Message]) -> list[list[Message]]:
    """A conversation in parts, each of which the target answers.

    A user's message is answered unless a given assistant message follows it: what is given is
    context.
    """
    parts: list[list[Message]] = [[]]
    for i, message in enumerate(messages):
        parts[-1].append(message)
        given = messages[i + 1 : i + 2] and messages[i + 1]["role"] == "assistant"
        if message["role"] == "user" and not given:
            parts.append([])
    return [part for part in parts if part]


@dataclasses.dataclass
class Writing:
    """A conversation that is being written.

    Attributes:
        ids: tokens that are known, from position 0 on.
        start: position of the first token of the answer that is being written.
        messages: what `ids` render, without the answer that is being written.
        turns: parts of the conversation (`split_turns`) that are still to come.
        spans: [start, stop) of the answers that are complete.
        features: pieces of [rows, n + 1, H] bfloat16, from position 0 on.
        refused: why the conversation gives no sequence.
    """

    prompt_id: str
    source: str
    ids: list[int]
    start: int
    messages: list[Message]
    turns: list[list[Message]]
    spans: list[tuple[int, int]] = dataclasses.field(default_factory=list)
    features: list[np.ndarray] = dataclasses.field(default_factory=list)
    refused: str | None = None

    @classmethod
    def begin(cls, prompt: Mapping[str, Any], ids: Sequence[int]) -> Writing:
        """`prompt` ({"id", "source", "messages"}), whose first part is `ids`."""
        first, *rest = split_turns(prompt["messages"])
        return cls(prompt["id"], prompt["source"], list(ids), len(ids), first, rest)

    @property
    def fed(self) -> int:
        """Tokens whose features are there."""
        return sum(len(piece) for piece in self.features)

    @property
    def written(self) -> int:
        """Tokens of complete answers."""
        return sum(stop - start for start, stop in self.spans)

    def next_turn(self, tokenizer: Tokenizer, max_tokens: int) -> bool:
        """Puts what follows the last complete answer behind it, up to the next answer's header.

        The template renders the conversation with the answers' text, as a server would do it for
        this turn. It has to give the tokens that are there, else the conversation is `refused`: its
        features would be of another text. False where it ends here: refused, no turn left, or no
        room for an answer in `max_tokens`.
        """
        if not self.turns:
            return False
        text = tokenizer.decode(self.ids[slice(*self.spans[-1])])
        answer = {"role": "assistant", "content": text}
        self.messages = [*self.messages, answer, *self.turns.pop(0)]
        try:
            whole = tokenizer.chat(self.messages)
        except InputError as err:
            self.refused = str(err)
            return False
        if whole[: len(self.ids)] != self.ids:
            self.refused = REFUSED
        if self.refused or len(whole) >= max_tokens:
            return False
        self.ids, self.start = whole, len(whole)
        return True


def spans_of(shard: Mapping[str, np.ndarray], row: int) -> list[tuple[int, int]]:
    """[start, stop) of the answers of a sequence; one from its prompt on where a shard has no
    spans."""
    if "spans" not in shard:
        found = [(int(shard["prompt_len"][row]), int(shard["length"][row]))]
    else:
        found = [(int(start), int(stop)) for start, stop in shard["spans"][row]]
    return [(start, stop) for start, stop in found if start < stop]


class ShardWriter:
    """Sequences to .npz shards and a manifest, atomically."""

    def __init__(self, out: Path, per_shard: int = 64) -> None:
        self.out, self.per_shard, self.pending = out, per_shard, []
        out.mkdir(parents=True, exist_ok=True)
        self.manifest = out / "manifest.jsonl"
        self.lines = (
            [json.loads(x) for x in self.manifest.read_text().splitlines()]
            if self.manifest.exists()
            else []
        )
        self.seen = {i for line in self.lines for i in line["ids"]}

    @property
    def tokens(self) -> int:
        return sum(line.get("answer_tokens", 0) for line in self.lines)

    def _append(self, line: dict[str, Any]) -> None:
        with self.manifest.open("a") as file:
            file.write(json.dumps(line) + "\n")
        self.lines.append(line)
        self.seen.update(line["ids"])

    def drop(self, prompt_id: str, verdict: str, reason: str) -> None:
        """Records a prompt that gives no sequence: verdict "skipped" (by rule) or "failed"."""
        self._append({"verdict": verdict, "ids": [prompt_id], "reason": reason})

    def add(self, done: Writing) -> None:
        self.pending.append(done)
        if len(self.pending) >= self.per_shard:
            self.flush()

    def flush(self) -> None:
        """Writes pending sequences as one shard: the file first, then the manifest line that makes
        it count.
        """
        if not self.pending:
            return
        longest = max(len(s.ids) for s in self.pending)
        count = len(self.pending)
        tokens = np.zeros((count, longest), np.int32)
        n_taps, width = self.pending[0].features[0].shape[-2:]
        taps = np.zeros((count, longest, n_taps - 1, width), np.uint16)
        final = np.zeros((count, longest, width), np.uint16)
        spans = np.zeros((count, max(len(s.spans) for s in self.pending), 2), np.int32)
        for i, seq in enumerate(self.pending):
            rows = np.concatenate(seq.features)[: len(seq.ids)].view(np.uint16)
            tokens[i, : len(seq.ids)] = seq.ids
            spans[i, : len(seq.spans)] = seq.spans
            taps[i, : len(rows)] = rows[:, :-1]
            final[i, : len(rows)] = rows[:, -1]
        shards = sum("shard" in line for line in self.lines)
        name = f"shard_{shards:05d}.npz"
        part = self.out / (name + ".part")
        with part.open("wb") as file:
            np.savez(
                file,
                tokens=tokens,
                taps=taps,
                final=final,
                length=np.asarray([len(s.ids) for s in self.pending], np.int32),
                prompt_len=np.asarray([s.spans[0][0] for s in self.pending], np.int32),
                spans=spans,
            )
        part.rename(self.out / name)
        self._append(
            {
                "verdict": "done",
                "shard": name,
                "ids": [s.prompt_id for s in self.pending],
                "sources": [s.source for s in self.pending],
                "answers": sum(len(s.spans) for s in self.pending),
                "answer_tokens": sum(s.written for s in self.pending),
            }
        )
        self.pending = []
