"""Steps of `serve.gpu_check` that need an engine; each is a process of its own.

    python -m serve.gpu_steps facts | exactness | run [--rehearse] [--model PATH]

The last line of stdout is JSON. Exit status 1 where the step does not hold.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import shutil
import subprocess
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from jetspec_jax.config import EngineConfig, ModelConfig, SamplingParams, SpecConfig
from jetspec_jax.errors import ModelFileError
from serve import cli, facts

# What tests, tokenizers of GGUF files and GPUs without wgmma need beside JAX.
OPTIONAL = ("flax", "pytest", "hypothesis", "jaxtyping", "beartype", "gguf", "jax-triton", "triton")
# Trees of drafts that come true: few, since each is a program to compile.
TREES = (("exact", 8), ("accum_logp", 16), ("exact", 64))
# Heads, widths and vocabulary of Qwen3-0.6B with fewer layers: every kernel shape of a dense target
# with head dimension 128 is met, and it compiles in seconds.
GEOMETRY = {
    "vocab_size": 8192,
    "hidden_size": 1024,
    "num_layers": 4,
    "num_heads": 16,
    "num_kv_heads": 8,
    "head_dim": 128,
    "ffn_size": 3072,
    "max_context": 2048,
}
HEAD = {
    "num_layers": 2,
    "num_heads": 16,
    "num_kv_heads": 8,
    "head_dim": 128,
    "ffn_size": 3072,
    "target_layer_ids": (0, 1, 2),
    "mask_token_id": 8191,
    "block_size": 8,
}


def random_engine(rehearse: bool) -> Any:
    """An engine over random weights: bfloat16 through the GPU kernels, or small on a CPU."""
    from jetspec_jax import testing
    from jetspec_jax.engine import LLM

    if rehearse:
        return testing.tiny_llm()
    engine = EngineConfig(capacity=1024, dtype="bfloat16", kernels="gpu")
    config: ModelConfig = testing.tiny_config(**GEOMETRY)
    target = testing.tiny_target(config, engine=engine)
    return LLM.from_parts(
        target, testing.tiny_head(target, engine=engine, **HEAD), engine=engine, progress=cli.say
    )


def prompts(llm: Any, count: int, length: int) -> list[list[int]]:
    """Random ids; first ids differ, since scripts are chosen by them."""
    rng = np.random.default_rng(0)
    high = min(250, llm.model_config.vocab_size)
    return [[i, *rng.integers(0, high, length - 1 + 3 * i).tolist()] for i in range(1, count + 1)]


def gpu_facts() -> dict[str, Any]:
    """Device, driver and versions; which optional packages are missing."""
    import jax

    found: dict[str, Any] = {"device": jax.devices()[0].device_kind, "hardware": facts.hardware()}
    if shutil.which("nvidia-smi"):
        query = "name,driver_version,memory.total,clocks.max.sm,power.limit"
        done = subprocess.run(
            ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            check=False,
        )
        found["nvidia-smi"] = done.stdout.strip()
    missing = []
    for name in OPTIONAL:
        try:
            importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            missing.append(name)
    return {
        **found,
        "missing packages": ", ".join(missing) or "none",
        "commit": facts.git_revision(),
        "versions": facts.versions(),
    }


def exactness_step(rehearse: bool) -> dict[str, Any]:
    """Bits of all logits, plain against trees: random drafts, drafts that come true, batches."""
    from jetspec_jax import testing
    from serve.exactness import compare, decode

    llm = random_engine(rehearse)
    tokens, trees = (16, TREES[:1]) if rehearse else (48, TREES)
    report = llm.probe()
    single, batched = prompts(llm, 3, 20), prompts(llm, 4, 20)
    tally, _ = compare(llm, single, 1, tokens)
    several, _ = compare(llm, batched, 4, tokens)
    different = positions = 0
    accepted = 0
    plain, rows, _ = decode(llm, SpecConfig(mode="off"), batched, tokens)
    oracle = testing.oracle(llm, batched, tokens)
    for builder, budget in trees:
        spec = testing.with_budget(oracle, builder=builder, budget=budget)
        written, found, rounds = decode(llm, spec, batched, tokens)
        positions += sum(map(len, rows))
        different += sum(
            a != b for x, y in zip(rows, found, strict=True) for a, b in zip(x, y, strict=True)
        )
        different += written != plain
        accepted += tokens - rounds
    return {
        "probe": str(report),
        "probe_invariant": report.invariant,
        "positions": positions + tally.positions + several.positions,
        "different": different + tally.different + several.different,
        "tokens_identical": tally.tokens_identical and several.tokens_identical,
        # drafts that come true commit paths: without them only the root would have been checked
        "rounds_saved_by_accepted_drafts": accepted,
        "kernels": llm.plan()["kernels"],
        "held": report.invariant
        and not (different + tally.different + several.different)
        and tally.tokens_identical
        and several.tokens_identical
        and accepted > 0,
    }


def run_step(rehearse: bool, model: str | None) -> dict[str, Any]:
    """Plain and speculative decoding end to end, tokens compared and timed."""
    from jetspec_jax import testing
    from jetspec_jax.engine import LLM

    limit = 16 if rehearse else 96
    sampling = SamplingParams(max_tokens=limit, ignore_eos=True)
    what, note = "random weights", "drafts that come true: SYNTHETIC"
    try:
        if rehearse:
            raise ModelFileError("rehearsal")
        engine = EngineConfig(capacity=1024, dtype="bfloat16", kernels="gpu")
        llm = LLM(model, engine=engine, progress=cli.say)
        what, note = llm.plan()["model"], "its draft head" if llm.draft_config else "prompt lookup"
        spec = SpecConfig()
        texts = ["Write a Python function that adds two numbers.", "Explain rainbows."]
        asked = [llm.encode([{"role": "user", "content": t}]) for t in texts]
    except ModelFileError as error:
        if model is not None:
            raise
        cli.say(f"no bundled model here ({error}); random weights instead")
        llm = random_engine(rehearse)
        asked = prompts(llm, 2, 24)
        spec = testing.oracle(llm, asked, limit)
    times: dict[str, list[float]] = {"plain": [], "speculative": []}
    written: dict[str, list[list[int]]] = {}
    tau = None
    specs = {"plain": SpecConfig(mode="off"), "speculative": spec}
    for turn in range(3):  # the first compiles
        for label, way in specs.items():
            results = [llm.generate([ids], sampling, spec=way)[0] for ids in asked]
            written.setdefault(label, [list(r.token_ids) for r in results])
            if turn:
                times[label].append(sum(r.timings.decode_s for r in results))
            if label == "speculative":
                tau = results[0].spec.tau
    count = sum(map(len, written["plain"]))
    best = {label: min(spent) for label, spent in times.items()}
    same = written["plain"] == written["speculative"]
    return {
        "model": what,
        "drafts": note,
        "tokens": count,
        "tokens_identical": same,
        "plain_tok_s": count / best["plain"],
        "speculative_tok_s": count / best["speculative"],
        "speedup": best["plain"] / best["speculative"],
        "tau": tau,
        "held": same,
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one step; returns the exit code."""
    parser = cli.Parser(prog="python -m serve.gpu_steps", description="A step of serve.gpu_check.")
    parser.add_argument("step", choices=("facts", "exactness", "run"))
    parser.add_argument("--rehearse", action="store_true")
    parser.add_argument("--model", metavar="PATH")
    parser.add_argument("--debug", action="store_true", help="show tracebacks")
    return cli.run(_run, parser, argv)


def _run(args: argparse.Namespace) -> int:
    started = time.monotonic()
    if args.step == "facts":
        found = gpu_facts()
    elif args.step == "exactness":
        found = exactness_step(args.rehearse)
    else:
        found = run_step(args.rehearse, args.model)
    print(cli.dump_json({**found, "seconds": round(time.monotonic() - started, 1)}))
    return 0 if found.get("held", True) else 1


if __name__ == "__main__":
    raise SystemExit(main())
