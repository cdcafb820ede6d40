"""Row-invariant projection: see `api`."""

from pallas_kernels.row_invariant_matmul.api import gated_matmul, matmul, take_rows
from pallas_kernels.row_invariant_matmul.arrays import project, project_grouped
from pallas_kernels.row_invariant_matmul.packing import (
    PackedWeight,
    gather,
    integer_pays,
    pack,
    pack_gguf,
    pack_panels,
    resolve,
    unpack,
)

__all__ = [
    "PackedWeight",
    "gated_matmul",
    "gather",
    "integer_pays",
    "matmul",
    "pack",
    "pack_gguf",
    "pack_panels",
    "project",
    "project_grouped",
    "resolve",
    "take_rows",
    "unpack",
]
