"""Hugging Face directories (config.json, safetensors whole or sharded) as a `TensorSource`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from jetspec_jax.config import ModelConfig
from jetspec_jax.errors import ModelFileError
from jetspec_jax.weights.hf_config import parse_config, read_json
from jetspec_jax.weights.mapped import pieces
from jetspec_jax.weights.safetensors_file import SafetensorsFile
from jetspec_jax.weights.source import RawTensor

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_DERIVED_SUFFIX = (
    "rotary_emb.inv_freq"  # buffers that old checkpoints saved; computed from the config here
)
_KINDS = {
    np.dtype(ml_dtypes.bfloat16): "BF16",
    np.dtype(np.float16): "F16",
    np.dtype(np.float32): "F32",
    np.dtype(np.float64): "F64",
}


class HFSource:
    """Reads one model directory.

    Raises:
        ModelFileError: missing or unreadable directory, shard or index; damaged files.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        try:
            entries = {entry.name for entry in os.scandir(self.path)}
        except OSError as err:
            raise ModelFileError(
                f"{self.path}: cannot be read ({err.strerror or err}); check the path and "
                "permissions"
            ) from err
        self._files: dict[str, SafetensorsFile] = {}
        if _INDEX in entries:
            self._open_sharded()
        elif _SINGLE in entries:
            file = SafetensorsFile(self.path / _SINGLE)
            self._files = dict.fromkeys(file.names(), file)
        else:
            raise ModelFileError(
                f"{self.path}: holds neither {_SINGLE} nor {_INDEX}; give a directory with "
                "safetensors weights "
                "(convert .bin checkpoints with transformers' save_pretrained)"
            )
        self._config: ModelConfig | None = None
        self._names: list[str] | None = None

    def _open_sharded(self) -> None:
        index = self.path / _INDEX
        placed = read_json(index).get("weight_map")
        if not isinstance(placed, dict) or not all(isinstance(v, str) for v in placed.values()):
            raise ModelFileError(
                f"{index}: field weight_map is missing or damaged; download it again"
            )
        shards: dict[str, SafetensorsFile] = {}
        for tensor, shard in placed.items():
            if Path(shard).name != shard:
                raise ModelFileError(
                    f"{index}: shard name {shard!r} points outside the directory; download the "
                    "model again"
                )
            if shard not in shards:
                if not (self.path / shard).is_file():
                    raise ModelFileError(
                        f"{self.path / shard}: shard is missing (index lists it for {tensor!r}); "
                        "download the model again"
                    )
                shards[shard] = SafetensorsFile(self.path / shard)
        for shard, file in shards.items():
            for tensor in file.names():
                if placed.get(tensor) != shard:
                    raise ModelFileError(
                        f"{file.path}: tensor {tensor!r} is not where {_INDEX} says; download the "
                        "model again"
                    )
                self._files[tensor] = file
        for tensor, shard in placed.items():
            if tensor not in self._files:
                raise ModelFileError(
                    f"{self.path / shard}: tensor {tensor!r} is missing though the index lists it; "
                    "download the model again"
                )

    def raw_config(self) -> dict[str, Any]:
        """config.json as a dict."""
        return read_json(self.path / "config.json")

    def config(self) -> ModelConfig:
        """Geometry of the model, from config.json and generation_config.json."""
        if self._config is None:
            self._config = parse_config(self.raw_config(), self.path / "config.json")
        return self._config

    def names(self) -> list[str]:
        """Names of all tensors that matter: no derived buffers, no stored copy of a tied head."""
        if self._names is None:
            names = [name for name in self._files if not name.endswith(_DERIVED_SUFFIX)]
            embed, head = "model.embed_tokens.weight", "lm_head.weight"
            if head in names and embed in names and self.raw_config().get("tie_word_embeddings"):
                self._check_tied(embed, head)
                names.remove(head)
            self._names = names
        return self._names

    def _check_tied(self, embed: str, head: str) -> None:
        a, b = self.read(embed), self.read(head)

        def release() -> None:
            for name in (embed, head):
                self._file(name).release()

        same = a.shape == b.shape and all(
            np.array_equal(a[rows], b[rows]) for rows in pieces(len(a), a[:1].nbytes, release)
        )
        if not same:
            raise ModelFileError(
                f"{self.path}: {head!r} differs from the embedding although tie_word_embeddings is "
                "true; "
                "set tie_word_embeddings to false in config.json to use it"
            )

    def _file(self, name: str) -> SafetensorsFile:
        if name not in self._files:
            raise ModelFileError(
                f"{self.path}: tensor {name!r} is missing; the checkpoint is incomplete, download "
                "it again"
            )
        return self._files[name]

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor, [out, in] for projections."""
        return self._file(name).shape(name)

    def dtype(self, name: str) -> np.dtype:
        """Stored type of a tensor."""
        return self._file(name).dtype(name)

    def read(self, name: str, out: np.ndarray | None = None) -> np.ndarray:
        """The tensor in its stored dtype (a view of the file); converted into `out` when given."""
        file = self._file(name)
        value = file.read(name)
        if out is None:
            return value
        if value.ndim < 2:
            out[...] = value
            return out
        for rows in pieces(len(value), value[:1].nbytes, file.release):
            out[rows] = value[rows]
        return out

    def raw(self, name: str) -> RawTensor:
        """Stored values as bytes (a view of the file)."""
        file = self._file(name)
        value = file.read(name)
        if value.dtype not in _KINDS:
            raise ModelFileError(
                f"{file.path}: tensor {name!r} is stored as {value.dtype}, which is no weight type"
            )
        return RawTensor(_KINDS[value.dtype], value.shape, value.view(np.uint8), file.release)
