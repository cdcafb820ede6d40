"""The best tree of B nodes from candidate tables, for a whole batch in one launch on a GPU."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels import dispatch, gpu_forms
from pallas_kernels.build_tree import reference, specs
from pallas_kernels.build_tree.reference import Nodes
from pallas_kernels.native import KernelError


def build_tree(
    tokens: jax.Array,
    table: jax.Array,
    root: jax.Array,
    nodes: int,
    *,
    implementation: dispatch.Implementation = "auto",
) -> Nodes:
    """The `nodes` best prefixes, best first; ties by depth, then parent, then rank.

    Args:
      tokens: [B, D, W] int32.
      table: [B, D, W, W] float32 log-probability of candidate w given candidate p of the depth
        above, at most 0, -inf where there is none, never NaN
        (`jetspec_jax.tree.build.conditional_table`). Depth 0 uses row 0.
      root: [B] int32.
      nodes: N, the root included.
      implementation: "auto" takes "triton" on a GPU that has it, else XLA; a name insists.

    Returns:
      The trees; the same from every implementation.

    Raises:
      KernelError: shapes that do not fit, or an implementation that is not available.
    """
    batch, depth, width = tokens.shape
    if table.shape != (batch, depth, width, width) or root.shape != (batch,) or nodes < 1:
        raise KernelError(
            f"{specs.OP}: tokens {list(tokens.shape)}, table {list(table.shape)} and root "
            f"{list(root.shape)} do not fit a tree of {nodes} nodes"
        )

    def fits() -> None:
        if nodes * width > specs.MAX_FRONTIER:
            raise KernelError(specs.TOO_LARGE.format(nodes=nodes, width=width))
        kinds = (tokens.dtype, table.dtype, root.dtype)
        if kinds != (jnp.int32, jnp.float32, jnp.int32) or not depth or not width:
            raise KernelError(f"{specs.OP}: needs int32, float32, int32 and candidates")

    module = gpu_forms.select(specs.OP, implementation, fits, ("triton",))
    return (reference if module is None else module).build_tree(tokens, table, root, nodes)
