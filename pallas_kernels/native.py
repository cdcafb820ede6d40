"""Build, load and register the native CPU kernels.

The C++ source of an op lies beside it (`<op>/cpu.cc`). At first use it is compiled with the
system's compiler against the headers that JAX ships (`jax.ffi.include_dir()`), kept in the user's
cache directory under a key made of everything the binary depends on, loaded with ctypes and
registered with `jax.ffi`. A later process only loads it.
"""

import ctypes
import dataclasses
import functools
import hashlib
import json
import os
import platform
import shutil
import subprocess
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import jax
import jaxlib.version

COMPILERS = ("c++", "g++", "clang++")
_COMMON_HEADER = Path(__file__).with_name("cpu_common.h")
# Contraction is off so that a fused multiply-add appears exactly where the source says so: the bits
# are then the same for every compiler and vector width.
_FLAGS = ("-std=c++17", "-O3", "-fPIC", "-shared", "-ffp-contract=off", "-fno-math-errno", "-w")
_BUILD_TIMEOUT_S = 600.0


class KernelError(RuntimeError):
    """A requested kernel implementation that is not available here. The message is one line."""


@dataclasses.dataclass(frozen=True)
class NativeLibrary:
    """A loaded kernel library.

    Attributes:
      path: the shared object in the cache.
      targets: FFI target name by C symbol, registered for platform "cpu".
      built: whether this process compiled it (False: found in the cache).
      seconds: time spent in the compiler by this process (0.0 when found).
    """

    path: Path
    targets: dict[str, str]
    built: bool
    seconds: float
    handle: ctypes.CDLL = dataclasses.field(repr=False)


def cache_root() -> Path:
    """The compiled kernels: `jetspec-jax/kernels` in `$XDG_CACHE_HOME` or `~/.cache`."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "jetspec-jax" / "kernels"


def source_beside(module_file: str) -> Path:
    """The C++ source of the op whose Python module is `module_file`."""
    return Path(module_file).with_name("cpu.cc")


def _one_line(text: str, limit: int = 300) -> str:
    return " ".join(text.split())[:limit]


def _find_compilers() -> list[str]:
    found: dict[str, str] = {}  # by resolved path: c++ is usually a link to g++
    for name in COMPILERS:
        path = shutil.which(name)
        if path is not None:
            found.setdefault(os.path.realpath(path), path)
    return list(found.values())


@functools.cache
def _compiler_version(compiler: str) -> str:
    try:
        done = subprocess.run(
            [compiler, "--version"], capture_output=True, text=True, timeout=30, check=True
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise KernelError(f"compiler {compiler} does not run: {_one_line(str(error))}") from error
    return done.stdout.strip()


@functools.cache
def cpu_identity() -> str:
    """Model and feature flags of this machine's CPU: a binary for another CPU is never loaded."""
    wanted = ("model name", "flags", "Features", "CPU implementer", "CPU part", "CPU architecture")
    seen: dict[str, str] = {}
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            name, _, value = line.partition(":")
            if name.strip() in wanted:
                seen.setdefault(name.strip(), " ".join(sorted(value.split())))
    except OSError:
        pass
    return json.dumps([platform.machine(), platform.processor(), seen], sort_keys=True)


def _arch_flag() -> str:
    # GCC and Clang for arm64 tune and select features by -mcpu; on x86-64 it is -march.
    return "-mcpu=native" if platform.machine() in ("aarch64", "arm64") else "-march=native"


def build_key(sources: Sequence[Path], compiler: str, flags: Sequence[str]) -> str:
    """Cache key: all source text, compiler version, flags, CPU, jaxlib version."""
    digest = hashlib.sha256()
    for source in sources:
        digest.update(source.read_bytes() + b"\0")
    for part in (_compiler_version(compiler), *flags, cpu_identity(), jaxlib.version.__version__):
        digest.update(part.encode() + b"\0")
    return digest.hexdigest()[:32]


class _FileLock:
    """Exclusive lock between processes (released by the system when a process dies)."""

    def __init__(self, path: Path):
        self._path = path

    def __enter__(self) -> None:
        import fcntl  # POSIX only; absence is reported as "no native kernels here" by `load`

        self._file = open(self._path, "w")
        fcntl.flock(self._file, fcntl.LOCK_EX)

    def __exit__(self, *unused: object) -> None:
        self._file.close()


def _compile(source: Path, target: Path, compiler: str, flags: Sequence[str]) -> None:
    """Compiles in a private directory, then renames: readers never see half a file."""
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".build-") as scratch:
        output = Path(scratch) / target.name
        command = [compiler, *flags, "-o", str(output), str(source)]
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=_BUILD_TIMEOUT_S, check=False
            )
        except (OSError, subprocess.SubprocessError) as error:
            raise KernelError(f"{compiler} failed: {_one_line(str(error))}") from error
        if done.returncode != 0:
            lines = [line for line in done.stderr.splitlines() if "error" in line] or [done.stderr]
            raise KernelError(f"{compiler} could not compile {source}: {_one_line(lines[0])}")
        os.replace(output, target)


def _build_and_open(
    source: Path, compiler: str, flags: tuple[str, ...]
) -> tuple[ctypes.CDLL, Path, float]:
    key = build_key((source, _COMMON_HEADER), compiler, flags)
    folder = cache_root() / key
    target = folder / f"{source.parent.name}.so"
    full = (*flags, f"-I{jax.ffi.include_dir()}", f"-I{_COMMON_HEADER.parent}")
    folder.mkdir(parents=True, exist_ok=True)
    seconds = 0.0
    with _FileLock(folder / ".lock"):
        for attempt in (0, 1):
            if not target.exists():
                start = time.perf_counter()
                _compile(source, target, compiler, full)
                seconds = time.perf_counter() - start
            try:
                return ctypes.CDLL(str(target)), target, seconds
            except OSError as error:  # damaged file in the cache: build it once more
                if attempt == 1 or seconds > 0.0:
                    raise KernelError(f"cannot load {target}: {_one_line(str(error))}") from error
                target.unlink(missing_ok=True)
    raise KernelError(f"cannot load {target}")


_lock = threading.Lock()
_registered: dict[str, ctypes.CDLL] = {}  # FFI target names are global to the process
_loaded: dict[tuple[Path, tuple[str, ...]], NativeLibrary | str] = {}


def load(source: Path, symbols: Sequence[str], extra_flags: Sequence[str] = ()) -> NativeLibrary:
    """Compiles (at first use), loads and registers the FFI handlers of one source file.

    Args:
      source: the C++ file.
      symbols: its `XLA_FFI_DEFINE_HANDLER_SYMBOL` names.
      extra_flags: appended compiler flags (tests force a narrower vector form with them).

    Returns:
      The library, the same object for every later call in this process.

    Raises:
      KernelError: no compiler, a failed build, or a cache directory that cannot be written. The
        outcome is remembered for the process: it is not tried again at every call.
    """
    slot = (source, tuple(extra_flags))
    with _lock:
        known = _loaded.get(slot)
        if known is None:
            try:
                known = _load(source, symbols, tuple(extra_flags))
            except KernelError as error:
                known = str(error)
            except (OSError, ImportError) as error:
                known = f"native kernels cannot be built in {cache_root()}: {_one_line(str(error))}"
            _loaded[slot] = known
    if isinstance(known, str):
        raise KernelError(known)
    return known


def _load(source: Path, symbols: Sequence[str], extra_flags: tuple[str, ...]) -> NativeLibrary:
    compilers = _find_compilers()
    if not compilers:
        raise KernelError(f"no C++ compiler on PATH (looked for {', '.join(COMPILERS)})")
    flags = (*_FLAGS, _arch_flag(), *extra_flags)
    failures: list[str] = []
    for compiler in compilers:
        try:
            handle, path, seconds = _build_and_open(source, compiler, flags)
        except KernelError as error:
            failures.append(str(error))
            continue
        prefix = f"jetspec_{path.parent.name[:12]}"
        targets: dict[str, str] = {}
        for symbol in symbols:
            name = f"{prefix}_{symbol}"
            targets[symbol] = name
            if name not in _registered:  # the key is part of the name: same name, same code
                jax.ffi.register_ffi_target(
                    name, jax.ffi.pycapsule(getattr(handle, symbol)), platform="cpu"
                )
                _registered[name] = handle
        return NativeLibrary(path, targets, seconds > 0.0, seconds, handle)
    raise KernelError("; ".join(failures))
