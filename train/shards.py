"""Shards of regenerated answers, written: the format that `train.data` reads."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np


@dataclasses.dataclass
class Writing:
    """A sequence that is being written: `features` are pieces of [rows, n + 1, H] bfloat16."""

    prompt_id: str
    source: str
    ids: list[int]
    prompt_len: int
    features: list[np.ndarray]


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
        for i, seq in enumerate(self.pending):
            rows = np.concatenate(seq.features)[: len(seq.ids)].view(np.uint16)
            tokens[i, : len(seq.ids)] = seq.ids
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
                prompt_len=np.asarray([s.prompt_len for s in self.pending], np.int32),
            )
        part.rename(self.out / name)
        self._append(
            {
                "verdict": "done",
                "shard": name,
                "ids": [s.prompt_id for s in self.pending],
                "sources": [s.source for s in self.pending],
                "answer_tokens": sum(len(s.ids) - s.prompt_len for s in self.pending),
            }
        )
        self.pending = []
