"""Are the logits of plain and tree decoding the same bits? Every committed position, real prompts.

    python -m serve.exactness --limit 50 --max-tokens 200 --batches 1,8

Decodes every prompt plainly and by trees and compares, position by position, the whole row of
logits that chose each token: all 32 bits of all of them. Over the prompts every tree builder meets
every budget, a pair a prompt in turn. Also gives a digest of all plain logits, to be compared
between runs (with another number of threads: `taskset -c 0 python -m serve.exactness ...`).
Last line of stdout: JSON with "logits_identical" and "tokens_identical" (plain against trees);
"weights_identical", whether weight formats multiplied by the same arithmetic gave the same logits
(null where no two were: by default packed weights use integer sums and expanded ones cannot, so
give `--arithmetic float`); and "token_agreement", how many prompts any two modes wrote alike. Exit
status 1 where one of the first three is false.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from jetspec_jax.config import BUILDERS, WEIGHTS, SamplingParams, SpecConfig
from jetspec_jax.errors import ConfigError
from serve import cli

BUDGETS = (2, 3, 5, 8, 16, 24)
SAMPLING = SamplingParams(ignore_eos=True, logprobs=1)  # makes a round report its logits


@dataclasses.dataclass
class Tally:
    """What one mode (weights and batch) found."""

    positions: int = 0
    different: int = 0
    first_different: str | None = None
    tokens_identical: bool = True
    rounds: int = 0
    digest: str = ""


def pairs() -> list[tuple[str, int]]:
    """Every builder with every budget once; any few in a row differ in both."""
    count = math.lcm(len(BUILDERS), len(BUDGETS))
    return [(BUILDERS[i % len(BUILDERS)], BUDGETS[i % len(BUDGETS)]) for i in range(count)]


def spec_for(builder: str, budget: int, depth: int) -> SpecConfig:
    """Trees of one builder and budget; the histogram that one builder needs falls off."""
    width = 8
    histogram = tuple(tuple(0.6 * 0.8**d * 0.5**w for w in range(width)) for d in range(depth))
    return SpecConfig(
        mode="tree",
        builder=builder,
        budget=budget,
        width=width,
        histogram=histogram if builder == "depth_rank_histogram" else None,
    )


def decode(
    llm: Any, spec: SpecConfig, prompts: Sequence[list[int]], max_tokens: int
) -> tuple[list[list[int]], list[list[bytes]], int]:
    """Tokens and, per token, a digest of the logits that chose it, for a batch; and the rounds."""
    resolved = llm.resolve(spec)
    plan = llm.plan_for(resolved, [SAMPLING])
    tokens: list[list[int]] = [[] for _ in prompts]
    digests: list[list[bytes]] = [[] for _ in prompts]
    rounds = 0
    with llm.session(plan, len(prompts)) as session:
        session.compile(details=True)
        for slot, ids in enumerate(prompts):
            session.admit(slot, ids, len(ids) + max_tokens, (), SAMPLING, resolved.enabled)
        while min(map(len, tokens)) < max_tokens:
            out = session.step()
            rounds += 1
            count, emitted, logits = (np.asarray(x) for x in (out.count, out.emitted, out.logits))
            for slot in range(len(prompts)):
                for i in range(int(count[slot])):
                    tokens[slot].append(int(emitted[slot, i]))
                    digests[slot].append(hashlib.blake2b(logits[slot, i], digest_size=16).digest())
    return tokens, digests, rounds


def groups(items: Sequence[Any], size: int) -> Iterator[Sequence[Any]]:
    """Whole batches of `size`; the last takes from the front what it lacks."""
    for at in range(0, len(items), size):
        yield [items[(at + i) % len(items)] for i in range(size)]


def compare(
    llm: Any, prompts: Sequence[list[int]], batch: int, max_tokens: int
) -> tuple[Tally, list[list[int]]]:
    """Plain against trees for all prompts; also what plain decoding wrote."""
    from tqdm import tqdm

    found, whole, turn = Tally(), hashlib.blake2b(digest_size=16), itertools.cycle(pairs())
    written: list[list[int]] = []
    depth = llm.resolve(SpecConfig()).depth
    steps = math.ceil(len(prompts) / batch)
    for number, group in enumerate(tqdm(groups(prompts, batch), total=steps, unit="batch")):
        plain, rows, _ = decode(llm, SpecConfig(mode="off"), group, max_tokens)
        written += plain
        builder, budget = next(turn)
        tree, tree_rows, rounds = decode(llm, spec_for(builder, budget, depth), group, max_tokens)
        found.rounds += rounds
        found.tokens_identical &= plain == tree
        for slot, (a, b) in enumerate(zip(rows, tree_rows, strict=True)):
            whole.update(b"".join(a))
            found.positions += len(a)
            bad = [i for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y]
            found.different += len(bad)
            if bad and found.first_different is None:
                found.first_different = (
                    f"batch {number}, sequence {slot}, token {bad[0]}, {builder} budget {budget}"
                )
    found.digest = whole.hexdigest()
    return found, written[: len(prompts)]


def agreement(a: Sequence[list[int]], b: Sequence[list[int]]) -> dict[str, Any]:
    """How far two ways of computing write the same: prompts, those identical to the end, and where
    the others part ({prompt index: token index})."""
    parts = {
        i: next((t for t, (p, q) in enumerate(zip(x, y, strict=False)) if p != q), len(x))
        for i, (x, y) in enumerate(zip(a, b, strict=True))
        if x != y
    }
    return {"prompts": len(a), "identical": len(a) - len(parts), "first_different": parts}


def same_bits(digests: Mapping[tuple[str, int], set[str]], modes: int) -> bool | None:
    """Whether all modes of one arithmetic gave the same logits; None where no two share one.

    Args:
        digests: of all logits, by arithmetic and batch.
        modes: how many weight modes ran.
    """
    if modes == len({arithmetic for arithmetic, _ in digests}):
        return None
    return all(len(found) == 1 for found in digests.values())


def build_parser() -> cli.Parser:
    parser = cli.Parser(
        prog="python -m serve.exactness",
        usage="python -m serve.exactness [flags]",
        description="Bits of all logits, plain against tree decoding, on real prompts.",
    )
    cli.add_model_flags(parser)
    parser.add_argument("--suite", default="humaneval", help="prompts (default: humaneval)")
    parser.add_argument("--limit", type=int, default=50, help="prompts (default: 50)")
    parser.add_argument("--max-tokens", type=int, default=200, help="per prompt (default: 200)")
    parser.add_argument("--batches", default="1,8", metavar="B,...", help="default: 1,8")
    parser.add_argument(
        "--weights-modes",
        default=",".join(WEIGHTS),
        metavar="MODE,...",
        help=f"weight formats to compare, see --weights (default: {','.join(WEIGHTS)})",
    )
    parser.add_argument("--debug", action="store_true", help="show tracebacks")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns the exit code."""
    return cli.run(lambda args: _run(args, argv), build_parser(), argv)


def _numbers(text: str, flag: str) -> list[int]:
    try:
        found = [int(part) for part in text.split(",")]
    except ValueError:
        found = []
    if not found or min(found) < 1:
        raise ConfigError(f"{flag} {text}: give numbers from 1, such as 1,8")
    return found


def _run(args: argparse.Namespace, argv: Sequence[str] | None) -> int:
    batches = _numbers(args.batches, "--batches")
    if args.weights is not None:
        raise ConfigError("--weights: this command takes --weights-modes, one or more of them")
    modes = args.weights_modes.split(",")
    if unknown := [m for m in modes if m not in WEIGHTS]:
        raise ConfigError(f"--weights-modes {unknown[0]}: choose from {', '.join(WEIGHTS)}")
    if args.max_tokens < 1:
        raise ConfigError(f"--max-tokens {args.max_tokens}: give at least 1")
    from serve import facts
    from serve.suites import load_suite

    suite = load_suite(args.suite, args.limit)
    tallies: dict[str, Tally] = {}
    digests: dict[tuple[str, int], set[str]] = {}
    written: dict[int, dict[str, list[list[int]]]] = {}
    kernels = ""
    for mode in modes:
        args.weights = mode
        llm = cli.load_llm(args, SpecConfig(), cli.engine_from_args(args, max_batch=max(batches)))
        kernels = llm.plan()["kernels"]
        room = llm.capacity - args.max_tokens
        if room < 1:
            raise ConfigError(
                f"--max-tokens {args.max_tokens} leaves no room in a capacity of {llm.capacity}"
            )
        prompts = [llm.tokenizer.chat(list(p.messages))[:room] for p in suite.prompts]
        for batch in batches:
            cli.say(f"weights {mode}, batch {batch} ...")
            found, tokens = compare(llm, prompts, batch, args.max_tokens)
            tallies[f"{mode}, batch {batch}"] = found
            digests.setdefault((llm.arithmetic, batch), set()).add(found.digest)
            written.setdefault(batch, {})[f"{mode} ({llm.arithmetic} sums)"] = tokens
            cli.say(
                f"weights {mode}, batch {batch}: {found.different} of {found.positions} positions "
                f"differ, tokens {'identical' if found.tokens_identical else 'DIFFERENT'}"
            )
    document = {
        "logits_identical": not any(t.different for t in tallies.values()),
        "tokens_identical": all(t.tokens_identical for t in tallies.values()),
        "weights_identical": same_bits(digests, len(modes)),
        "token_agreement": {
            f"{a} and {b}, batch {batch}": agreement(found[a], found[b])
            for batch, found in written.items()
            for a, b in itertools.combinations(found, 2)
        },
        "modes": {name: dataclasses.asdict(t) for name, t in tallies.items()},
        "suite": suite.name,
        "prompts": len(suite.prompts),
        "max_tokens": args.max_tokens,
        "builders": list(BUILDERS),
        "budgets": list(BUDGETS),
        "hardware": facts.hardware(),
        "dtype": args.dtype or "float32",
        "kernels": kernels,
        "versions": facts.versions(),
        "commit": facts.git_revision(),
        "command": facts.command("serve.exactness", argv),
    }
    print(cli.dump_json(document))
    exact = document["logits_identical"] and document["tokens_identical"]
    return 0 if exact and document["weights_identical"] is not False else 1


if __name__ == "__main__":
    raise SystemExit(main())
