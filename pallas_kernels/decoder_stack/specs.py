"""Name of the op and the stacks of real models (tests and bench)."""

from typing import NamedTuple

OP = "decoder_stack"


class Shape(NamedTuple):
    """A stack: widths in elements."""

    name: str
    layers: int
    width: int
    heads: int
    kv_heads: int
    dim: int
    ffn: int
    qk_norm: bool = False
    bias: bool = False


SMOLLM2_135M = Shape("smollm2-135m", 30, 576, 9, 3, 64, 1536)
SMALL = (
    Shape("llama", 2, 64, 4, 2, 16, 96),
    Shape("qwen3", 3, 48, 4, 1, 32, 64, qk_norm=True),
    Shape("qwen2", 2, 80, 5, 5, 16, 128, bias=True),
    Shape("odd", 1, 70, 3, 3, 22, 32, qk_norm=True, bias=True),
)
