"""Build parameters of the native matmul. A sum runs in one accumulator from its first input to its
last, and integer sums are exact, so none of them changes a bit.
"""

from pallas_kernels.parameters import Facts, build_parameter
from pallas_kernels.row_invariant_matmul.specs import OP


def _sums(facts: Facts) -> bool:
    return bool(facts.integer)


def _float(facts: Facts) -> bool:
    return bool(facts.floating)


def _float_wide(facts: Facts) -> bool:
    return bool(facts.floating) and facts.form == 3


def _fused(facts: Facts) -> bool:
    return facts.form == 3 and any(f != "f32" for f in facts.floating)


PARAMETERS = (
    build_parameter(
        OP,
        "AHEAD",
        4096,
        (1024, 2048, 4096, 8192, 16384),
        "bytes that the prefetch of weights runs ahead: memory's latency against the cache's room",
    ),
    build_parameter(
        OP,
        "LOCALITY",
        2,
        (0, 1, 2, 3),
        "cache level that prefetched weights go to: 3 all, 2 second, 1 third, 0 past the caches",
    ),
    build_parameter(
        OP,
        "TILES_FROM",
        3,
        (1, 2, 3, 4, 5, 9),
        "rows of a group from which AMX tiles multiply instead of vector dot products; 9: never",
        lambda facts: facts.tiles and _sums(facts),
    ),
    build_parameter(
        OP,
        "ROW_GROUP",
        8,
        (4, 8),
        "rows that share one decoding of the weights in integer sums",
        _sums,
    ),
    build_parameter(
        OP,
        "DOT_ROWS",
        4,
        (1, 2, 3, 4),
        "rows that share decoded weights in vector dot products: reuse against registers",
        _sums,
    ),
    build_parameter(
        OP,
        "DOT_VECTORS",
        2,
        (1, 2),
        "vectors of outputs that share a broadcast of digits: loads against registers",
        lambda facts: _sums(facts) and facts.form == 3,
    ),
    build_parameter(
        OP,
        "CHUNK",
        128,
        (64, 96, 128, 256),
        "inputs of decoded weights kept in the first-level cache for several passes of rows",
        _float,
    ),
    build_parameter(
        OP,
        "TILE_ROWS",
        14,
        (8, 10, 12, 14),
        "rows of a register tile of float sums",
        _float_wide,
    ),
    build_parameter(
        OP,
        "FUSED_ROWS",
        12,
        (2, 4, 6, 8, 10, 12),
        "rows up to which weights are decoded in registers, again for every register tile",
        _fused,
    ),
)
