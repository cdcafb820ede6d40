"""Tuned parameters of the GPU kernels: JSON per kind of device and op, or the kernel's own choice.

`tuned/<device>/<op>.json` holds `{form: {parameter: value}}`, with `"dim=128"` and the like for
values that hold for one shape only, and `"source"`: where the values come from. A parameter that
changes the bits of a row (the length of a segment, a tile along K) may depend on the device and on
the model, never on the number of rows or on the batch.
"""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

from pallas_kernels import parameters
from pallas_kernels.gpu_target import TARGETS
from pallas_kernels.native import KernelError

_FOLDER = Path(__file__).parent / "tuned"


def family(kind: str) -> str | None:
    """Name in `gpu_target.TARGETS` of a device kind as JAX reports it, or None.

    "NVIDIA H100 PCIe" and "NVIDIA H100 80GB HBM3" are both "h100", "NVIDIA A100-SXM4-80GB" is
    "a100".
    """
    words = kind.lower().replace("nvidia", "").replace("-", " ").split()
    for name in TARGETS:
        parts = name.split("-")
        if words[: len(parts)] == parts:
            return name
    return None


@functools.cache
def _table(device: str, op: str) -> dict[str, dict[str, Any]]:
    path = _FOLDER / device / f"{op}.json"
    if not path.is_file():
        return {}
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise KernelError(f"{path}: not JSON ({error}): repair it or delete it") from error


def lookup(op: str, form: str, kind: str, defaults: dict[str, int], **shape: int) -> dict[str, int]:
    """Parameters of a kernel: those in force (`parameters.using`), else as `table`.

    Raises:
      KernelError: the table, or what is in force, names a parameter that the kernel lacks.
    """
    forced = parameters.table_values(op)
    for name in forced:
        if name not in defaults:
            raise KernelError(
                f"{op}: {form} has no parameter {name!r}: use one of {', '.join(sorted(defaults))}"
            )
    return table(op, form, kind, defaults, **shape) | forced


def table(op: str, form: str, kind: str, defaults: dict[str, int], **shape: int) -> dict[str, int]:
    """Parameters of a kernel on a device.

    Args:
      op: name of the op.
      form: "mosaic_gpu" or "triton".
      kind: the device's name.
      defaults: the kernel's own choice for this shape, for every parameter it has.
      shape: numbers that a table may tell apart, as `dim=128`.

    Returns:
      `defaults`, overridden by the device's table, then by its entries for this shape.

    Raises:
      KernelError: the table names a parameter that the kernel lacks.
    """
    device = family(kind)
    entry = _table(device, op).get(form, {}) if device else {}
    found = {k: v for k, v in entry.items() if not isinstance(v, dict)}
    for name, value in shape.items():
        found |= entry.get(f"{name}={value}", {})
    unknown = sorted(set(found) - set(defaults))
    if unknown:
        raise KernelError(
            f"tuned/{device}/{op}.json: {form} has no parameter {unknown[0]!r}: "
            f"use one of {', '.join(sorted(defaults))}"
        )
    return defaults | found
