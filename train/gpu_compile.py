"""Compiles a training configuration for GPUs that are not there: does the step build, does it fit?

    python -m train.gpu_compile --config configs/train/qwen3_8b.toml --geometry qwen3-8b --devices 8

Both programs of a step are compiled by XLA for the named GPU, sharded over all devices, with
abstract weights: the target's forward that gives the features, and the update of the head. Prints
bytes a device and the least time the matrix products allow; no time is measured. Exit code 1 where
a device's memory does not suffice. Needs requirements/gpu-compile.txt, no GPU and no driver.
"""

from __future__ import annotations

import argparse
import functools
import json
import sys
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jetspec_jax.config import DraftConfig, ModelConfig
from jetspec_jax.drafter import declare as declare_head
from jetspec_jax.errors import ConfigError, JetSpecError
from jetspec_jax.models import decoder
from jetspec_jax.models.geometries import GEOMETRIES, geometry
from jetspec_jax.models.spec import Declaration, nest
from pallas_kernels.gpu_target import TARGETS, GpuToolsError, topology
from train.config import TrainConfig, load_config
from train.features import features_of
from train.head_setup import draft_config, first_state, optimiser_of
from train.step import Batch, Frozen, train_step


def _abstract(decl: Declaration, dtype: Any) -> Any:
    return nest({name: jax.ShapeDtypeStruct(w.shape, dtype) for name, w in decl.items()})


def _array(shape: tuple[int, ...], dtype: Any) -> Any:
    return jax.ShapeDtypeStruct(shape, dtype)


def _placed(tree: Any, mesh: Mesh, spec: PartitionSpec) -> Any:
    sharding = NamedSharding(mesh, spec)
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), tree)


def _bytes(tree: Any) -> int:
    return sum(int(np.prod(x.shape)) * x.dtype.itemsize for x in jax.tree.leaves(tree))


def _compile(fn: Any, args: tuple[Any, ...], donate: tuple[int, ...] = ()) -> dict[str, Any]:
    """Bytes a device of the compiled program, and how long compiling took."""
    started = time.monotonic()
    lowered = jax.jit(fn, donate_argnums=donate).trace(*args).lower(lowering_platforms=("cuda",))
    memory: Any = lowered.compile().memory_analysis()
    return {
        "arguments": memory.argument_size_in_bytes,
        "outputs": memory.output_size_in_bytes - memory.alias_size_in_bytes,
        "temporary": memory.temp_size_in_bytes,
        "compile_s": round(time.monotonic() - started, 1),
    }


def step_flops(cfg: TrainConfig, head: DraftConfig, model: ModelConfig) -> dict[str, float]:
    """Multiply-adds times two of the matrix products of a step, all devices together."""

    def linear(decl: Declaration) -> int:
        return sum(
            int(np.prod(w.shape))
            for name, w in decl.items()
            if w.linear and not name.startswith(("embed", "lm_head", "path."))
        )

    tokens = cfg.data.sequences * cfg.data.max_tokens
    anchors = cfg.data.sequences * cfg.data.anchors
    slots = anchors * head.block_size
    decl = declare_head(head)
    context = sum(int(np.prod(decl[n].shape)) for n in decl if n == "fc" or n.endswith(".kv"))
    # attention: causal over the sequence; a block sees half of its context on average
    target_attention = 4 * model.num_layers * model.q_width * cfg.data.max_tokens / 2 * tokens
    head_attention = (
        4 * head.num_layers * head.num_heads * head.head_dim * cfg.data.max_tokens / 2 * slots
    )
    vocabulary = 2 * head.head_vocab_size * head.hidden_size * anchors * head.depth
    backward = 4 if cfg.optim.remat else 3  # forward, twice for the gradient, forward again
    return {
        "target": 2.0 * linear(decoder.declare(model)) * tokens + target_attention,
        "head": backward * (2.0 * linear(decl) * slots + head_attention)
        + 3 * 2.0 * context * tokens,
        "vocabulary": 3.0 * vocabulary,  # student, its gradient, teacher
    }


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Compiles both programs; returns the report."""
    cfg = load_config(args.config, args.overrides)
    target = TARGETS[args.target]
    count = args.devices or cfg.optim.devices or 1
    if cfg.data.sequences % (count * cfg.optim.accumulate):
        raise ConfigError(
            f"data.sequences={cfg.data.sequences} cannot be cut into {count} devices x "
            f"{cfg.optim.accumulate} parts; give a multiple"
        )
    model = geometry(args.geometry)
    head = draft_config(cfg, model, None)
    devices = np.asarray(topology(target, count).devices)
    mesh = Mesh(devices, ("data",), axis_types=(AxisType.Auto,))
    every, shared = PartitionSpec(), PartitionSpec("data")
    dtype = jnp.dtype(cfg.optim.precision)

    weights = _abstract(decoder.declare(model), jnp.bfloat16)
    size, rows, width = cfg.data.sequences, cfg.data.max_tokens, model.hidden_size
    tokens = _array((size, rows), jnp.int32)
    forward = functools.partial(features_of, cfg=model, layer_ids=head.target_layer_ids, mesh=mesh)
    features = _compile(forward, (_placed(weights, mesh, every), _placed(tokens, mesh, shared)))

    optimiser = optimiser_of(cfg.optim)
    params = _abstract(declare_head(head), jnp.float32)
    state = jax.eval_shape(lambda p: first_state(p, optimiser, cfg.optim.ema), params)
    frozen = Frozen(
        embed=_array((model.vocab_size, width), dtype),
        head=_array((head.head_vocab_size, width), dtype),
        draft_of=_array((model.vocab_size,), jnp.int32),
    )
    taps = len(head.target_layer_ids)
    batch = Batch(
        tokens=tokens,
        taps=_array((size, rows, taps, width), jnp.bfloat16),
        final=_array((size, rows, width), jnp.bfloat16),
        anchors=_array((size, cfg.data.anchors), jnp.int32),
        stop=_array((size, cfg.data.anchors), jnp.int32),
        valid=_array((size, cfg.data.anchors), jnp.bool_),
    )
    step = functools.partial(
        train_step,
        cfg=head,
        loss=cfg.loss,
        optimiser=optimiser,
        ema_decay=cfg.optim.ema,
        dtype=dtype,
        remat=cfg.optim.remat,
        accumulate=cfg.optim.accumulate,
        mesh=mesh,
    )
    placed = (
        _placed(state, mesh, every),
        _placed(batch, mesh, shared),
        _placed(frozen, mesh, every),
    )
    update = _compile(step, placed, donate=(0,))

    # What lies in memory all the time, and what each program needs beside it.
    resident = _bytes(weights) + _bytes(state) + _bytes(frozen)
    batch_bytes = _bytes(batch) // count
    peak = resident + max(
        features["outputs"] + features["temporary"],
        batch_bytes + update["outputs"] + update["temporary"],
    )
    flops = step_flops(cfg, head, model)
    return {
        "target": target.name,
        "devices": count,
        "head_parameters": sum(int(np.prod(p.shape)) for p in jax.tree.leaves(params)),
        "resident_gb": round(resident / 1e9, 2),
        "batch_gb": round(batch_bytes / 1e9, 2),
        "features": features,
        "update": update,
        "peak_gb": round(peak / 1e9, 2),
        "memory_gb": round(target.memory / 1e9, 2),
        "fits": peak < target.memory,
        "tflop_per_step": {k: round(v / 1e12, 1) for k, v in flops.items()},
        "least_step_s": round(sum(flops.values()) / (count * target.bf16_flops), 4),
    }


def main(argv: list[str] | None = None) -> int:
    """Command line; the last line of stdout is JSON."""
    p = argparse.ArgumentParser(
        prog="python -m train.gpu_compile", description=(__doc__ or "").splitlines()[0]
    )
    p.add_argument("--config", required=True, help="training configuration")
    p.add_argument("--geometry", required=True, choices=sorted(GEOMETRIES), help="target model")
    p.add_argument("--target", choices=sorted(TARGETS), default="h100")
    p.add_argument("--devices", type=int, default=0, help="default: optim.devices")
    p.add_argument("overrides", nargs="*", metavar="section.key=value")
    args = p.parse_args(argv)
    try:
        report = run(args)
    except (JetSpecError, GpuToolsError) as err:
        print(f"error: {err}", file=sys.stderr)
        return getattr(err, "exit_code", 1)
    print(json.dumps(report))
    return 0 if report["fits"] else 1


if __name__ == "__main__":
    sys.exit(main())
