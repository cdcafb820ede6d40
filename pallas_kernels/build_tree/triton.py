"""Best-first search of a tree in one program: a launch builds the trees of a whole batch.

The frontier, N W scores, stays in registers. Each of N - 1 turns takes its maximum (ties: the
smallest of depth, parent and rank in one integer) and adds the children of the node it took; no
sort, no gather between threads, no memory but the table. The level-by-level form in XLA is some 4 D
kernels one after the other instead. Runs on every NVIDIA GPU that Triton knows, Hopper included:
there is no product for wgmma here, and Mosaic has no gather.
"""

# Triton is an extra: pyright sees none of it.
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
from __future__ import annotations

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from pallas_kernels import triton_call
from pallas_kernels.build_tree import specs
from pallas_kernels.build_tree.reference import Nodes
from pallas_kernels.native import KernelError

_LAST = tl.constexpr(2**31 - 1)


@triton.jit
def tree_kernel(
    token_ptr,
    table_ptr,
    root_ptr,
    out_token_ptr,
    out_parent_ptr,
    out_depth_ptr,
    out_score_ptr,
    out_rank_ptr,
    N: tl.constexpr,
    D: tl.constexpr,
    W: tl.constexpr,
    FRONTIER: tl.constexpr,
):
    """One tree a program. FRONTIER: a power of two, at least N W."""
    b = tl.program_id(0)
    token_ptr += b * D * W
    table_ptr += b * D * W * W
    entry = tl.arange(0, FRONTIER)  # child `entry % W` of node `entry // W`
    owner, rank_of = entry // W, entry % W
    tl.store(out_token_ptr + b * N, tl.load(root_ptr + b))
    tl.store(out_parent_ptr + b * N, -1)
    tl.store(out_depth_ptr + b * N, 0)
    tl.store(out_score_ptr + b * N, 0.0)
    tl.store(out_rank_ptr + b * N, -1)
    score = tl.load(table_ptr + rank_of, mask=owner == 0, other=-float("inf"))
    level = tl.full((FRONTIER,), 1, tl.int32)
    for place in range(1, N):
        best = tl.max(score, axis=0)
        live = best > -float("inf")
        chosen = tl.min(tl.where(score == best, level * FRONTIER + entry, _LAST), axis=0)
        at, depth = chosen % FRONTIER, chosen // FRONTIER
        rank = at % W
        token = tl.load(token_ptr + (depth - 1) * W + rank, mask=live, other=0)
        to = b * N + place
        tl.store(out_token_ptr + to, token)
        tl.store(out_parent_ptr + to, tl.where(live, at // W, 0))
        tl.store(out_depth_ptr + to, tl.where(live, depth, 0))
        tl.store(out_score_ptr + to, best)
        tl.store(out_rank_ptr + to, tl.where(live, rank, -1))
        # where no node is left, `best` is -inf, and so is all that follows from it
        mine = owner == tl.where(depth < D, place, -1)
        row = table_ptr + depth * W * W + rank * W + rank_of
        children = best + tl.load(row, mask=mine, other=-float("inf"))
        score = tl.where(mine, children, tl.where(entry == at, -float("inf"), score))
        level = tl.where(mine, depth + 1, level)


def build_tree(tokens: jax.Array, table: jax.Array, root: jax.Array, nodes: int) -> Nodes:
    """As `reference.build_tree`, node for node.

    Raises:
      KernelError: more nodes times width than the kernel's registers hold.
    """
    batch, depth, width = tokens.shape
    frontier = triton.next_power_of_2(nodes * width)
    if frontier > specs.MAX_FRONTIER:
        raise KernelError(specs.TOO_LARGE.format(nodes=nodes, width=width))
    kinds = (jnp.int32, jnp.int32, jnp.int32, jnp.float32, jnp.int32)
    found = triton_call.call(
        tree_kernel,
        tokens,
        table,
        root,
        out_type=tuple(jax.ShapeDtypeStruct((batch, nodes), kind) for kind in kinds),
        grid=(batch,),
        num_warps=4,
        num_stages=1,
        N=nodes,
        D=depth,
        W=width,
        FRONTIER=frontier,
    )
    return Nodes(*found)
