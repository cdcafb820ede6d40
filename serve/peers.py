"""Side by side with transformers on torch: same weights, same prompts, one run. Optional, not in
CI.

    python -m serve.peers --torch-python /path/to/python --limit 4 --max-tokens 128

The peer runs in the given interpreter (it needs torch and transformers; torch's CPU wheels exist
for other Python versions than ours), from a temporary Hugging Face directory with exactly our
dequantised weights. Per prompt: the peer, our plain decoding and our speculative decoding, in turn,
greedy, batch 1. Last line of stdout: JSON.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from jetspec_jax import LLM, SamplingParams, SpecConfig
from jetspec_jax.config import ModelConfig
from jetspec_jax.errors import JetSpecError, ModelFileError
from jetspec_jax.weights import bundled_model_path, open_source
from serve import cli
from serve.facts import cores, hardware
from serve.suites import load_suite

_WORKER = """
import json, sys, time
import torch, transformers
transformers.utils.logging.set_verbosity_error()
model = transformers.AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32).eval()
versions = {"torch": torch.__version__, "transformers": transformers.__version__}
print(json.dumps(versions | {"threads": torch.get_num_threads()}), flush=True)
for line in sys.stdin:
    job = json.loads(line)
    ids = torch.tensor([job["ids"]])
    with torch.inference_mode():
        model(ids[:, :-1])
        began = time.perf_counter()
        model(ids[:, :-1])
        prefill = time.perf_counter() - began
        began = time.perf_counter()
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, pad_token_id=0,
            max_new_tokens=job["max_tokens"], min_new_tokens=job["max_tokens"])
        seconds = time.perf_counter() - began
    answer = {"ids": out[0, ids.shape[1]:].tolist(), "decode_s": seconds - prefill}
    print(json.dumps(answer), flush=True)
"""


def write_reference(folder: Path) -> ModelConfig:
    """The bundled model's dequantised float32 weights as a Hugging Face directory."""
    source = open_source(bundled_model_path())
    cfg = source.config()
    save_file(
        {n: np.asarray(source.read(n), np.float32) for n in source.names()},
        str(folder / "model.safetensors"),
        metadata={"format": "pt"},
    )
    values = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": cfg.vocab_size,
        "hidden_size": cfg.hidden_size,
        "intermediate_size": cfg.ffn_size,
        "num_hidden_layers": cfg.num_layers,
        "num_attention_heads": cfg.num_heads,
        "num_key_value_heads": cfg.num_kv_heads,
        "head_dim": cfg.head_dim,
        "rms_norm_eps": cfg.rms_eps,
        "rope_theta": cfg.rope.theta,
        "max_position_embeddings": cfg.max_context,
        "tie_word_embeddings": cfg.tie_embeddings,
        "eos_token_id": list(cfg.eos_ids),
        "bos_token_id": cfg.bos_id,
        "hidden_act": "silu",
        "torch_dtype": "float32",
    }
    (folder / "config.json").write_text(json.dumps(values))
    return cfg


class Peer:
    """transformers in another process; one JSON line per request."""

    def __init__(self, python: str, folder: Path) -> None:
        try:
            self._process = subprocess.Popen(
                [python, "-c", _WORKER, str(folder)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
        except OSError as err:
            raise ModelFileError(
                f"--torch-python {python}: {err.strerror}; give an interpreter with torch"
            ) from err
        self.versions = self._read()

    def _read(self) -> dict[str, Any]:
        line = self._process.stdout.readline()  # type: ignore[union-attr]  # PIPE above
        if not line:
            raise ModelFileError(
                "the peer process ended; does --torch-python have torch and transformers?"
            )
        return json.loads(line)

    def generate(self, ids: Sequence[int], max_tokens: int) -> dict[str, Any]:
        job = json.dumps({"ids": list(ids), "max_tokens": max_tokens})
        print(job, file=self._process.stdin, flush=True)
        return self._read()

    def close(self) -> None:
        self._process.terminate()


def compare(args: argparse.Namespace) -> dict[str, Any]:
    """Runs all three, prompt by prompt; figures are medians over prompts."""
    suite = load_suite("humaneval", args.limit)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_reference(folder)
        peer = Peer(args.torch_python, folder)
        try:
            llm = LLM(progress=lambda m: print(m, file=sys.stderr, flush=True))
            off = SpecConfig(mode="off")
            for spec in (off, None):
                llm.warmup(spec=spec)
            sampling = SamplingParams(max_tokens=args.max_tokens, ignore_eos=True)
            rates: dict[str, list[float]] = {"transformers": [], "plain": [], "speculative": []}
            same = 0
            for prompt in suite.prompts:
                ids = llm.encode(list(prompt.messages))
                theirs = peer.generate(ids, args.max_tokens)
                plain = llm.generate([ids], sampling, spec=off)[0]
                spec_run = llm.generate([ids], sampling)[0]
                rates["transformers"].append(len(theirs["ids"]) / theirs["decode_s"])
                rates["plain"].append(plain.timings.tok_s or 0.0)
                rates["speculative"].append(spec_run.timings.tok_s or 0.0)
                # the peer suppresses the end token, we write on after it: equal up to there
                ends = llm.model_config.eos_ids
                end = next((i for i, t in enumerate(plain.token_ids) if t in ends), args.max_tokens)
                same += (
                    list(plain.token_ids[:end]) == theirs["ids"][:end]
                    and plain.token_ids == spec_run.token_ids
                )
                print({k: round(v[-1], 1) for k, v in rates.items()}, file=sys.stderr, flush=True)
        finally:
            peer.close()
    weights = llm.plan()["memory"]["target_bytes"]
    bandwidth = read_bandwidth()
    median = {k: statistics.median(v) for k, v in rates.items()}
    return {
        "prompts": len(suite.prompts),
        "max_tokens": args.max_tokens,
        "tokens_identical": same == len(suite.prompts),
        "tok_s": {k: round(v, 2) for k, v in median.items()},
        "vs_transformers": {
            k: round(median[k] / median["transformers"], 3) for k in ("plain", "speculative")
        },
        "read_gb_s": round(bandwidth / 1e9, 1),
        "plain_of_bandwidth_limit": round(median["plain"] * weights / bandwidth, 3),
        "peer": peer.versions,
        "hardware": hardware(),
        "dtype": "float32",
        "batch": 1,
        "temperature": 0.0,
    }


def read_bandwidth() -> float:
    """Bytes per second that this machine reads, best of six passes of one numpy thread per core."""
    halves = np.array_split(np.ones(128 << 20, np.float32), cores())  # 512 MiB: beyond any cache
    best = float("inf")
    with concurrent.futures.ThreadPoolExecutor(len(halves)) as pool:
        for _ in range(6):
            began = time.perf_counter()
            list(pool.map(np.max, halves))
            best = min(best, time.perf_counter() - began)
    return sum(h.nbytes for h in halves) / best


def main(argv: Sequence[str] | None = None) -> int:
    parser = cli.Parser(
        prog="python -m serve.peers",
        description="Side by side with transformers on torch, float32.",
    )
    parser.add_argument(
        "--torch-python", default=sys.executable, help="interpreter with torch and transformers"
    )
    parser.add_argument("--limit", type=int, default=4, help="HumanEval prompts")
    parser.add_argument("--max-tokens", type=int, default=128)
    try:
        print(json.dumps(compare(parser.parse_args(argv))))
    except JetSpecError as err:
        print(f"error: {err}", file=sys.stderr)
        return err.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
