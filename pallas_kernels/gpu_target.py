"""GPUs that are not there: compile for them on a machine without one.

XLA's GPU compiler needs a description of the device, not the device. With NVIDIA's compiler
packages installed (requirements/gpu-compile.txt, no driver), `topology` gives devices to shard
over, and a jitted function lowered for "cuda" compiles to machine code of that GPU: the proof that
it fits, not that it is fast.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import os
import shutil
from pathlib import Path
from typing import Any

import jax


class GpuToolsError(RuntimeError):
    """The packages that compile for a GPU are not installed."""


@dataclasses.dataclass(frozen=True)
class GpuTarget:
    """Published facts of a GPU (data sheet values).

    Attributes:
        name: device kind as JAX reports it.
        cores: streaming multiprocessors.
        memory, bandwidth: bytes, bytes a second.
        bf16_flops: dense tensor-core operations a second.
        capability: compute capability, major and minor.
        arch: name of the machine code for ptxas.
        shared_per_block, shared_per_core: bytes of shared memory that one block may use, that a
            multiprocessor has.
        threads_per_core: that a multiprocessor holds at once.
        l2: bytes of the level-2 cache.
        clock_ghz: boost clock.
        fp32_lanes: float32 units of a multiprocessor.
    """

    name: str
    cores: int
    memory: int
    bandwidth: float
    bf16_flops: float
    capability: tuple[int, int] = (9, 0)
    arch: str = "sm_90a"
    shared_per_block: int = 232_448
    shared_per_core: int = 233_472
    threads_per_core: int = 2048
    l2: int = 52_428_800
    clock_ghz: float = 1.98
    fp32_lanes: int = 128


TARGETS = {
    "h100": GpuTarget("NVIDIA H100 80GB HBM3", 132, 84_942_979_072, 3.352e12, 989e12),
    "h200": GpuTarget("NVIDIA H200", 132, 150_754_820_096, 4.8e12, 989e12),
    "rtx-pro-6000": GpuTarget(
        "NVIDIA RTX PRO 6000 Blackwell Workstation Edition",
        188,
        102_640_517_120,
        1.792e12,
        503.8e12,
        capability=(12, 0),
        arch="sm_120a",
        shared_per_block=101_376,
        shared_per_core=102_400,
        threads_per_core=1536,
        l2=134_217_728,
        clock_ghz=2.617,
    ),
    "a100": GpuTarget(
        "NVIDIA A100-SXM4-80GB",
        108,
        84_974_239_744,
        2.039e12,
        312e12,
        capability=(8, 0),
        arch="sm_80",
        shared_per_block=166_912,
        shared_per_core=167_936,
        l2=41_943_040,
        clock_ghz=1.41,
        fp32_lanes=64,
    ),
    "l40s": GpuTarget(
        "NVIDIA L40S",
        142,
        47_810_871_296,
        8.64e11,
        362e12,
        capability=(8, 9),
        arch="sm_89",
        shared_per_block=101_376,
        shared_per_core=102_400,
        threads_per_core=1536,
        l2=100_663_296,
        clock_ghz=2.52,
    ),
}
REMEDY = "install them with `uv pip install --no-deps -r requirements/gpu-compile.txt`"


def config_text(target: GpuTarget, toolkit: str = "13.0.0") -> str:
    """GpuTargetConfigProto of a GPU in text form."""
    major, minor = target.capability
    # "sm_90a" has instructions that no later GPU keeps; "sm_80" has none
    special = target.arch.endswith("a")
    feature = "feature_extension: ACCELERATED_FEATURES" if special else ""
    return f"""
gpu_device_info {{
  threads_per_block_limit: 1024  threads_per_warp: 32
  shared_memory_per_block: 49152  shared_memory_per_core: {target.shared_per_core}
  shared_memory_per_block_optin: {target.shared_per_block}
  threads_per_core_limit: {target.threads_per_core}  core_count: {target.cores}
  fpus_per_core: {target.fp32_lanes}
  block_dim_limit_x: 2147483647  block_dim_limit_y: 65535  block_dim_limit_z: 65535
  memory_bandwidth: {target.bandwidth:.0f}  l2_cache_size: {target.l2}
  clock_rate_ghz: {target.clock_ghz}  device_memory_size: {target.memory}
  cuda_compute_capability {{
    major: {major} minor: {minor} {feature}
  }}
  registers_per_core_limit: 65536  registers_per_block_limit: 65536
  thread_dim_limit_x: 1024  thread_dim_limit_y: 1024  thread_dim_limit_z: 64
  device_vendor: "NVIDIA Corporation"  name: "{target.name}"
  platform_version: "Compute Capability {major}.{minor}{"a" if special else ""}"
  device_address_bits: 64  ecc_enabled: true
  driver_version: "{toolkit}"  runtime_version: "{toolkit}"
  compile_time_toolkit_version: "{toolkit}"  dnn_version: "9.12.0"
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 12 patch: 0 }}
device_description_str: "{target.name}"
"""


def _find_tools() -> None:
    """Puts ptxas on PATH, the installed package's before any other: it knows the newest PTX.

    Raises:
        GpuToolsError: the plugin or ptxas is missing.
    """
    if importlib.util.find_spec("jax_plugins") is None or not importlib.util.find_spec(
        "jax_plugins.xla_cuda13"
    ):
        raise GpuToolsError(f"JAX's CUDA compiler (jax-cuda13-plugin) is not installed; {REMEDY}")
    found = tool("ptxas")
    if found is None:
        raise GpuToolsError(f"ptxas is not on PATH and nvidia-cuda-nvcc is not installed; {REMEDY}")
    folder = str(Path(found).parent)
    if folder != os.environ.get("PATH", "").split(os.pathsep)[0]:
        os.environ["PATH"] = f"{folder}{os.pathsep}{os.environ.get('PATH', '')}"


def tool(name: str) -> str | None:
    """Path of one of NVIDIA's compiler tools: from their packages, from PATH or from Triton."""
    for package, below in (("nvidia", "cu13/bin"), (None, ""), ("triton", "backends/nvidia/bin")):
        if package is None:
            found = shutil.which(name)
            if found:
                return found
            continue
        spec = importlib.util.find_spec(package)
        for root in spec.submodule_search_locations or () if spec else ():
            path = Path(root) / below / name
            if path.is_file():
                return str(path)
    return None


def topology(target: GpuTarget, devices: int = 1) -> Any:
    """Description of one host with `devices` of these GPUs, for `jax.sharding.Mesh` and
    ahead-of-time compilation.

    Raises:
        GpuToolsError: the packages that compile for a GPU are missing.
    """
    _find_tools()
    from jax.experimental import topologies

    return topologies.get_topology_desc(
        platform="cuda", target_config=config_text(target), topology=f"1x1x{devices}"
    )


def on_abstract(target: GpuTarget) -> contextlib.AbstractContextManager[Any]:
    """Context in which kernels are lowered for, or interpreted as on, a GPU that is not there."""
    device = jax.sharding.AbstractDevice(
        device_kind=target.name, num_cores=target.cores, platform="gpu"
    )
    return jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), (), abstract_device=device))
