"""What can be tuned of an engine: numerics, which change bits by definition, and how prompts and
batches are scheduled.
"""

from collections.abc import Mapping
from typing import Any

from pallas_kernels.parameters import Parameter

_BOTH = {"q4_1", "q4_0", "q8_0"}  # formats that can be multiplied either way


def _two_arithmetics(facts: Any) -> bool:
    formats = _BOTH & {*facts.integer, *facts.floating}
    return facts.kernels == "cpu" and facts.engine.weights == "stored" and bool(formats)


def _packed(facts: Any) -> bool:
    return facts.kernels == "cpu" and any(f != "f32" for f in (*facts.integer, *facts.floating))


def _max_batch(facts: Any) -> Mapping[str, Any]:
    most = min(facts.engine.max_batch, facts.batch)
    sizes = [1 << i for i in range(most.bit_length()) if 1 << i <= most]
    return {"default": most, "choices": tuple(sorted({*sizes, most}))}


PARAMETERS = (
    Parameter(
        "engine.arithmetic",
        "choice",
        "integer",
        "sums of quantised weights: integer sums make several rows cheaper",
        ("float", "integer"),
        applies=_two_arithmetics,
        here=lambda facts: {"default": facts.arithmetic},
        changes_bits=True,
        setup="engine",
        only=(("engine.weights", ("stored",)),),
    ),
    Parameter(
        "engine.weights",
        "choice",
        "stored",
        "as in the file, or expanded: bytes to read against instructions to decode them",
        ("stored", "float32"),
        applies=_packed,
        # expanded weights hold the same values, but integer sums do not multiply them
        here=lambda facts: {
            "default": facts.engine.weights,
            "changes_bits": bool(facts.integer),
        },
        changes_bits=True,
        setup="engine",
    ),
    Parameter(
        "engine.prefill_chunk",
        "choice",
        64,
        "prompt tokens a step: time to the first token against memory",
        (16, 32, 64, 128, 256),
        here=lambda facts: {
            "default": facts.engine.prefill_chunk,
            "changes_bits": facts.kernels == "xla",  # whose rows depend on their number
        },
        setup="engine",
    ),
    Parameter(
        "engine.attention_chunk",
        "choice",
        256,
        "keys per turn of attention where XLA does it",
        (64, 128, 256, 512),
        applies=lambda facts: facts.kernels == "xla",
        here=lambda facts: {
            "default": facts.engine.attention_chunk,
            "changes_bits": not facts.bitwise,
        },
        setup="engine",
    ),
    Parameter(
        "engine.max_batch",
        "choice",
        32,
        "sequences decoded together at most: more rows a step, or shorter waits",
        (1, 2, 4, 8, 16, 32),
        applies=lambda facts: facts.batch > 1,
        here=lambda facts: {
            **_max_batch(facts),
            "changes_bits": facts.kernels == "xla",
        },
        setup="engine",
    ),
)
