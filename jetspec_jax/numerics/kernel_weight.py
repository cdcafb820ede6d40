"""Weights whose products run through the GPU kernels of `pallas_kernels`."""

from __future__ import annotations

from typing import Any

import flax.struct

from jetspec_jax.typing import Array, Params

# Matrices of a target (`decoder.declare`); norms, biases and routers stay arrays.
_LINEAR = (
    "embed",
    "lm_head",
    "qkv",
    "o",
    "gate_up",
    "down",
    "experts_gate_up",
    "experts_down",
)


@flax.struct.dataclass
class KernelWeight:
    """A weight [out, in], or [E, out, in] of experts, in the dtype that the kernels multiply."""

    w: Array


def for_kernels(params: Params) -> Params:
    """The same parameters with every matrix marked for the GPU kernels; no array is copied."""

    def marked(tree: dict[str, Any]) -> dict[str, Any]:
        return {
            name: KernelWeight(value) if name in _LINEAR and hasattr(value, "shape") else value
            for name, value in tree.items()
        }

    return marked(params) | {"layers": [marked(layer) for layer in params["layers"]]}
