"""Test-wide settings: CPU, strict types, and warnings as errors (pyproject.toml).

Strict dtype and rank promotion hold in tests only: they find mistakes here, and cost users of the
library nothing.
"""

from __future__ import annotations

import os
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

# Before the first import of jax. A test that wants another platform runs in a process of its own.
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax  # noqa: E402
import pytest  # noqa: E402
from hypothesis import settings  # noqa: E402

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")
# Compiling is most of the suite's time: keep every program, also across runs.
# A folder for each worker of pytest-xdist: JAX's cache writes in place, and another process could
# read half a program.
WORKER = os.environ.get("PYTEST_XDIST_WORKER", "main")
COMPILATIONS = ROOT / ".cache" / "test-compilations" / WORKER
jax.config.update("jax_compilation_cache_dir", str(COMPILATIONS))
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)

# The first example of a property compiles; that must not read as a slow test. Same examples every
# run: a failure in CI is a failure here.
settings.register_profile("default", deadline=None, derandomize=True)
settings.load_profile("default")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves out what needs a GPU where there is none (deselected and counted, not skipped)."""
    if jax.default_backend() == "gpu":
        return
    needs_gpu = [item for item in items if item.get_closest_marker("gpu")]
    if needs_gpu:
        config.hook.pytest_deselected(items=needs_gpu)
        items[:] = [item for item in items if not item.get_closest_marker("gpu")]
