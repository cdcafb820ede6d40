"""Host memory for weights: aligned so that XLA adopts it, and in huge pages where the system has
them.
"""

import contextlib
import mmap
import threading
from typing import Any

import numpy as np

ALIGN = 64  # bytes; XLA's CPU client adopts a host buffer without a copy only at this alignment
_HUGE = 2 << 20  # bytes of a huge page on x86-64 and arm64
_CHUNK = 16 * _HUGE  # taken from the system at once
_SMALL = 64 << 10  # below this NumPy's own memory will do

_lock = threading.Lock()
_rest: np.ndarray | None = None  # what is left of the last chunk


def _chunk(nbytes: int) -> np.ndarray:
    """`nbytes`, rounded up to whole huge pages, at the beginning of one."""
    size = -(-nbytes // _HUGE) * _HUGE
    # private: memory shared between processes, mmap's default, has no huge pages
    memory = mmap.mmap(-1, size + _HUGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a kernel without them: ordinary pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    whole = np.frombuffer(memory, np.uint8)
    start = -whole.ctypes.data % _HUGE
    return whole[start : start + size]


def aligned_empty(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """Uninitialised C-contiguous array whose memory starts at a multiple of 64 bytes.

    Large arrays lie side by side in huge pages where the system offers them (Linux): a forward
    reads every weight once, and with pages of 4 KB the walk through the page table costs some
    percent of a step (NOTES.md). A chunk is given back when the last array in it is gone.
    """
    global _rest
    dtype = np.dtype(dtype)
    nbytes = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    if nbytes < _SMALL or not hasattr(mmap, "MADV_HUGEPAGE"):
        buffer = np.empty(nbytes + ALIGN, np.uint8)
        start = -buffer.ctypes.data % ALIGN
        return buffer[start : start + nbytes].view(dtype).reshape(shape)
    padded = -(-nbytes // ALIGN) * ALIGN
    with _lock:
        if padded > _CHUNK // 2:
            taken = _chunk(padded)
        else:
            if _rest is None or _rest.size < padded:
                _rest = _chunk(_CHUNK)
            taken, _rest = _rest[:padded], _rest[padded:]
    return taken[:nbytes].view(dtype).reshape(shape)
