"""Candidates from a draft head as a plain array, as GPUs take it; no path head."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels import dispatch, gpu_forms
from pallas_kernels.draft_head_topk import gpu, reference, specs
from pallas_kernels.row_invariant_matmul import reference as matmul_reference


def candidates(
    hidden: jax.Array,
    head: jax.Array,
    width: int,
    *,
    ids: jax.Array | None = None,
    scale: jax.Array | None = None,
    implementation: dispatch.Implementation = "auto",
) -> tuple[jax.Array, jax.Array]:
    """Candidates of D depths for each sequence.

    Args:
      hidden: [B, D, H] after the draft head's final norm.
      head: [Vd, H] rows of the target's LM head.
      width: W candidates a depth.
      ids: [Vd] int32 target ids of the draft vocabulary; None: the same.
      scale: [B] float32 factor above 0 of all logits (1 / temperature); None: 1.
      implementation: "auto" takes "mosaic_gpu" on a Hopper GPU, for bfloat16 in multiples of 64 and
        up to 32 candidates, else XLA; a name insists.

    Returns:
      Tokens [B, D, W] int32, best first, and log-probabilities [B, D, W, W] float32, the same under
      every parent; NaN where a logit is (`conditional_table` drops such depths).

    Raises:
      KernelError: an implementation that is not available for this call.
    """
    batch, depth, size = hidden.shape
    rows = hidden.reshape(batch * depth, size)
    factors = None if scale is None else jnp.repeat(scale, depth)
    module = gpu_forms.select(
        specs.OP, implementation, lambda: gpu.check(rows, head, width), ("mosaic_gpu",)
    )
    if module is None:
        chosen, logp = reference.topk(matmul_reference.matmul_arrays(rows, head), width, factors)
    else:
        chosen, logp = module.topk(rows, head, width, scale=factors)
    tokens = (chosen if ids is None else ids[chosen]).reshape(batch, depth, width)
    table = logp.reshape(batch, depth, 1, width)
    return tokens, jnp.broadcast_to(table, (batch, depth, width, width))
