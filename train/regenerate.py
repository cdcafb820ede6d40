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
import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from tqdm import tqdm

from jetspec_jax.config import KERNELS, EngineConfig, ModelConfig, SamplingParams
from jetspec_jax.drafter.checkpoint import default_layer_ids
from jetspec_jax.errors import ConfigError
from jetspec_jax.loading import Target, load_target, resolve_kernels
from jetspec_jax.models.decoder import Numerics, forward_full
from jetspec_jax.typing import Array, Params
from train import answers
from train.cli import make_folder, run_command
from train.prompts import prompts_from_file, training_prompts
from train.shards import ShardWriter, Writing, split_turns
from train.slots import CHUNK, RegenConfig, Regenerator, compute_params, kept_features

_WINDOW = 256  # prompts that are put in order of length, so that a group pads little


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
        return kept_features(forward_full(params, target.config, tokens, taps=cfg.taps))

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
        tokens = np.zeros((cfg.group, -(-longest // CHUNK) * CHUNK), np.int32)
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


def check_size(cfg: RegenConfig, model: ModelConfig, asked: int | None) -> None:
    """Refuses conversations beyond the target's context, and caches beyond the machine's memory.

    Raises:
        ConfigError: names the flags and what fits.
    """
    if cfg.max_tokens > model.max_context:
        flag = "--max-prompt and --max-new" if asked is None else "--max-tokens"
        raise ConfigError(
            f"{flag}: {cfg.max_tokens} tokens exceed the target's context of {model.max_context}; "
            "give less"
        )
    slot = 2 * 4 * model.num_layers * model.num_kv_heads * model.head_dim * cfg.allocated
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if (cfg.slots + cfg.group) * slot > 0.8 * memory and jax.default_backend() == "cpu":
        raise ConfigError(
            f"--slots {cfg.slots} of {cfg.max_tokens} tokens need "
            f"{(cfg.slots + cfg.group) * slot / 1e9:.1f} GB of keys and values, the machine has "
            f"{memory / 1e9:.1f} GB; give fewer slots or tokens"
        )


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
        raise ConfigError(
            f"--taps {list(taps)}: the target has layers 0 to {layers - 1}; give some of those"
        )
    if len(set(taps)) < len(taps):
        flag = f"--taps {list(taps)}" if args.taps else f"--num-taps {args.num_taps}"
        raise ConfigError(
            f"{flag} takes a layer more than once; the target has {layers}, give fewer or others"
        )
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
    check_size(cfg, target.config, args.max_tokens)
    writer = ShardWriter(make_folder(Path(args.out), "--out"))
    meta = {
        "target": target.config.name,
        "hidden_size": target.config.hidden_size,
        "taps": list(taps),
        "vocab_size": target.config.vocab_size,
        "max_new": args.max_new,
        "max_tokens": cfg.max_tokens,
        "turns": args.turns,
        "prompts": args.prompts,
        "prompts_file": Path(args.prompts_file).name if args.prompts_file else None,
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
        # folders of older versions do not say all of this
        later = ("max_new", "max_tokens", "turns", "prompts_file")
        changed += [k for k in later if before.get(k, meta[k]) != meta[k]]
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
    wanted = {p["id"] for p in prompts}  # the folder may hold more
    verdicts = {
        v: sum(len(wanted.intersection(x["ids"])) for x in writer.lines if x["verdict"] == v)
        for v in ("done", "skipped", "failed")
    }
    verdicts |= {"input": len(prompts), "open": len(wanted - writer.seen)}
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
        help="at the time limit, do not finish open sequences",
    )
    return p


def main(argv: list[str] | None = None) -> int:
    args = parser().parse_args(argv)
    return run_command(run, args)


if __name__ == "__main__":
    sys.exit(main())
