"""A machine without a compiler generates all the same, and says so once."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import COMPILATIONS

ROOT = Path(__file__).resolve().parents[2]
# An engine with a draft head on each choice of kernels, in one process: the second finds the
# programs of the first.
SCRIPT = """
from jetspec_jax import SamplingParams, SpecConfig
from jetspec_jax.config import EngineConfig
from jetspec_jax.errors import JetSpecError
from jetspec_jax.testing import tiny_llm

for kernels in ("auto", "xla", "cpu"):
    engine = EngineConfig(kernels=kernels, capacity=64, attention_chunk=64, prefill_chunk=32)
    try:
        llm = tiny_llm(engine=engine, spec=SpecConfig(mode="tree", budget=4))
    except JetSpecError as error:
        print(kernels, "refused:", type(error).__name__, error)
        continue
    (result,) = llm.generate([(72, 101, 108)], SamplingParams(max_tokens=16, ignore_eos=True))
    print(kernels, llm._target.kernels, *result.token_ids)
"""


@pytest.fixture(scope="module")
def spoken(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[str], list[str]]:
    """Lines of stdout and stderr of SCRIPT with no compiler on PATH and nothing in the cache."""
    folder = tmp_path_factory.mktemp("bare")
    for name in ("bin", "cache"):
        (folder / name).mkdir()
    env = dict(
        os.environ,
        PATH=str(folder / "bin"),
        XDG_CACHE_HOME=str(folder / "cache"),
        JAX_PLATFORMS="cpu",
        JAX_COMPILATION_CACHE_DIR=str(COMPILATIONS),
        JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS="0.2",
        JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES="-1",
    )
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=env,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert not list((folder / "cache").rglob("*.so"))
    return done.stdout.splitlines(), done.stderr.splitlines()


def test_the_tokens_are_those_of_xla(spoken: tuple[list[str], list[str]]) -> None:
    auto, xla = (line.split() for line in spoken[0][:2])
    assert auto[:2] == ["auto", "xla"] and xla[:2] == ["xla", "xla"]
    assert len(auto) == 2 + 16 and auto[2:] == xla[2:]


def test_native_kernels_asked_for_are_one_clear_error(spoken: tuple[list[str], list[str]]) -> None:
    (line,) = spoken[0][2:]
    assert line.startswith("cpu refused: KernelError row_invariant_matmul: implementation 'cpu'")
    assert "no C++ compiler on PATH (looked for c++, g++, clang++); use 'auto' or 'xla'" in line


def test_one_warning_says_what_and_why(spoken: tuple[list[str], list[str]]) -> None:
    (line,) = spoken[1]
    assert ": xla (native kernel not available: no C++ compiler on PATH" in line
