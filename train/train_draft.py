"""Train a draft head: `python -m train.train_draft --config configs/train/smollm2_135m.toml
[section.key=value ...]`."""

from __future__ import annotations

import argparse
import functools
import json
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from tqdm import tqdm

from jetspec_jax.errors import ConfigError, InputError, JetSpecError
from jetspec_jax.models import decoder
from jetspec_jax.typing import Params
from jetspec_jax.weights import bundled_model_path, load_params, open_source
from train import checkpoint
from train.cli import make_folder
from train.config import TrainConfig, load_config, to_json
from train.data import (
    Dataset,
    coverage,
    held_out_batches,
    is_for_evaluation,
    load_dataset,
    train_batch,
)
from train.evaluate import evaluate, make_evaluator
from train.export import export_head
from train.features import feature_function
from train.head_setup import (
    draft_config,
    first_params,
    first_state,
    frozen_of,
    id_map_for,
    optimiser_of,
)
from train.show import show_sample
from train.step import Batch, data_mesh, train_step


class StopFlag:
    """Set by SIGINT or SIGTERM; a second signal ends the process the usual way."""

    def __init__(self) -> None:
        self.reason = ""

    def __enter__(self) -> StopFlag:
        self._old = {s: signal.signal(s, self._handle) for s in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, *exc: object) -> None:
        for number, handler in self._old.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: object) -> None:
        self.reason = signal.Signals(number).name
        signal.signal(number, self._old[signal.Signals(number)])


def device_mesh(cfg: TrainConfig) -> Mesh | None:
    """The devices that share a step's sequences; None for one.

    Raises:
        ConfigError: more devices than there are, or sequences that cannot be shared evenly.
    """
    there = jax.device_count()
    count = cfg.optim.devices or there
    if count > there:
        raise ConfigError(f"optim.devices={count}, but JAX finds {there}; give at most {there}")
    parts = count * cfg.optim.accumulate
    if cfg.data.sequences % parts:
        raise ConfigError(
            f"data.sequences={cfg.data.sequences} cannot be cut into {count} devices x "
            f"{cfg.optim.accumulate} parts; give a multiple of {parts}"
        )
    return None if count == 1 else data_mesh(count)


class Trainer:
    """One run: builds everything from the configuration, resumes if the run folder holds a
    checkpoint.

    Args:
        cfg: training configuration.
        command: recorded in provenance.json.
        say: progress messages (stderr by default).
        data: what `cfg.data` would load, where it is loaded already.
    """

    def __init__(
        self,
        cfg: TrainConfig,
        command: str = "",
        say: Callable[[str], None] | None = None,
        data: Dataset | None = None,
    ) -> None:
        self.cfg, self.command = cfg, command
        self.say = say or (lambda text: print(text, file=sys.stderr, flush=True))
        self.out = Path(cfg.run.out)
        self.dtype = jnp.dtype(cfg.optim.precision)
        self.mesh = device_mesh(cfg)  # before the data: reading it takes a while
        if is_for_evaluation(Path(cfg.data.path)):
            raise ConfigError(
                f"data.path={cfg.data.path} answers evaluation prompts and must not be trained on; "
                "give another folder"
            )
        self.data = load_dataset(cfg.data) if data is None else data
        self.say(
            f"data {cfg.data.path}: {len(self.data.train)} sequences, "
            f"{self.data.answer_tokens} answer tokens, "
            f"{len(self.data.held_out)} held out, {self.data.rejected} rejected"
        )
        source = open_source(cfg.data.target or bundled_model_path())
        self.target = source.config()
        self.head = draft_config(cfg, self.target, self.data.target_layer_ids)
        self.say(f"target {source.path}")
        target_dtype = jnp.dtype(cfg.data.target_dtype)
        target_params = load_params(source, decoder.declare(self.target), target_dtype)
        self.id_map = id_map_for(cfg, self.target, self.data)
        self.frozen = frozen_of(target_params, self.target.vocab_size, self.id_map, self.dtype)
        params = first_params(cfg, self.head, self.target, target_params, self.id_map)
        needs = any(s.taps is None or s.final is None for s in self.data.train + self.data.held_out)
        self.features = (
            feature_function(target_params, self.target, self.head.target_layer_ids, self.mesh)
            if needs
            else None
        )
        self.covered = (
            1.0
            if self.id_map is None
            else coverage(self.data.train, self.id_map, self.target.vocab_size)
        )
        self.optimiser = optimiser_of(cfg.optim)
        self.state = first_state(params, self.optimiser, cfg.optim.ema)
        self.step_fn = jax.jit(
            functools.partial(
                train_step,
                cfg=self.head,
                loss=cfg.loss,
                optimiser=self.optimiser,
                ema_decay=cfg.optim.ema,
                dtype=self.dtype,
                remat=cfg.optim.remat,
                accumulate=cfg.optim.accumulate,
                mesh=self.mesh,
            ),
            donate_argnums=0,
        )
        self.evaluator = make_evaluator(self.head, self.dtype)
        self.best: dict[str, Any] = {}
        self.seconds = 0.0  # of training, over all resumptions
        self.log: list[dict[str, Any]] = []

    # ---- data ----

    def to_batch(self, arrays: dict[str, np.ndarray]) -> Batch:
        """Device batch of host arrays; features are computed where the shards hold none."""
        device: dict[str, Any] = dict(arrays)
        if self.features is not None and not {"taps", "final"} <= device.keys():
            taps, final = self.features(arrays["tokens"])
            device |= {"taps": taps, "final": final}
        return Batch(**{name: jnp.asarray(value) for name, value in device.items()})

    # ---- checkpoints ----

    def resume(self) -> None:
        """Continue from the newest complete checkpoint of the run folder, if there is one."""
        found = checkpoint.complete(self.out)
        if not found:
            return
        meta = checkpoint.read_meta(found[-1])
        checkpoint.check_same(found[-1], meta, to_json(self.cfg), self.data.digest)
        self.state = checkpoint.load(found[-1], self.state)
        self.best, self.seconds = meta["best"], meta["seconds"]
        log = self.out / "log.jsonl"
        if log.is_file():  # lines past the checkpoint are written again
            lines = [
                ln
                for ln in log.read_text().splitlines()
                if ln and json.loads(ln)["step"] <= int(self.state.step)
            ]
            log.write_text("".join(f"{ln}\n" for ln in lines))
        self.say(f"resumed {found[-1]}")

    def save(self, seconds: float) -> None:
        """Write a checkpoint of the current state."""
        meta = {
            "config": to_json(self.cfg),
            "digest": self.data.digest,
            "best": self.best,
            "seconds": seconds,
        }
        checkpoint.save(self.out, self.state, meta, self.cfg.run.keep)

    def shipped_params(self) -> Params:
        """What is evaluated and exported: the averaged weights where there are any."""
        return self._on_one_device(self.state.params if self.state.ema is None else self.state.ema)

    def evaluation_batch(self, arrays: dict[str, np.ndarray]) -> Batch:
        """`to_batch` where evaluation runs."""
        return self._on_one_device(self.to_batch(arrays))

    def _on_one_device(self, tree: Any) -> Any:
        # Evaluation is a program of one device: sharded over several, XLA's partitioner does not
        # survive the barrier in `candidates` (jaxlib 0.11.2).
        return tree if self.mesh is None else jax.device_put(tree, self.mesh.devices.flat[0])

    # ---- evaluation ----

    def evaluate(self) -> dict[str, Any]:
        """Held-out metrics of the current weights; exports them when they are the best so far."""
        run = self.cfg.run
        batches = held_out_batches(self.data, self.cfg.data, run.eval_sequences, run.eval_anchors)
        result: dict[str, Any] = evaluate(
            self.evaluator,
            self.shipped_params(),
            map(self.evaluation_batch, batches),
            self.frozen,
            self.id_map,
        ) | {"step": int(self.state.step)}
        if not result["blocks"]:
            return result
        score = result["tree_tau"]["16"]
        if score > self.best.get("tree_tau", {}).get("16", 0.0):
            self.best = result
            export_head(
                self.out / "best",
                self.head,
                self.shipped_params(),
                self.id_map,
                target=self.target,
                provenance=self.provenance(result),
            )
        return result

    def provenance(self, metrics: dict[str, Any]) -> dict[str, Any]:
        """What went into the head, for provenance.json."""
        return {
            "command": self.command,
            "config": to_json(self.cfg),
            "data": {
                "sha256": self.data.digest,
                "sequences": len(self.data.train),
                "answer_tokens": self.data.answer_tokens,
                "vocabulary_coverage": round(self.covered, 5),
            },
            "target": self.target.name,
            "metrics": {"held_out": metrics, "training_seconds": round(self.seconds, 1)},
        }

    # ---- the loop ----

    def plan(self) -> dict[str, Any]:
        """What a run would do, without doing it."""
        count = sum(int(p.size) for p in jax.tree.leaves(self.state.params))
        slots = self.cfg.data.sequences * self.cfg.data.anchors * self.head.depth
        logits = self.cfg.loss.chunk * self.head.depth * self.head.head_vocab_size * 4
        return {
            "head": {k: v for k, v in vars(self.head).items() if k != "rope"},
            "parameters": count,
            "export_mb": round(2 * count / 1e6, 1),
            "state_mb": round(4 * count * (3 + (self.state.ema is not None)) / 1e6, 1),
            "slots_per_step": slots,
            "logits_chunk_mb": round(logits / 1e6, 1),
            "sequences": len(self.data.train),
            "answer_tokens": self.data.answer_tokens,
            "epochs": round(
                self.cfg.optim.steps * self.cfg.data.sequences / len(self.data.train), 2
            ),
            "anchors_per_position": round(
                self.cfg.optim.steps
                * self.cfg.data.sequences
                * self.cfg.data.anchors
                / self.data.answer_tokens,
                2,
            ),
            "vocabulary_coverage": round(self.covered, 5),
            "config": to_json(self.cfg),
        }

    def _record(
        self, step: int, metrics: dict[str, Any], seconds: float, extra: dict[str, Any]
    ) -> dict[str, Any]:
        slots = float(metrics["slots"])
        line = {
            "step": step,
            "loss": float(metrics["loss"]),
            "loss_per_depth": [round(float(x), 4) for x in metrics["loss_per_depth"]],
            "agreement": [round(float(x), 4) for x in metrics["agreement"]],
            "chain_tau": round(float(metrics["chain_tau"]), 4),
            "grad_norm": float(metrics["grad_norm"]),
            "slots": slots,
            "slots_per_s": round(slots / max(seconds, 1e-9), 1),
            **extra,
        }
        if not np.isfinite(line["loss"]) or not np.isfinite(line["grad_norm"]):
            raise InputError(
                f"step {step}: loss {line['loss']} or its gradient is not finite; lower "
                "optim.lr (last checkpoint kept)"
            )
        self.log.append(line)
        return line

    def run(self) -> dict[str, Any]:
        """Train to `optim.steps`, the time limit or a signal; returns the summary (last line of
        stdout)."""
        cfg = self.cfg
        make_folder(self.out, "run.out")
        self.resume()
        begun, before = time.monotonic(), self.seconds
        total, step, reason = cfg.optim.steps, int(self.state.step), "steps"
        with (
            StopFlag() as stop,
            open(self.out / "log.jsonl", "a") as log,
            tqdm(
                total=total,
                initial=step,
                file=sys.stderr,
                desc="train",
                mininterval=2,
                disable=None,
            ) as bar,
        ):
            batch = self.to_batch(train_batch(self.data, cfg.data, step)) if step < total else None
            while step < total and batch is not None:
                started = time.monotonic()
                self.state, metrics = self.step_fn(self.state, batch, self.frozen)
                step += 1
                # The next batch is put together while this step computes.
                batch = (
                    self.to_batch(train_batch(self.data, cfg.data, step)) if step < total else None
                )
                metrics = jax.device_get(metrics)
                now = time.monotonic()
                self.seconds = before + now - begun
                due = step % cfg.run.eval_every == 0 or step == total
                extra = {"held_out": self.evaluate()} if due else {}
                line = self._record(step, metrics, now - started, extra)
                log.write(json.dumps(line) + "\n")
                log.flush()
                bar.update()
                bar.set_postfix(
                    loss=f"{line['loss']:.3f}", tau=line["chain_tau"], slots_s=line["slots_per_s"]
                )
                if due:
                    self.say(f"step {step}: held out {json.dumps(extra['held_out'])}")
                if stop.reason:
                    reason = stop.reason
                elif cfg.run.max_seconds and self.seconds > cfg.run.max_seconds:
                    reason = "max_seconds"
                if reason != "steps" or step % cfg.run.save_every == 0 or step == total:
                    self.save(self.seconds)
                if reason != "steps":
                    break
        if reason != "steps" and self.log and "held_out" not in self.log[-1]:
            final = self.evaluate()
            self.say(f"step {step}: held out {json.dumps(final)}")
        export_head(
            self.out / "last",
            self.head,
            self.shipped_params(),
            self.id_map,
            target=self.target,
            provenance=self.provenance(self.best),
        )
        return {
            "stopped": reason,
            "step": step,
            "seconds": round(self.seconds, 1),
            "loss": self.log[-1]["loss"] if self.log else None,
            "best": self.best,
            "head": str(self.out / ("best" if self.best else "last")),
        }


def main(argv: list[str] | None = None) -> int:
    """Command line; returns the exit code (0 also after a clean stop by signal or time limit)."""
    parser = argparse.ArgumentParser(prog="python -m train.train_draft", description=__doc__)
    parser.add_argument("--config", help="TOML file; see configs/train/")
    parser.add_argument("--plan", action="store_true", help="print what would be done, then exit")
    parser.add_argument(
        "--show-sample",
        type=int,
        metavar="N",
        help="show training sequence N: loss mask, anchors, tokens outside the draft vocabulary",
    )
    parser.add_argument("--debug", action="store_true", help="show tracebacks")
    parser.add_argument(
        "overrides", nargs="*", metavar="section.key=value", help="for example optim.lr=3e-4"
    )
    args = parser.parse_intermixed_args(argv)
    command = " ".join(["python -m train.train_draft", *(sys.argv[1:] if argv is None else argv)])
    try:
        trainer = Trainer(load_config(args.config, args.overrides), command)
        if args.show_sample is not None:
            show_sample(trainer.cfg, trainer.data, trainer.id_map, args.show_sample)
            print(json.dumps({"sequence": args.show_sample}))
        else:
            print(json.dumps(trainer.plan() if args.plan else trainer.run()))
    except JetSpecError as err:
        if args.debug:
            raise
        print(f"error: {err}", file=sys.stderr)
        return err.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
