"""Candidates of a drafted block: LM head, top-W of each depth, scores under each parent.

The native kernel (`cpu.cc`) is the serving form of `jetspec_jax.drafter.candidates` (which is the
XLA form and the reference, with the "tail" normaliser): one call instead of a matmul, D rankings of
the vocabulary and D small tables, and no [D, Vd] logits outside of it. What it drafts can change no
token of the output; only the order of equal logits and rounding may differ from the reference.
"""

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import native
from pallas_kernels import row_invariant_matmul as rim
from pallas_kernels.draft_head_topk import specs
from pallas_kernels.row_invariant_matmul import specs as matmul_specs


@flax.struct.dataclass
class PathHead:
    """Correction by the parent: logits_d(b | a) = U_d(b) + w2[b] . (w1[a] * gate_d).

    Attributes:
      w1: [V, r] float32 or bfloat16, V the target's vocabulary.
      w2: packed [Vd, r].
      gate: [B, D, r] float32 of this call; None: 1 (the Markov head).
    """

    w1: jax.Array
    w2: rim.PackedWeight
    gate: jax.Array | None = None


def supported(head: rim.PackedWeight, path: PathHead | None, width: int) -> bool:
    """Whether the native kernel takes these weights."""
    weights = (head,) if path is None else (head, path.w2)
    return width <= specs.MAX_WIDTH and all(w.layout == "panels" for w in weights)


def draft_head_topk(
    hidden: jax.Array,
    head: rim.PackedWeight,
    width: int,
    *,
    anchor: jax.Array,
    counts: jax.Array,
    ids: jax.Array | None = None,
    path: PathHead | None = None,
    scale: jax.Array | None = None,
    noise: jax.Array | None = None,
    threads: int = 0,
) -> tuple[jax.Array, jax.Array]:
    """Candidates of D depths for each sequence; native CPU only.

    Args:
      hidden: [B, D, H] float32, after the draft head's final norm, depths in order.
      head: packed rows [Vd, H] of the target's LM head.
      width: W candidates a depth, at most 64.
      anchor: [B] int32, the root's token.
      counts: [B] int32, 0: the sequence does not draft (its results are zero).
      ids: [Vd] int32 target ids of the draft vocabulary; None: the same.
      path: path head, None: every parent's row is the same.
      scale: [B] float32 factor of all logits (1 / temperature); None: 1.
      noise: [B, D, Vd] float32, added before ranking.
      threads: most threads; 0: all there are.

    Returns:
      Tokens [B, D, W] int32, best first, and log-probabilities [B, D, W, W] float32 of candidate w
      given candidate p of the depth above (depth 0: given the anchor, in every row).

    Raises:
      native.KernelError: shapes or weights that do not fit, or no native kernel here.
    """
    batch, depth, _ = hidden.shape
    if hidden.shape[-1] != head.k or not 1 <= width <= head.n or not supported(head, path, width):
        raise native.KernelError(
            f"{specs.OP}: hidden {list(hidden.shape)}, width {width} and a head [{head.n}, "
            f"{head.k}] in {head.layout} do not fit; need packed panels and a width of 1 to "
            f"{min(head.n, specs.MAX_WIDTH)}"
        )
    operands: list[jax.Array] = []
    if ids is not None:
        operands.append(ids)
    if noise is not None:
        operands.append(noise)
    if path is not None:
        operands += [path.w1, path.w2.data]
        if path.gate is not None:
            operands.append(path.gate)
    call = jax.ffi.ffi_call(
        native.library().target("DraftHeadTopk"),
        [
            jax.ShapeDtypeStruct((batch, depth, width), jnp.int32),
            jax.ShapeDtypeStruct((batch, depth, width, width), jnp.float32),
        ],
    )
    tokens, table = call(
        hidden,
        head.data,
        counts,
        anchor,
        jnp.ones((batch,), jnp.float32) if scale is None else scale,
        *operands,
        outputs=np.int64(head.n),
        format=np.int64(matmul_specs.LAYOUT_ID[head.panel_layout]),
        has_ids=ids is not None,
        has_noise=noise is not None,
        markov=path is not None,
        has_gate=path is not None and path.gate is not None,
        rank=np.int64(0 if path is None else path.w2.k),
        targets=np.int64(0 if path is None else path.w1.shape[0]),
        w1_half=path is not None and path.w1.dtype == jnp.bfloat16,
        path_format=np.int64(0 if path is None else matmul_specs.LAYOUT_ID[path.w2.panel_layout]),
        threads=np.int64(threads),
    )
    return tokens, table
