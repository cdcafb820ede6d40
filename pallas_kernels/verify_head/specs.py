"""Name and shapes of the op (shared by tests, compile check and bench)."""

from typing import NamedTuple

from pallas_kernels.geometries import GEOMETRIES
from pallas_kernels.row_invariant_matmul.specs import Tiling

OP = "verify_head"
GPU_ROWS = (1, 8, 16, 32, 64, 128, 256)


class Shape(NamedTuple):
    """An LM head [vocab, hidden]."""

    name: str
    vocab: int
    hidden: int


GPU_SHAPES = tuple(Shape(g.name, g.vocab, g.hidden) for g in GEOMETRIES.values())


def tiling(vocab: int, hidden: int) -> Tiling | None:
    """Tiling of a head for the GPU kernels: K whole, for a row's logits live in one block only;
    None where they do not take it."""
    if vocab < 1 or hidden < 1 or vocab % 64 or hidden % 64:
        return None
    return Tiling(128 if vocab % 128 == 0 else 64, 64, 1, 4)
