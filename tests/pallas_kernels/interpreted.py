"""Mosaic kernels interpreted on the CPU wherever they are called from."""

from contextlib import AbstractContextManager

from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import mosaic


def interpreted_mosaic() -> AbstractContextManager[None]:
    """Context in which a traced Mosaic kernel is interpreted; beside `gpu_target.on_abstract`."""
    return plgpu.force_gpu_interpret_mode(mosaic.interpret_params())
