"""Row-invariant projection: see `api`."""

from pallas_kernels.row_invariant_matmul.api import gated_matmul, matmul
from pallas_kernels.row_invariant_matmul.packing import (
    PackedWeight,
    gather,
    pack,
    pack_gguf,
    resolve,
    take_rows,
    unpack,
)

__all__ = [
    "PackedWeight",
    "gated_matmul",
    "gather",
    "matmul",
    "pack",
    "pack_gguf",
    "resolve",
    "take_rows",
    "unpack",
]
