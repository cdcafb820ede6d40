"""A stack of decoder layers as one op: see `api`."""

from pallas_kernels.decoder_stack.api import (
    Geometry,
    StackLayer,
    StackOut,
    decoder_stack,
    supported,
)

__all__ = ["Geometry", "StackLayer", "StackOut", "decoder_stack", "supported"]
