"""Parameters of tree attention. On a CPU a row's sums follow the order of its keys, whatever the
blocks are, so no build parameter changes a bit. On GPUs the length of a segment does.
"""

from collections.abc import Mapping
from typing import Any

from pallas_kernels import tuned
from pallas_kernels.parameters import Facts, build_parameter, gpu_parameter
from pallas_kernels.tree_attention.specs import OP, SEGMENT, triton_heuristics


def _several(facts: Facts) -> bool:
    return facts.cores > 1


def _gpu_default(name: str) -> Any:
    def here(facts: Facts) -> Mapping[str, Any]:
        own = triton_heuristics(facts.head_dim)
        if facts.gpu_form == "mosaic_gpu":
            own = {"segment": SEGMENT}
        return {
            "default": tuned.table(OP, facts.gpu_form, facts.device, own, dim=facts.head_dim)[name]
        }

    return here


PARAMETERS = (
    build_parameter(
        OP,
        "LEAD",
        64,
        (16, 32, 64, 128, 256),
        "keys that the prefetch of keys and values runs ahead",
    ),
    build_parameter(
        OP,
        "LOCALITY",
        2,
        (0, 1, 2, 3),
        "cache level that prefetched keys go to: 3 all, 2 second, 1 third, 0 past the caches",
    ),
    build_parameter(
        OP,
        "FEW_ROWS_BLOCK",
        32,
        (16, 32, 64),
        "keys between two prefetches where few rows share the values; at most VALUE_BLOCK",
    ),
    build_parameter(
        OP,
        "VALUE_BLOCK",
        64,
        (32, 64, 128),
        "keys whose values stay in the first-level cache for all tiles of rows",
    ),
    build_parameter(
        OP,
        "TILE_ROWS",
        6,
        (4, 5, 6),
        "query rows that share a value in registers",
        lambda facts: facts.form == 3,
    ),
    build_parameter(
        OP,
        "COLUMNS",
        4,
        (2, 4),
        "vectors of a head's columns summed at once: loads of weights against registers",
        lambda facts: facts.form == 3,
    ),
    build_parameter(
        OP,
        "SCORE_KB",
        384,
        (96, 192, 384, 768),
        "KB of scores that a unit of work keeps: a part of the second-level cache",
    ),
    build_parameter(
        OP,
        "SPLIT_ROWS",
        12,
        (6, 12, 24, 48),
        "query rows below which a unit is not cut further: reading keys again against even threads",
        _several,
    ),
    build_parameter(
        OP,
        "SPLIT_KEYS",
        64,
        (0, 64, 256, 1024, 1_000_000),
        "cached keys from which a head is shared between threads",
        _several,
    ),
    gpu_parameter(
        OP,
        "segment",
        SEGMENT,
        (512, 1024, 2048, 4096),
        "positions folded by one block: blocks in flight against partial results",
        ("mosaic_gpu", "triton"),
        changes_bits=True,
        here=_gpu_default("segment"),
    ),
    gpu_parameter(
        OP,
        "num_warps",
        8,
        (4, 8),
        "warps of a block",
        ("triton",),
        here=_gpu_default("num_warps"),
    ),
    gpu_parameter(
        OP,
        "num_stages",
        2,
        (1, 2, 3, 4),
        "loads of keys under way",
        ("triton",),
        here=_gpu_default("num_stages"),
    ),
)
