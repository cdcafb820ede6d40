"""The judge of the compile check: what passes, what does not, and its exit code.

The compilers are not needed here; `make gpu-compile` runs them, and the last test where they are.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from pallas_kernels import gpu_compile
from pallas_kernels.gpu_cases import GpuCase, all_cases
from pallas_kernels.gpu_stats import KernelStats, ProgramStats
from pallas_kernels.gpu_target import TARGETS

ROOT = Path(__file__).resolve().parents[2]
KERNEL = KernelStats(
    name="fold",
    registers=200,
    spill_bytes=0,
    shared_bytes=100_000,
    instructions={"HGMMA": 8, "UTMALDG": 4},
    arithmetic={"HGMMA": 8, "FADD": 3},
    fences=5,
)
PROGRAM = ProgramStats(
    kernels=(KERNEL,),
    operations={"kCustomCall": 1},
    device_kernels=1,
    host_transfers=0,
    loops=0,
    argument_bytes=10,
    output_bytes=10,
    alias_bytes=0,
    temporary_bytes=0,
    peak_bytes=20,
    compile_s=0.1,
)
NEEDS = ("HGMMA", "UTMALDG")


def changed(program: ProgramStats = PROGRAM, **kernel) -> ProgramStats:
    return dataclasses.replace(program, kernels=(dataclasses.replace(KERNEL, **kernel),))


def test_a_good_program_has_no_fault():
    assert gpu_compile.faults(PROGRAM, TARGETS["h100"], NEEDS) == []
    assert gpu_compile.regressions(PROGRAM, gpu_compile.row(PROGRAM)) == []


@pytest.mark.parametrize(
    "program,message",
    [
        (changed(spill_bytes=8), "SPILL: fold spills 8 bytes"),
        (changed(shared_bytes=232_449), "fold takes 232449 bytes of shared memory"),
        (changed(instructions={"HGMMA": 8}), "no UTMALDG in the machine code"),
        (dataclasses.replace(PROGRAM, kernels=()), "no kernel of ours"),
        (dataclasses.replace(PROGRAM, host_transfers=1), "1 transfers to or from the host"),
    ],
)
def test_faults(program, message):
    assert any(message in text for text in gpu_compile.faults(program, TARGETS["h100"], NEEDS))


@pytest.mark.parametrize(
    "program,message",
    [
        (changed(registers=209), "fold: 209 registers, were 200"),
        (changed(shared_bytes=100_001), "100001 bytes of shared memory, were 100000"),
        (changed(fences=4), "fold: 4 fences, were 5"),
        (changed(instructions={"HGMMA": 8}), "fold: 0 UTMALDG, were 4"),
        (changed(name="other"), "other kernels than in the committed table"),
        (dataclasses.replace(PROGRAM, device_kernels=2), "2 device kernels, were 1"),
        (dataclasses.replace(PROGRAM, temporary_bytes=1), "1 temporary bytes, were 0"),
    ],
)
def test_regressions(program, message):
    found = gpu_compile.regressions(program, gpu_compile.row(PROGRAM))
    (text,) = found
    assert message in text and text.startswith("REGRESSION")


def test_a_few_registers_more_are_not_a_regression():
    assert gpu_compile.regressions(changed(registers=208), gpu_compile.row(PROGRAM)) == []


def case(name: str, same_bits: str = "") -> GpuCase:
    return GpuCase("op", "mosaic_gpu", name, "h100", lambda: (None, ()), same_bits=same_bits)


def test_cases_that_promise_equal_bits_have_equal_arithmetic():
    other = changed(arithmetic={"HGMMA": 8, "FADD": 2, "FFMA": 1})
    cases = [case("a", "x"), case("b", "x"), case("c", "x"), case("d", "y"), case("e")]
    programs = [PROGRAM, other, PROGRAM, other, other]
    outcomes = [gpu_compile.Outcome(c.name, p, ()) for c, p in zip(cases, programs, strict=True)]
    found = gpu_compile.unequal_arithmetic(cases, outcomes)
    assert list(found) == [cases[1].name] and cases[0].name in found[cases[1].name]


def test_every_op_with_a_gpu_kernel_is_in_the_check():
    cases = all_cases()
    checked = {(c.op, c.form) for c in cases if c.form != "xla"}
    written = {
        (path.parent.name, path.stem)
        for form in ("mosaic_gpu", "triton")
        for path in (ROOT / "pallas_kernels").glob(f"*/{form}.py")
    }
    assert checked == written
    assert {(c.op, c.form) for c in cases if c.quick and c.form != "xla"} == written


def test_the_committed_table_has_every_case_and_no_other():
    table = json.loads(gpu_compile.TABLE.read_text(encoding="utf-8"))
    assert set(table["cases"]) == {c.name for c in all_cases()}


SCRIPT = """
import sys
import jax, jax.numpy as jnp
from pallas_kernels import gpu_compile, mosaic
from pallas_kernels.gpu_cases import GpuCase, array
from pallas_kernels.tree_attention import mosaic_gpu

def spilling(x):
    # more values alive than there are registers
    def body(x_ref, o_ref):
        layout = mosaic.Layout.WGMMA
        parts = [mosaic.load(x_ref.at[i], layout=layout, optimized=False) for i in range(6)]
        for part in parts[1:]:
            parts[0] = parts[0] + jnp.exp(parts[0]) * part
        for i, part in enumerate(parts):
            o_ref[i] = part * parts[0]
    return mosaic.kernel(body, out_type=jax.ShapeDtypeStruct(x.shape, x.dtype))(x)

def attention():
    q, cache = array(1, 1, 4, 8, 64), array(1, 1, 128, 64)
    new, ints = array(1, 1, 8, 64), jnp.int32
    args = (q, cache, cache, array(1, dtype=ints), new, new, array(1, 8, 8, dtype=jnp.bool_))
    return (lambda *a: mosaic_gpu.tree_attention.__wrapped__(*a, scale=1.0, segment=128)), args

def case(name, build):
    return GpuCase("planted", "mosaic_gpu", name, "h100", build)

good = case("attention", attention)
table = sys.argv[1]
args = ["--table", table]
print("first", gpu_compile.main([*args, "--update"], [good]))
wide = array(6, 64, 128, dtype=jnp.float32)
print("spill", gpu_compile.main([*args, "--update"], [case("spill", lambda: (spilling, (wide,)))]))
commit, calls = mosaic.commit_smem, []
def all_but_one():
    calls.append(None)
    if len(calls) != 5:  # after the probabilities are written
        commit()
mosaic.commit_smem = all_but_one
print("fence", gpu_compile.main(args, [good]))
"""


@pytest.mark.skipif(
    not (ROOT / ".venv/gpu-compile/jax_plugins").is_dir()
    and importlib.util.find_spec("jax_plugins") is None,
    reason="needs requirements/gpu-compile.txt: `make gpu-compile` installs it",
)
def test_a_spill_and_a_missing_fence_end_with_exit_code_1(tmp_path):
    env = dict(os.environ, PYTHONPATH=str(ROOT / ".venv/gpu-compile"), JAX_PLATFORMS="cpu")
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tmp_path / "table.json")],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=env,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    codes = dict(
        line.split()
        for line in done.stdout.splitlines()
        if line.split()[0]
        in (
            "first",
            "spill",
            "fence",
        )
    )
    assert codes == {"first": "0", "spill": "1", "fence": "1"}, done.stdout
    assert "SPILL" in done.stdout and "4 fences, were 5" in done.stdout
