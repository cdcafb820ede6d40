"""Runs Triton kernels on the CPU by Triton's own interpreter, without torch.

The interpreter wants tensors with a few of torch's methods; `_Tensor` has those over numpy memory.
"""

from __future__ import annotations

import importlib
import os
from types import ModuleType, SimpleNamespace
from typing import Any

import jax.numpy as jnp
import numpy as np


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


def _call(kernel: Any, *operands: Any, out_type: Any, grid: tuple[int, ...], **meta: Any) -> Any:
    """`pallas_kernels.triton_call.call` in the interpreter."""
    meta = {k: v for k, v in meta.items() if k not in ("num_warps", "num_stages")}
    single = not isinstance(out_type, tuple)
    outs = []
    for shape in (out_type,) if single else out_type:
        out = np.zeros(shape.shape, shape.dtype)
        if jnp.issubdtype(shape.dtype, jnp.floating):
            out[...] = np.nan  # what a kernel does not write must not be read
        outs.append(out)
    tensors = [_Tensor(np.array(x)) for x in (*operands, *outs)]
    kernel[grid](*tensors, **meta)
    results = tuple(jnp.asarray(t.storage.array) for t in tensors[len(operands) :])
    return results[0] if single else results


def interpreted(op: str) -> ModuleType:
    """`pallas_kernels.<op>.triton`, whose kernels run on the CPU in this process from now on.

    Triton decides when it is first imported: call this before anything imports it.
    """
    os.environ["TRITON_INTERPRET"] = "1"
    module = importlib.import_module(f"pallas_kernels.{op}.triton")
    module.triton_call = SimpleNamespace(call=_call)  # pyright: ignore[reportAttributeAccessIssue]
    return module
