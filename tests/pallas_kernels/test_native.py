"""Building and loading of native kernels: cache, locks, damage, and machines that cannot build."""

import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest

from pallas_kernels import dispatch, native

ROOT = Path(__file__).resolve().parents[2]
TINY = 'extern "C" int answer() { return 42; }\n'


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A small source, an empty cache, and a process that has loaded nothing yet."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(native, "_loaded", {})
    folder = tmp_path / "tiny_op"
    folder.mkdir()
    path = folder / "cpu.cc"
    path.write_text(TINY)
    return path


def forget(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "_loaded", {})


def test_builds_once_then_finds_it(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = native.load((source,))
    assert first.built and first.seconds > 0 and first.handle.answer() == 42
    assert native.load((source,)) is first
    forget(monkeypatch)
    second = native.load((source,))
    assert not second.built and second.seconds == 0.0 and second.path == first.path
    assert [p.name for p in first.path.parent.iterdir() if p.name != ".lock"] == ["kernels.so"]


def test_key_follows_source_flags_and_cpu(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = {native.load((source,)).path, native.load((source,), ("-DOTHER=1",)).path}
    source.write_text(TINY.replace("42", "43"))
    forget(monkeypatch)
    changed = native.load((source,))
    assert changed.handle.answer() == 43
    paths.add(changed.path)
    monkeypatch.setattr(native, "cpu_identity", lambda: "another CPU")
    forget(monkeypatch)
    paths.add(native.load((source,)).path)
    assert len(paths) == 4


def test_damaged_library_is_built_again(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = native._find_compilers()[0]
    flags = (*native._FLAGS, native._arch_flag())
    key = native.build_key((source, *native.HEADERS), compiler, flags)
    damaged = native.cache_root() / key / "kernels.so"
    damaged.parent.mkdir(parents=True)
    damaged.write_bytes(b"not a library")
    library = native.load((source,))
    assert library.path == damaged and library.built and library.handle.answer() == 42


def test_failed_build_is_one_line_and_remembered(
    source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source.write_text("this is not C++")
    with pytest.raises(native.KernelError, match=r"could not compile .*cpu\.cc.*error") as caught:
        native.load((source,))
    assert "\n" not in str(caught.value)
    monkeypatch.setattr(native, "_find_compilers", lambda: pytest.fail("tried again"))
    with pytest.raises(native.KernelError, match="could not compile"):
        native.load((source,))


def test_cache_that_cannot_be_written(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(native.KernelError, match="cannot be built in") as caught:
        native.load((source,))
    assert "\n" not in str(caught.value)


def test_no_compiler(
    source: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("PATH", "")
    dispatch._log_once.cache_clear()

    def load() -> native.NativeLibrary:
        return native.load((source,))

    with caplog.at_level(logging.INFO, logger="pallas_kernels"):
        assert [dispatch.choose("op", "auto", load) for _ in range(3)] == ["xla"] * 3
    assert len(caplog.messages) == 1
    assert caplog.records[0].levelno == logging.WARNING  # shown without any logging set-up
    assert "op: xla" in caplog.messages[0] and "no C++ compiler on PATH" in caplog.messages[0]
    with pytest.raises(native.KernelError, match=r"'cpu' is not available.*no C\+\+ compiler"):
        dispatch.choose("op", "cpu", load)
    assert dispatch.choose("op", "xla", lambda: pytest.fail("xla must not build")) == "xla"


def test_unknown_implementation() -> None:
    with pytest.raises(native.KernelError, match=r"unknown kernel implementation 'gpu'.*auto"):
        dispatch.choose("op", "gpu", lambda: None)


def test_two_processes_build_one_library(source: Path) -> None:
    script = (
        "import sys, pathlib; from pallas_kernels import native; sys.stdin.readline();"
        "lib = native.load((pathlib.Path(sys.argv[1]),));"
        "assert lib.handle.answer() == 42; print(int(lib.built))"
    )
    # A slow compiler: both are certain to be there at the same time.
    bin_dir = source.parent / "bin"
    bin_dir.mkdir()
    real = native._find_compilers()[0]
    slow = bin_dir / "c++"
    slow.write_text(
        f'#!/bin/sh\ncase "$1" in --version) ;; *) sleep 0.5;; esac\nexec {real} "$@"\n'
    )
    slow.chmod(0o755)
    env = dict(os.environ, PATH=f"{bin_dir}:{os.environ['PATH']}", JAX_PLATFORMS="cpu")
    both = [
        subprocess.Popen(
            [sys.executable, "-c", script, str(source)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env=env,
        )
        for _ in range(2)
    ]
    for process in both:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    built = [process.communicate(timeout=60)[0].strip() for process in both]
    assert [process.returncode for process in both] == [0, 0]
    assert sorted(built) == ["0", "1"]
