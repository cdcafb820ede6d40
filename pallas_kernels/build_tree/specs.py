"""Name, limits and shapes of the op."""

from typing import NamedTuple

from pallas_kernels.geometries import GEOMETRIES

OP = "build_tree"
MAX_FRONTIER = 8192  # nodes times width: 64 a thread of the kernel's 128
TOO_LARGE = (
    f"{OP}: {{nodes}} nodes of width {{width}}: the GPU kernel holds {MAX_FRONTIER} children"
)


class Shape(NamedTuple):
    """`batch` trees of `nodes` slots from tables [depth, width, width]."""

    name: str
    batch: int
    nodes: int
    depth: int
    width: int


GPU_SHAPES = tuple(
    Shape(f"{g.name} batch {batch} nodes {nodes}", batch, nodes, g.draft.block - 1, 8)
    for g in (GEOMETRIES["qwen3-8b"], GEOMETRIES["smollm2-135m"])
    for batch, nodes in ((1, 64), (32, 16), (1, 256))
)
