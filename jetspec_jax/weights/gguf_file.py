"""The GGUF container: metadata, tensor directory and raw blocks, read without copying.

Own parser because `gguf.GGUFReader` builds a numpy view per metadata string: 4.4 s for the 98,000
tokenizer strings of the bundled model, against 0.1 s here. Layout: ggml/docs/gguf.md, versions 2
and 3, little endian.
"""

from __future__ import annotations

import dataclasses
import math
import mmap
import os
import struct
from pathlib import Path
from typing import Any

import numpy as np

from jetspec_jax.errors import ModelFileError
from jetspec_jax.weights.mapped import MappedFile

# type id: (name, elements per block, bytes per block). Types without a dequantiser here are listed
# so that the error names them; `dequant.SUPPORTED` decides.
BLOCKS: dict[int, tuple[str, int, int]] = {
    0: ("F32", 1, 4),
    1: ("F16", 1, 2),
    2: ("Q4_0", 32, 18),
    3: ("Q4_1", 32, 20),
    6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24),
    8: ("Q8_0", 32, 34),
    9: ("Q8_1", 32, 40),
    10: ("Q2_K", 256, 84),
    11: ("Q3_K", 256, 110),
    12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210),
    15: ("Q8_K", 256, 292),
    16: ("IQ2_XXS", 256, 66),
    17: ("IQ2_XS", 256, 74),
    18: ("IQ3_XXS", 256, 98),
    19: ("IQ1_S", 256, 50),
    20: ("IQ4_NL", 32, 18),
    21: ("IQ3_S", 256, 110),
    22: ("IQ2_S", 256, 82),
    23: ("IQ4_XS", 256, 136),
    24: ("I8", 1, 1),
    25: ("I16", 1, 2),
    26: ("I32", 1, 4),
    27: ("I64", 1, 8),
    28: ("F64", 1, 8),
    29: ("IQ1_M", 256, 56),
    30: ("BF16", 1, 2),
    34: ("TQ1_0", 256, 54),
    35: ("TQ2_0", 256, 66),
    39: ("MXFP4", 32, 17),
    40: ("NVFP4", 64, 36),
    41: ("Q1_0", 128, 18),
}

_SCALARS: dict[int, str] = {
    0: "<u1",
    1: "<i1",
    2: "<u2",
    3: "<i2",
    4: "<u4",
    5: "<i4",
    6: "<f4",
    7: "|b1",
    10: "<u8",
    11: "<i8",
    12: "<f8",
}
_STRING, _ARRAY = 8, 9
_DEFAULT_ALIGNMENT = 32


@dataclasses.dataclass(frozen=True)
class TensorInfo:
    """One directory entry. `shape` is numpy order (slowest first, the reverse of the file's)."""

    name: str
    shape: tuple[int, ...]
    type_id: int
    start: int  # byte offset in the file
    nbytes: int

    @property
    def type_name(self) -> str:
        return BLOCKS[self.type_id][0]


class _Cursor:
    """Sequential reads over a memory map; every read past the end is a typed error."""

    def __init__(self, data: mmap.mmap, path: Path) -> None:
        self.data, self.path, self.pos, self.size = data, path, 0, len(data)

    def take(self, count: int) -> int:
        start = self.pos
        if count < 0 or start + count > self.size:
            raise ModelFileError(
                f"{self.path}: truncated GGUF header (byte {start + count} of {self.size} is "
                "needed); download the file again"
            )
        self.pos = start + count
        return start

    def number(self, code: str) -> Any:
        fmt = "<" + code
        return struct.unpack_from(fmt, self.data, self.take(struct.calcsize(fmt)))[0]

    def string(self) -> str:
        length = self.number("Q")
        start = self.take(length)
        return self.text(start, length)

    def text(self, start: int, length: int) -> str:
        try:
            return self.data[start : start + length].decode("utf-8")
        except UnicodeDecodeError as err:
            raise ModelFileError(
                f"{self.path}: metadata text at byte {start} is not UTF-8; the file is damaged, "
                "download it again"
            ) from err

    def strings(self, count: int) -> list[str]:
        # The hot loop: hundreds of thousands of tokens and merges in big vocabularies.
        data, size, pos, unpack = self.data, self.size, self.pos, struct.Struct("<Q").unpack_from
        out: list[str] = []
        start = pos
        try:
            for _ in range(count):
                start = pos + 8
                pos = start + unpack(data, pos)[0]
                if pos > size:
                    break
                out.append(data[start:pos].decode("utf-8"))
        except struct.error:
            pos = size + 1
        except UnicodeDecodeError:
            self.text(start, pos - start)  # raises the typed error
        if pos > size:
            self.take(size + 1 - self.pos)
        self.pos = pos
        return out

    def value(self, kind: int, key: str) -> Any:
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            inner, count = self.number("I"), self.number("Q")
            if inner == _STRING:
                return self.strings(count)
            if inner in _SCALARS:
                dtype = np.dtype(_SCALARS[inner])
                start = self.take(count * dtype.itemsize)
                return np.frombuffer(self.data, dtype, count, start).copy()
        elif kind in _SCALARS:
            dtype = np.dtype(_SCALARS[kind])
            return np.frombuffer(self.data, dtype, 1, self.take(dtype.itemsize))[0].item()
        raise ModelFileError(
            f"{self.path}: metadata key {key!r} has an unknown value type; convert the model again"
        )


class GGUFFile:
    """Metadata and tensor directory of one GGUF file; tensor bytes stay on disk.

    Raises:
        ModelFileError: missing or unreadable file, bad magic or version, truncated header or data,
            unknown type.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        try:
            with open(self.path, "rb") as handle:
                if os.fstat(handle.fileno()).st_size == 0:
                    raise ModelFileError(f"{self.path}: empty file, not a GGUF; download it again")
                self._file = MappedFile(handle)
        except OSError as err:
            raise ModelFileError(
                f"{self.path}: cannot be read ({err.strerror or err}); check the path and "
                "permissions"
            ) from err
        data = self._file.data
        cursor = _Cursor(data, self.path)
        if data[:4] != b"GGUF":
            raise ModelFileError(
                f"{self.path}: not a GGUF file (it starts with {bytes(data[:4])!r}); give a .gguf "
                "model"
            )
        cursor.pos = 4
        version = cursor.number("I")
        if version not in (2, 3):
            raise ModelFileError(
                f"{self.path}: GGUF version {version} is not supported; convert the model to "
                "version 3, little endian"
            )
        tensors, entries = cursor.number("Q"), cursor.number("Q")
        self.metadata: dict[str, Any] = {}
        for _ in range(entries):
            key = cursor.string()
            self.metadata[key] = cursor.value(cursor.number("I"), key)
        directory = [self._entry(cursor) for _ in range(tensors)]
        align = self.metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
        if not isinstance(align, int) or align < 1 or align & (align - 1):
            raise ModelFileError(
                f"{self.path}: general.alignment={align} is not a power of two; the file is damaged"
            )
        base = (cursor.pos + align - 1) // align * align
        self._bytes = self._file.bytes
        self.tensors: dict[str, TensorInfo] = {}
        expected = 0  # tensors lie in the order of the directory, each at the next aligned byte
        for name, shape, type_id, offset in directory:
            info = self._check(name, shape, type_id, base + offset)
            if offset != expected:
                raise ModelFileError(
                    f"{self.path}: tensor {name!r} is said to begin at byte {offset}, but the one "
                    f"before it ends at {expected}; the file is damaged, download it again"
                )
            expected += (info.nbytes + align - 1) // align * align
            self.tensors[name] = info
        self.release()

    def release(self) -> None:
        """Gives the pages of the file that were read so far back to the system."""
        self._file.release()

    @staticmethod
    def _entry(cursor: _Cursor) -> tuple[str, tuple[int, ...], int, int]:
        name, rank = cursor.string(), cursor.number("I")
        if rank > 8:
            raise ModelFileError(
                f"{cursor.path}: tensor {name!r} claims {rank} dimensions; the file is damaged, "
                "download it again"
            )
        dims = tuple(int(cursor.number("Q")) for _ in range(rank))
        return name, dims[::-1], cursor.number("I"), cursor.number("Q")

    def _check(self, name: str, shape: tuple[int, ...], type_id: int, start: int) -> TensorInfo:
        if type_id not in BLOCKS:
            raise ModelFileError(
                f"{self.path}: tensor {name!r} has unknown quantisation type {type_id}; use a file "
                "quantised as Q4_1, Q8_0 or F16"
            )
        if name in self.tensors:
            raise ModelFileError(
                f"{self.path}: tensor {name!r} is listed twice; the file is damaged, convert the "
                "model again"
            )
        kind, per_block, block_bytes = BLOCKS[type_id]
        if not shape or min(shape) < 1 or shape[-1] % per_block:
            raise ModelFileError(
                f"{self.path}: tensor {name!r} of shape {shape} does not divide into {kind} blocks "
                f"of {per_block}; convert the model again"
            )
        nbytes = math.prod(shape) // per_block * block_bytes
        if start + nbytes > self._bytes.size:
            raise ModelFileError(
                f"{self.path}: truncated at tensor {name!r} (needs byte {start + nbytes}, the file "
                f"has {self._bytes.size}); download it again"
            )
        return TensorInfo(name, shape, type_id, start, nbytes)

    def blocks(self, name: str) -> np.ndarray:
        """Stored bytes of a tensor: uint8 [..., bytes per row], read-only, a view of the file."""
        info = self.tensors[name]
        _, per_block, block_bytes = BLOCKS[info.type_id]
        flat = self._bytes[info.start : info.start + info.nbytes]
        return flat.reshape(*info.shape[:-1], info.shape[-1] // per_block * block_bytes)
