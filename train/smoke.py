"""The whole training path on the real target, small: regenerate, train, export, evaluate, serve.

    python -m train.smoke

Takes under three minutes on two cores. The head is far too small and short-trained to be of use;
what is checked is that every stage reads what the one before it wrote, that serving with the new
head changes no token, and that simulated and served tau agree. Exit code 1 where they do not.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import jax.numpy as jnp

from jetspec_jax import EngineConfig, SamplingParams, SpecConfig
from jetspec_jax.engine import LLM
from jetspec_jax.errors import JetSpecError
from train import evaluate as evaluation
from train import regenerate
from train.config import load_config
from train.data import Dataset
from train.evaluate import walk_tau
from train.export import main as export
from train.train_draft import Trainer

BUDGET = 8
OVERRIDES = (
    "data.sequences=4",
    "data.anchors=24",
    "data.max_tokens=192",
    "data.held_out=0.0",
    "draft.layers=1",
    "draft.block_size=5",
    "draft.vocab=4096",
    "draft.path_head=pairwise",
    "draft.path_rank=16",
    "draft.mask_token_id=16",
    "optim.lr=2e-3",
    "run.eval_every=1000",
    "run.save_every=1000",
)


def _regenerate(folder: Path, prompts: int) -> dict[str, Any]:
    words = ["--out", str(folder), "--prompts", str(prompts), "--slots", str(prompts)]
    words += ["--max-new", "64", "--max-prompt", "160", "--num-taps", "3"]
    done = regenerate.run(regenerate.parser().parse_args(words))
    if done["done"] + done["skipped"] + done["failed"] != done["input"]:
        raise JetSpecError(f"regeneration lost prompts: {done}; report this")
    return done


def _simulated(trainer: Trainer, data: Dataset) -> float:
    """Tau of decoding the training answers round by round."""
    evaluator = evaluation.make_evaluator(trainer.head, jnp.dtype("float32"))
    taus = walk_tau(
        evaluator,
        trainer.shipped_params(),
        data.train,
        trainer.to_batch,
        trainer.frozen,
        trainer.id_map,
    )
    return taus[str(BUDGET)]


def run(out: Path, prompts: int, steps: int) -> dict[str, Any]:
    """All stages under `out`; returns the summary."""
    clock, seconds = time.monotonic(), {}

    def lap(name: str) -> None:
        nonlocal clock
        now = time.monotonic()
        seconds[name], clock = round(now - clock, 1), now

    answers = _regenerate(out / "data", prompts)
    lap("regenerate")
    paths = (f"data.path={out / 'data'}", f"run.out={out / 'run'}", f"optim.steps={steps}")
    trainer = Trainer(load_config(None, (*OVERRIDES, *paths)), "train.smoke")
    trainer.run()
    losses = [line["loss"] for line in trainer.log]
    lap("train")
    head = out / "head"
    if export(["--run", str(out / "run"), "--which", "last", "--out", str(head)]):
        raise JetSpecError("export failed; see above")
    lap("export")
    simulated = _simulated(trainer, trainer.data)
    lap("evaluate")
    llm = LLM(draft=head, engine=EngineConfig(capacity=512))
    sampling = SamplingParams(max_tokens=64)
    spec = SpecConfig(mode="tree", drafter="head", budget=BUDGET)
    texts = [s.tokens[:start].tolist() for s in trainer.data.train for start, _ in s.spans]
    plain = llm.generate(texts, sampling, spec=SpecConfig(mode="off"))
    fast = llm.generate(texts, sampling, spec=spec)
    rounds = sum(r.spec.rounds for r in fast)
    tau = 1 + sum(r.spec.accepted for r in fast) / max(rounds, 1)
    lap("serve")
    return {
        "tokens_identical": all(
            a.token_ids == b.token_ids for a, b in zip(plain, fast, strict=True)
        ),
        "tau_served": round(tau, 3),
        "tau_simulated": simulated,
        "loss_first": round(losses[0], 3),
        "loss_last": round(losses[-1], 3),
        "answers": answers["done"],
        "answer_tokens": answers["answer_tokens"],
        "seconds": seconds,
    }


def main(argv: list[str] | None = None) -> int:
    """Command line; the last line of stdout is JSON."""
    p = argparse.ArgumentParser(
        prog="python -m train.smoke", description=(__doc__ or "").splitlines()[0]
    )
    p.add_argument("--out", help="folder to keep (default: a temporary one)")
    p.add_argument("--prompts", type=int, default=12)
    p.add_argument("--steps", type=int, default=100)
    args = p.parse_args(argv)
    out = Path(args.out or tempfile.mkdtemp(prefix="jetspec-smoke-"))
    try:
        result = run(out, args.prompts, args.steps)
    except JetSpecError as err:
        print(f"error: {err}", file=sys.stderr)
        return err.exit_code
    finally:
        if not args.out:
            shutil.rmtree(out, ignore_errors=True)
    print(json.dumps(result))
    learned = result["loss_last"] < 0.6 * result["loss_first"] and result["tau_served"] > 1.3
    agree = abs(result["tau_served"] - result["tau_simulated"]) < 0.1
    return 0 if result["tokens_identical"] and learned and agree else 1


if __name__ == "__main__":
    sys.exit(main())
