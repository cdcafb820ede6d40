"""Build parameter of the native LM head. Maxima of parts compare exactly and the parts keep the
order of ids, so it changes no bit.
"""

from pallas_kernels.parameters import build_parameter
from pallas_kernels.verify_head.specs import OP

PARAMETERS = (
    build_parameter(
        OP,
        "TASK_PANELS",
        12,
        (2, 4, 6, 12, 24, 48),
        "panels of 32 tokens of the vocabulary that a thread takes at once",
    ),
)
