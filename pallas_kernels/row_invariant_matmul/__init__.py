"""Row-invariant projection: see `api`."""

from pallas_kernels.row_invariant_matmul.api import (
    PackedWeight,
    matmul,
    pack,
    resolve,
    take_rows,
    unpack,
)

__all__ = ["PackedWeight", "matmul", "pack", "resolve", "take_rows", "unpack"]
