"""What a jitted program becomes on a GPU that is not there: machine code and launches, counted.

`compile_for` compiles for a `gpu_target.GpuTarget` and reads what the compilers wrote: registers,
spills, shared memory and instructions of every Mosaic and Triton kernel, and the sequence of device
operations of the whole program. It proves that a program builds and fits, never how fast it is.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import importlib.util
import os
import re
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax

from pallas_kernels import gpu_target
from pallas_kernels.gpu_target import GpuTarget, GpuToolsError

# Tensor-core products, bulk copies to shared memory (TMA), small asynchronous copies, spills.
INSTRUCTIONS = ("HGMMA", "HMMA", "QGMMA", "UTMALDG", "LDGSTS", "LDL", "STL")
# What rounds: kernels that promise equal bits have equal counts.
ARITHMETIC = ("HGMMA", "HMMA", "FFMA", "FMUL", "FADD", "MUFU", "F2F", "F2FP")
_PTXAS = re.compile(
    r"Compiling entry function '(?P<name>\S+)'.*?(?P<stack>\d+) bytes stack frame, "
    r"(?P<stores>\d+) bytes spill stores, (?P<loads>\d+) bytes spill loads.*?"
    r"Used (?P<registers>\d+) registers(?P<rest>[^\n]*)",
    re.DOTALL,
)
_THUNK = re.compile(r"^\s*\d+: (k\w+)\s*(?:\[[^\]]*\])?\s*(.*)$")
_HOST = re.compile(r"Infeed|Outfeed|HostSend|HostRecv|HostExecute|DeviceToHost|HostToDevice")
_DEVICE_KERNELS = frozenset(
    ("kKernel", "kCustomKernel", "kCustomCall", "kGemm", "kCublasLtMatmul", "kCuDnn", "kSelectK")
)


@dataclasses.dataclass(frozen=True)
class KernelStats:
    """One Mosaic or Triton kernel.

    Attributes:
        name: entry function.
        registers: per thread (255 at most).
        spill_bytes: stored and loaded per thread because registers ran out.
        shared_bytes: shared memory of one block.
        instructions: how often each of `INSTRUCTIONS` stands in the machine code (not how often it
            runs); empty where nvdisasm is not installed.
        arithmetic: the same for each of `ARITHMETIC`.
        fences: makes writes to shared memory visible to wgmma and bulk copies; one too few is a
            race that the interpreter does not see.
    """

    name: str
    registers: int
    spill_bytes: int
    shared_bytes: int
    instructions: dict[str, int]
    arithmetic: dict[str, int]
    fences: int


@dataclasses.dataclass(frozen=True)
class ProgramStats:
    """A compiled program.

    Attributes:
        kernels: Mosaic and Triton kernels in it, each kind of machine code once.
        operations: device operations by XLA's kind of thunk, as they stand in the program (the
            body of a loop once).
        device_kernels: those of `operations` that start a kernel.
        host_transfers: infeeds, sends to and calls of the host.
        loops: while loops and conditionals; XLA reads their predicate on the host.
        argument_bytes, output_bytes, alias_bytes, temporary_bytes: `memory_analysis()`.
        peak_bytes: arguments, outputs that alias none of them, and temporaries.
        compile_s: seconds of compiling on this machine.
    """

    kernels: tuple[KernelStats, ...]
    operations: dict[str, int]
    device_kernels: int
    host_transfers: int
    loops: int
    argument_bytes: int
    output_bytes: int
    alias_bytes: int
    temporary_bytes: int
    peak_bytes: int
    compile_s: float

    def as_json(self) -> dict[str, Any]:
        """Plain containers."""
        return dataclasses.asdict(self)


def placed(tree: Any, target: GpuTarget) -> Any:
    """Abstract arrays of `tree` on one such GPU."""
    mesh = jax.sharding.Mesh(gpu_target.topology(target).devices, ("gpu",))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), tree)


def compile_for(
    fn: Callable[..., Any],
    args: Sequence[Any],
    target: GpuTarget,
    *,
    donate: tuple[int, ...] = (),
) -> tuple[Any, ProgramStats]:
    """Compiles `jax.jit(fn)` for one GPU of the kind `target` on abstract arguments.

    Args:
        fn: a function of arrays, not jitted, or a jitted one.
        args: its arguments: pytrees of anything with a shape and a dtype.
        target: the GPU.
        donate: numbers of donated arguments (a jitted `fn` has its own).

    Returns:
        The `jax.stages.Compiled` and what was found in it.

    Raises:
        GpuToolsError: the packages that compile for a GPU are missing.
        Exception: whatever lowering or compiling raises.
    """
    started = time.monotonic()
    abstract = placed(tuple(args), target)
    jitted: Any = fn if hasattr(fn, "lower") else jax.jit(fn, donate_argnums=donate)
    with tempfile.TemporaryDirectory(prefix="gpu-stats-") as folder:
        dump = Path(folder)
        with _dumping(dump), gpu_target.on_abstract(target):
            lowered = jitted.trace(*abstract).lower(lowering_platforms=("cuda",))
            compiled = lowered.compile(compiler_options={"xla_dump_to": str(dump)})
        seconds = time.monotonic() - started
        kernels = (*_mosaic_kernels(dump, target), *_triton_kernels(dump, target))
        operations = _operations(dump)
    memory: Any = compiled.memory_analysis()
    fresh = memory.output_size_in_bytes - memory.alias_size_in_bytes
    stats = ProgramStats(
        kernels=kernels,
        operations=dict(operations),
        device_kernels=sum(n for kind, n in operations.items() if kind in _DEVICE_KERNELS),
        host_transfers=sum(n for kind, n in operations.items() if _HOST.search(kind)),
        loops=operations["kWhile"] + operations["kConditional"],
        argument_bytes=memory.argument_size_in_bytes,
        output_bytes=memory.output_size_in_bytes,
        alias_bytes=memory.alias_size_in_bytes,
        temporary_bytes=memory.temp_size_in_bytes,
        peak_bytes=memory.argument_size_in_bytes + fresh + memory.temp_size_in_bytes,
        compile_s=round(seconds, 2),
    )
    return compiled, stats


@contextlib.contextmanager
def _dumping(dump: Path) -> Iterator[None]:
    """Mosaic's and Triton's compilers write their machine code below `dump`."""
    ours = {
        "MOSAIC_GPU_DUMP_TO": str(dump),
        "MOSAIC_GPU_DUMP_MLIR_PASSES": "0",  # 40 MB a kernel
    }
    before = {name: os.environ.get(name) for name in ours}
    os.environ.update(ours)
    try:
        with _dumping_triton(dump / "triton"):
            yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@contextlib.contextmanager
def _dumping_triton(dump: Path) -> Iterator[None]:
    if importlib.util.find_spec("jax_triton") is None:
        yield
        return
    library: Any = importlib.import_module("jax_triton.triton_lib")
    dump.mkdir()
    # it writes what it compiles, and compiles what it does not remember
    remembered: Any = collections.defaultdict(dict)
    cache = library.TritonFunction._kernel_cache
    folder = library._JAX_TRITON_DUMP_DIR
    library._JAX_TRITON_DUMP_DIR = str(dump)
    library.TritonFunction._kernel_cache = property(lambda self: remembered[self.fn])
    try:
        yield
    finally:
        library._JAX_TRITON_DUMP_DIR = folder
        library.TritonFunction._kernel_cache = cache


def _kernels_of(ptx: Path, target: GpuTarget, shared: int) -> list[KernelStats]:
    report, sass = _assemble(ptx, target)
    words = collections.Counter(re.findall(r"\b[A-Z][A-Z0-9]+\b", sass))
    fences = ptx.read_text(encoding="utf-8").count("fence.proxy.async")
    found = []
    for match in _PTXAS.finditer(report):
        static = re.search(r"(\d+) bytes smem", match["rest"])
        found.append(
            KernelStats(
                name=match["name"],
                registers=int(match["registers"]),
                spill_bytes=int(match["stores"]) + int(match["loads"]),
                shared_bytes=shared + (int(static[1]) if static else 0),
                instructions={name: words[name] for name in INSTRUCTIONS if words[name]},
                arithmetic={name: words[name] for name in ARITHMETIC if words[name]},
                fences=fences,
            )
        )
    return found


def _mosaic_kernels(dump: Path, target: GpuTarget) -> list[KernelStats]:
    kernels = []
    for ptx in sorted(dump.glob("*.ptx")):
        if not ptx.with_suffix(".resources.txt").is_file():
            continue  # XLA's own
        resources = ptx.with_suffix(".resources.txt").read_text(encoding="utf-8")
        shared = re.search(r"smem_scratch_bytes=(\d+)", resources)
        kernels += _kernels_of(ptx, target, int(shared[1]) if shared else 0)
    return kernels


def _triton_kernels(dump: Path, target: GpuTarget) -> list[KernelStats]:
    kernels = []
    for ptx in sorted((dump / "triton").glob("*/*.ptx")):
        info = ptx.with_suffix(".compile_info").read_text(encoding="utf-8")
        shared = re.search(r"shared_mem_bytes: (\d+)", info)
        kernels += _kernels_of(ptx, target, int(shared[1]) if shared else 0)
    return kernels


def _assemble(ptx: Path, target: GpuTarget) -> tuple[str, str]:
    """(ptxas' report, machine code in text form or nothing)."""
    ptxas = gpu_target.tool("ptxas")
    if ptxas is None:
        raise GpuToolsError(f"ptxas was not found; {gpu_target.REMEDY}")
    cubin = ptx.with_suffix(".cubin")
    command = [ptxas, "-v", f"-arch={target.arch}", str(ptx), "-o", str(cubin)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise GpuToolsError(f"ptxas refused {ptx.name}: {done.stderr.strip().splitlines()[-1]}")
    disassembler = gpu_target.tool("nvdisasm")
    if disassembler is None:
        return done.stdout + done.stderr, ""
    sass = subprocess.run(
        [disassembler, "-c", str(cubin)], capture_output=True, text=True, check=True
    )
    return done.stdout + done.stderr, sass.stdout


def _operations(dump: Path) -> collections.Counter[str]:
    """Kinds of device operations in the program, from XLA's dump of its thunks."""
    counts: collections.Counter[str] = collections.Counter()
    for path in dump.glob("*.thunk_sequence.txt"):
        for line in path.read_text(encoding="utf-8").splitlines():
            match = _THUNK.match(line)
            if match:
                counts[match[1]] += 1
    if not counts:
        raise GpuToolsError("XLA wrote no sequence of device operations: unknown version of XLA")
    return counts
