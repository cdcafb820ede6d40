"""From a checkpoint to the parameter pytree, one weight at a time."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np

from jetspec_jax.errors import ModelFileError
from jetspec_jax.models.spec import Declaration, WeightSpec, nest
from jetspec_jax.typing import Params
from jetspec_jax.weights.source import TensorSource

Transform = Callable[[str, WeightSpec, np.ndarray], Any]
Progress = Callable[[str, int, int], None]

_ALIGN = 64  # bytes; XLA's CPU client adopts a host buffer without a copy only at this alignment


def aligned_empty(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """Uninitialised C-contiguous array whose memory starts at a multiple of 64 bytes."""
    dtype = np.dtype(dtype)
    nbytes = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    buffer = np.empty(nbytes + _ALIGN, np.uint8)
    start = -buffer.ctypes.data % _ALIGN
    return buffer[start : start + nbytes].view(dtype).reshape(shape)


def check_source(source: TensorSource, decl: Declaration) -> None:
    """Compare a checkpoint's directory with a declaration, before any tensor is read.

    Raises:
        ModelFileError: a missing, misshapen or unexpected tensor, named with the file and the remedy.
    """
    present = set(source.names())
    wanted: dict[str, None] = {}
    for name, spec in decl.items():
        rows = 0
        for entry in spec.sources:
            parts = (entry,) if isinstance(entry, str) else entry
            height = 0
            for part in parts:
                if part not in present:
                    near = difflib.get_close_matches(part, present, 1)
                    hint = f" (the nearest name there is {near[0]!r})" if near else ""
                    raise ModelFileError(
                        f"{source.path}: tensor {part!r} is missing{hint}; the checkpoint is incomplete or of another model, download it again"
                    )
                shape = source.shape(part)
                tail = spec.shape[2:] if spec.stack else spec.shape[1:]
                if not shape or shape[1:] != tail:
                    raise _misshapen(source, part, shape, f"(*, {', '.join(map(str, tail))})" if tail else "(*,)", name)
                height += shape[0]
                wanted[part] = None
            if spec.stack and height != spec.shape[1]:
                raise _misshapen(source, parts[0], source.shape(parts[0]), f"{spec.shape[1:]} for {len(parts)} tensor(s)", name)
            rows += height
        full = len(spec.sources) if spec.stack else rows
        if full != spec.shape[0]:
            shapes = [source.shape(p) for e in spec.sources for p in ((e,) if isinstance(e, str) else e)]
            raise _misshapen(source, _first(spec), shapes if len(shapes) > 1 else shapes[0], str(spec.shape), name)
    extra = sorted(present - set(wanted))
    if extra:
        raise ModelFileError(
            f"{source.path}: {len(extra)} unexpected tensor(s), such as {extra[0]!r}; config and weights do not belong together, "
            "use the config.json that came with the weights"
        )


def _first(spec: WeightSpec) -> str:
    entry = spec.sources[0]
    return entry if isinstance(entry, str) else entry[0]


def _misshapen(source: TensorSource, tensor: str, got: object, want: str, weight: str) -> ModelFileError:
    return ModelFileError(
        f"{source.path}: tensor {tensor!r} has shape {got}, but the config needs {want} for {weight!r}; "
        "use the config.json that came with the weights"
    )


def load_params(
    source: TensorSource,
    decl: Declaration,
    dtype: Any = jnp.float32,
    *,
    transform: Transform | None = None,
    progress: Progress | None = None,
) -> Params:
    """Read all weights of a declaration.

    Every weight is assembled in one preallocated array (fused projections and stacked experts included) that
    becomes the device array, so the peak is the parameters plus one weight.

    Args:
        source: an opened checkpoint.
        decl: flat declaration; `sources` name tensors of the checkpoint.
        dtype: of the returned arrays (and of the array that `transform` gets).
        transform: called with (flat name, spec, array [out, in]); its result takes the place of the weight, so
            that the numerics layer can repack. NumPy arrays in the result become jax arrays.
        progress: called with (flat name, weights done, weights in all) after each weight.

    Returns:
        Nested parameters (`nest`).

    Raises:
        ModelFileError: see `check_source`; nothing is read before the whole directory fits the declaration.
    """
    check_source(source, decl)
    flat: dict[str, Any] = {}
    for done, (name, spec) in enumerate(decl.items(), 1):
        array = _assemble(source, spec, np.dtype(dtype))
        value: Any = array if transform is None else transform(name, spec, array)
        flat[name] = jnp.asarray(value) if isinstance(value, np.ndarray) else value
        del array, value
        if progress is not None:
            progress(name, done, len(decl))
    return nest(flat)


def _assemble(source: TensorSource, spec: WeightSpec, dtype: np.dtype) -> np.ndarray:
    out = aligned_empty(spec.shape, dtype)
    rows = out.reshape(-1, *spec.shape[2:]) if spec.stack else out
    at = 0
    for entry in spec.sources:
        for tensor in (entry,) if isinstance(entry, str) else entry:
            piece = rows[at : at + source.shape(tensor)[0]]
            if dtype == np.float32:
                source.read(tensor, piece)
            else:
                piece[...] = source.read(tensor)
            at += piece.shape[0]
    return out
