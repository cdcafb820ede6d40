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
import contextlib
import os
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from jetspec_jax.config import WEIGHTS, EngineConfig, SamplingParams, SpecConfig
from jetspec_jax.device import read_bandwidth
from jetspec_jax.errors import ConfigError, InputError
from serve import cli
from serve.peer_figures import (
    F32,
    METHOD,
    MODES,
    Q4_1,
    TORCH,
    Run,
    bandwidth_figures,
    print_rates,
    rate,
    summarise,
)

CONTEXT = 2_048  # tokens, prompt and answer together, for everyone
PAUSE_S = 0.05  # between turns: a thread pool spins for a while after its last job
WARM_TOKENS = 8
BUSY = 0.5  # load average from which a comparison is not fair
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


Decode = Callable[[Sequence[int], int], Run]  # (prompt ids, new tokens)
Prompts = Sequence[tuple[str, Sequence[int]]]  # (name, prompt ids)


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
    print_rates(document)
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
        speeds = (f"{name} {rate([runs[name][index]]):.1f}" for name in names)
        cli.say(f"  {index + 1}/{len(prompts)} {prompt}, tok/s: {', '.join(speeds)}")
    return runs


if __name__ == "__main__":
    sys.exit(main())
