"""jax-triton, imported when a Triton kernel is chosen and not before.

Triton serves the NVIDIA GPUs that have no wgmma (sm_80, sm_89, sm_120). Its versions are pinned
(extra `triton`): jax-triton 0.4.1 needs triton 3.7 and jax 0.11.
"""

from __future__ import annotations

import importlib
from importlib import metadata
from typing import Any

from pallas_kernels import dispatch
from pallas_kernels.native import KernelError

_PINNED = {"jax-triton": "0.4.1", "triton": "3.7.1"}
_REMEDY = "install `jetspec-jax[triton]`"


def load(op: str) -> Any:
    """The module `pallas_kernels.<op>.triton`, which imports Triton.

    Raises:
      KernelError: Triton or jax-triton is missing or of another version.
    """
    for name, wanted in _PINNED.items():
        try:
            found = metadata.version(name)
        except metadata.PackageNotFoundError as error:
            raise KernelError(f"{name} is not installed: {_REMEDY}") from error
        if found != wanted:
            raise KernelError(f"{name} {found} is installed, {wanted} is needed: {_REMEDY}")
    try:
        return importlib.import_module(f"pallas_kernels.{op}.triton")
    except ImportError as error:
        raise KernelError(f"Triton does not import ({error}): {_REMEDY}") from error


def call(kernel: Any, *operands: Any, out_type: Any, grid: tuple[int, ...], **meta: Any) -> Any:
    """`jax_triton.triton_call` for the GPU at hand or the one `gpu_target.on_abstract` names.

    Args:
      kernel: a `triton.jit` function of operands, then outputs, then constants.
      operands: arrays.
      out_type: `jax.ShapeDtypeStruct`, or a tuple of them.
      grid: blocks.
      meta: constants of the kernel, num_warps, num_stages.
    """
    jax_triton = importlib.import_module("jax_triton")
    capability = dispatch.device().capability
    return jax_triton.triton_call(
        *operands,
        kernel=kernel,
        out_type=out_type,
        grid=grid,
        compute_capability=capability and 10 * capability[0] + capability[1],
        **meta,
    )
