"""Projection weights in the layout of the native matmul kernel, in the format of the file.

A weight is repacked a few rows at a time into its final array, so that loading needs that array
and some megabytes, whatever the format and however many tensors a fused projection is made of.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Sequence

import jax
import ml_dtypes
import numpy as np

from jetspec_jax.models.spec import WeightSpec
from jetspec_jax.weights import quantize
from jetspec_jax.weights.dequant import dequantize
from jetspec_jax.weights.source import RawTensor
from pallas_kernels import native
from pallas_kernels import row_invariant_matmul as rim
from pallas_kernels.memory import aligned_empty
from pallas_kernels.row_invariant_matmul import specs

_SLICE = 4 << 20  # bytes of rows repacked at once


class Packer:
    """The `pack` hook of `load_params` where the native kernels run.

    Args:
        stored: keep the format of the file where there is a kernel for it; else float32 throughout.
        quantise: store every weight of whole blocks as Q8_0 instead, whatever the file has.
        arithmetic: how weights are multiplied that have both.

    Attributes:
        expanded: number of weights that `stored` could not keep, by reason.
    """

    def __init__(
        self, stored: bool, quantise: bool = False, arithmetic: specs.Arithmetic = "float"
    ) -> None:
        self.stored, self.quantise = stored, quantise
        self.arithmetic: specs.Arithmetic = arithmetic
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
        if self.quantise and parts[0].shape[1] % quantize.BLOCK == 0:
            count = sum(len(part.blocks) for part in parts)
            values = _rows(parts, 0, count, stored=False)[1]
            for part in parts:
                part.release()
            return rim.pack_gguf(quantize.q8_0(values), "Q8_0", "cpu", arithmetic=self.arithmetic)
        if self.stored and kinds != {"F32"}:
            reason = refusal(kinds)
            if reason is None:
                try:
                    return pack_parts(parts, stored=True, arithmetic=self.arithmetic)
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


def pack_parts(
    parts: Sequence[RawTensor], *, stored: bool, arithmetic: specs.Arithmetic = "float"
) -> rim.PackedWeight:
    """One packed weight from the rows of all parts, one under the other.

    Args:
        parts: as stored, with the same number of columns; of one kind if `stored`.
        stored: keep their format (`refusal` must be None); else float32.
        arithmetic: how it is multiplied, if its format has both.

    Raises:
        native.KernelError: values that the packed format cannot hold (Q4_0).
    """
    count, columns = sum(len(part.blocks) for part in parts), parts[0].shape[1]
    row_bytes = parts[0].blocks.shape[1] if stored else 4 * columns
    step = max(1, _SLICE // (specs.PANEL * row_bytes)) * specs.PANEL  # whole panels
    kind, rows = _rows(parts, 0, 1, stored)  # what the packed weight is beside its data
    if kind in specs.GGUF_KINDS:
        both = specs.GGUF_KINDS[kind].format in specs.INTEGER_LAYOUTS
        arithmetic = arithmetic if both else "float"
        one = rim.pack_gguf(rows, kind, "cpu", arithmetic=arithmetic)
    else:
        arithmetic, one = "float", rim.pack(rows, "cpu")
    out = aligned_empty((specs.panels(count), *one.data.shape[1:]), one.data.dtype)
    for start in range(0, count, step):
        stop = min(count, start + step)
        panels = out[start // specs.PANEL : specs.panels(stop)]
        rim.pack_panels(_rows(parts, start, stop, stored)[1], kind, panels, arithmetic=arithmetic)
        for part in parts:
            part.release()
    # On CPU device_put adopts the aligned buffer.
    return dataclasses.replace(one, data=jax.device_put(out), n=count)


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
