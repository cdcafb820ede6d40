"""Answers without their features: small enough to keep, and complete enough to train on again.

    python -m train.answers --data .cache/regen/smollm2 --out train/assets/smollm2_135m_answers.npz

Features are thousands of times larger than the tokens they belong to, and one forward brings them
back: `train.regenerate --answers FILE` fills a data folder from a pack before it writes new
answers. A pack holds ids of prompts and tokens of answers, no prompt text: prompts are drawn again
from the same packages, and a checksum of the tokens before each answer tells whether it still
belongs there.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import sys
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jetspec_jax.errors import ConfigError, ModelFileError
from train.cli import run_command
from train.shards import spans_of

# of data folders that were made before meta.json had them
DEFAULTS = {"precision": "float32", "for_evaluation": False}
_KEYS = ("target", "vocab_size", "seed", "temperature", "precision", "max_new", "for_evaluation")


def _checksum(ids: Sequence[int] | np.ndarray) -> int:
    return zlib.crc32(np.asarray(ids, "<i4").tobytes())


class Answer(NamedTuple):
    """One turn's tokens, [n] int32, and the checksum of all tokens before them; -1: not known."""

    tokens: np.ndarray
    before: int = -1

    def follows(self, ids: Sequence[int]) -> bool:
        """Whether it was written behind `ids`, as far as is known."""
        return self.before in (-1, _checksum(ids))


@dataclasses.dataclass(frozen=True)
class Answers:
    """`answers[i]` are those of the conversation `ids[i]`, in order; `meta` says who wrote them and
    how."""

    ids: tuple[str, ...]
    answers: tuple[tuple[Answer, ...], ...]
    meta: dict[str, Any]

    @property
    def flat(self) -> list[Answer]:
        """All answers, in order."""
        return [answer for written in self.answers for answer in written]

    @property
    def count(self) -> int:
        """Answer tokens."""
        return sum(len(answer.tokens) for answer in self.flat)


def collect(folder: Path) -> Answers:
    """All answers of a data folder.

    Raises:
        ModelFileError: no complete data folder of `train.regenerate`.
    """
    try:
        meta = json.loads((folder / "meta.json").read_text(encoding="utf-8"))
        lines = (folder / "manifest.jsonl").read_text(encoding="utf-8").splitlines()
        entries = [json.loads(line) for line in lines]
        ids: list[str] = []
        found: list[tuple[Answer, ...]] = []
        for entry in entries:
            if "shard" not in entry:
                continue
            file = folder / entry["shard"]
            with file.open("rb") as handle, np.load(handle, allow_pickle=False) as stored:
                wanted = {"tokens", "length", "prompt_len", "spans"} & set(stored.files)
                shard = {name: stored[name] for name in wanted}
            for row, prompt_id in enumerate(entry["ids"]):
                tokens = shard["tokens"][row].astype(np.int32)
                spans = spans_of(shard, row)
                ids.append(prompt_id)
                found.append(tuple(Answer(tokens[a:b], _checksum(tokens[:a])) for a, b in spans))
    except (OSError, ValueError, KeyError) as err:
        raise ModelFileError(
            f"{folder}: is no complete data folder ({str(err)[:100]}); make one with `python -m "
            "train.regenerate`"
        ) from err
    return Answers(tuple(ids), tuple(found), {k: meta.get(k, DEFAULTS.get(k)) for k in _KEYS})


def write(answers: Answers, path: Path) -> None:
    """One compressed .npz, atomically."""
    part = path.with_suffix(".part")
    small = answers.meta["vocab_size"] <= 1 << 16
    flat = np.concatenate([np.zeros(0, np.int32), *(a.tokens for a in answers.flat)])
    with part.open("wb") as file:
        np.savez_compressed(
            file,
            ids=np.asarray(answers.ids, "S16"),
            turns=np.asarray([len(written) for written in answers.answers], np.int32),
            length=np.asarray([len(a.tokens) for a in answers.flat], np.int32),
            before=np.asarray([a.before for a in answers.flat], np.int64),
            tokens=flat.astype(np.uint16 if small else np.int32),
            meta=np.asarray(json.dumps(answers.meta)),
        )
    part.rename(path)


def read(path: Path) -> Answers:
    """A pack; one without turns holds an answer for each conversation.

    Raises:
        ModelFileError: missing or damaged.
    """
    try:
        # opened here: np.load leaves a damaged file open
        with path.open("rb") as handle, np.load(handle, allow_pickle=False) as file:
            length, flat = file["length"], file["tokens"].astype(np.int32)
            ids = tuple(x.decode() for x in file["ids"])
            meta = json.loads(str(file["meta"]))
            turns = file["turns"] if "turns" in file else np.ones(len(ids), np.int32)
            before = file["before"] if "before" in file else np.full(len(length), -1)
        counts = (len(flat), len(length), len(length), len(ids))
        sums = (int(length.sum()), int(turns.sum()), len(before), len(turns))
        if counts != sums or (length < 1).any() or (turns < 1).any():
            raise ValueError("its lengths do not add up")
    except Exception as err:
        raise ModelFileError(
            f"{path}: is no pack of answers ({_why(err)}); make one with `python -m train.answers`"
        ) from err
    pieces = np.split(flat, np.cumsum(length)[:-1])
    every = iter([Answer(*x) for x in zip(pieces, before.tolist(), strict=False)])
    return Answers(ids, tuple(tuple(itertools.islice(every, n)) for n in turns.tolist()), meta)


def _why(err: Exception) -> str:
    # what NumPy says of other files is about pickles, and no advice to follow
    known = (OSError, KeyError)
    return str(err)[:100] if isinstance(err, known) or "add up" in str(err) else "another format"


def check(answers: Answers, meta: dict[str, Any], path: str) -> None:
    """Refuse answers of another target or another way of decoding.

    Raises:
        ConfigError: names what differs.
    """
    fixed = ("target", "vocab_size", "temperature", "for_evaluation")
    wrong = [k for k in fixed if answers.meta.get(k) != meta.get(k)]
    if wrong:
        found = ", ".join(f"{k} {answers.meta.get(k)!r} (here {meta.get(k)!r})" for k in wrong)
        raise ConfigError(f"{path}: holds answers of other settings: {found}; drop --answers")


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Packs a data folder."""
    answers = collect(Path(args.data))
    if not answers.ids:
        raise ModelFileError(f"{args.data}: holds no answers yet")
    write(answers, Path(args.out))
    size = Path(args.out).stat().st_size
    counts = {"sequences": len(answers.ids), "answers": len(answers.flat)}
    return counts | {"tokens": answers.count, "bytes": size}


def main(argv: list[str] | None = None) -> int:
    """Command line; the last line of stdout is JSON."""
    p = argparse.ArgumentParser(
        prog="python -m train.answers", description=(__doc__ or "").splitlines()[0]
    )
    p.add_argument("--data", required=True, help="data folder of train.regenerate")
    p.add_argument("--out", required=True, help="pack to write (.npz)")
    return run_command(run, p.parse_args(argv))


if __name__ == "__main__":
    sys.exit(main())
