"""Whole programs compiled for GPUs that are not there: round, prefill and plain step of big models.

    python -m jetspec_jax.gpu_programs                          all programs
    python -m jetspec_jax.gpu_programs --match "qwen3-8b round"

Weights and state are abstract, so no memory is needed for them. Judged like the kernels
(`pallas_kernels.gpu_compile`, whose options it has), and against a table of its own: peak memory,
number of device kernels, no transfer to or from the host.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from jetspec_jax import drafter
from jetspec_jax.cache import alloc
from jetspec_jax.config import DraftConfig, ModelConfig, SpecConfig
from jetspec_jax.decode import prefill, spec_round
from jetspec_jax.models import decoder
from jetspec_jax.models.decoder import Numerics, lm_head_weight
from jetspec_jax.models.geometries import geometry
from jetspec_jax.models.spec import Declaration, nest
from jetspec_jax.numerics import for_kernels
from jetspec_jax.plan import RoundPlan
from jetspec_jax.policy import Costs
from jetspec_jax.session import new_state
from jetspec_jax.state import DecodeState, EngineParams
from pallas_kernels import gpu_compile
from pallas_kernels.geometries import GEOMETRIES
from pallas_kernels.gpu_cases import HOPPER, OTHER, GpuCase

TABLE = Path(__file__).with_name("gpu_programs.json")
MODELS = ("qwen3-8b", "qwen3-30b-a3b")
NODES, CONTEXT, PREFILL = 64, 4096, 256
MASK_TOKEN = 151_669


def _abstract(decl: Declaration) -> Any:
    return nest({name: jax.ShapeDtypeStruct(w.shape, jnp.bfloat16) for name, w in decl.items()})


def head_config(model: ModelConfig, name: str) -> DraftConfig:
    """The published kind of draft head for a target of this geometry."""
    sizes = GEOMETRIES[name].draft
    return DraftConfig(
        hidden_size=model.hidden_size,
        num_layers=sizes.layers,
        num_heads=model.num_heads,
        num_kv_heads=model.num_kv_heads,
        head_dim=model.head_dim,
        ffn_size=sizes.ffn,
        target_hidden_size=model.hidden_size,
        num_target_layers=model.num_layers,
        target_layer_ids=drafter.default_layer_ids(sizes.taps, model.num_layers),
        vocab_size=model.vocab_size,
        mask_token_id=MASK_TOKEN,
        block_size=sizes.block,
    )


def program(
    name: str, what: str, kernels: bool, batch: int = 1
) -> tuple[Callable[..., Any], tuple[EngineParams, DecodeState]]:
    """A jitted program and its abstract arguments; the state is donated.

    Args:
        name: geometry of the target.
        what: "plain step", "round" or "prefill".
        kernels: through the GPU kernels in their exact form, else XLA alone in its fast form.
        batch: sequences.
    """
    model = geometry(name)
    head = None if what == "plain step" else head_config(model, name)
    depth = head.depth if head is not None else 0
    plan = RoundPlan(
        model=model,
        head=head,
        spec=SpecConfig(mode="tree" if head else "off", drafter="head" if head else "none"),
        budgets=(NODES,) if head else (1,),
        depth=depth,
        prefill_chunk=PREFILL,
        numerics=Numerics(bitwise=kernels, gpu=kernels),
    )
    target = _abstract(decoder.declare(model))
    if kernels:
        target = for_kernels(target)
    costs = Costs(
        verify=jax.ShapeDtypeStruct((1,), jnp.float32),  # pyright: ignore[reportArgumentType]
        draft=jax.ShapeDtypeStruct((), jnp.float32),  # pyright: ignore[reportArgumentType]
    )
    params = EngineParams(
        target=target,
        draft=_abstract(drafter.declare(head)) if head else None,
        draft_lm=lm_head_weight(target),
        draft_ids=None,
        costs=costs,
    )

    def state() -> DecodeState:
        def cache(layers: int) -> Any:
            sizes = (model.num_kv_heads, CONTEXT, model.head_dim)
            return alloc(layers, batch, *sizes, jnp.bfloat16)

        context = cache(head.num_layers) if head else None
        return new_state(plan, batch, cache(model.num_layers), context)

    run = prefill if what == "prefill" else spec_round
    fn = jax.jit(functools.partial(run, plan), donate_argnums=(1,))
    return fn, (params, jax.eval_shape(state))


def cases() -> Iterator[GpuCase]:
    """Every program on both GPUs, by kernels and by XLA alone."""
    for model in MODELS:
        for what in ("plain step", "round", "prefill"):
            for target in (HOPPER, OTHER):
                for form in ("kernels", "xla"):
                    yield GpuCase(
                        "program",
                        form,
                        f"{model} {what} batch 1 context {CONTEXT}",
                        target,
                        functools.partial(program, model, what, form == "kernels"),
                    )


def main(argv: list[str] | None = None) -> int:
    """Command line of `pallas_kernels.gpu_compile` for the programs."""
    return gpu_compile.main(argv, tuple(cases()), TABLE)


if __name__ == "__main__":
    sys.exit(main())
