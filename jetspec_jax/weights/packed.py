"""Projection weights in the layout of the native matmul kernel, in the format of the file.

A weight is repacked a few rows at a time into its final array, so that loading needs that array
and some megabytes, whatever the format and however many tensors a fused projection is made of.
"""

from __future__ import annotations

import collections
import concurrent.futures
import dataclasses
import os
from collections.abc import Collection, Sequence

import jax
import ml_dtypes
import numpy as np

from jetspec_jax.models.spec import WeightSpec
from jetspec_jax.weights.dequant import dequantize
from jetspec_jax.weights.load import aligned_empty
from jetspec_jax.weights.source import RawTensor
from pallas_kernels import native
from pallas_kernels import row_invariant_matmul as rim
from pallas_kernels.row_invariant_matmul import reference, specs

_SLICE = 1 << 18  # bytes repacked at once by a thread: stays in its cache
_RELEASE = 8 << 20  # bytes of the file read between two releases of its pages


class Packer:
    """The `pack` hook of `load_params` where the native kernels run.

    Args:
        stored: keep the format of the file where there is a kernel for it; else float32 throughout.
        float_tables: names of weights whose rows are read as they are and must be float32, so that
            bfloat16 is no choice.

    Attributes:
        expanded: number of weights that `stored` could not keep, by reason.
    """

    def __init__(self, stored: bool, float_tables: Collection[str] = ()) -> None:
        self.stored, self.float_tables = stored, float_tables
        self.expanded: collections.Counter[str] = collections.Counter()

    def __call__(
        self, name: str, spec: WeightSpec, parts: Sequence[RawTensor]
    ) -> rim.PackedWeight | None:
        """The packed weight; None for one that no packed kernel multiplies (it is read dense)."""
        kinds = {part.kind for part in parts}
        if not spec.linear:
            if self.stored and spec.stack and kinds != {"F32"}:
                self.expanded["experts, which have no packed kernel"] += 1
            return None
        if self.stored and kinds != {"F32"}:
            reason = refusal(kinds)
            if kinds == {"BF16"} and name in self.float_tables:
                reason = "bfloat16, and read by row as float32"
            if reason is None:
                try:
                    return pack_parts(parts, stored=True)
                except native.KernelError:
                    # the one thing that depends on values: Q4_0 offsets, kept as float16
                    reason = f"{parts[0].kind} with a scale that is out of the kernel's range"
            self.expanded[reason] += 1
        return pack_parts(parts, stored=False)

    def expanded_line(self) -> str | None:
        """What was expanded to float32 and why, in one line; None where nothing was."""
        if not self.expanded:
            return None
        reasons = ", ".join(f"{count} ({reason})" for reason, count in self.expanded.items())
        return f"weights expanded to float32: {reasons}"


def refusal(kinds: set[str]) -> str | None:
    """Why parts of these kinds cannot be one packed weight in their stored format; None: they
    can.
    """
    if len(kinds) > 1:
        return f"fused from parts stored as {' and '.join(sorted(kinds))}"
    (kind,) = kinds
    if kind in specs.GGUF_KINDS or kind in ("BF16", "F32"):
        return None
    return f"stored as {kind}, which has no kernel"


def pack_parts(parts: Sequence[RawTensor], *, stored: bool) -> rim.PackedWeight:
    """One packed weight from the rows of all parts, one under the other.

    Args:
        parts: as stored, with the same number of columns; of one kind if `stored`.
        stored: keep their format (`refusal` must be None); else float32.

    Raises:
        native.KernelError: values that the packed format cannot hold (Q4_0).
    """
    count, columns = sum(len(part.blocks) for part in parts), parts[0].shape[1]
    row_bytes = parts[0].blocks.shape[1] if stored else 4 * columns
    step = max(1, _SLICE // (specs.PANEL * row_bytes)) * specs.PANEL  # whole panels
    sample = _panels(*_rows(parts, 0, specs.PANEL, stored))
    out = aligned_empty((specs.panels(count), *sample.shape[1:]), sample.dtype)

    def fill(start: int) -> None:
        data = _panels(*_rows(parts, start, start + step, stored))
        at = start // specs.PANEL
        out[at : at + len(data)] = data
        if start // step % every == 0:
            release()

    def release() -> None:
        for part in parts:
            part.release()

    every = max(1, _RELEASE // (step * row_bytes))
    # NumPy lets go of the interpreter lock while it moves bytes
    with concurrent.futures.ThreadPoolExecutor(_workers()) as pool:
        list(pool.map(fill, range(0, count, step)))
    release()
    kind, rows = _rows(parts, 0, 1, stored)  # for what a packed weight is beside its data
    one = rim.pack_gguf(rows, kind, "cpu") if kind in specs.GGUF_KINDS else rim.pack(rows, "cpu")
    # On CPU device_put adopts the aligned buffer.
    return dataclasses.replace(one, data=jax.device_put(out), n=count)


def _panels(kind: str, rows: np.ndarray) -> np.ndarray:
    """The data of a packed weight, still in NumPy."""
    if kind in specs.GGUF_KINDS:
        with np.errstate(over="ignore"):  # a Q4_0 scale that is refused
            return reference.pack_gguf_array(rows, kind)
    return reference.pack_array(rows)


def _workers() -> int:
    cores = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(2)
    return min(4, len(cores))


def _rows(
    parts: Sequence[RawTensor], start: int, stop: int, stored: bool
) -> tuple[str, np.ndarray]:
    """Kind and rows, from `start` to `stop`, of all parts under each other: GGUF blocks, bfloat16
    or float32 values.
    """
    found, first = [], 0
    for part in parts:
        blocks = part.blocks[max(start - first, 0) : max(stop - first, 0)]
        if len(blocks):
            found.append(blocks if stored else dequantize(blocks, part.kind))
        first += len(part.blocks)
    rows = found[0] if len(found) == 1 else np.concatenate(found)
    kind = parts[0].kind if stored else "F32"
    return kind, rows.view(ml_dtypes.bfloat16) if kind == "BF16" else rows
