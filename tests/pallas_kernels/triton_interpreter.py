"""Runs Triton kernels on the CPU by Triton's own interpreter, without torch.

The interpreter wants tensors with a few of torch's methods; `_Tensor` has those over numpy memory.
Triton decides between compiling and interpreting when a kernel is decorated: ours are imported a
second time for it, and Triton's library of kernels (`tl.zeros`, `tl.max`, ...) is exchanged while
one runs. So it does not matter what was imported before, and nothing stays changed.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest


class _Storage:
    def __init__(self, array: np.ndarray) -> None:
        self.array = array

    def data_ptr(self) -> int:
        return self.array.ctypes.data

    def cpu(self) -> _Storage:
        return self

    def copy_(self, other: _Storage) -> None:
        assert other is self  # the interpreter works in place


class _Tensor:
    def __init__(self, array: np.ndarray) -> None:
        self.storage = _Storage(array)
        self.dtype = f"torch.{array.dtype.name}"

    def data_ptr(self) -> int:
        return self.storage.data_ptr()

    def untyped_storage(self) -> _Storage:
        return self.storage

    def new_empty(self, *_: Any, **__: Any) -> _Tensor:
        return _Tensor(self.storage.array)

    def set_(self, storage: _Storage, *_: Any) -> None:
        self.storage = storage

    def storage_offset(self) -> int:
        return 0

    def size(self) -> tuple[int, ...]:
        return self.storage.array.shape

    def stride(self) -> tuple[int, ...]:
        return tuple(s // self.storage.array.itemsize for s in self.storage.array.strides)


@contextlib.contextmanager
def _language() -> Iterator[None]:
    """Triton's own kernels interpreted."""
    triton: Any = importlib.import_module("triton")
    importlib.import_module("triton.experimental.gluon")  # looks at them when it is imported
    interpreter: Any = importlib.import_module("triton.runtime.interpreter")
    patch = pytest.MonkeyPatch()
    for module in (triton.language, triton.language.standard):
        for name, value in list(vars(module).items()):
            if isinstance(value, triton.runtime.JITFunction):
                patch.setattr(module, name, interpreter.InterpretedFunction(value.fn))
    try:
        yield
    finally:
        patch.undo()


def _multipliable(x: np.ndarray) -> np.ndarray:
    """bfloat16 as float32, exactly: the interpreter would multiply its bits as integers."""
    return x.astype(np.float32) if x.dtype.name == "bfloat16" else x


def _call(kernel: Any, *operands: Any, out_type: Any, grid: tuple[int, ...], **meta: Any) -> Any:
    """`pallas_kernels.triton_call.call` in the interpreter."""
    meta = {k: v for k, v in meta.items() if k not in ("num_warps", "num_stages")}
    single = not isinstance(out_type, tuple)
    shapes = (out_type,) if single else out_type
    outs = []
    for shape in shapes:
        # what a kernel does not write must not be read
        worst = np.nan if jnp.issubdtype(shape.dtype, jnp.floating) else np.iinfo(shape.dtype).max
        outs.append(np.full(shape.shape, worst, shape.dtype))
    tensors = [_Tensor(_multipliable(np.array(x))) for x in (*operands, *outs)]
    with _language():
        kernel[grid](*tensors, **meta)
    results = tuple(
        jnp.asarray(t.storage.array.astype(shape.dtype))
        for t, shape in zip(tensors[len(operands) :], shapes, strict=True)
    )
    return results[0] if single else results


def _ours() -> list[str]:
    return [n for n in sys.modules if n.startswith("pallas_kernels.") and n.endswith(".triton")]


@functools.cache
def interpreted(op: str) -> ModuleType:
    """A second `pallas_kernels.<op>.triton`, whose kernels run on the CPU, outside of jit."""
    triton: Any = pytest.importorskip("triton")
    before = {name: sys.modules.pop(name) for name in _ours()}
    try:
        with triton.knobs.runtime.scope():
            triton.knobs.runtime.interpret = True
            module = importlib.import_module(f"pallas_kernels.{op}.triton")
    finally:
        for name in _ours():
            del sys.modules[name]
        sys.modules.update(before)
    module.triton_call = SimpleNamespace(call=_call)  # pyright: ignore[reportAttributeAccessIssue]
    return module
