"""Answers without their features: small enough to keep, and complete enough to train on again.

    python -m train.answers --data .cache/regen/smollm2 --out train/assets/smollm2_135m_answers.npz

Features are thousands of times larger than the tokens they belong to, and one forward brings them
back: `train.regenerate --answers FILE` fills a data folder from a pack before it writes new
answers. A pack holds ids of prompts and tokens of answers, no prompt text: prompts are drawn again
from the same packages.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

from jetspec_jax.errors import ConfigError, ModelFileError
from train.cli import run_command

# of data folders that were made before meta.json had them
DEFAULTS = {"precision": "float32", "for_evaluation": False}
_KEYS = ("target", "vocab_size", "seed", "temperature", "precision", "max_new", "for_evaluation")


@dataclasses.dataclass(frozen=True)
class Answers:
    """`tokens[i]` [n] int32 answers the prompt `ids[i]`; `meta` says who wrote them and how."""

    ids: tuple[str, ...]
    tokens: tuple[np.ndarray, ...]
    meta: dict[str, Any]

    @property
    def count(self) -> int:
        return sum(len(t) for t in self.tokens)


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
        tokens: list[np.ndarray] = []
        for entry in entries:
            if "shard" not in entry:
                continue
            file = folder / entry["shard"]
            with file.open("rb") as handle, np.load(handle, allow_pickle=False) as shard:
                spans = zip(entry["ids"], shard["prompt_len"], shard["length"], strict=True)
                rows = shard["tokens"]
                for row, (prompt_id, start, stop) in enumerate(spans):
                    ids.append(prompt_id)
                    tokens.append(rows[row, start:stop].astype(np.int32))
    except (OSError, ValueError, KeyError) as err:
        raise ModelFileError(
            f"{folder}: is no complete data folder ({str(err)[:100]}); make one with `python -m "
            "train.regenerate`"
        ) from err
    return Answers(tuple(ids), tuple(tokens), {k: meta.get(k, DEFAULTS.get(k)) for k in _KEYS})


def write(answers: Answers, path: Path) -> None:
    """One compressed .npz, atomically."""
    part = path.with_suffix(".part")
    small = answers.meta["vocab_size"] <= 1 << 16
    flat = np.concatenate([np.zeros(0, np.int32), *answers.tokens])
    with part.open("wb") as file:
        np.savez_compressed(
            file,
            ids=np.asarray(answers.ids, "S16"),
            length=np.asarray([len(t) for t in answers.tokens], np.int32),
            tokens=flat.astype(np.uint16 if small else np.int32),
            meta=np.asarray(json.dumps(answers.meta)),
        )
    part.rename(path)


def read(path: Path) -> Answers:
    """A pack.

    Raises:
        ModelFileError: missing or damaged.
    """
    try:
        # opened here: np.load leaves a damaged file open
        with path.open("rb") as handle, np.load(handle, allow_pickle=False) as file:
            length, flat = file["length"], file["tokens"].astype(np.int32)
            ids = tuple(x.decode() for x in file["ids"])
            meta = json.loads(str(file["meta"]))
        if int(length.sum()) != len(flat) or len(ids) != len(length) or (length < 1).any():
            raise ValueError("its lengths do not add up")
    except Exception as err:
        raise ModelFileError(
            f"{path}: is no pack of answers ({_why(err)}); make one with `python -m train.answers`"
        ) from err
    return Answers(ids, tuple(np.split(flat, np.cumsum(length)[:-1])) if ids else (), meta)


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
    return {"sequences": len(answers.ids), "tokens": answers.count, "bytes": size}


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
