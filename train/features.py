"""Target features on the fly: taps and final hidden states from the tokens, by the serving
decoder."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

from jetspec_jax.config import ModelConfig
from jetspec_jax.models.decoder import forward_full
from jetspec_jax.typing import Array, Params


def features_of(
    params: Params,
    tokens: Array,
    *,
    cfg: ModelConfig,
    layer_ids: tuple[int, ...],
    mesh: Mesh | None = None,
) -> tuple[Array, Array]:
    """tokens [B, T] int32 (right padded) -> taps [B, T, n, H], final [B, T, H], both bfloat16 as in
    the shards. With a mesh, its devices share the sequences along axis "data"."""

    def local(params: Params, tokens: Array) -> tuple[Array, Array]:
        out = forward_full(params, cfg, tokens, taps=layer_ids)
        return jnp.asarray(out.taps).astype(jnp.bfloat16), out.hidden.astype(jnp.bfloat16)

    if mesh is None:
        return local(params, tokens)
    run = jax.shard_map(
        local,
        mesh=mesh,
        in_specs=(PartitionSpec(), PartitionSpec("data")),
        out_specs=PartitionSpec("data"),
        check_vma=False,
    )
    return run(params, tokens)


def feature_function(
    params: Params, cfg: ModelConfig, layer_ids: tuple[int, ...], mesh: Mesh | None = None
) -> Callable[[Any], tuple[Array, Array]]:
    """`features_of` compiled, for these parameters."""
    run = jax.jit(functools.partial(features_of, cfg=cfg, layer_ids=layer_ids, mesh=mesh))
    return lambda tokens: run(params, jnp.asarray(tokens))
