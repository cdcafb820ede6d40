"""The published checkpoint layout of draft heads, read and written (algorithm.md section 2).

A directory with model.safetensors and config.json: Qwen3 fields, `block_size`, `num_target_layers`
and `dflash_config` {target_layer_ids, mask_token_id, causal_head}. Ours adds, where used, tensors
`path_head.w1.weight`, `path_head.w2.weight` and `draft_id_map` (int32) and the keys of
`jetspec_config`; a head without them loads as well.
"""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import safetensors
import safetensors.numpy

from jetspec_jax.config import DraftConfig, ModelConfig
from jetspec_jax.drafter.head import declare
from jetspec_jax.errors import ModelFileError
from jetspec_jax.models.spec import flatten
from jetspec_jax.typing import Array, Params
from jetspec_jax.weights.hf import HFSource
from jetspec_jax.weights.hf_config import parse_config, read_json
from jetspec_jax.weights.load import Pack, Progress, load_params

ID_MAP = "draft_id_map"
_CAUSAL_NAMES = ("causal_head", "causal")


class DraftHead(NamedTuple):
    """A loaded head. `id_map` [Vd] int32: target id of each draft id; None: the whole target
    vocabulary."""

    config: DraftConfig
    params: Params
    id_map: np.ndarray | None


def default_layer_ids(taps: int, target_layers: int) -> tuple[int, ...]:
    """The published choice of tapped layers: one in the middle, or evenly from layer 1 to layer nT
    - 3."""
    if taps == 1:
        return (target_layers // 2,)
    return tuple(round(1 + i * (target_layers - 4) / (taps - 1)) for i in range(taps))


def _field(values: Mapping[str, Any], key: str, path: Path) -> Any:
    if values.get(key) is None:
        raise ModelFileError(
            f"{path}: field {key} is missing; use the config.json published with the draft head"
        )
    return values[key]


def _causal(values: Mapping[str, Any], inner: Mapping[str, Any], path: Path) -> bool:
    found = {
        str(where[name])
        for where in (inner, values)
        for name in _CAUSAL_NAMES
        if where.get(name) is not None
    }
    if len(found) > 1:
        raise ModelFileError(
            f"{path}: causal_head and causal contradict each other; keep the value the head "
            "was trained with"
        )
    if not found:
        warnings.warn(
            f"{path}: neither causal_head nor causal is set; taking the head as bidirectional "
            "(DFlash). "
            "If acceptance is near zero, set dflash_config.causal_head to true",
            stacklevel=3,
        )
        return False
    return found == {"True"}


def parse_draft_config(values: Mapping[str, Any], path: Path) -> DraftConfig:
    """DraftConfig from the parsed config.json at `path`.

    Warns when neither public name of the causal flag is there.

    Raises:
        ModelFileError: a missing or contradictory field, named with the file.
    """
    inner = values.get("dflash_config") or {}
    extra = values.get("jetspec_config") or {}
    if not isinstance(inner, dict) or not isinstance(extra, dict):
        raise ModelFileError(
            f"{path}: dflash_config and jetspec_config must be JSON objects; download the "
            "head again"
        )
    base = parse_config({**values, "model_type": "qwen3"}, path)
    if base.qkv_bias:
        raise ModelFileError(
            f"{path}: attention_bias is true, but published draft heads have none; check the file"
        )
    ids = inner.get("target_layer_ids", values.get("target_layer_ids"))
    target_layers = int(_field(values, "num_target_layers", path))
    if ids is None:
        # Heads from before the key existed tapped as many layers as they have themselves.
        ids = default_layer_ids(base.num_layers, target_layers)
    mask = inner.get("mask_token_id", values.get("mask_token_id"))
    if mask is None:
        raise ModelFileError(
            f"{path}: field dflash_config.mask_token_id is missing; use the published config.json"
        )
    return DraftConfig(
        hidden_size=base.hidden_size,
        num_layers=base.num_layers,
        num_heads=base.num_heads,
        num_kv_heads=base.num_kv_heads,
        head_dim=base.head_dim,
        ffn_size=base.ffn_size,
        target_hidden_size=int(extra.get("target_hidden_size", base.hidden_size)),
        num_target_layers=target_layers,
        target_layer_ids=tuple(int(i) for i in ids),
        vocab_size=base.vocab_size,
        mask_token_id=int(mask),
        block_size=int(_field(values, "block_size", path)),
        causal=_causal(values, inner, path),
        draft_shift=bool(inner.get("draft_shift", values.get("draft_shift", False))),
        rms_eps=base.rms_eps,
        rope=base.rope,
        draft_vocab_size=extra.get("draft_vocab_size"),
        path_head=str(extra.get("path_head", "none")),
        path_rank=int(extra.get("path_rank", 0)),
    )


def read_draft_config(directory: str | os.PathLike[str]) -> DraftConfig:
    """DraftConfig of a head directory; see `parse_draft_config`."""
    path = Path(directory) / "config.json"
    return parse_draft_config(read_json(path), path)


def config_json(
    cfg: DraftConfig, target: ModelConfig | None = None, dtype: str = "bfloat16"
) -> dict[str, Any]:
    """The published config.json of a head; both names of the causal flag are written."""
    rope: dict[str, Any] = {"rope_theta": cfg.rope.theta, "rope_scaling": None}
    if cfg.rope.kind != "default":
        scaling = {"rope_type": cfg.rope.kind, "factor": cfg.rope.factor}
        if cfg.rope.kind in ("llama3", "yarn"):
            scaling["original_max_position_embeddings"] = cfg.rope.original_max_position
        names = {
            "llama3": ("low_freq_factor", "high_freq_factor"),
            "yarn": (
                "beta_fast",
                "beta_slow",
                "attention_factor",
                "mscale",
                "mscale_all_dim",
                "truncate",
            ),
        }
        for name in names.get(cfg.rope.kind, ()):
            if getattr(cfg.rope, name) is not None:
                scaling[name] = getattr(cfg.rope, name)
        rope["rope_scaling"] = scaling
    inner = {
        "target_layer_ids": list(cfg.target_layer_ids),
        "mask_token_id": cfg.mask_token_id,
        "draft_shift": cfg.draft_shift,
        **dict.fromkeys(_CAUSAL_NAMES, cfg.causal),
    }
    values: dict[str, Any] = {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "block_size": cfg.block_size,
        "dflash_config": inner,
        "dtype": dtype,
        "head_dim": cfg.head_dim,
        "hidden_act": "silu",
        "hidden_size": cfg.hidden_size,
        "intermediate_size": cfg.ffn_size,
        "layer_types": ["full_attention"] * cfg.num_layers,
        "max_position_embeddings": target.max_context if target else 40_960,
        "num_attention_heads": cfg.num_heads,
        "num_hidden_layers": cfg.num_layers,
        "num_key_value_heads": cfg.num_kv_heads,
        "num_target_layers": cfg.num_target_layers,
        "rms_norm_eps": cfg.rms_eps,
        "tie_word_embeddings": False,
        "use_cache": True,
        "use_sliding_window": False,
        "vocab_size": cfg.vocab_size,
        **rope,
    }
    extra = {}
    if cfg.draft_vocab_size is not None:
        extra["draft_vocab_size"] = cfg.draft_vocab_size
    if cfg.path_head != "none":
        extra |= {"path_head": cfg.path_head, "path_rank": cfg.path_rank}
    if extra:
        values["jetspec_config"] = extra
    return values


def check_target(
    cfg: DraftConfig, target: ModelConfig, path: str | os.PathLike[str] = "draft head"
) -> None:
    """Refuse a head that was made for another target, naming everything that differs in one line.

    Raises:
        ModelFileError: hidden size, vocabulary, layer count or tapped layers do not fit; mask token
            is pad or EOS.
    """
    wrong = [
        f"{name} {ours} (target: {theirs})"
        for name, ours, theirs in (
            ("hidden size", cfg.hidden_size, target.hidden_size),
            ("target hidden size", cfg.target_hidden_size, target.hidden_size),
            ("vocabulary", cfg.vocab_size, target.vocab_size),
            ("num_target_layers", cfg.num_target_layers, target.num_layers),
        )
        if ours != theirs
        and not (name == "target hidden size" and cfg.hidden_size == cfg.target_hidden_size)
    ]
    beyond = [i for i in cfg.target_layer_ids if not 0 <= i < target.num_layers]
    if beyond:
        wrong.append(f"target_layer_ids {beyond} out of range (target: {target.num_layers} layers)")
    if wrong:
        raise ModelFileError(
            f"{path}: a head of another target: {'; '.join(wrong)}; give the head trained for "
            "this model"
        )
    if (
        cfg.mask_token_id in (*target.eos_ids, target.pad_id)
        or not 0 <= cfg.mask_token_id < target.vocab_size
    ):
        raise ModelFileError(
            f"{path}: mask_token_id {cfg.mask_token_id} is the target's pad or EOS, or "
            "outside its vocabulary; "
            "use the id the head was trained with"
        )


class _HeadSource(HFSource):
    """A head directory: like a model's, but the id map is no float weight and is read apart."""

    def names(self) -> list[str]:
        return [name for name in super().names() if name != ID_MAP]


def _read_id_map(directory: Path, cfg: DraftConfig) -> np.ndarray | None:
    path = directory / "model.safetensors"
    found = None
    if path.is_file():
        with safetensors.safe_open(str(path), "numpy") as file:
            names = set(file.keys())
            found = np.asarray(file.get_tensor(ID_MAP)) if ID_MAP in names else None
    if cfg.draft_vocab_size is None:
        if found is not None:
            raise ModelFileError(
                f"{path}: holds {ID_MAP}, but config.json has no draft_vocab_size; use the "
                "head's own config"
            )
        return None
    if found is None:
        raise ModelFileError(
            f"{path}: tensor {ID_MAP!r} is missing though draft_vocab_size is "
            f"{cfg.draft_vocab_size}; export the head again"
        )
    return check_id_map(found, cfg, path)


def check_id_map(
    id_map: np.ndarray, cfg: DraftConfig, path: str | os.PathLike[str] = "draft head"
) -> np.ndarray:
    """The id map as int32 [Vd] after checking type, size, range and distinctness.

    Raises:
        ModelFileError: any of these does not hold.
    """
    good = id_map.shape == (cfg.draft_vocab_size,) and id_map.dtype.kind in "iu"
    if (
        not good
        or id_map.min() < 0
        or id_map.max() >= cfg.vocab_size
        or np.unique(id_map).size != id_map.size
    ):
        raise ModelFileError(
            f"{path}: {ID_MAP} {id_map.dtype} {id_map.shape} is not a list of "
            f"{cfg.draft_vocab_size} distinct ids below "
            f"{cfg.vocab_size}; export the head again"
        )
    return id_map.astype(np.int32)


def load_draft(
    directory: str | os.PathLike[str],
    target: ModelConfig | None = None,
    dtype: Any = np.float32,
    *,
    pack: Pack | None = None,
    progress: Progress | None = None,
) -> DraftHead:
    """Load a head directory.

    Args:
        directory: holds config.json and model.safetensors (or shards with an index).
        target: refused when the head does not fit it (`check_target`); None: not checked.
        dtype: of the parameters.
        pack, progress: as in `weights.load_params`.

    Raises:
        ModelFileError: damaged, incomplete, or a head of another target.
    """
    folder = Path(directory)
    source = _HeadSource(folder)
    cfg = read_draft_config(folder)
    if target is not None:
        check_target(cfg, target, folder)
    id_map = _read_id_map(folder, cfg)
    params = load_params(source, declare(cfg), dtype, pack=pack, progress=progress)
    return DraftHead(cfg, params, id_map)


def published_tensors(
    cfg: DraftConfig, params: Params, id_map: np.ndarray | None, dtype: Any
) -> dict[str, np.ndarray]:
    """Parameters as checkpoint tensors: fused projections are split into their published parts."""
    flat = flatten(params)
    sizes = {"kv": (cfg.num_kv_heads * cfg.head_dim,) * 2, "gate_up": (cfg.ffn_size,) * 2}
    tensors: dict[str, np.ndarray] = {}
    for name, spec in declare(cfg).items():
        array = np.asarray(flat[name]).astype(dtype)
        parts = sizes.get(name.rsplit(".", 1)[-1], (spec.shape[0],))
        for source, piece in zip(spec.sources, np.split(array, np.cumsum(parts)[:-1]), strict=True):
            tensors[str(source)] = np.ascontiguousarray(piece)
    if id_map is not None:
        tensors[ID_MAP] = check_id_map(np.asarray(id_map), cfg)
    return tensors


def save_draft(
    directory: str | os.PathLike[str],
    cfg: DraftConfig,
    params: Params,
    id_map: np.ndarray | Array | None = None,
    *,
    dtype: Any = ml_dtypes.bfloat16,
    target: ModelConfig | None = None,
) -> Path:
    """Write a head in the published layout; each file appears complete or not at all. Returns the
    directory."""
    folder = Path(directory)
    folder.mkdir(parents=True, exist_ok=True)
    tensors = published_tensors(cfg, params, None if id_map is None else np.asarray(id_map), dtype)
    values = config_json(cfg, target, np.dtype(dtype).name)
    data = safetensors.numpy.save(tensors, {"format": "pt"})
    for name, content in (
        ("model.safetensors", data),
        ("config.json", (json.dumps(values, indent=2) + "\n").encode()),
    ):
        temporary = folder / f".{name}.tmp"
        temporary.write_bytes(content)
        os.replace(temporary, folder / name)
    return folder
