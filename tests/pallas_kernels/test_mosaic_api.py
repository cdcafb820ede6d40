"""One module holds the unstable part of Pallas: nothing else imports it, and it says which JAX it
knows.
"""

import ast
import dataclasses
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import mosaic
from pallas_kernels.gpu_target import TARGETS, config_text, on_abstract
from pallas_kernels.native import KernelError

ROOT = Path(__file__).resolve().parent.parent.parent
PACKAGES = ("pallas_kernels", "jetspec_jax", "train", "serve")


def pallas_imports(source: str) -> list[str]:
    """Imports of Pallas or Mosaic, of any form."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        found += [n for n in names if n.startswith("jax.") and ("pallas" in n or "mosaic" in n)]
        found += [n for n in names if n.startswith("jax._src.pallas")]
    return found


def test_only_one_module_imports_pallas():
    users = {
        str(path.relative_to(ROOT))
        for package in PACKAGES
        for path in (ROOT / package).rglob("*.py")
        if pallas_imports(path.read_text(encoding="utf-8"))
    }
    assert users == {"pallas_kernels/mosaic.py"}


@pytest.mark.parametrize(
    "line",
    [
        "import jax.experimental.pallas as pl",
        "from jax.experimental import pallas as pl",
        "def f():\n    from jax.experimental.pallas import mosaic_gpu",
        "from jax._src.pallas.mosaic_gpu import core",
        "from jax.experimental.mosaic.gpu import core",
    ],
)
def test_the_rule_finds_every_form_of_import(line):
    assert pallas_imports(line)


@pytest.mark.parametrize("version", ["0.10.2", "0.11.1", "0.12.1", "0.13.0", "1.0.0"])
def test_another_jax_is_refused_in_one_line(version):
    with pytest.raises(KernelError, match=rf"need jax .*{version}.*'xla'") as caught:
        mosaic._check_version(version)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("version", ["0.11.2", "0.12.0", "0.12.0.1", "0.12.0.dev20261101"])
def test_the_known_versions_pass(version):
    mosaic._check_version(version)


def _copy_through_shared_memory(x: jax.Array, *, commit: bool) -> jax.Array:
    def body(x_ref, o_ref, scratch, barrier):
        mosaic.copy_gmem_to_smem(x_ref, scratch, barrier)
        mosaic.barrier_wait(barrier)
        scratch[...] = scratch[...] * 2
        if commit:
            mosaic.commit_smem()
        mosaic.copy_smem_to_gmem(scratch, o_ref)
        mosaic.wait_smem_to_gmem(0)

    return mosaic.kernel(
        body,
        out_type=jax.ShapeDtypeStruct(x.shape, x.dtype),
        scratch_types=[mosaic.SMEM(x.shape, x.dtype), mosaic.Barrier()],
        interpret=mosaic.interpret_params(detect_races=True),
    )(x)


def test_the_interpreter_runs_and_finds_a_race():
    x = jnp.arange(128, dtype=jnp.float32)
    with on_abstract(TARGETS["h100"]):
        result = _copy_through_shared_memory(x, commit=True)
        np.testing.assert_array_equal(result, 2 * np.arange(128))
        assert not mosaic.races_found()
        _copy_through_shared_memory(x, commit=False)
        assert mosaic.races_found()
    mosaic.reset_interpreter()
    with pytest.raises(KernelError, match="no kernel was interpreted"):
        mosaic.races_found()


def test_target_texts_name_the_gpu():
    for target in TARGETS.values():
        text = config_text(target)
        major, minor = target.capability
        assert target.name in text and f"major: {major} minor: {minor}" in text
    h100, h200 = TARGETS["h100"], TARGETS["h200"]
    same = dataclasses.replace(h200, name=h100.name, memory=h100.memory, bandwidth=h100.bandwidth)
    assert config_text(same) == config_text(h100)
