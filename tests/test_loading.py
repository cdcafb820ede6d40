"""Which kernels an engine gets, and what is said when it cannot have those it asked for."""

import pytest

from jetspec_jax.config import EngineConfig
from jetspec_jax.errors import ConfigError, KernelError
from jetspec_jax.loading import weight_transform
from pallas_kernels import native, tree_attention


def no_compiler(*_):
    raise native.KernelError("no C++ compiler on PATH; install g++")


def test_native_kernels_in_another_dtype_are_refused():
    with pytest.raises(ConfigError, match="run float32, not bfloat16"):
        weight_transform(EngineConfig(kernels="cpu", dtype="bfloat16"))
    assert weight_transform(EngineConfig(dtype="bfloat16")) == (None, "xla")


def test_kernels_that_cannot_be_built_are_one_line(monkeypatch):
    monkeypatch.setattr(tree_attention, "resolve", no_compiler)
    with pytest.raises(KernelError, match="no C\\+\\+ compiler"):
        weight_transform(EngineConfig(kernels="cpu"))


def test_one_missing_kernel_means_xla_for_all(monkeypatch):
    monkeypatch.setattr(tree_attention, "resolve", lambda _: "xla")
    assert weight_transform(EngineConfig()) == (None, "xla")
