"""Name and shapes of the op."""

from typing import NamedTuple

from pallas_kernels.geometries import GEOMETRIES

OP = "accept_commit"


class GpuShape(NamedTuple):
    """Caches of `layers` layers, paths of `path` rows out of `rows`."""

    name: str
    layers: int
    batch: int
    heads: int
    capacity: int
    dim: int
    rows: int
    path: int


GPU_SHAPES = tuple(
    GpuShape(
        f"{g.name} batch {batch} rows 64 context 4096",
        *(g.layers, batch, g.kv_heads, 4096, g.head_dim, 64, g.draft.block),
    )
    for g in (GEOMETRIES["qwen3-8b"], GEOMETRIES["smollm2-135m"])
    for batch in (1, 32)
)
