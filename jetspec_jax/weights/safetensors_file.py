"""One .safetensors file: header and zero-copy views of its tensors.

Own header reading (https://huggingface.co/docs/safetensors, "Format") so that damage is reported
with file and tensor, and bfloat16 comes out as a NumPy array.
"""

from __future__ import annotations

import json
import math
import os
import struct
from pathlib import Path

import ml_dtypes
import numpy as np

from jetspec_jax.errors import ModelFileError
from jetspec_jax.weights.mapped import MappedFile

_DTYPES = {
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F64": np.dtype(np.float64),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
    "BOOL": np.dtype(np.bool_),
    "I8": np.dtype(np.int8),
    "U8": np.dtype(np.uint8),
    "I16": np.dtype(np.int16),
    "U16": np.dtype(np.uint16),
    "I32": np.dtype(np.int32),
    "U32": np.dtype(np.uint32),
    "I64": np.dtype(np.int64),
    "U64": np.dtype(np.uint64),
}
_MAX_HEADER = 100_000_000  # as in the reference implementation


class SafetensorsFile:
    """Directory of one file, checked against its size at construction.

    Raises:
        ModelFileError: missing, unreadable, truncated or damaged file.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        try:
            with open(self.path, "rb") as handle:
                size = os.fstat(handle.fileno()).st_size
                if size < 8:
                    raise self._damaged(f"{size} bytes, too short for a safetensors header")
                self._file = MappedFile(handle)
        except FileNotFoundError as err:
            raise ModelFileError(f"{self.path}: file is missing; download the model again") from err
        except OSError as err:
            raise ModelFileError(
                f"{self.path}: cannot be read ({err.strerror or err}); check the path and "
                "permissions"
            ) from err
        data = self._file.data
        length = struct.unpack_from("<Q", data)[0]
        if length > _MAX_HEADER:
            raise self._damaged(f"the header claims {length} bytes")
        if 8 + length > size:
            raise self._damaged(f"truncated header ({size} of {8 + length} bytes)")
        try:
            header = json.loads(data[8 : 8 + length])
            header.pop("__metadata__", None)
            self._entries = {
                name: (
                    str(e["dtype"]),
                    tuple(int(n) for n in e["shape"]),
                    int(e["data_offsets"][0]),
                    int(e["data_offsets"][1]),
                )
                for name, e in header.items()
            }
        except (ValueError, KeyError, TypeError, IndexError, AttributeError) as err:
            raise self._damaged(
                f"the header is not a safetensors header ({type(err).__name__})"
            ) from err
        self._data = self._file.bytes[8 + length :]
        for name, (kind, shape, start, stop) in self._entries.items():
            if kind not in _DTYPES:
                raise ModelFileError(
                    f"{self.path}: tensor {name!r} has unknown type {kind!r}; "
                    "use a checkpoint in BF16, F16 or F32"
                )
            if (
                min(shape, default=0) < 0
                or stop - start != math.prod(shape) * _DTYPES[kind].itemsize
            ):
                raise self._damaged(
                    f"tensor {name!r}: {stop - start} bytes do not hold {kind} {shape}"
                )
            if start < 0 or stop > self._data.size:
                raise self._damaged(
                    f"truncated at tensor {name!r} (needs byte {8 + length + stop}, the file has "
                    f"{size})"
                )

    def _damaged(self, what: str) -> ModelFileError:
        return ModelFileError(f"{self.path}: {what}; the file is damaged, download it again")

    def names(self) -> list[str]:
        return list(self._entries)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._entries[name][1]

    def dtype(self, name: str) -> np.dtype:
        return _DTYPES[self._entries[name][0]]

    def read(self, name: str) -> np.ndarray:
        """The tensor in its stored type; a read-only view of the file."""
        kind, shape, start, stop = self._entries[name]
        return self._data[start:stop].view(_DTYPES[kind]).reshape(shape)

    def release(self) -> None:
        """Gives the pages of the file that were read so far back to the system."""
        self._file.release()
