"""From a checkpoint to the parameter pytree, one weight at a time."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from jetspec_jax.errors import ModelFileError
from jetspec_jax.models.spec import Declaration, WeightSpec, nest
from jetspec_jax.typing import Params
from jetspec_jax.weights.source import RawTensor, TensorSource
from pallas_kernels.memory import aligned_empty

Pack = Callable[[str, WeightSpec, Sequence[RawTensor]], Any]
Progress = Callable[[str, int, int], None]

_FLOATS = tuple(np.dtype(t) for t in (np.float32, np.float16, np.float64, ml_dtypes.bfloat16))


def check_source(source: TensorSource, decl: Declaration) -> None:
    """Compare a checkpoint's directory with a declaration, before any tensor is read.

    Raises:
        ModelFileError: a missing, misshapen, non-float or unexpected tensor, with the file and the
            remedy.
    """
    present = set(source.names())
    wanted: set[str] = set()
    for name, spec in decl.items():
        tail = spec.shape[2:] if spec.stack else spec.shape[1:]
        heights = []  # rows of each entry of `sources`
        for entry in spec.sources:
            parts = (entry,) if isinstance(entry, str) else entry
            for part in parts:
                _check_tensor(source, part, tail, name, present)
            heights.append(sum(source.shape(part)[0] for part in parts))
            wanted.update(parts)
        got = (len(heights), *set(heights)) if spec.stack else (sum(heights),)
        if (*got, *tail) != spec.shape:
            first = spec.sources[0] if isinstance(spec.sources[0], str) else spec.sources[0][0]
            raise _misshapen(source, first, name, (*got, *tail), spec.shape)
    extra = sorted(present - wanted)
    if extra:
        raise ModelFileError(
            f"{source.path}: {len(extra)} unexpected tensor(s), such as {extra[0]!r}; config and "
            "weights do not belong together, use the config.json that came with the weights"
        )


def _check_tensor(
    source: TensorSource, tensor: str, tail: tuple[int, ...], weight: str, present: set[str]
) -> None:
    if tensor not in present:
        near = difflib.get_close_matches(tensor, present, 1)
        hint = f" (the nearest name there is {near[0]!r})" if near else ""
        raise ModelFileError(
            f"{source.path}: tensor {tensor!r} is missing{hint}; the checkpoint is incomplete or "
            "of another model, download it again"
        )
    shape = source.shape(tensor)
    if not shape or shape[1:] != tail:
        raise _misshapen(source, tensor, weight, shape, ("rows", *tail))
    if source.dtype(tensor) not in _FLOATS:
        raise ModelFileError(
            f"{source.path}: tensor {tensor!r} is stored as {source.dtype(tensor)}, which is not a "
            "supported weight type; use a bf16, fp16 or fp32 checkpoint, or a .gguf file"
        )


def _misshapen(
    source: TensorSource, tensor: str, weight: str, got: tuple[Any, ...], want: tuple[Any, ...]
) -> ModelFileError:
    return ModelFileError(
        f"{source.path}: tensor {tensor!r} gives {weight!r} the shape {_shape(got)}, but "
        "the config "
        f"needs {_shape(want)}; use the config.json that came with the weights"
    )


def _shape(dims: tuple[Any, ...]) -> str:
    return f"[{', '.join(map(str, dims))}]"


def load_params(
    source: TensorSource,
    decl: Declaration,
    dtype: Any = jnp.float32,
    *,
    pack: Pack | None = None,
    progress: Progress | None = None,
) -> Params:
    """Read all weights of a declaration.

    Every weight is assembled in one preallocated array (fused projections and stacked experts
    included) that becomes the device array, and the file's pages are given back as it is read: the
    peak is the parameters plus some megabytes.

    Args:
        source: an opened checkpoint.
        decl: flat declaration; `sources` name tensors of the checkpoint.
        dtype: of the returned arrays.
        pack: called for every matrix with (flat name, spec, its tensors as stored, in the order of
            `spec.sources`); its result takes the place of the weight, so that the numerics layer
            can keep it in its kernel's layout. None: the weight is read as an array of `dtype`.
        progress: called with (flat name, weights done, weights in all) after each weight.

    Returns:
        Nested parameters (`nest`).

    Raises:
        ModelFileError: see `check_source`; nothing is read before the whole directory fits.
    """
    check_source(source, decl)
    flat: dict[str, Any] = {}
    for done, (name, spec) in enumerate(decl.items(), 1):
        value: Any = None
        if pack is not None and len(spec.shape) > 1:
            value = pack(name, spec, [source.raw(tensor) for tensor in _tensors(spec)])
        if value is None:
            # On CPU device_put adopts the aligned buffer (jnp.asarray would copy it).
            value = jax.device_put(_assemble(source, spec, np.dtype(dtype)))
        flat[name] = value
        del value
        if progress is not None:
            progress(name, done, len(decl))
    return nest(flat)


def _tensors(spec: WeightSpec) -> list[str]:
    """Checkpoint tensors of a weight, in row order."""
    return [
        tensor
        for entry in spec.sources
        for tensor in ((entry,) if isinstance(entry, str) else entry)
    ]


def _assemble(source: TensorSource, spec: WeightSpec, dtype: np.dtype) -> np.ndarray:
    out = aligned_empty(spec.shape, dtype)
    rows = out.reshape(-1, *spec.shape[2:]) if spec.stack else out
    at = 0
    for tensor in _tensors(spec):
        piece = rows[at : at + source.shape(tensor)[0]]
        source.read(tensor, piece)
        at += piece.shape[0]
    return out
