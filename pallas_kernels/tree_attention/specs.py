"""Names and shapes of the op (shared by tests and bench)."""

from typing import NamedTuple

from pallas_kernels.geometries import GEOMETRIES

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


class GpuShape(NamedTuple):
    """One call of a GPU form: `capacity` slots a sequence, in pages of `page` unless that is 0."""

    name: str
    batch: int
    heads: int
    group: int
    rows: int
    dim: int
    capacity: int
    page: int = 0


def _gpu_shapes() -> tuple[GpuShape, ...]:
    def of(model: str, batch: int, rows: int, capacity: int, page: int = 0) -> GpuShape:
        g = GEOMETRIES[model]
        name = f"{model} batch {batch} rows {rows} context {capacity}"
        name += f" page {page}" if page else ""
        group = g.heads // g.kv_heads
        return GpuShape(name, batch, g.kv_heads, group, rows, g.head_dim, capacity, page)

    first = [of("qwen3-8b", 1, rows, 4096) for rows in (1, 8, 16, 32, 64, 128, 256)]
    batches = [of("qwen3-8b", 4, 64, 4096), of("qwen3-8b", 32, 16, 4096)]
    pages = [of("qwen3-8b", 8, 32, 4096, page) for page in (16, 32, 64, 128, 256)]
    long = [of("qwen3-8b", 1, 1, 32768), of("qwen3-8b", 1, 64, 32768)]
    others = [of(m, 1, rows, 4096) for m in GEOMETRIES if m != "qwen3-8b" for rows in (1, 64)]
    return (*first, *batches, *pages, *long, *others)


GPU_SHAPES = _gpu_shapes()


def triton_heuristics(dim: int) -> dict[str, int]:
    """Triton's parameters where a device has no table; of the model's shape only, never of N."""
    return {"segment": SEGMENT, "num_warps": 8 if dim > 64 else 4, "num_stages": 2}
