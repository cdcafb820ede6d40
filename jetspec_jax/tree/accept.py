"""The walk down the verified tree: which drafted tokens the target would have chosen itself."""

from __future__ import annotations

import flax.struct
import jax.numpy as jnp
import numpy as np

from jetspec_jax.tree.topology import Tree, all_along_path, take, up
from jetspec_jax.typing import Array


@flax.struct.dataclass
class Acceptance:
    """Outcome of one verification of one sequence.

    Attributes:
        path: `[D+1]` int32 slots of the accepted path in depth order, path[0] = 0; past the end it
            repeats the last accepted slot.
        accepted: int32, accepted nodes below the root; the round commits accepted + 1 tokens.
        bonus: int32, the target's choice after the last accepted node.
        had_node: `[D]` bool, the tree had a valid node at depth k+1 (denominator of acceptance per
            depth).
    """

    path: Array
    accepted: Array
    bonus: Array
    had_node: Array


def accept(tree: Tree, choice: Array, *, depth: int | None = None) -> Acceptance:
    """Follows the target's choices from the root, vectorised (algorithm.md section 5).

    A node matches when it holds the token the target chose at its parent; it is accepted when all
    of its ancestors match too. At most one node per depth is accepted, because siblings hold
    distinct tokens: every builder, `merge` and `lookup_tree` guarantee that.

    Args:
        tree: N slots.
        choice: `[N]` int32, the target's token after each node (argmax, or its sample). Unused at
            invalid slots.
        depth: static bound D on the depth of the tree; None: N-1. Nodes deeper than D are not
            looked at.

    Returns:
        The accepted path; shapes by D.
    """
    slots = tree.token.shape[0]
    bound = slots - 1 if depth is None else depth
    here = np.arange(slots, dtype=np.int32)
    match = (tree.token == take(choice, up(tree.parent))) & tree.valid & (tree.depth <= bound)
    match = all_along_path(match | (here == 0), tree.parent, bound)
    accepted = jnp.max(jnp.where(match, tree.depth, 0))
    level = np.arange(bound + 1, dtype=np.int32)
    # The accepted slots are one chain: one maximum per depth reads it off, no walk back up.
    wanted = jnp.minimum(level, accepted)
    on_path = match[None, :] & (tree.depth[None, :] == wanted[:, None])
    path = jnp.max(jnp.where(on_path, here[None, :], 0), axis=1)
    present = (tree.depth[None, :] == level[1:, None]) & tree.valid[None, :]
    return Acceptance(
        path=path,
        accepted=accepted,
        bonus=take(choice, path[bound]),
        had_node=jnp.any(present, axis=1),
    )
