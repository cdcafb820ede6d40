"""The target's greedy choice after every row: LM head, argmax and top-2 margin in one pass.

The native kernel (`cpu.cc`) keeps the best two logits of each row while it reads the packed head
once; [rows, V] logits (3 MB for 16 nodes of a 49,152-word vocabulary) are never written or read
again. On a GPU `mosaic_gpu` and `triton` do the same with a bfloat16 head, and can sample.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import dispatch, gpu_forms, native
from pallas_kernels import row_invariant_matmul as rim
from pallas_kernels.row_invariant_matmul import reference as matmul_reference
from pallas_kernels.row_invariant_matmul import specs as matmul_specs
from pallas_kernels.verify_head import gpu, reference, specs


class Choice(NamedTuple):
    """Per row; zeros past a sequence's count."""

    ids: jax.Array  # [B, T] int32, largest logit, the lowest id among equals
    best: jax.Array  # [B, T] float32, that logit
    margin: jax.Array  # [B, T] float32, its distance from the second largest


def verify_head(
    hidden: jax.Array,
    head: rim.PackedWeight | jax.Array,
    counts: jax.Array,
    *,
    sampling: gpu.Sampling | None = None,
    implementation: dispatch.Implementation = "auto",
    threads: int = 0,
) -> Choice:
    """Choice of each row.

    Args:
      hidden: [B, T, H] after the final norm; float32 for a packed head.
      head: LM head [V, H], packed or, on a GPU, as it is.
      counts: [B] int32, rows of each sequence that are there, 0..T (checked when it runs).
      sampling: for a plain head only: keys [B, T, 2] and temperature [B, T] of each row, whose
        choice is then argmax(logits / temperature + noise); None: greedy.
      implementation: "auto" runs, on a CPU, the native kernel where it can be built and the head is
        in panels; on a GPU, for a plain head and bfloat16 in multiples of 64, "mosaic_gpu" or
        "triton"; else XLA. A name insists.
      threads: most threads of the native kernel; 0: all there are. The result does not depend on
        it.

    Returns:
      Ids, logits and margins. Where a logit is NaN, the first NaN is chosen (as `jnp.argmax`).

    Raises:
      native.KernelError: shapes that do not fit, or an implementation that is not available.
    """
    if isinstance(head, jax.Array):
        return _plain(hidden, head, counts, sampling, implementation)
    if (head.layout, head.format, hidden.dtype) == ("rows", "bf16", jnp.bfloat16):
        return _plain(hidden, head.data, counts, sampling, implementation)
    if sampling is not None:
        raise native.KernelError(f"{specs.OP}: a packed head is greedy; add noise to its logits")
    if hidden.ndim != 3 or hidden.shape[-1] != head.k or counts.shape != hidden.shape[:1]:
        raise native.KernelError(
            f"{specs.OP}: hidden {list(hidden.shape)} and counts {list(counts.shape)} do not fit a "
            f"head [{head.n}, {head.k}]"
        )
    if head.layout != "panels" and implementation == "cpu":
        raise native.KernelError(
            f"{specs.OP}: implementation 'cpu' needs a head in panels: use pack(w, 'cpu')"
        )
    if (
        head.layout != "panels"
        or dispatch.choose(specs.OP, implementation, native.library) == "xla"
    ):
        found = reference.choose(rim.matmul(hidden, head, implementation="xla"))
        there = jnp.arange(hidden.shape[1])[None, :] < counts[:, None]
        return Choice(*(jnp.where(there, t, 0).astype(t.dtype) for t in found))
    rows = hidden.shape[:2]
    call = jax.ffi.ffi_call(
        native.library().target("VerifyHead"),
        [jax.ShapeDtypeStruct(rows, t) for t in (jnp.int32, jnp.float32, jnp.float32)],
    )
    return Choice(
        *call(
            hidden.astype(jnp.float32),
            head.data,
            counts,
            format=np.int64(matmul_specs.LAYOUT_ID[head.panel_layout]),
            outputs=np.int64(head.n),
            threads=np.int64(threads),
        )
    )


def _plain(
    hidden: jax.Array,
    head: jax.Array,
    counts: jax.Array,
    sampling: gpu.Sampling | None,
    implementation: dispatch.Implementation,
) -> Choice:
    if hidden.ndim != 3 or hidden.shape[-1] != head.shape[-1] or counts.shape != hidden.shape[:1]:
        raise native.KernelError(
            f"{specs.OP}: hidden {list(hidden.shape)} and counts {list(counts.shape)} do not fit a "
            f"head {list(head.shape)}"
        )
    batch, rows, width = hidden.shape
    flat = hidden.reshape(batch * rows, width)
    if sampling is not None:
        sampling = gpu.Sampling(sampling.keys.reshape(-1, 2), sampling.temperature.reshape(-1))
    module = gpu_forms.select(specs.OP, implementation, lambda: gpu.check(flat, head))
    if module is None:
        logits = matmul_reference.matmul_arrays(flat, head)
        found = reference.choose(reference.perturb(logits, *sampling) if sampling else logits)
    else:
        found = module.verify_head(flat, head, sampling=sampling)
    there = jnp.arange(rows)[None, :] < counts[:, None]
    return Choice(*(jnp.where(there, t.reshape(batch, rows), 0).astype(t.dtype) for t in found))
