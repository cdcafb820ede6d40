"""Build parameters of how the native kernels share work between threads (`cpu_common.h`).

Which thread computes a task changes nothing of the task, so no value changes a bit.
"""

from pallas_kernels.parameters import Facts, build_parameter

OP = "threads"


def _several(facts: Facts) -> bool:
    return facts.cores > 1


PARAMETERS = (
    build_parameter(
        OP,
        "SHARE",
        2,
        (1, 2, 3, 4, 8),
        "a thread takes 1 / (SHARE x threads) of the tasks that are left: long runs for the "
        "prefetchers, or an even end",
        _several,
    ),
    build_parameter(
        OP,
        "SPINS",
        4096,
        (256, 1024, 4096, 16384, 65536),
        "turns of waiting for another thread before the CPU is given away",
        _several,
    ),
)
