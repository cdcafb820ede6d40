"""Calls of Triton kernels through jax-triton, imported when one is chosen and not before.

`<op>/triton.py` holds the kernels; it imports Triton at its top, so an op imports it inside of the
function that runs it, after `require`.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from typing import Any

from pallas_kernels.native import KernelError

# The oldest PTX that knows sm_120: every ptxas from CUDA 12.8 on takes it. Triton's own choice for
# Blackwell, 9.1, is refused by CUDA 13.0.
_PTX_VERSION = 87
REMEDY = "install the extra: pip install 'jetspec-jax[triton]'"


def require() -> None:
    """Raises KernelError in one line where Triton or jax-triton is not installed."""
    missing = [name for name in ("triton", "jax_triton") if importlib.util.find_spec(name) is None]
    if missing:
        raise KernelError(f"Triton kernels need {' and '.join(missing)}; {REMEDY}")


def call(
    kernel: Any,
    args: Sequence[Any],
    out_type: Any,
    grid: tuple[int, ...],
    *,
    num_warps: int,
    num_stages: int,
    **constants: Any,
) -> Any:
    """One launch.

    Args:
      kernel: a `triton.jit` function of pointers to `args`, then to the outputs, then constants.
      args: arrays and numbers.
      out_type: `jax.ShapeDtypeStruct`, or a sequence of them.
      grid: programs along each axis, the first runs fastest.
      num_warps, num_stages: of Triton.
      constants: its `tl.constexpr` arguments.
    """
    import jax_triton  # pyright: ignore[reportMissingImports]

    return jax_triton.triton_call(
        *args,
        kernel=kernel,
        out_type=out_type,
        grid=grid,
        num_warps=num_warps,
        num_stages=num_stages,
        backend_options={"ptx_version": _PTX_VERSION},
        **constants,
    )
