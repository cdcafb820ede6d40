"""Layout constants and the shapes of real models (shared by tests and bench)."""

from typing import NamedTuple

PANEL = 32  # outputs beside each other in a packed panel; the C++ source names the same number
OP = "row_invariant_matmul"


class Shape(NamedTuple):
    """One projection: y [M, n] = x [M, k] @ w [n, k].T."""

    name: str
    n: int
    k: int


SMOLLM2_135M = (
    Shape("qkv", 960, 576),
    Shape("o", 576, 576),
    Shape("gate_up", 3072, 576),
    Shape("down", 576, 1536),
    Shape("lm_head", 49152, 576),
    Shape("draft_head", 12288, 576),
)


def panels(n: int) -> int:
    """Number of packed panels that hold `n` outputs."""
    return -(-n // PANEL)
