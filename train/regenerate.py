"""Answers written by the target itself, with the features that a draft head reads: the training
data.

    python -m train.regenerate --out .cache/regen/smollm2 --prompts 20000 --max-seconds 3600

Continuous batching over a fixed number of slots: a finished sequence leaves, the next prompt is
prefilled alone and its keys are copied into the free slot. While an answer is written, the tapped
hidden states and the final hidden state of every token are kept, so no second forward is needed to
train. Shards are written atomically; a run goes on where the last one ended, and every prompt is
accounted for: done + skipped + failed = input.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import signal
import sys
import time
from pathlib import Path
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from tqdm import tqdm

from jetspec_jax.cache import KVCache, after, alloc, commit
from jetspec_jax.config import KERNELS, EngineConfig, ModelConfig, SamplingParams
from jetspec_jax.drafter.checkpoint import default_layer_ids
from jetspec_jax.errors import ConfigError, JetSpecError
from jetspec_jax.loading import Target, load_target
from jetspec_jax.models.decoder import Numerics, forward_block, head_logits
from jetspec_jax.sampling import SamplingState, choose, sampling_state
from jetspec_jax.typing import Array, Params
from train.prompts import training_prompts

_CHUNK = 64  # rows of a prefill step, and the unit of cache lengths
_STEPS = 16  # decode steps between two looks at the host


@dataclasses.dataclass(frozen=True)
class RegenConfig:
    """Static shapes of a regeneration run."""

    slots: int
    max_prompt: int
    max_new: int
    taps: tuple[int, ...]
    numerics: Numerics

    @property
    def allocated(self) -> int:
        chunk = self.numerics.attention_chunk
        return -(-(self.max_prompt + self.max_new + _CHUNK) // chunk) * chunk


@flax.struct.dataclass
class Slots:
    """B sequences that are being written."""

    cache: KVCache
    token: Array  # [B] int32, last id, no key yet
    cached: Array  # [B] int32 live keys
    sampling: SamplingState


def _features(out: Any) -> Array:
    """Taps and final hidden state side by side, bfloat16 [B, T, n + 1, H]."""
    return jnp.concatenate([out.taps, out.hidden[:, :, None]], 2).astype(jnp.bfloat16)


def prefill_chunk(
    model: ModelConfig,
    cfg: RegenConfig,
    params: Params,
    cache: KVCache,
    tokens: Array,
    start: Array,
) -> tuple[KVCache, Array]:
    """Keys and features of `_CHUNK` prompt tokens [1, _CHUNK] from position `start` [1] of one
    sequence.
    """
    rows = tokens.shape[1]
    mask = jnp.tril(jnp.ones((rows, rows), bool))[None]
    positions = start[:, None] + lax.iota(jnp.int32, rows)[None]
    out = forward_block(
        params,
        model,
        tokens,
        positions,
        cache.k,
        cache.v,
        start,
        mask,
        taps=cfg.taps,
        numerics=cfg.numerics,
    )
    return commit(cache, out.new_k, out.new_v, after(start, out.hidden)), _features(out)


def admit(
    slots: Slots, one: KVCache, slot: Array, token: Array, cached: Array, sampling: SamplingState
) -> Slots:
    """Copies a prefilled sequence (`one`, batch 1) into slot `slot` (int32 [])."""

    def place(whole: Array, part: Array) -> Array:
        return lax.dynamic_update_slice(
            whole, part.astype(whole.dtype), (slot,) + (0,) * (whole.ndim - 1)
        )

    return Slots(
        cache=jax.tree.map(place, slots.cache, one),
        token=place(slots.token, token),
        cached=place(slots.cached, cached),
        sampling=jax.tree.map(place, slots.sampling, sampling),
    )


def write_steps(
    model: ModelConfig, cfg: RegenConfig, params: Params, slots: Slots
) -> tuple[Slots, Array, Array]:
    """`_STEPS` tokens of every slot: new ids [steps, B] and the features of the tokens before them.

    A finished or empty slot writes on into its own slack; the host drops what it wrote.
    """
    mask = jnp.ones((cfg.slots, 1, 1), bool)
    last = cfg.allocated - _CHUNK

    def step(slots: Slots, _: None) -> tuple[Slots, tuple[Array, Array]]:
        out = forward_block(
            params,
            model,
            slots.token[:, None],
            slots.cached[:, None],
            slots.cache.k,
            slots.cache.v,
            slots.cached,
            mask,
            taps=cfg.taps,
            numerics=cfg.numerics,
        )
        logits = head_logits(params, out.hidden)
        zero = jnp.zeros_like(slots.token)[:, None]
        token = choose(logits, slots.cached[:, None] + 1, zero, slots.sampling, 0)[:, 0]
        cache = commit(slots.cache, out.new_k, out.new_v, after(slots.cached, token))
        return (
            dataclasses.replace(
                slots, cache=cache, token=token, cached=jnp.minimum(slots.cached + 1, last)
            ),
            (token, _features(out)[:, 0]),
        )

    slots, (tokens, features) = lax.scan(step, slots, None, length=_STEPS)
    return slots, tokens, features


@dataclasses.dataclass
class _Writing:
    """Host side of a slot."""

    prompt_id: str
    source: str
    ids: list[int]
    prompt_len: int
    features: list[np.ndarray]


class ShardWriter:
    """Sequences to .npz shards and a manifest, atomically, with the format that `train.features`
    reads.
    """

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

    def add(self, done: _Writing) -> None:
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


def _common_prefix(a: list[int], b: list[int]) -> int:
    return next(
        (i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b))
    )


class Regenerator:
    """Compiled programs and slots of one run."""

    def __init__(self, target: Target, cfg: RegenConfig) -> None:
        self.target, self.cfg = target, cfg
        model = target.config
        dtype = jnp.float32
        self._alloc = functools.partial(
            alloc,
            model.num_layers,
            heads=model.num_kv_heads,
            allocated=cfg.allocated,
            head_dim=model.head_dim,
            dtype=dtype,
        )
        self._prefill = jax.jit(functools.partial(prefill_chunk, model, cfg), donate_argnums=(1,))
        self._admit = jax.jit(admit, donate_argnums=(0,))
        self._steps = jax.jit(functools.partial(write_steps, model, cfg), donate_argnums=(1,))
        self.one = self._alloc(batch=1)
        idle = np.zeros((cfg.slots,), np.int32)
        self.slots = Slots(
            self._alloc(batch=cfg.slots),
            jnp.array(idle),
            jnp.array(idle),
            sampling_state([SamplingParams()] * cfg.slots),
        )
        self.writing: list[_Writing | None] = [None] * cfg.slots
        self._prefilled: list[int] = []
        self._prefilled_features: list[np.ndarray] = []

    def start(
        self, slot: int, prompt: dict[str, Any], ids: list[int], sampling: SamplingParams
    ) -> None:
        """Prefills all prompt ids but the last and puts the sequence into `slot`."""
        # Prompts share the template's opening: its keys are still in `one`, its features are kept
        # beside it.
        done = _common_prefix(self._prefilled, ids[:-1])
        features = [np.concatenate(self._prefilled_features)[:done]] if done else []
        while done < len(ids) - 1:
            piece = ids[done : min(done + _CHUNK, len(ids) - 1)]
            row = np.zeros((1, _CHUNK), np.int32)
            row[0, : len(piece)] = piece
            self.one, feats = self._prefill(
                self.target.params, self.one, row, jnp.asarray([done], jnp.int32)
            )
            features.append(np.asarray(feats[0, : len(piece)]))
            done += len(piece)
        self._prefilled, self._prefilled_features = ids[:-1], features
        self.slots = self._admit(
            self.slots,
            self.one,
            jnp.asarray(slot, jnp.int32),
            jnp.asarray(ids[-1:], jnp.int32),
            jnp.asarray([done], jnp.int32),
            sampling_state([sampling]),
        )
        self.writing[slot] = _Writing(
            prompt["id"], prompt["source"], list(ids), len(ids), list(features)
        )

    def advance(self, stop_ids: set[int]) -> list[_Writing]:
        """Runs `_STEPS` steps; returns the sequences that ended."""
        self.slots, tokens, features = self._steps(self.target.params, self.slots)
        new, feats = np.asarray(tokens), np.asarray(features)
        ended = []
        for slot, seq in enumerate(self.writing):
            if seq is None:
                continue
            fresh = [int(t) for t in new[:, slot]]
            room = seq.prompt_len + self.cfg.max_new - len(seq.ids)
            stop = next((i + 1 for i, t in enumerate(fresh) if t in stop_ids), None)
            kept = min(x for x in (stop, room, len(fresh)) if x is not None)
            seq.ids += fresh[:kept]
            seq.features.append(feats[:kept, slot])  # row i belongs to the token before fresh[i]
            if kept in (room, stop):
                ended.append(seq)
                self.writing[slot] = None
        return ended


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Regenerates until the prompts or the time are used up; returns the accounting."""
    target = load_target(
        args.model,
        EngineConfig(kernels=args.kernels),
        lambda m: print(m, file=sys.stderr, flush=True),
    )
    taps = (
        tuple(args.taps)
        if args.taps
        else default_layer_ids(args.num_taps, target.config.num_layers)
    )
    cfg = RegenConfig(
        args.slots,
        args.max_prompt,
        args.max_new,
        taps,
        Numerics(native=target.kernels == "cpu", attention_chunk=128),
    )
    writer = ShardWriter(Path(args.out))
    meta = {
        "target": target.config.name,
        "hidden_size": target.config.hidden_size,
        "taps": list(taps),
        "vocab_size": target.config.vocab_size,
        "max_new": args.max_new,
        "prompts": args.prompts,
        "seed": args.seed,
        "temperature": args.temperature,
        "command": " ".join(["python -m train.regenerate", *sys.argv[1:]]),
    }
    meta_path = writer.out / "meta.json"
    if meta_path.exists():
        before = json.loads(meta_path.read_text())
        changed = [
            k
            for k in ("target", "taps", "vocab_size", "seed", "temperature")
            if before[k] != meta[k]
        ]
        if changed:
            raise ConfigError(
                f"{args.out} was made with another {', '.join(changed)}; use another --out"
            )
    meta_path.write_text(json.dumps(meta, indent=1))

    prompts = training_prompts(args.prompts, args.seed)
    todo = [p for p in prompts if p["id"] not in writer.seen]
    regen = Regenerator(target, cfg)
    stop_ids = set(target.config.eos_ids)
    stopping = []
    for sig in (signal.SIGINT, signal.SIGTERM):
        signal.signal(sig, lambda *_: stopping.append(True))
    started, first = time.monotonic(), writer.tokens
    bar = tqdm(total=len(prompts), initial=len(prompts) - len(todo), unit="prompt", mininterval=5)
    queue = iter(todo)
    exhausted = False
    while True:
        out_of_time = time.monotonic() - started > args.max_seconds
        for slot in range(cfg.slots):
            while regen.writing[slot] is None and not (exhausted or out_of_time or stopping):
                prompt = next(queue, None)
                if prompt is None:
                    exhausted = True
                    break
                ids = target.tokenizer.chat(prompt["messages"])
                if not 2 <= len(ids) <= cfg.max_prompt:
                    writer.drop(prompt["id"], "skipped", f"{len(ids)} prompt tokens")
                    bar.update()
                    continue
                seed = int(prompt["id"][:8], 16)
                regen.start(
                    slot, prompt, ids, SamplingParams(temperature=args.temperature, seed=seed)
                )
        if stopping or not any(regen.writing) or (out_of_time and args.drop_unfinished):
            break
        for seq in regen.advance(stop_ids):
            writer.add(seq)
            bar.update()
        written = writer.tokens + sum(len(s.ids) - s.prompt_len for s in writer.pending) - first
        bar.set_postfix(tokens=written, tok_s=f"{written / (time.monotonic() - started):.0f}")
    bar.close()
    writer.flush()
    verdicts = {
        v: sum(len(x["ids"]) for x in writer.lines if x["verdict"] == v)
        for v in ("done", "skipped", "failed")
    }
    verdicts |= {"input": len(prompts), "open": len(prompts) - len(writer.seen)}
    return {
        **verdicts,
        "answer_tokens": writer.tokens,
        "seconds": round(time.monotonic() - started, 1),
    }


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(
        prog="train.regenerate", description=(__doc__ or "").splitlines()[0]
    )
    p.add_argument("--model", help="model directory or GGUF file (default: bundled)")
    p.add_argument(
        "--out", required=True, help="folder for shards; an earlier run there is resumed"
    )
    p.add_argument("--prompts", type=int, default=20_000, help="how many training prompts to draw")
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--slots", type=int, default=32, help="sequences written at once")
    p.add_argument(
        "--max-prompt", type=int, default=320, help="longer prompts are skipped (tokens)"
    )
    p.add_argument("--max-new", type=int, default=224, help="longest answer (tokens)")
    p.add_argument("--temperature", type=float, default=0.0)
    p.add_argument("--num-taps", type=int, default=5, help="tapped layers, by the default formula")
    p.add_argument("--taps", type=int, nargs="*", help="tapped layers, explicitly")
    p.add_argument("--kernels", choices=KERNELS, default="auto")
    p.add_argument("--max-seconds", type=float, default=float("inf"))
    p.add_argument(
        "--drop-unfinished",
        action="store_true",
        help="at the time limit, do not finish open sequences",
    )
    return p


def main(argv: list[str] | None = None) -> int:
    args = parser().parse_args(argv)
    try:
        print(json.dumps(run(args)))
    except JetSpecError as err:
        print(f"error: {err}", file=sys.stderr)
        return err.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
