"""Name, limits and shapes of the op; cpu.cc has the same limit."""

from typing import NamedTuple

from pallas_kernels.geometries import GEOMETRIES

OP = "draft_head_topk"
MAX_WIDTH = 64
GPU_MAX_WIDTH = 32  # a block ranks that many of its 64 or 128 tokens


class Shape(NamedTuple):
    """Draft LM head [vocab, hidden] over `depth` rows a sequence."""

    name: str
    vocab: int
    hidden: int
    depth: int
    width: int


GPU_SHAPES = tuple(
    Shape(g.name, g.draft.vocab, g.hidden, g.draft.block - 1, 8) for g in GEOMETRIES.values()
)
