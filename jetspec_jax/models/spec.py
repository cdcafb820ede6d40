"""Weights declared once: name, shape, logical axes, initialiser and where a checkpoint keeps them.

Abstract shapes, random weights, shardings and checkpoint loading are all derived from one flat
`dict[str, WeightSpec]` (style of jax-llm-examples); `nest` turns flat names into the parameter
pytree.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from jetspec_jax.typing import Array, Params


@dataclasses.dataclass(frozen=True)
class WeightSpec:
    """One parameter.

    Attributes:
        shape: of the stored array. Projections are stored [out, in].
        axes: logical axis name per dimension (for shardings), None where never sharded.
        sources: checkpoint tensor names; several are concatenated along axis 0 (fused projections),
            or, with `stack`, stacked along a new axis 0 (experts; then each entry of `sources` may
            be a tuple to concatenate).
        init: "normal" (std 0.02), "ones" or "zeros".
        linear: True for a projection that the numerics layer may repack for its matmul kernel.
    """

    shape: tuple[int, ...]
    axes: tuple[str | None, ...]
    sources: tuple[str | tuple[str, ...], ...]
    init: str = "normal"
    stack: bool = False
    linear: bool = False


Declaration = dict[str, WeightSpec]


def nest(flat: Mapping[str, Any]) -> Params:
    """{"layers.0.qkv": x, ...} -> {"layers": ({"qkv": x}, ...), ...}; numeric path parts become
    tuples.
    """
    root: dict[str, Any] = {}
    for name, value in flat.items():
        node = root
        *parents, leaf = name.split(".")
        for part in parents:
            node = node.setdefault(part, {})
        node[leaf] = value

    def tupled(node: Any) -> Any:
        if not isinstance(node, dict):
            return node
        if node and all(k.isdigit() for k in node):
            return tuple(tupled(node[k]) for k in sorted(node, key=int))
        return {k: tupled(v) for k, v in node.items()}

    return tupled(root)


def flatten(params: Any, prefix: str = "") -> dict[str, Any]:
    """Inverse of `nest`."""
    if isinstance(params, dict):
        items = params.items()
    elif isinstance(params, tuple) and not hasattr(params, "_fields"):
        items = ((str(i), v) for i, v in enumerate(params))
    else:
        return {prefix: params}
    out: dict[str, Any] = {}
    for key, value in items:
        out |= flatten(value, f"{prefix}.{key}" if prefix else key)
    return out


def init_params(
    decl: Declaration, key: Array, dtype: Any = jnp.float32, std: float = 0.02
) -> Params:
    """Random parameters of a declaration (tests, benchmarks, the start of training)."""
    flat = {}
    for i, (name, spec) in enumerate(decl.items()):
        if spec.init == "normal":
            flat[name] = (
                std * jax.random.normal(jax.random.fold_in(key, i), spec.shape, jnp.float32)
            ).astype(dtype)
        else:
            flat[name] = jnp.full(spec.shape, 1.0 if spec.init == "ones" else 0.0, dtype)
    return nest(flat)


def abstract_params(decl: Declaration, dtype: Any = jnp.float32) -> Params:
    """Shapes only: enough to trace, plan memory and compile without weights."""
    return nest({name: jax.ShapeDtypeStruct(spec.shape, dtype) for name, spec in decl.items()})
