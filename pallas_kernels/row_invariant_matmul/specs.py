"""Packed formats, layout constants, and the shapes of real models (tests and bench)."""

from typing import Literal, NamedTuple

from pallas_kernels.geometries import GEOMETRIES, Geometry

OP = "row_invariant_matmul"
PANEL = 32  # outputs beside each other in a packed panel; cpu.cc names the same number
BLOCK = 32  # inputs that share a scale in the quantised formats

Format = Literal["f32", "bf16", "q8_0", "q4_1", "q4_k", "q6_k"]
Arithmetic = Literal["float", "integer"]
# Layouts of panels: a format, with "i" where it is multiplied in integers (integer.h).
INTEGER_LAYOUTS: dict[str, str] = {"q8_0": "q8_0i", "q4_1": "q4_1i"}
# Number of each layout in cpu.cc; formats.h has them.
LAYOUT_ID: dict[str, int] = {
    "f32": 0,
    "bf16": 1,
    "q8_0": 2,
    "q4_1": 3,
    "q4_k": 4,
    "q6_k": 5,
    "q8_0i": 6,
    "q4_1i": 7,
}
# A block as it lies in memory: (number of rows of 32 outputs, bytes of an output in such a row).
ROWS: dict[str, tuple[tuple[int, int], ...]] = {
    "f32": ((1, 4),),
    "bf16": ((1, 2),),
    "q8_0": ((1, 2), (32, 1)),  # scale; one input a row
    "q4_1": ((4, 4), (2, 2)),  # eight inputs a row; scale, minimum
    "q4_k": ((2, 2), *(((4, 4), (2, 1)) * 8)),
    "q6_k": ((1, 2), *(((4, 4), (4, 2), (2, 1)) * 8)),
    "q8_0i": ((1, 2), (8, 4)),  # scale; four inputs a row
    "q4_1i": ((4, 4), (2, 2)),  # inputs 4 g + i and 16 + 4 g + i in byte i of row g
}
# Inputs of a block.
DEPTH: dict[str, int] = {
    "f32": 1,
    "bf16": 1,
    "q8_0": 32,
    "q4_1": 32,
    "q4_k": 256,
    "q6_k": 256,
    "q8_0i": 32,
    "q4_1i": 32,
}


class Kind(NamedTuple):
    """A kind of GGUF block that can be packed."""

    format: Format
    size: int  # bytes of a block of DEPTH[format] weights
    number: int  # in cpu.cc


GGUF_KINDS: dict[str, Kind] = {
    "Q8_0": Kind("q8_0", 34, 2),
    "Q4_1": Kind("q4_1", 20, 3),
    "Q4_K": Kind("q4_k", 144, 4),
    "Q6_K": Kind("q6_k", 210, 5),
    "Q4_0": Kind("q4_1", 18, 6),  # q * d + (-8 d): the same values, both terms exact in float16
}


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


# --- GPU -----------------------------------------------------------------------------------------

ROW_BLOCK = 64  # rows of one wgmma: fewer are padded on the chip, more are further wgmmas
GPU_ROWS = (1, 8, 16, 32, 64, 128, 256)  # M of the compile check and the bench
_BUSY = 120  # blocks that occupy a Hopper GPU (132 multiprocessors) well


class Tiling(NamedTuple):
    """How a GPU kernel cuts a weight. A function of the weight alone, never of M: with it every
    order of addition is fixed.

    Attributes:
      block_n: outputs of a block.
      block_k: inputs of a step.
      splits: parts of K, summed by different blocks, then from left to right.
      stages: steps in flight.
    """

    block_n: int
    block_k: int
    splits: int
    stages: int


def tiling(n: int, k: int, *, split: bool = True) -> Tiling | None:
    """Tiling of a weight [n, k]; None where the GPU kernels do not take it.

    Wide blocks re-read the rows less often, so they come first; then the fewest parts of K that
    occupy the GPU. Parts have at least 1,024 inputs: at 64 rows their sums, written and read again,
    are then a quarter of the weight at most.
    """
    block_k = 64
    if n < 1 or k < 1 or n % 64 or k % block_k:
        return None
    steps, most = k // block_k, k // 1024 if split else 1
    splits = [s for s in range(1, max(most, 1) + 1) if steps % s == 0]
    for block_n in (128, 64):
        for s in splits if n % block_n == 0 else ():
            if n // block_n * s >= _BUSY:
                return Tiling(block_n, block_k, s, 4)
    return Tiling(64, block_k, splits[-1], 4)


def projections(g: Geometry) -> tuple[Shape, ...]:
    """Dense projections of a target model and of its draft head (the LM head is verify_head's)."""
    name, d = g.name, g.draft
    shapes = [
        Shape(f"{name} qkv", g.qkv, g.hidden),
        Shape(f"{name} o", g.hidden, g.q_width),
        Shape(f"{name} draft fc", g.hidden, d.taps * g.hidden),
        Shape(f"{name} draft kv", 2 * g.kv_width, g.hidden),
    ]
    if not g.experts:
        shapes.append(Shape(f"{name} gate_up", 2 * g.ffn, g.hidden))
        shapes.append(Shape(f"{name} down", g.hidden, g.ffn))
    else:
        shapes.append(Shape(f"{name} draft gate_up", 2 * d.ffn, g.hidden))
        shapes.append(Shape(f"{name} draft down", g.hidden, d.ffn))
    return tuple(shapes)


GPU_SHAPES = tuple(shape for g in GEOMETRIES.values() for shape in projections(g))


class GroupedShape(NamedTuple):
    """One projection of `experts` experts of which every row takes `active`."""

    name: str
    n: int
    k: int
    experts: int
    active: int


GROUPED_SHAPES = tuple(
    shape
    for g in GEOMETRIES.values()
    if g.experts
    for shape in (
        GroupedShape(f"{g.name} experts gate_up", 2 * g.ffn, g.hidden, g.experts, g.active),
        GroupedShape(f"{g.name} experts down", g.hidden, g.ffn, g.experts, g.active),
    )
)


def layout(form: str, arithmetic: Arithmetic) -> str:
    """Name of the panels' layout; a format without integer sums has one for both arithmetics."""
    return INTEGER_LAYOUTS.get(form, form) if arithmetic == "integer" else form


def block_bytes(form: str) -> int:
    """Bytes of one block: 32 outputs and DEPTH[form] inputs."""
    return sum(rows * width * PANEL for rows, width in ROWS[form])


def panels(n: int) -> int:
    """Number of packed panels that hold `n` outputs."""
    return -(-n // PANEL)
