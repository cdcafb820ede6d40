"""Programs on disk: a second start compiles nothing and writes the same; damage is no harm."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SCRIPT = """
from jetspec_jax import SamplingParams
from jetspec_jax.testing import tiny_llm

said = []
llm = tiny_llm(head=True)
llm.programs._say = said.append
results = llm.generate([[1, 2, 3], [4, 5]], SamplingParams(max_tokens=12, ignore_eos=True))
print(sum(line.startswith("compiling") for line in said), [list(r.token_ids) for r in results])
"""


@pytest.fixture
def start(tmp_path: Path):
    """Runs a fresh process with its own cache; the number of compilations, and the tokens."""
    kernels = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    cache = tmp_path / "cache" / "jetspec-jax"
    cache.mkdir(parents=True)
    (cache / "kernels").symlink_to(Path(kernels) / "jetspec-jax" / "kernels")
    env = dict(os.environ, XDG_CACHE_HOME=str(tmp_path / "cache"), PYTHONPATH=str(ROOT))

    def run(**more: str) -> tuple[int, str]:
        done = subprocess.run(
            [sys.executable, "-c", SCRIPT],
            env=env | more,
            capture_output=True,
            text=True,
            timeout=900,
            check=True,
        )
        compiled, _, tokens = done.stdout.strip().partition(" ")
        return int(compiled), tokens

    run.folder = cache / "programs"  # type: ignore[attr-defined]
    return run


def test_a_second_start_compiles_nothing(start):
    first, tokens = start()
    kept = sorted(start.folder.glob("*.bin"))
    assert first == len(kept) > 0
    assert start() == (0, tokens)

    kept[0].write_bytes(b"not a program")
    kept[1].write_bytes(kept[1].read_bytes()[:1000])
    assert start() == (2, tokens)
    assert start() == (0, tokens)

    # other flags of XLA are other programs
    assert start(XLA_FLAGS="--xla_cpu_enable_fast_math=false")[0] == first


def test_a_folder_that_cannot_be_written_costs_only_time(start):
    start.folder.write_text("in the way")
    first, tokens = start()
    assert first > 0 and tokens
    assert start() == (first, tokens)
