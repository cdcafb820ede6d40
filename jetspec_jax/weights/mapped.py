"""A checkpoint file in the address space, whose pages can be given back once they are used."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterator
from typing import BinaryIO

import numpy as np

_PIECE = 8 << 20  # bytes read between two releases


class MappedFile:
    """A file mapped read-only.

    Pages of a mapped file count as memory of the process for as long as they are mapped: a loader
    that only reads would hold the whole checkpoint beside the arrays it makes of it.

    Attributes:
        data: the map, for the header.
        bytes: the same as uint8 [size].
    """

    def __init__(self, handle: BinaryIO) -> None:
        self.data = mmap.mmap(handle.fileno(), 0, access=mmap.ACCESS_READ)
        self.bytes = np.frombuffer(self.data, np.uint8)

    def release(self) -> None:
        """Gives all pages back; arrays over the file stay valid and are read again when touched."""
        if hasattr(mmap, "MADV_DONTNEED"):  # not on Windows
            self.data.madvise(mmap.MADV_DONTNEED)


def pieces(rows: int, row_bytes: int, release: Callable[[], None]) -> Iterator[slice]:
    """Slices of `rows` rows of at most 8 MB of the file, with a release after each."""
    step = max(1, _PIECE // max(1, row_bytes))
    for start in range(0, rows, step):
        yield slice(start, min(rows, start + step))
        release()
