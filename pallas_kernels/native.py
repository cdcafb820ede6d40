"""Build, load and register the native CPU kernels.

The C++ source of an op lies beside it (`<op>/cpu.cc`). At first use all of them are compiled, side
by side, with the system's compiler against the headers that JAX ships (`jax.ffi.include_dir()`),
linked into one library (ops call each other's code), kept in the user's cache directory under a key
made of everything the binary depends on, loaded with ctypes and registered with `jax.ffi`. A later
process only loads it.
"""

import concurrent.futures
import ctypes
import dataclasses
import functools
import hashlib
import json
import logging
import os
import platform
import re
import shutil
import subprocess
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import jax
import jaxlib.version

from pallas_kernels import parameters

_logger = logging.getLogger("pallas_kernels")
COMPILERS = ("c++", "g++", "clang++")
_HERE = Path(__file__).parent
SOURCES = tuple(sorted(_HERE.glob("*/cpu.cc")))  # of all ops
HEADERS = tuple(sorted((*_HERE.glob("*.h"), *_HERE.glob("*/*.h"))))
# Contraction is off so that a fused multiply-add appears exactly where the source says so: the bits
# are then the same for every compiler and vector width.
_FLAGS = ("-std=c++17", "-O3", "-fPIC", "-ffp-contract=off", "-fno-math-errno", "-w")
_BUILD_TIMEOUT_S = 600.0


class KernelError(RuntimeError):
    """A requested kernel implementation that is not available here. The message is one line."""


# An op with one handler a dtype has a macro of its own.
_HANDLER = re.compile(r"^(?:XLA_FFI_DEFINE_HANDLER_SYMBOL|JETSPEC_\w+)\((\w+),", re.MULTILINE)


@dataclasses.dataclass(frozen=True)
class NativeLibrary:
    """A loaded kernel library.

    Attributes:
      path: the shared object in the cache.
      built: whether this process compiled it (False: found in the cache).
      seconds: time spent in the compiler by this process (0.0 when found).
      symbols: its FFI handlers.
      handle: the library, for its plain C functions.
    """

    path: Path
    built: bool
    seconds: float
    symbols: tuple[str, ...]
    handle: ctypes.CDLL = dataclasses.field(repr=False)

    def target(self, symbol: str) -> str:
        """FFI target name of an `XLA_FFI_DEFINE_HANDLER_SYMBOL`, registered for platform "cpu"."""
        # the key of the build is part of the name: same name, same code
        name = f"jetspec_{self.path.parent.name[:12]}_{symbol}"
        with _lock:
            if name not in _registered:
                capsule = jax.ffi.pycapsule(getattr(self.handle, symbol))
                jax.ffi.register_ffi_target(name, capsule, platform="cpu")
                _registered[name] = self.handle
        return name

    def register(self) -> None:
        """Registers all handlers: a compiled program from disk names its targets, nothing more."""
        for symbol in self.symbols:
            self.target(symbol)


def cache_root() -> Path:
    """The compiled kernels: `jetspec-jax/kernels` in `$XDG_CACHE_HOME` or `~/.cache`."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "jetspec-jax" / "kernels"


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


def _run(command: list[str], what: str) -> None:
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_BUILD_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise KernelError(f"{command[0]} failed: {_one_line(str(error))}") from error
    if done.returncode != 0:
        lines = [line for line in done.stderr.splitlines() if "error" in line] or [done.stderr]
        raise KernelError(f"{command[0]} could not {what}: {_one_line(lines[0])}")


def _compile(
    sources: Sequence[Path], target: Path, compiler: str, flags: Sequence[str], link: Sequence[str]
) -> None:
    """Compiles in a private directory, then renames: readers never see half a file."""
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".build-") as scratch:
        output = Path(scratch) / target.name
        objects = [Path(scratch) / f"{i}.o" for i in range(len(sources))]

        def one(source: Path, to: Path) -> None:
            _run([compiler, *flags, "-c", "-o", str(to), str(source)], f"compile {source}")

        with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
            list(pool.map(one, sources, objects))
        _run([compiler, "-shared", *link, "-o", str(output), *map(str, objects)], "link")
        if not output.is_file():
            raise KernelError(f"{compiler} ended without an error and without a library")
        os.replace(output, target)


def _build_and_open(
    sources: Sequence[Path], compiler: str, extra_flags: tuple[str, ...]
) -> tuple[ctypes.CDLL, Path, float]:
    flags = (*_FLAGS, _arch_flag(), *extra_flags)
    key = build_key((*sources, *HEADERS), compiler, flags)
    folder = cache_root() / key
    target = folder / "kernels.so"
    full = (*flags, f"-I{jax.ffi.include_dir()}", f"-I{_HERE}")
    folder.mkdir(parents=True, exist_ok=True)
    seconds = 0.0
    with _FileLock(folder / ".lock"):
        for attempt in (0, 1):
            if not target.exists():
                _logger.warning("compiling native CPU kernels, once for this machine ...")
                for debris in folder.glob(
                    ".build-*"
                ):  # of a build that was killed; we have the lock
                    shutil.rmtree(debris, ignore_errors=True)
                start = time.perf_counter()
                _compile(sources, target, compiler, full, extra_flags)
                seconds = time.perf_counter() - start
            try:
                return ctypes.CDLL(str(target)), target, seconds
            except OSError as error:  # damaged file in the cache: build it once more
                if attempt == 1 or seconds > 0.0:
                    raise KernelError(f"cannot load {target}: {_one_line(str(error))}") from error
                target.unlink(missing_ok=True)
    raise KernelError(f"cannot load {target}")


_build_lock = threading.Lock()
_lock = threading.Lock()
_registered: dict[str, ctypes.CDLL] = {}  # FFI target names are global to the process
_loaded: dict[tuple[tuple[Path, ...], tuple[str, ...]], NativeLibrary | str] = {}


def library(extra_flags: Sequence[str] = ()) -> NativeLibrary:
    """The kernels of all ops with the build parameters in force (`parameters.using`); built at
    first use. Each set of values is a library of its own, and a process may use several. Arguments
    and errors as `load`.
    """
    return load(SOURCES, (*parameters.build_flags(parameters.in_force()), *extra_flags))


@dataclasses.dataclass(frozen=True)
class Features:
    """What the library at hand was built for and may use: fields as in `parameters.Facts`."""

    form: int
    vnni: bool
    tiles: bool


def features() -> Features:
    """Of the library in force. Errors as `load`."""
    bits = int(library().handle.native_features())
    return Features(bits & 255, bool(bits & 256), bool(bits & 512))


def load(sources: Sequence[Path], extra_flags: Sequence[str] = ()) -> NativeLibrary:
    """Compiles (at first use) and loads C++ sources as one library.

    Args:
      sources: the C++ files.
      extra_flags: appended compiler and linker flags (tests force a narrower vector form with
        them).

    Returns:
      The library, the same object for every later call in this process.

    Raises:
      KernelError: no compiler, a failed build, or a cache directory that cannot be written. The
        outcome is remembered for the process: it is not tried again at every call.
    """
    slot = (tuple(sources), tuple(extra_flags))
    with _build_lock:
        known = _loaded.get(slot)
        if known is None:
            try:
                known = _load(*slot)
            except KernelError as error:
                known = str(error)
            except (OSError, ImportError) as error:
                known = f"native kernels cannot be built in {cache_root()}: {_one_line(str(error))}"
            _loaded[slot] = known
    if isinstance(known, str):
        raise KernelError(known)
    return known


def _load(sources: tuple[Path, ...], extra_flags: tuple[str, ...]) -> NativeLibrary:
    compilers = _find_compilers()
    if not compilers:
        raise KernelError(f"no C++ compiler on PATH (looked for {', '.join(COMPILERS)})")
    failures: list[str] = []
    for compiler in compilers:
        try:
            handle, path, seconds = _build_and_open(sources, compiler, extra_flags)
        except KernelError as error:
            failures.append(str(error))
            continue
        text = "".join(source.read_text() for source in sources)
        return NativeLibrary(path, seconds > 0.0, seconds, tuple(_HANDLER.findall(text)), handle)
    raise KernelError("; ".join(failures))
