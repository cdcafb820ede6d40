"""Training data: shards of regenerated answers, split by content, and batches that depend on (seed,
step) only.

A data folder holds shards (.npz or .safetensors). `train.regenerate` adds `manifest.jsonl`, whose
lines with a `shard` are the complete shards, and `meta.json`, whose `taps` are the tapped layers.
Arrays of a shard:

    tokens     int32  [n, T]          right padded; tokens[:prompt_len] is the prompt, the first
        answer follows
    length     int32  [n]             the whole conversation
    prompt_len int32  [n]
    spans      int32  [n, S, 2]       [start, stop) of the answers that the target wrote, ascending,
        padded with zeros (optional: without it one answer, from prompt_len to length)
    taps       uint16 [n, T, k, H]    bits of bfloat16; row t: outputs of the tapped layers at token
    t   (optional)
    final      uint16 [n, T, H]       bits of bfloat16; row t: hidden state after the final norm
        (optional)

Labels are tokens of spans only; all else, such as the next question, is context. A block ends with
the span that it begins in. The last token's features are never used (nothing follows it), and may
be zero.
Without taps and final the features are computed by `train.features` from the tokens.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import safetensors.numpy

from jetspec_jax.errors import ModelFileError
from train.config import DataConfig
from train.shards import spans_of


@dataclasses.dataclass(frozen=True)
class Sample:
    """One conversation with its answers. `taps` and `final` are bfloat16 bits (uint16) or None."""

    tokens: np.ndarray  # [length] int32
    spans: tuple[tuple[int, int], ...]  # [start, stop) of each answer, ascending, start at least 1
    taps: np.ndarray | None  # [length, k, H] uint16
    final: np.ndarray | None  # [length, H] uint16
    origin: str  # shard and row, for messages

    @property
    def length(self) -> int:
        return len(self.tokens)

    @functools.cached_property
    def span_stop(self) -> np.ndarray:
        """[length] int32: where the answer that holds the token ends; 0 for context."""
        stops = np.zeros(self.length, np.int32)
        for start, stop in self.spans:
            stops[start:stop] = stop
        return stops

    @property
    def answer(self) -> np.ndarray:
        """[answer tokens] int32: what is learned."""
        return self.tokens[self.span_stop > 0]

    @property
    def anchors(self) -> np.ndarray:
        """Positions that a block can follow, ascending int32.

        An anchor is the position of the last committed token: from the one before an answer (its
        block starts with the answer's first token) to the answer's last but one.
        """
        return np.flatnonzero(self.span_stop[1:]).astype(np.int32)


@dataclasses.dataclass(frozen=True)
class Dataset:
    """All sequences with at least one answer token, training part and held-out part."""

    train: tuple[Sample, ...]
    held_out: tuple[Sample, ...]
    digest: str  # sha256 over the shards
    target_layer_ids: tuple[int, ...] | None
    rejected: int  # sequences without an answer token

    @property
    def answer_tokens(self) -> int:
        return sum(len(s.answer) for s in self.train)


def _read_shard(path: Path) -> dict[str, np.ndarray]:
    try:
        if path.suffix == ".npz":
            with open(path, "rb") as handle, np.load(handle, allow_pickle=False) as file:
                return {name: file[name] for name in file.files}
        return safetensors.numpy.load_file(path)
    except Exception as err:
        raise ModelFileError(
            f"{path}: cannot be read ({str(err)[:100]}); delete the shard and regenerate it"
        ) from err


def shard_list(folder: Path) -> list[Path]:
    """Complete shards of a data folder: those of the manifest, or all shard files where there is no
    manifest.

    Raises:
        ModelFileError: no such folder, no shards, or a damaged manifest.
    """
    manifest = folder / "manifest.jsonl"
    remedy = f"make some with `python -m train.regenerate --out {folder}`"
    if not folder.is_dir():
        raise ModelFileError(f"{folder}: no such data folder; {remedy}")
    if manifest.is_file():
        lines = manifest.read_text(encoding="utf-8").splitlines()
        names = [
            entry["shard"]
            for i, line in enumerate(lines)
            if "shard" in (entry := _json(manifest, i, line))
        ]
    else:
        names = sorted(p.name for p in folder.iterdir() if p.suffix in (".npz", ".safetensors"))
    if not names:
        raise ModelFileError(f"{folder}: holds no shards; {remedy}")
    return [folder / str(name) for name in names]


def _json(path: Path, index: int, text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as err:
        raise ModelFileError(
            f"{path}:{index + 1}: not valid JSON ({err}); delete the line"
        ) from err
    if not isinstance(value, dict):
        raise ModelFileError(f"{path}:{index + 1}: not a JSON object; delete the line")
    return value


def tapped_layers(folder: Path) -> tuple[int, ...] | None:
    """Layers whose outputs the shards hold, from meta.json; None where there is none."""
    meta = folder / "meta.json"
    if not meta.is_file():
        return None
    value = _json(meta, 0, meta.read_text(encoding="utf-8"))
    return tuple(int(i) for i in value["taps"]) if "taps" in value else None


def is_for_evaluation(folder: Path) -> bool:
    """Whether the answers are to prompts of evaluation suites (`train.regenerate
    --for-evaluation`)."""
    meta = folder / "meta.json"
    return meta.is_file() and bool(
        _json(meta, 0, meta.read_text(encoding="utf-8")).get("for_evaluation", False)
    )


def _place(tokens: np.ndarray) -> float:
    """Where the prompt falls between 0 and 1, by its content alone."""
    digest = hashlib.sha256(np.ascontiguousarray(tokens, np.int32).tobytes()).digest()
    return int.from_bytes(digest[:8], "big") / 2**64


def load_dataset(cfg: DataConfig, *, allow_empty: bool = False) -> Dataset:
    """Read all shards of `cfg.path`; sequences longer than `max_tokens` are cut, those without an
    answer token rejected.

    The split depends on the tokens before the first answer only, so that growing data never moves a
    sequence across it, and two answers to one prompt stay on the same side. `allow_empty`: an
    evaluation may do without a training part.

    `limit` keeps that many training sequences, chosen by content: learning curves over data. The
    held-out part stays.

    Raises:
        ModelFileError: damaged or incomplete shards, or no usable sequence.
    """
    folder = Path(cfg.path)
    train: list[Sample] = []
    held: list[Sample] = []
    digest = hashlib.sha256()
    ids = tapped_layers(folder)
    rejected = 0
    for path in shard_list(folder):
        arrays = _read_shard(path)
        missing = [k for k in ("tokens", "length", "prompt_len") if k not in arrays]
        if missing:
            raise ModelFileError(
                f"{path}: array {missing[0]!r} is missing; delete the shard and regenerate it"
            )
        for name in ("tokens", "length", "spans"):
            digest.update(arrays[name].tobytes() if name in arrays else b"")
        for row in range(len(arrays["tokens"])):
            length = int(arrays["length"][row])
            cut = min(length, cfg.max_tokens)
            found = spans_of(arrays, row)
            places = [place for span in found for place in span]
            if places != sorted(places) or max(places, default=0) > length:
                raise ModelFileError(
                    f"{path}: row {row}: answers {found} overlap, or end behind its {length} "
                    "tokens; delete the shard and regenerate it"
                )
            spans = tuple((a, min(b, cut)) for a, b in found if 1 <= a < cut)
            if not spans:
                rejected += 1
                continue
            sequence = Sample(
                np.asarray(arrays["tokens"][row, :cut], np.int32),
                spans,
                # copies, so that the padding of the shard is freed
                *(arrays[k][row, :cut].copy() if k in arrays else None for k in ("taps", "final")),
                origin=f"{path.name} row {row}",
            )
            prompt = sequence.tokens[: spans[0][0]]
            (held if _place(prompt) < cfg.held_out else train).append(sequence)
    if not train and not (allow_empty and held):
        raise ModelFileError(
            f"{folder}: no sequence with an answer among {rejected + len(held)}; regenerate "
            "the data"
        )
    if 0 < cfg.limit < len(train):
        # by content: shards may be in order of length or family
        places = np.asarray([_place(s.tokens[: s.spans[0][0]]) for s in train])
        train = [train[i] for i in np.sort(np.argsort(places, kind="stable")[: cfg.limit])]
    return Dataset(tuple(train), tuple(held), digest.hexdigest(), ids, rejected)


def draft_vocabulary(
    sequences: Sequence[Sample], size: int, vocab: int, always: Sequence[int]
) -> np.ndarray:
    """Ids of the reduced draft vocabulary, ascending, [size] int32: `always`, then the most
    frequent answer ids.

    Ids that never occur fill up from the lowest. Ascending order keeps "lowest id wins ties" true
    in draft ids.
    """
    counts = np.zeros(vocab, np.int64)
    for s in sequences:
        counts += np.bincount(s.answer, minlength=vocab)[:vocab]
    keep = np.unique(np.asarray([i for i in always if 0 <= i < vocab], np.int64))
    order = np.argsort(-counts, kind="stable")
    rest = order[~np.isin(order, keep)][: max(size - len(keep), 0)]
    return np.sort(np.concatenate([keep, rest]))[:vocab].astype(np.int32)


def coverage(sequences: Sequence[Sample], id_map: np.ndarray, vocab: int) -> float:
    """Share of answer tokens that the draft vocabulary holds."""
    known = np.zeros(vocab, bool)
    known[id_map] = True
    hits = [known[s.answer] for s in sequences]
    return float(np.concatenate(hits).mean()) if hits else 0.0


def step_sequences(
    count: int, per_step: int, step: int, seed: int, lengths: np.ndarray
) -> np.ndarray:
    """Indices of the sequences of a step, [per_step]; every sequence once an epoch, a function of
    its arguments only.

    Within an epoch's random order, runs of 16 steps are sorted by length so that a batch holds
    similar lengths (less padding), and the batches of a run are shuffled again.
    """
    steps = max(count // per_step, 1)
    epoch, index = divmod(step, steps)
    rng = np.random.default_rng([seed, 1, epoch])
    order = np.resize(rng.permutation(count), steps * per_step)
    for start in range(0, len(order), 16 * per_step):
        run = order[start : start + 16 * per_step]
        run = run[np.argsort(lengths[run], kind="stable")].reshape(-1, per_step)
        order[start : start + run.size] = run[rng.permutation(len(run))].reshape(-1)
    return order[index * per_step : (index + 1) * per_step]


def draw_anchors(
    sequence: Sample, count: int, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """`count` distinct anchors of a sequence, ascending, and which of them are real ([count] int32,
    [count] bool)."""
    every = sequence.anchors
    chosen = np.sort(rng.permutation(every)[:count])
    valid = np.arange(count) < len(chosen)
    return np.resize(chosen, count) * valid + every[0] * ~valid, valid


def pad_length(longest: int, bucket: int) -> int:
    """Smallest multiple of `bucket` that holds `longest`."""
    return -(-longest // bucket) * bucket


def assemble(
    sequences: Sequence[Sample], anchors: list[tuple[np.ndarray, np.ndarray]], bucket: int
) -> dict[str, np.ndarray]:
    """Host arrays of a batch: the fields of `step.Batch`, without features where a sequence has
    none."""
    rows = pad_length(max(s.length for s in sequences), bucket)
    out: dict[str, np.ndarray] = {
        "tokens": np.zeros((len(sequences), rows), np.int32),
        "stop": np.stack(
            [s.span_stop[a + 1] for s, (a, _) in zip(sequences, anchors, strict=True)]
        ),
        "anchors": np.stack([a for a, _ in anchors]).astype(np.int32),
        "valid": np.stack([v for _, v in anchors]),
    }
    for i, s in enumerate(sequences):
        out["tokens"][i, : s.length] = s.tokens
    for name in ("taps", "final"):
        parts = [getattr(s, name) for s in sequences]
        if any(p is None for p in parts):
            continue
        array = np.zeros((len(sequences), rows, *parts[0].shape[1:]), np.uint16)
        for i, part in enumerate(parts):
            array[i, : len(part)] = part
            _check_finite(part, f"{name} of {sequences[i].origin}")
        out[name] = array.view(ml_dtypes.bfloat16)
    return out


def _check_finite(bits: np.ndarray, what: str) -> None:
    # All exponent bits set is inf or NaN; on the raw bits, because bfloat16 tests in NumPy are
    # slow.
    if ((bits & 0x7F80) == 0x7F80).any():
        raise ModelFileError(f"{what}: holds inf or NaN; delete the shard and regenerate it")


def train_batch(data: Dataset, cfg: DataConfig, step: int) -> dict[str, np.ndarray]:
    """The batch of a step: the same for the same data, configuration and step, however the run got
    there."""
    lengths = np.asarray([s.length for s in data.train])
    picked = [
        data.train[i]
        for i in step_sequences(len(data.train), cfg.sequences, step, cfg.seed, lengths)
    ]
    rng = np.random.default_rng([cfg.seed, 2, step])
    return assemble(picked, [draw_anchors(s, cfg.anchors, rng) for s in picked], cfg.bucket)


def held_out_batches(
    data: Dataset, cfg: DataConfig, sequences: int, anchors: int
) -> Iterator[dict[str, np.ndarray]]:
    """Fixed batches of the held-out part: evenly spaced whole blocks where the answers are long
    enough."""
    chosen = sorted(data.held_out[:sequences], key=lambda s: s.length)
    for start in range(0, len(chosen), cfg.sequences):
        group = chosen[start : start + cfg.sequences]
        group = group + group[:1] * (cfg.sequences - len(group))  # repeats are masked below
        picked = []
        for i, s in enumerate(group):
            every = s.anchors
            first = int(every[0])
            spread = np.linspace(first, first + len(every) - 1, anchors).astype(np.int32)
            where = every[np.unique(spread) - first]
            valid = np.arange(anchors) < len(where)
            if start + i >= len(chosen):
                valid[:] = False
            picked.append((np.resize(where, anchors), valid))
        yield assemble(group, picked, cfg.bucket)
