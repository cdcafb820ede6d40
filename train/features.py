"""Target features on the fly: taps and final hidden states from the tokens, by the serving
decoder."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jetspec_jax.config import ModelConfig
from jetspec_jax.models.decoder import forward_full
from jetspec_jax.typing import Array, Params


def feature_function(
    params: Params, cfg: ModelConfig, layer_ids: tuple[int, ...]
) -> Callable[[Any], tuple[Array, Array]]:
    """tokens [B, T] int32 (right padded) -> taps [B, T, n, H], final [B, T, H], both bfloat16 as in
    the shards."""

    @functools.partial(jax.jit, static_argnames=("ids",))
    def run(params: Params, tokens: Array, ids: tuple[int, ...]) -> tuple[Array, Array]:
        out = forward_full(params, cfg, tokens, taps=ids)
        return jnp.asarray(out.taps).astype(jnp.bfloat16), out.hidden.astype(jnp.bfloat16)

    return lambda tokens: run(params, jnp.asarray(tokens), layer_ids)
