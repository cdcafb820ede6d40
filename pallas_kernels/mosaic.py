"""The part of Pallas that GPU kernels use, under names that do not change.

Pallas renames and moves calls from release to release (0.10, 0.11 and 0.12 each did), so kernels
import from here and from nowhere else (a test checks it). Importing this module under a JAX that
it was not tried on raises `KernelError` in one line; importing it costs a second and no GPU, so
kernels import it when they are chosen, not before.

Tried on jax 0.11.2 and 0.12.0.1.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax

from pallas_kernels.native import KernelError

_OLDEST, _NEWEST = (0, 11, 2), (0, 12, 0)


def _check_version(version: str) -> None:
    """Raises KernelError unless this module was tried on that release of JAX."""
    parts = tuple(int(part) for part in version.split(".")[:3])
    if not _OLDEST <= parts <= _NEWEST:
        raise KernelError(
            f"Pallas GPU kernels need jax 0.11.2 to 0.12.0.x, not {version}: "
            "install one of those, or choose implementation 'xla'"
        )


_check_version(jax.__version__)

try:
    from jax._src.pallas.mosaic_gpu.interpret import interpret_pallas_call as _interpreter
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import mosaic_gpu

    plgpu: Any = mosaic_gpu  # its annotations say less than it does

    # memory, layouts
    ACC = plgpu.WGMMAAccumulatorRef
    Barrier = plgpu.Barrier
    BlockSpec = plgpu.BlockSpec
    CompilerParams = plgpu.CompilerParams
    GMEM = plgpu.GMEM
    Layout = plgpu.Layout
    SMEM = plgpu.SMEM
    SwizzleTransform = plgpu.SwizzleTransform
    TilingTransform = plgpu.TilingTransform

    # a kernel and its control flow
    cdiv = pl.cdiv
    ds = pl.ds
    emit_pipeline = plgpu.emit_pipeline
    kernel = plgpu.kernel
    run_scoped = pl.run_scoped
    run_state = pl.run_state
    when = pl.when

    # inside of a kernel
    barrier_arrive = plgpu.barrier_arrive
    barrier_wait = plgpu.barrier_wait
    broadcasted_iota = plgpu.broadcasted_iota
    commit_smem = plgpu.commit_smem
    copy_gmem_to_smem = plgpu.copy_gmem_to_smem
    copy_smem_to_gmem = plgpu.copy_smem_to_gmem
    layout_cast = plgpu.layout_cast
    load = plgpu.load
    set_max_registers = plgpu.set_max_registers
    wait_smem_to_gmem = plgpu.wait_smem_to_gmem
    wgmma = plgpu.wgmma
    wgmma_wait = plgpu.wgmma_wait

    _InterpretParams = plgpu.InterpretGPUParams
    _reset, _races = _interpreter.reset_gpu_interpret_mode_state, _interpreter.get_races
except (ImportError, AttributeError) as error:
    raise KernelError(
        f"Pallas of jax {jax.__version__} lacks what the GPU kernels use ({error}): "
        "install jax 0.11.2 to 0.12.0.x, or choose implementation 'xla'"
    ) from error


def swizzled(dtype: Any) -> tuple[Any, ...]:
    """Transforms of a shared-memory buffer that wgmma reads: 8 x 128-byte tiles, swizzle 128."""
    columns = 128 // jax.numpy.dtype(dtype).itemsize
    return (TilingTransform((8, columns)), SwizzleTransform(128))


def transposed(ref: Any) -> Any:
    """View of a matrix in shared memory with its two axes exchanged; no data moves."""
    return ref.transpose((1, 0))


def interpret_params(*, detect_races: bool = False, poison: bool = True) -> Any:
    """`interpret=` of `kernel`: runs it on the CPU, with shared memory, barriers and bulk copies.

    Args:
      detect_races: follows happens-before of every access; `races_found` then answers.
      poison: memory that was not written reads as NaN (or the largest integer), else as zero.
    """
    fields = {field.name for field in dataclasses.fields(_InterpretParams)}
    # jax 0.12 raises at the first race by default, 0.11 has no choice but to go on
    later: dict[str, Any] = {"on_race": "warn"} if "on_race" in fields else {}
    return _InterpretParams(
        detect_races=detect_races, uninitialized_memory="nan" if poison else "zero", **later
    )


def races_found() -> bool:
    """Whether the last interpreted kernel (with `detect_races`) raced.

    Raises:
      KernelError: no kernel was interpreted with `detect_races`.
    """
    try:
        return bool(_races().races_found)
    except AssertionError as error:
        raise KernelError(
            "no kernel was interpreted with detect_races since the last reset: run one first"
        ) from error


def reset_interpreter() -> None:
    """Forgets the state of the interpreter: needed after a kernel raised, harmless otherwise."""
    _reset()


def rounded_up(value: int, multiple: int) -> int:
    """Smallest multiple of `multiple` that is at least `value`."""
    return math.ceil(value / multiple) * multiple
