"""The GPU kernels of an op: which form serves a call, and its module."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from types import ModuleType

from pallas_kernels import dispatch, triton_call


def select(
    op: str,
    implementation: dispatch.Implementation,
    fits: Callable[[], object],
    forms: tuple[str, ...] = ("mosaic_gpu", "triton"),
) -> ModuleType | None:
    """`pallas_kernels.<op>.<form>` of the form to run, None where that is XLA.

    Args:
      op: its name and folder.
      implementation: "auto", or a form to insist on.
      fits: raises KernelError where the kernels do not take this call.
      forms: what the op has, in the order "auto" tries them.

    Raises:
      KernelError: as `dispatch.select`.
    """
    found: dict[str, ModuleType] = {}

    def loader(form: str) -> Callable[[], object]:
        def load() -> None:
            fits()
            found[form] = (
                triton_call.load(op)
                if form == "triton"
                else importlib.import_module(f"pallas_kernels.{op}.{form}")
            )

        return load

    return found.get(dispatch.select(op, implementation, {form: loader(form) for form in forms}))
