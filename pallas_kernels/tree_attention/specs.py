"""Names and shapes of the op (shared by tests and bench)."""

from typing import NamedTuple

OP = "tree_attention"
# Logical positions that one block of a GPU kernel folds. At 4,096 positions and batch 1 that makes
# 4 x 8 key heads x N / 16 blocks for 132 multiprocessors; a shorter one writes more partial sums.
SEGMENT = 1024


class Shape(NamedTuple):
    """One call: q [batch, heads, group, rows, dim] over `live` cached keys per sequence."""

    name: str
    batch: int
    heads: int
    group: int
    rows: int
    dim: int
    live: int


# SmolLM2-135M: 9 query heads, 3 key heads.
SMOLLM2_135M = (
    Shape("plain step", 1, 3, 3, 1, 64, 300),
    Shape("plain step, long", 1, 3, 3, 1, 64, 1000),
    Shape("verify 8", 1, 3, 3, 8, 64, 300),
    Shape("verify 16", 1, 3, 3, 16, 64, 300),
    Shape("prefill chunk", 1, 3, 3, 64, 64, 256),
    Shape("batch 32", 32, 3, 3, 1, 64, 300),
)


def live_bytes(shape: Shape, itemsize: int = 4) -> int:
    """Bytes of keys and values that one call has to read."""
    keys = shape.live + shape.rows
    return 2 * shape.batch * shape.heads * keys * shape.dim * itemsize
