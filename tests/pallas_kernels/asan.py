"""The kernel tests under AddressSanitizer and UndefinedBehaviorSanitizer: `make asan`.

    python -m tests.pallas_kernels.asan [pytest arguments]

The kernels are built with the sanitizers into their own place in the cache; a second process loads
the sanitizer's runtime before Python (so that XLA's and numpy's buffers have guards on both sides)
and runs the tests with that library. An error ends the process with its report and EXIT_CODE.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
EXIT_CODE = 66
FLAGS = (
    "-fsanitize=address,undefined",
    # Buffers of any address are allowed and tested. The bits of a power of two are made by integer
    # shifts and sums that may leave the range for arguments whose result is then not used (NaN,
    # far below zero): what they give is what C++20 and both compilers say.
    "-fno-sanitize=alignment,shift-base,signed-integer-overflow",
    "-fno-sanitize-recover=undefined",
    "--param=asan-instrumentation-with-call-threshold=100",  # half the time to compile
    "-fno-omit-frame-pointer",
    "-O1",
)
TESTS = tuple(
    f"tests/pallas_kernels/test_{op}.py"
    for op in (
        "row_invariant_matmul",
        "integer_sums",
        "tree_attention",
        "decoder_stack",
        "verify_head",
        "accept_commit",
        "draft_head_topk",
        "draft_context",
    )
)
# Further vector forms are further builds; tests that start processes, of XLA's form alone, or of
# random shapes (a program each) bring no more kernel code.
LEFT_OUT = " and ".join(
    f"not {name}"
    for name in ("form", "narrower", "compiler", "xla-", "auto_takes", "any_", "_widths")
)


def environment() -> dict[str, str]:
    """For a process that can load a library built with `FLAGS`.

    Raises:
      RuntimeError: the compiler has no shared sanitizer runtime (GCC is needed).
    """
    from pallas_kernels import native

    compiler = native._find_compilers()[0]
    # libstdc++ comes along: the sanitizer looks up __cxa_throw when it starts, jaxlib throws.
    runtime = [
        subprocess.run(
            [compiler, f"-print-file-name={name}"], capture_output=True, text=True, check=True
        ).stdout.strip()
        for name in ("libasan.so", "libstdc++.so.6")
    ]
    missing = [path for path in runtime if not Path(path).is_absolute()]
    if missing:
        raise RuntimeError(f"{compiler} has no shared {', '.join(missing)}; install GCC")
    common = f"halt_on_error=1:print_stacktrace=1:exitcode={EXIT_CODE}"
    return dict(
        os.environ,
        LD_PRELOAD=" ".join(runtime),
        ASAN_OPTIONS=f"{common}:detect_leaks=0:allocator_may_return_null=1",
        UBSAN_OPTIONS=common,
        JAX_PLATFORMS="cpu",
    )


def run(arguments: Sequence[str], **kwargs: object) -> subprocess.CompletedProcess[str]:
    """Python with these arguments in the sanitizer's environment, at the repository's root."""
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        env=environment(),
        text=True,
        check=False,
        **kwargs,  # type: ignore[call-overload]
    )


def _inside(arguments: list[str]) -> int:
    import pytest

    from pallas_kernels import native

    native.library = lambda extra_flags=(): native.load(native.SOURCES, (*extra_flags, *FLAGS))
    library = native.library()
    print(f"kernels with sanitizers: {library.path}, {library.seconds:.0f} s to build", flush=True)
    return int(pytest.main(["-q", "--capture=sys", "--durations=5", *arguments]))


def main(arguments: list[str]) -> int:
    """Starts the tests, or (inside) is them."""
    if arguments[:1] == ["--inside"]:
        return _inside(arguments[1:])
    arguments = arguments or ["-k", LEFT_OUT, *TESTS]
    return run(["-m", "tests.pallas_kernels.asan", "--inside", *arguments]).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
