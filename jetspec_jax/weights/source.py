"""What every checkpoint format offers, and how a user's `--model` value becomes one."""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Protocol, runtime_checkable

import numpy as np

from jetspec_jax.config import ModelConfig
from jetspec_jax.errors import ModelFileError

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
_HUB_FILES = ("*.json", "*.safetensors", "*.jinja", "*.model", "*.txt")


@dataclasses.dataclass(frozen=True)
class RawTensor:
    """A tensor as the file stores it.

    Attributes:
        kind: GGUF type name, such as "Q4_1"; "BF16", "F16", "F32" or "F64" in safetensors.
        shape: of the values.
        blocks: uint8 [rows, bytes per row], rows in Hugging Face order.
        release: gives the pages of the file that were read so far back (`blocks` stays valid).
    """

    kind: str
    shape: tuple[int, ...]
    blocks: np.ndarray
    release: Callable[[], None] = lambda: None


@runtime_checkable
class TensorSource(Protocol):
    """Tensors of a checkpoint, read lazily under Hugging Face names and in its row order."""

    path: Path

    def config(self) -> ModelConfig:
        """Geometry of the target model (`jetspec_jax.drafter` reads a draft head's own config)."""
        ...

    def names(self) -> list[str]:
        """All tensors that a loader has to account for."""
        ...

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor; ModelFileError when it is missing."""
        ...

    def dtype(self, name: str) -> np.dtype:
        """Type of the values that `read` gives."""
        ...

    def read(self, name: str, out: np.ndarray | None = None) -> np.ndarray:
        """Values in their dtype; into `out` (C-contiguous, same shape, any float type) if given."""
        ...

    def raw(self, name: str) -> RawTensor:
        """The tensor as stored, read lazily."""
        ...


def resolve_model(
    path: str | os.PathLike[str],
    wanted: str = "a model directory (config.json + safetensors) or a .gguf file",
) -> Path:
    """Local path of a model: a directory or file as given, or the local copy of a hub id.

    A hub id (`owner/name`) is downloaded, or taken from the local hub cache when it is there.
    `wanted` is what the message asks for where there is nothing.

    Raises:
        ModelFileError: nothing at the path; hub unreachable, with what to do.
    """
    text = os.fspath(path)
    local = Path(text).expanduser()
    try:
        if local.exists():
            return local
    except OSError as err:
        raise ModelFileError(
            f"{text}: cannot be read ({err.strerror or err}); check the path and permissions"
        ) from err
    if (
        not _HUB_ID.fullmatch(text)
        or text.endswith(".gguf")
        or (local.parent != Path(".") and local.parent.is_dir())
    ):
        raise ModelFileError(f"{text}: no such file or directory; give {wanted}")
    return _from_hub(text)


def _from_hub(hub_id: str) -> Path:
    from huggingface_hub import snapshot_download  # slow import, and only needed for hub ids

    try:
        return Path(snapshot_download(hub_id, allow_patterns=list(_HUB_FILES)))
    except Exception as err:  # the hub client raises many unrelated types
        reason = (str(err).strip() or type(err).__name__).splitlines()[0]
        raise ModelFileError(
            f"{hub_id}: no such local path, and the Hugging Face hub did not deliver it "
            f"({reason[:160].rstrip('.')}); on a machine with network run `hf download "
            f"{hub_id} --local-dir DIR` and give DIR here"
        ) from err


def open_source(path: str | os.PathLike[str]) -> TensorSource:
    """Open a Hugging Face directory, a .gguf file, or a hub id.

    Returns:
        A source whose directory has been checked against the file sizes; no tensor is read yet.

    Raises:
        ModelFileError: missing, unreadable, damaged or unsupported file; the message names file,
            tensor and remedy.
    """
    from jetspec_jax.weights.gguf import GGUFSource
    from jetspec_jax.weights.hf import HFSource

    local = resolve_model(path)
    if local.is_dir():
        return HFSource(local)
    return GGUFSource(local)
