"""Side by side with llama.cpp and with transformers on torch: one run, the same prompts. Not in CI.

    make bench-peers LLAMA_PYTHON=/path/to/python TORCH_PYTHON=/path/to/python ARGS="--limit 12"

Greedy, batch 1, the same prompt ids and the same number of tokens for everyone (the end of text
does not end an answer), decoding timed without the prompt. The contenders:

    llama_cpp_q4_1       llama.cpp on the bundled Q4_1 file
    llama_cpp_f32        llama.cpp on a float32 GGUF of exactly our dequantised weights
    transformers         transformers on torch, float32, the same weights
    stored_plain         ours, weights as stored (Q4_1), without speculation
    stored_speculative   ours, weights as stored, with the bundled draft head
    float32_plain        ours, weights expanded to float32
    float32_speculative

The contenders take turns on every prompt, starting with another one each time, so that noise hits
all alike. A prompt's seconds are the median over its turns; tok/s is all tokens / the sum of those
seconds, and a ratio is one such figure over the other. Last line of stdout: JSON, with
"tokens_identical" (all of ours, on all prompts and turns; exit code 1 where they differ),
"agreement" (how far each peer writes our tokens: other arithmetic may decide near ties otherwise),
"vs_llama_cpp_q4_1" (our weights as stored to it), "vs_llama_cpp_f32" and "vs_transformers" (our
float32 weights), "vs_own_plain", "tok_s", "tau", "bandwidth_gb_s". A figure that was not measured
is null.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import dataclasses
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from jetspec_jax.config import WEIGHTS, EngineConfig, SamplingParams, SpecConfig
from jetspec_jax.errors import ConfigError, InputError
from jetspec_jax.stats import SpecStats, pooled
from serve import cli

CONTEXT = 2_048  # tokens, prompt and answer together, for everyone
PAUSE_S = 0.05  # between turns: a thread pool spins for a while after its last job
WARM_TOKENS = 8
BUSY = 0.5  # load average from which a comparison is not fair
MODES = {"plain": SpecConfig(mode="off"), "speculative": None}
OURS = tuple(f"{weights}_{mode}" for weights in WEIGHTS for mode in MODES)
Q4_1, F32, TORCH = "llama_cpp_q4_1", "llama_cpp_f32", "transformers"
PEERS = {Q4_1: "stored", F32: "float32", TORCH: "float32"}  # which of ours each is held against
METHOD = (
    "per prompt the median seconds over interleaved turns; tok/s = tokens / sum of those seconds; "
    "a ratio divides two tok/s of this run"
)
EPILOG = """\
the two interpreters, once (any Python that the packages support; llama.cpp is compiled, minutes):
  python -m venv /tmp/llama && /tmp/llama/bin/pip install llama-cpp-python
  python -m venv /tmp/torch && /tmp/torch/bin/pip install transformers torch \\
      --extra-index-url https://download.pytorch.org/whl/cpu
then:
  make bench-peers LLAMA_PYTHON=/tmp/llama/bin/python TORCH_PYTHON=/tmp/torch/bin/python
A peer whose interpreter is not given is left out.

known crash: llama.cpp compiled by gcc 12 for a CPU with AMX ends by SIGILL (the compiler drops the
tile configuration as a dead store). Compile it with:
  export CMAKE_ARGS=-DCMAKE_CXX_FLAGS=-fno-dse
  /tmp/llama/bin/pip install --no-cache-dir llama-cpp-python"""


@dataclasses.dataclass(frozen=True)
class Run:
    """One answer. `decode_s` without the prompt; `stats` of our own runs only."""

    token_ids: tuple[int, ...]
    decode_s: float
    stats: SpecStats | None = None


Decode = Callable[[Sequence[int], int], Run]  # (prompt ids, new tokens)
Prompts = Sequence[tuple[str, Sequence[int]]]  # (name, prompt ids)
Runs = Mapping[str, Sequence[Sequence[Run]]]  # contender -> prompt -> turn


def build_parser() -> cli.Parser:
    parser = cli.Parser(
        prog="python -m serve.peers",
        usage="python -m serve.peers [flags]",
        description="Side by side with llama.cpp and transformers: one run, the same prompts.",
        epilog=EPILOG,
    )
    peers = parser.add_argument_group("peers")
    peers.add_argument(
        "--llama-python", metavar="PATH", help="interpreter with llama-cpp-python (default: none)"
    )
    peers.add_argument(
        "--torch-python",
        metavar="PATH",
        help="interpreter with torch, transformers (default: none)",
    )
    what = parser.add_argument_group("what to measure")
    what.add_argument(
        "--suite",
        default="humaneval",
        metavar="NAME",
        help="humaneval, mtbench, gsm8k or a JSON lines path (default: humaneval)",
    )
    what.add_argument(
        "--limit", type=int, default=6, metavar="N", help="prompts, evenly spread (default: 6)"
    )
    what.add_argument(
        "--max-tokens", type=int, default=128, metavar="N", help="tokens per answer (default: 128)"
    )
    what.add_argument(
        "--turns", type=int, default=3, metavar="N", help="times round per prompt (default: 3)"
    )
    parser.add_argument("--debug", action="store_true", help="show tracebacks")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns the exit code."""
    return cli.run(lambda args: _run(args, argv), build_parser(), argv)


def _run(args: argparse.Namespace, argv: Sequence[str] | None) -> int:
    for name in ("max_tokens", "turns"):
        if getattr(args, name) < 1:
            flag = "--" + name.replace("_", "-")
            raise ConfigError(f"{flag} {getattr(args, name)}: give at least 1")
    from serve import facts
    from serve.suites import load_suite

    suite = load_suite(args.suite, args.limit)
    load = os.getloadavg()[0]
    if load > BUSY:
        cli.say(
            f"the load average is {load:.1f}: something else runs here, which slows the peers "
            "(OpenMP threads that wait for each other) more than us; measure on a quiet machine"
        )
    with contextlib.ExitStack() as stack:
        contenders, about = start_peers(args, stack, facts.cores())
        engines = start_ours()
        tokenizer = next(iter(engines.values())).tokenizer
        prompts = [
            (prompt.id, tokenizer.chat(list(prompt.messages), add_generation_prompt=True))
            for prompt in suite.prompts
        ]
        _check_lengths(prompts, args.max_tokens)
        for weights, llm in engines.items():
            for mode, spec in MODES.items():
                contenders[f"{weights}_{mode}"] = ours(llm, spec)
        with cli.phase("warming up"):
            for decode in contenders.values():
                decode(prompts[0][1], WARM_TOKENS)
        bandwidth = read_bandwidth()
        runs = take_turns(contenders, prompts, args.max_tokens, args.turns)
        bandwidth = max(bandwidth, read_bandwidth())
    sizes = {w: llm.plan()["memory"]["target_bytes"] for w, llm in engines.items()}
    document = {
        "prompts": len(prompts),
        "suite": suite.name,
        "max_tokens": args.max_tokens,
        "turns": args.turns,
        **summarise(runs, [name for name, _ in prompts]),
        **bandwidth_figures(runs, sizes, bandwidth),
        "method": METHOD,
        "hardware": facts.hardware(),
        "threads": facts.cores(),
        "load_average_before": round(load, 2),
        "dtype": "float32",
        "batch": 1,
        "temperature": 0.0,
        "versions": facts.versions(),
        "peers": about,
        "commit": facts.git_revision(),
        "command": facts.command("serve.peers", argv),
    }
    _table(document)
    odd = document["first_different"]
    if odd is not None:
        cli.say(
            f"TOKENS DIFFER from plain decoding: {odd['contender']}, prompt {odd['id']}, "
            f"token {odd['token']}"
        )
    print(cli.dump_json(document))
    return 0 if document["tokens_identical"] else 1


def start_peers(
    args: argparse.Namespace, stack: contextlib.ExitStack, threads: int
) -> tuple[dict[str, Decode], dict[str, Any]]:
    """Starts the peers that were asked for; says in a line which were not.

    Returns:
        contender -> decode, and contender -> what the peer says of itself.
    """
    from jetspec_jax.weights import bundled_model_path
    from serve import peer_llama, peer_torch
    from serve.peer_worker import Worker

    workers: dict[str, Worker] = {}

    def enter(name: str, make: Callable[[], Worker]) -> None:
        with cli.phase(f"starting {name}"):
            workers[name] = stack.enter_context(make())

    def llama(path: Path) -> Worker:
        return peer_llama.start(args.llama_python, path, CONTEXT, threads)

    # A started peer has read or mapped its file: the folder (1 GB) can go before anything is timed.
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if args.llama_python is None:
            _say_skipped("llama.cpp", peer_llama.FLAG)
        else:
            bundled = bundled_model_path()
            enter(Q4_1, lambda: llama(bundled))
            enter(F32, lambda: llama(peer_llama.write_f32_gguf(bundled, folder / "f32.gguf")))
        if args.torch_python is None:
            _say_skipped("transformers", peer_torch.FLAG)
        else:
            peer_torch.write_reference(bundled_model_path(), folder / "hf")
            enter(TORCH, lambda: peer_torch.start(args.torch_python, folder / "hf", threads))
    return (
        {name: _theirs(worker) for name, worker in workers.items()},
        {name: worker.facts for name, worker in workers.items()},
    )


def _say_skipped(peer: str, flag: str) -> None:
    cli.say(f"{peer}: skipped, no {flag} given (python -m serve.peers --help says how to make one)")


def _theirs(worker: Any) -> Decode:
    return lambda ids, max_tokens: Run(*worker.decode(ids, max_tokens))


def start_ours() -> dict[str, Any]:
    """Our engine with weights as stored and with weights expanded, compiled and measured."""
    import jetspec_jax  # seconds of imports

    engines: dict[str, Any] = {}
    for weights in WEIGHTS:
        engine = EngineConfig(weights=weights, capacity=CONTEXT)
        engines[weights] = jetspec_jax.LLM(engine=engine, progress=cli.say)
        with cli.phase(f"compiling, weights {weights}"):
            for spec in MODES.values():
                engines[weights].warmup(spec=spec)
    return engines


def ours(llm: Any, spec: SpecConfig | None) -> Decode:
    """Our decoding of one prompt; None: the engine's own speculation."""

    def decode(ids: Sequence[int], max_tokens: int) -> Run:
        sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
        got = llm.generate([list(ids)], sampling, spec=spec)[0]
        return Run(tuple(int(t) for t in got.token_ids), got.timings.decode_s, got.spec)

    return decode


def _check_lengths(prompts: Prompts, max_tokens: int) -> None:
    for name, ids in prompts:
        if len(ids) + max_tokens > CONTEXT:
            raise InputError(
                f"prompt {name} has {len(ids)} tokens, with --max-tokens {max_tokens} more than "
                f"the {CONTEXT} of this comparison; lower --max-tokens or leave the prompt out"
            )


def take_turns(
    contenders: Mapping[str, Decode],
    prompts: Prompts,
    max_tokens: int,
    turns: int,
) -> dict[str, list[list[Run]]]:
    """Everyone on every prompt, `turns` times round, starting with another one each time."""
    names = list(contenders)
    runs: dict[str, list[list[Run]]] = {name: [[] for _ in prompts] for name in names}
    count = 0
    for index, (prompt, ids) in enumerate(prompts):
        for _ in range(turns):
            first = count % len(names)
            count += 1
            for name in names[first:] + names[:first]:
                time.sleep(PAUSE_S)
                runs[name][index].append(contenders[name](ids, max_tokens))
        speeds = (f"{name} {_rate([runs[name][index]]):.1f}" for name in names)
        cli.say(f"  {index + 1}/{len(prompts)} {prompt}, tok/s: {', '.join(speeds)}")
    return runs


def _rate(prompts: Sequence[Sequence[Run]]) -> float:
    """Tokens per second over prompts, each with the median of its turns."""
    tokens = sum(len(turns[0].token_ids) for turns in prompts)
    return tokens / sum(statistics.median(run.decode_s for run in turns) for turns in prompts)


def summarise(runs: Runs, ids: Sequence[str]) -> dict[str, Any]:
    """Identity, agreement, rates and ratios. `ids` names the prompts."""
    rates = {name: _rate(prompts) for name, prompts in runs.items()}

    def over(weights: str, peer: str) -> dict[str, float | None]:
        return {mode: _ratio(rates.get(f"{weights}_{mode}"), rates.get(peer)) for mode in MODES}

    odd = first_different(runs, ids)
    return {
        "tokens_identical": odd is None,
        "first_different": odd,
        "agreement": {peer: agreement(runs, peer) for peer in PEERS},
        "tok_s": {name: _rounded(rates.get(name), 2) for name in (*PEERS, *OURS)},
        "tau": {w: _tau(runs.get(f"{w}_speculative", ())) for w in WEIGHTS},
        **{f"vs_{peer}": over(weights, peer) for peer, weights in PEERS.items()},
        "vs_own_plain": {w: over(w, f"{w}_plain")["speculative"] for w in WEIGHTS},
        "per_prompt": [
            {"id": name, "tok_s": {n: round(_rate([p[index]]), 2) for n, p in runs.items()}}
            for index, name in enumerate(ids)
        ],
    }


def first_different(runs: Runs, ids: Sequence[str]) -> dict[str, Any] | None:
    """The first of our runs that is not what the first of ours, a plain one, wrote."""
    from serve.measure import first_difference

    mine = [name for name in OURS if name in runs]
    for index, prompt in enumerate(ids):
        reference = runs[mine[0]][index][0].token_ids
        for name in mine:
            for run in runs[name][index]:
                at = first_difference(reference, run.token_ids)
                if at is not None:
                    return {"id": prompt, "contender": name, "token": at}
    return None


def agreement(runs: Runs, peer: str) -> dict[str, Any] | None:
    """How far a peer writes our tokens: the share of equal leading tokens (mean over prompts), and
    the number of prompts that are equal to the end. None where the peer did not run.
    """
    from serve.measure import first_difference

    if peer not in runs:
        return None
    mine = runs[next(name for name in OURS if name in runs)]
    shares = []
    for ours_, theirs in zip(mine, runs[peer], strict=True):
        tokens = ours_[0].token_ids
        at = first_difference(tokens, theirs[0].token_ids)
        shares.append(1.0 if at is None else at / max(len(tokens), 1))
    return {
        "leading_share": round(statistics.fmean(shares), 4),
        "prompts_equal": sum(share == 1.0 for share in shares),
    }


def bandwidth_figures(
    runs: Runs, target_bytes: Mapping[str, int], bandwidth: float
) -> dict[str, Any]:
    """What the memory gives, and how much of it plain decoding uses: a token reads every weight."""
    used = {
        weights: _rounded(_rate(runs[f"{weights}_plain"]) * size / bandwidth, 3)
        for weights, size in target_bytes.items()
    }
    return {
        "bandwidth_gb_s": round(bandwidth / 1e9, 1),
        "target_mb": {w: round(size / 1e6, 1) for w, size in target_bytes.items()},
        "plain_of_bandwidth_limit": used,
    }


def _ratio(above: float | None, below: float | None) -> float | None:
    return None if above is None or not below else round(above / below, 3)


def _rounded(value: float | None, digits: int) -> float | None:
    return None if value is None else round(value, digits)


def _tau(prompts: Sequence[Sequence[Run]]) -> float | None:
    stats = (run.stats for turns in prompts for run in turns[:1] if run.stats is not None)
    return _rounded(pooled(stats).tau, 3)


def read_bandwidth(size: int = 512 << 20) -> float:
    """Bytes per second that this machine reads, best of six passes of one numpy thread per core.

    Args:
        size: bytes; beyond any cache.
    """
    import numpy as np

    from serve.facts import cores

    halves = np.array_split(np.ones(size // 4, np.float32), cores())
    best = float("inf")
    with concurrent.futures.ThreadPoolExecutor(len(halves)) as pool:
        for _ in range(6):
            began = time.perf_counter()
            list(pool.map(np.max, halves))
            best = min(best, time.perf_counter() - began)
    return sum(h.nbytes for h in halves) / best


def _table(document: Mapping[str, Any]) -> None:
    from serve.render import number
    from serve.report import print_table

    labels = {
        Q4_1: "llama.cpp, Q4_1 file",
        F32: "llama.cpp, float32",
        TORCH: "transformers, float32",
        **{f"stored_{mode}": f"ours, weights as stored, {mode}" for mode in MODES},
        **{f"float32_{mode}": f"ours, weights as float32, {mode}" for mode in MODES},
    }
    rates, alike = document["tok_s"], document["agreement"]
    rows = []
    for name, label in labels.items():
        rate, near = rates[name], alike.get(name)
        rows.append(
            [
                label,
                number(rate, 1),
                *(number(_ratio(rate, rates[peer]), 2, "x") for peer in PEERS),
                "" if near is None else f"{near['prompts_equal']}/{document['prompts']}",
            ]
        )
    footer = (
        f"{document['hardware']}, {document['threads']} threads · batch 1 · greedy · "
        f"{document['prompts']} prompts of {document['suite']}, {document['max_tokens']} tokens, "
        f"{document['turns']} turns · ours identical: "
        f"{'yes' if document['tokens_identical'] else 'NO'} · memory reads "
        f"{document['bandwidth_gb_s']} GB/s"
    )
    columns = (
        "",
        "tok/s",
        "to llama.cpp Q4_1",
        "to llama.cpp F32",
        "to transformers",
        "our tokens",
    )
    print_table("side by side", rows, columns, footer)


if __name__ == "__main__":
    sys.exit(main())
