"""Answers written by the target itself, with the features that a draft head reads: the training
data.

    python -m train.regenerate --out .cache/regen/smollm2 --prompts 20000 --max-seconds 3600

Continuous batching over a fixed number of slots: finished sequences leave, the next prompts are
prefilled together and their keys are copied into the free slots. While an answer is written, the
tapped hidden states and the final hidden state of every token are kept, so no second forward is
needed to train. Shards are written atomically; a run goes on where the last one ended, and every
prompt is accounted for: done + skipped + failed = input.

A prompt is a conversation. Each of its user messages is answered in turn, unless an assistant
message follows it: that is context, and never trained on (`--replace-answers`: the target writes
its own instead). After an answer, at its end or at `--max-new`, the next turn is read by the same
steps in the same slot, so nothing is computed twice. A conversation ends before a turn that
`--max-tokens` has no room for. Where the chat template does not render the answers as the tokens
that were written (Qwen3's drops their reasoning; some answers are other tokens than their text),
the conversation is skipped; the summary counts it by its reason. A run that is stopped writes open
conversations anew, from their first turn on.

`--precision bfloat16` multiplies in bfloat16 (AMX and tensor cores), with float32 accumulation,
residual stream, attention and norms. Answers are then the target's up to near ties, which is what
training needs; `float32` writes exactly what the engine would write.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import functools
import json
import signal
import sys
import time
from collections.abc import Iterator, Sequence
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
from jetspec_jax.errors import ConfigError
from jetspec_jax.loading import Target, load_target, resolve_kernels
from jetspec_jax.models.decoder import (
    Numerics,
    declare,
    forward_block,
    forward_full,
    head_logits,
)
from jetspec_jax.models.spec import flatten, nest
from jetspec_jax.numerics import ComputeWeight
from jetspec_jax.sampling import SamplingState, choose, greedy, sampling_state
from jetspec_jax.typing import Array, Params
from train import answers
from train.cli import run_command
from train.prompts import prompts_from_file, training_prompts
from train.shards import ShardWriter, Writing, split_turns

_CHUNK = 64  # rows of a prefill step, and the unit of cache lengths
_WINDOW = 256  # prompts that are put in order of length, so that a group pads little
_STEPS = 16  # decode steps between two looks at the host


@dataclasses.dataclass(frozen=True)
class RegenConfig:
    """Static shapes of a regeneration run: `group` prompts are prefilled together."""

    slots: int
    group: int
    max_prompt: int
    max_new: int
    max_tokens: int
    taps: tuple[int, ...]
    numerics: Numerics
    sampled: bool = False

    @property
    def allocated(self) -> int:
        chunk = self.numerics.attention_chunk
        return -(-(self.max_tokens + _CHUNK) // chunk) * chunk


@flax.struct.dataclass
class Slots:
    """B sequences that are being written."""

    cache: KVCache
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
    """Keys and features of the prompt tokens [G, _CHUNK] from position `start` (int32 []) on.

    Rows past a prompt's end leave keys above its live ones, where its answer overwrites them.
    """
    batch, rows = tokens.shape
    mask = jnp.broadcast_to(jnp.tril(jnp.ones((rows, rows), bool)), (batch, rows, rows))
    starts = jnp.broadcast_to(start, (batch,))
    positions = starts[:, None] + lax.iota(jnp.int32, rows)[None]
    out = forward_block(
        params,
        model,
        tokens,
        positions,
        cache.k,
        cache.v,
        starts,
        mask,
        taps=cfg.taps,
        numerics=cfg.numerics,
    )
    return commit(cache, out.new_k, out.new_v, after(starts, out.hidden)), _features(out)


def admit(
    slots: Slots,
    group: KVCache,
    row: Array,
    slot: Array,
    sampling: SamplingState,
) -> Slots:
    """Copies prefilled sequence `row` (int32 []) of `group` into slot `slot` (int32 [])."""

    def place(whole: Array, part: Array) -> Array:
        return lax.dynamic_update_slice(
            whole, part.astype(whole.dtype), (slot,) + (0,) * (whole.ndim - 1)
        )

    one = jax.tree.map(lambda x: lax.dynamic_slice_in_dim(x, row, 1), group)
    return Slots(
        cache=jax.tree.map(place, slots.cache, one),
        sampling=jax.tree.map(place, slots.sampling, sampling),
    )


def write_steps(
    model: ModelConfig,
    cfg: RegenConfig,
    params: Params,
    slots: Slots,
    token: Array,
    cached: Array,
    given: Array,
) -> tuple[Slots, Array, Array]:
    """`_STEPS` tokens of every slot: new ids [steps, B] and the features of the tokens before them.

    A finished or empty slot writes on into its own slack; the host drops what it wrote.

    Args:
        token: [B] int32, first id without a key; cached: [B] int32, live keys.
        given: [steps, B] int32, ids that are known already (a next turn), -1 where the target
            chooses.
    """
    mask = jnp.ones((cfg.slots, 1, 1), bool)
    last = cfg.allocated - _CHUNK

    def step(
        carry: tuple[KVCache, Array, Array], given: Array
    ) -> tuple[tuple[KVCache, Array, Array], tuple[Array, Array]]:
        cache, token, cached = carry
        out = forward_block(
            params,
            model,
            token[:, None],
            cached[:, None],
            cache.k,
            cache.v,
            cached,
            mask,
            taps=cfg.taps,
            numerics=cfg.numerics,
        )
        logits = head_logits(params, out.hidden)
        if cfg.sampled:
            zero = jnp.zeros_like(token)[:, None]
            chosen = choose(logits, cached[:, None] + 1, zero, slots.sampling, 0)[:, 0]
        else:
            chosen = greedy(logits)[:, 0]
        token = jnp.where(given < 0, chosen, given)
        cache = commit(cache, out.new_k, out.new_v, after(cached, token))
        return (cache, token, jnp.minimum(cached + 1, last)), (token, _features(out)[:, 0])

    (cache, _, _), (tokens, features) = lax.scan(step, (slots.cache, token, cached), given)
    return dataclasses.replace(slots, cache=cache), tokens, features


def compute_params(params: Params, model: ModelConfig, dtype: Any) -> Params:
    """Parameters whose projections and LM head multiply in `dtype`; all else stays float32."""
    decl = declare(model)
    flat = flatten(params)
    head = flat.get("lm_head", flat["embed"])  # a tied table keeps its float32 rows beside the head
    wrapped = {
        name: ComputeWeight(w.astype(dtype), dtype) if decl[name].linear and name != "embed" else w
        for name, w in flat.items()
    }
    return nest(wrapped | {"lm_head": ComputeWeight(head.astype(dtype), dtype)})


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
        self.group = self._alloc(batch=cfg.group)
        self.slots = Slots(
            self._alloc(batch=cfg.slots), sampling_state([SamplingParams()] * cfg.slots)
        )
        self.writing: list[Writing | None] = [None] * cfg.slots

    def free(self) -> list[int]:
        """Slots without a sequence."""
        return [i for i, seq in enumerate(self.writing) if seq is None]

    def start(self, prompts: Sequence[tuple[dict[str, Any], list[int], SamplingParams]]) -> None:
        """Prefills all ids but the last of up to `group` prompts (ids: of their first turn) and
        gives each a free slot."""
        kept = [len(ids) - 1 for _, ids, _ in prompts]
        chunks = -(-max(kept) // _CHUNK)
        rows = np.zeros((self.cfg.group, chunks * _CHUNK), np.int32)
        for i, (_, ids, _) in enumerate(prompts):
            rows[i, : kept[i]] = ids[:-1]
        pieces = []
        for start in range(0, chunks * _CHUNK, _CHUNK):
            self.group, feats = self._prefill(
                self.target.params,
                self.group,
                rows[:, start : start + _CHUNK],
                jnp.asarray(start, jnp.int32),
            )
            pieces.append(np.asarray(feats))
        features = np.concatenate(pieces, 1)
        for i, ((prompt, ids, sampling), slot) in enumerate(
            zip(prompts, self.free(), strict=False)
        ):
            self.slots = self._admit(
                self.slots,
                self.group,
                jnp.asarray(i, jnp.int32),
                jnp.asarray(slot, jnp.int32),
                sampling_state([sampling]),
            )
            self.writing[slot] = seq = Writing.begin(prompt, ids)
            seq.features.append(features[i, : kept[i]])

    def advance(self, stop_ids: set[int]) -> list[Writing]:
        """Runs `_STEPS` steps; returns the conversations that ended."""
        cfg = self.cfg
        token, cached = np.zeros((2, cfg.slots), np.int32)
        given = np.full((_STEPS, cfg.slots), -1, np.int32)
        for slot, seq in enumerate(self.writing):
            if seq is not None:
                token[slot], *known = seq.ids[(at := seq.fed) : at + 1 + _STEPS]
                cached[slot], given[: len(known), slot] = at, known
        self.slots, tokens, features = self._steps(
            self.target.params, self.slots, token, cached, given
        )
        new, feats = np.asarray(tokens), np.asarray(features)
        ended = []
        for slot, seq in enumerate(self.writing):
            if seq is None:
                continue
            read = len(seq.ids) - 1 - seq.fed  # steps that only read what was given
            fresh = [int(t) for t in new[read:, slot]]
            room = min(seq.start + cfg.max_new, cfg.max_tokens) - len(seq.ids)
            stop = next((i + 1 for i, t in enumerate(fresh) if t in stop_ids), None)
            kept = min(x for x in (stop, room, len(fresh)) if x is not None)
            seq.ids += fresh[:kept]
            # row i belongs to the token that step i read
            seq.features.append(feats[: read + kept, slot])
            if kept in (room, stop):
                seq.spans.append((seq.start, len(seq.ids)))
                if not seq.next_turn(self.target.tokenizer, cfg.max_tokens):
                    ended.append(seq)
                    self.writing[slot] = None
        return ended


def restore(
    target: Target,
    cfg: RegenConfig,
    writer: ShardWriter,
    pack: answers.Answers,
    prompts: dict[str, dict[str, Any]],
) -> int:
    """Writes shards of the packed answers to `prompts` (by id), features computed by one forward of
    the whole sequence; returns how many conversations.

    A prompt that the packages give no more, or that is longer than `cfg.max_prompt` by now, has no
    sequence: its answers are left out and written anew, if they are asked for. A conversation ends
    with the last answer that was written to the same tokens as it has before it now.
    """

    @jax.jit
    def features(params: Params, tokens: Array) -> Array:
        return _features(forward_full(params, target.config, tokens, taps=cfg.taps))

    known: list[Writing] = []
    for prompt_id, written in zip(pack.ids, pack.answers, strict=True):
        if prompt_id not in prompts or prompt_id in writer.seen:
            continue
        [(_, ids)] = _encoded([prompts[prompt_id]], target.tokenizer)
        seq = Writing.begin(prompts[prompt_id], ids)
        for answer in written:
            if seq.spans and not seq.next_turn(target.tokenizer, cfg.max_tokens):
                break
            if not answer.follows(seq.ids):
                break
            seq.ids += answer.tokens.tolist()
            seq.spans.append((seq.start, len(seq.ids)))
        if seq.spans and 2 <= len(ids) <= cfg.max_prompt:
            del seq.ids[seq.spans[-1][1] :]
            known.append(seq)
    known.sort(key=lambda seq: len(seq.ids))
    for start in tqdm(range(0, len(known), cfg.group), unit="group", desc="restore", mininterval=5):
        group = known[start : start + cfg.group]
        longest = max(len(seq.ids) for seq in group)
        tokens = np.zeros((cfg.group, -(-longest // _CHUNK) * _CHUNK), np.int32)
        for row, seq in enumerate(group):
            tokens[row, : len(seq.ids)] = seq.ids
        found = np.asarray(features(target.params, jnp.asarray(tokens)))
        for row, seq in enumerate(group):
            seq.features.append(found[row, : len(seq.ids) - 1])
            writer.add(seq)
    writer.flush()
    return len(known)


def _encoded(
    prompts: list[dict[str, Any]], tokenizer: Any
) -> Iterator[tuple[dict[str, Any], list[int]]]:
    """Prompts with the ids of their first turn, in order of length within every `_WINDOW`."""
    for start in range(0, len(prompts), _WINDOW):
        window = prompts[start : start + _WINDOW]
        pairs = [(p, tokenizer.chat(split_turns(p["messages"])[0])) for p in window]
        yield from sorted(pairs, key=lambda pair: len(pair[1]))


def check_args(args: argparse.Namespace) -> None:
    """Refuses what cannot work, before anything is loaded or written.

    Raises:
        ConfigError: names the flag, its value and what fits.
    """
    least = {"slots": 1, "group": 1, "max_prompt": 2, "max_new": 1, "num_taps": 1, "prompts": 1}
    least |= {"turns": 1}
    for name, low in least.items():
        value = getattr(args, name)
        if value < low:
            flag = "--" + name.replace("_", "-")
            raise ConfigError(f"{flag} {value} is too small; give at least {low}")
    if not args.max_seconds > 0:
        raise ConfigError(f"--max-seconds {args.max_seconds} is no time; give seconds above 0")
    SamplingParams(temperature=args.temperature)
    if args.max_tokens is not None and args.max_tokens <= args.max_prompt:
        raise ConfigError(
            f"--max-tokens {args.max_tokens} leaves no room for an answer behind --max-prompt "
            f"{args.max_prompt}; give more"
        )
    if not args.prompts_file:
        if args.for_evaluation:
            raise ConfigError("--for-evaluation needs --prompts-file; the built-in prompts train")
        if args.replace_answers:
            raise ConfigError("--replace-answers needs --prompts-file, whose answers it replaces")


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Regenerates until the prompts or the time are used up; returns the accounting."""
    check_args(args)
    pack = answers.read(Path(args.answers)) if args.answers else None
    given = (
        prompts_from_file(
            args.prompts_file,
            evaluation=args.for_evaluation,
            replace_answers=args.replace_answers,
        )
        if args.prompts_file
        else None
    )
    engine = EngineConfig(kernels=args.kernels)
    native = resolve_kernels(engine) == "cpu"
    if args.precision != "float32":
        engine = dataclasses.replace(engine, kernels="xla")  # whose weights are plain arrays
    target = load_target(args.model, engine, lambda m: print(m, file=sys.stderr, flush=True))
    if args.precision != "float32":
        params = compute_params(target.params, target.config, jnp.dtype(args.precision))
        target = dataclasses.replace(target, params=params)
    taps = (
        tuple(args.taps)
        if args.taps
        else default_layer_ids(args.num_taps, target.config.num_layers)
    )
    layers = target.config.num_layers
    if not all(0 <= i < layers for i in taps):
        raise ConfigError(f"--taps {list(taps)}: the target has layers 0 to {layers - 1}")
    cfg = RegenConfig(
        args.slots,
        min(args.group, args.slots),
        args.max_prompt,
        args.max_new,
        args.max_prompt + args.max_new if args.max_tokens is None else args.max_tokens,
        taps,
        Numerics(native=native, attention_chunk=128),
        args.temperature > 0,
    )
    writer = ShardWriter(Path(args.out))
    meta = {
        "target": target.config.name,
        "hidden_size": target.config.hidden_size,
        "taps": list(taps),
        "vocab_size": target.config.vocab_size,
        "max_new": args.max_new,
        "max_tokens": cfg.max_tokens,
        "turns": args.turns,
        "prompts": args.prompts,
        "seed": args.seed,
        "temperature": args.temperature,
        "precision": args.precision,
        "for_evaluation": args.for_evaluation,
        "command": " ".join(["python -m train.regenerate", *sys.argv[1:]]),
    }
    meta_path = writer.out / "meta.json"
    if meta_path.exists():
        before = json.loads(meta_path.read_text())
        keys = ("target", "taps", "vocab_size", "seed", "temperature", *answers.DEFAULTS)
        changed = [k for k in keys if before.get(k, answers.DEFAULTS.get(k)) != meta[k]]
        if changed:
            raise ConfigError(
                f"{args.out} was made with another {', '.join(changed)}; use another --out"
            )
    if pack is not None:
        answers.check(pack, meta, args.answers)
    meta_path.write_text(json.dumps(meta, indent=1))

    prompts = training_prompts(args.prompts, args.seed, args.turns) if given is None else given
    todo = [p for p in prompts if p["id"] not in writer.seen]
    if pack is not None:
        restored = restore(target, cfg, writer, pack, {p["id"]: p for p in todo})
        todo = [p for p in todo if p["id"] not in writer.seen]
        print(f"{restored} conversations of {args.answers} restored", file=sys.stderr, flush=True)
    regen = Regenerator(target, cfg)
    stop_ids = set(target.config.eos_ids)
    stopping = []
    for sig in (signal.SIGINT, signal.SIGTERM):
        signal.signal(sig, lambda *_: stopping.append(True))
    started, first = time.monotonic(), writer.tokens
    bar = tqdm(total=len(prompts), initial=len(prompts) - len(todo), unit="prompt", mininterval=5)
    queue = _encoded(todo, target.tokenizer)
    exhausted = False
    while True:
        out_of_time = time.monotonic() - started > args.max_seconds
        # a whole group or, at the end, what is left
        while len(regen.free()) >= cfg.group and not (exhausted or out_of_time or stopping):
            group = []
            while len(group) < cfg.group and not exhausted:
                prompt, ids = next(queue, (None, []))
                if prompt is None:
                    exhausted = True
                elif not 2 <= len(ids) <= cfg.max_prompt:
                    reason = f"first turn not of 2 to {cfg.max_prompt} tokens"
                    writer.drop(prompt["id"], "skipped", reason)
                    bar.update()
                else:
                    seed = int(prompt["id"][:8], 16)
                    group.append(
                        (prompt, ids, SamplingParams(temperature=args.temperature, seed=seed))
                    )
            if group:
                regen.start(group)
        if stopping or not any(regen.writing) or (out_of_time and args.drop_unfinished):
            break
        for seq in regen.advance(stop_ids):
            if seq.refused:
                writer.drop(seq.prompt_id, "skipped", seq.refused)
            else:
                writer.add(seq)
            bar.update()
        written = writer.tokens + sum(s.written for s in writer.pending) - first
        bar.set_postfix(tokens=written, tok_s=f"{written / (time.monotonic() - started):.0f}")
    bar.close()
    writer.flush()
    verdicts = {
        v: sum(len(x["ids"]) for x in writer.lines if x["verdict"] == v)
        for v in ("done", "skipped", "failed")
    }
    verdicts |= {"input": len(prompts), "open": len(prompts) - len(writer.seen)}
    reasons = collections.Counter(x["reason"] for x in writer.lines if "reason" in x)
    return {
        **verdicts,
        "reasons": dict(reasons),
        "answers": sum(x.get("answers", len(x["ids"])) for x in writer.lines if "shard" in x),
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
    p.add_argument(
        "--turns",
        type=int,
        default=3,
        help="most user turns of a training prompt (a third has more than one); 1: questions only",
    )
    p.add_argument("--prompts-file", help='JSON lines of {"prompt"} or {"messages"} instead')
    p.add_argument(
        "--replace-answers",
        action="store_true",
        help="leave out the assistant messages of the file: the target writes its own",
    )
    p.add_argument(
        "--for-evaluation",
        action="store_true",
        help="prompts may be those of evaluation suites; training refuses the folder",
    )
    p.add_argument("--answers", help="pack of answers (train.answers) to start from")
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--slots", type=int, default=32, help="sequences written at once")
    p.add_argument("--group", type=int, default=8, help="prompts prefilled together")
    p.add_argument(
        "--precision",
        choices=("float32", "bfloat16"),
        default="float32",
        help="of the matrix products; bfloat16: faster with AMX, answers equal up to near ties",
    )
    p.add_argument(
        "--max-prompt", type=int, default=320, help="longer first turns are skipped (tokens)"
    )
    p.add_argument("--max-new", type=int, default=224, help="longest answer (tokens)")
    p.add_argument(
        "--max-tokens", type=int, help="longest conversation (default: --max-prompt + --max-new)"
    )
    p.add_argument("--temperature", type=float, default=0.0)
    p.add_argument("--num-taps", type=int, default=5, help="tapped layers, by the default formula")
    p.add_argument("--taps", type=int, nargs="*", help="tapped layers, explicitly")
    p.add_argument("--kernels", choices=KERNELS, default="auto")
    p.add_argument("--max-seconds", type=float, default=float("inf"))
    p.add_argument(
        "--drop-unfinished",
        action="store_true",
        help="at the time limit, do not run_command open sequences",
    )
    return p


def main(argv: list[str] | None = None) -> int:
    args = parser().parse_args(argv)
    return run_command(run, args)


if __name__ == "__main__":
    sys.exit(main())
