"""GGUF models as a `TensorSource`: Hugging Face names and row order, ModelConfig from metadata."""

from __future__ import annotations

import dataclasses
import math
import os
import re
from typing import Any

import numpy as np

from jetspec_jax.config import ModelConfig, RopeConfig
from jetspec_jax.errors import ModelFileError
from jetspec_jax.weights.dequant import SUPPORTED, dequantize
from jetspec_jax.weights.gguf_file import GGUFFile, TensorInfo
from jetspec_jax.weights.mapped import pieces
from jetspec_jax.weights.source import RawTensor

FAMILY_OF_ARCHITECTURE = {
    "llama": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "qwen3moe": "qwen3_moe",
}

_TOP = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
}
_EXPERTS = {"ffn_gate_exps": "gate_proj", "ffn_up_exps": "up_proj", "ffn_down_exps": "down_proj"}
_LAYER_NAME = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)$")
_ROPE_FREQS = "rope_freqs.weight"  # llama 3 scaling, baked to one divisor per frequency


@dataclasses.dataclass(frozen=True)
class _Place:
    """Where one Hugging Face tensor lies: a GGUF tensor, or one expert of it."""

    info: TensorInfo
    expert: int | None = None
    permuted_heads: int = 0  # rows are interleaved for this many heads; 0: they are not

    @property
    def shape(self) -> tuple[int, ...]:
        return self.info.shape if self.expert is None else self.info.shape[1:]


class GGUFSource:
    """Reads one .gguf file.

    Raises:
        ModelFileError: see `GGUFFile`; also an unknown architecture, an unknown tensor or a
            quantisation without a dequantiser here.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.file = GGUFFile(path)
        self.path = self.file.path
        self.architecture = str(self._required("general.architecture"))
        if self.architecture not in FAMILY_OF_ARCHITECTURE:
            raise ModelFileError(
                f"{self.path}: architecture {self.architecture!r} is not supported; "
                f"use one of {', '.join(FAMILY_OF_ARCHITECTURE)}"
            )
        self._places: dict[str, _Place] = {}
        for info in self.file.tensors.values():
            self._map(info)
        self._config: ModelConfig | None = None

    @property
    def metadata(self) -> dict[str, Any]:
        """All metadata of the file (tokenizer included)."""
        return self.file.metadata

    def config(self) -> ModelConfig:
        """Geometry of the model, from the metadata and the tensors present."""
        if self._config is None:
            self._config = self._read_config()
        return self._config

    def names(self) -> list[str]:
        """Hugging Face names of all tensors; stacked experts are listed one by one."""
        return list(self._places)

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor, [out, in] for projections."""
        return self._place(name).shape

    def dtype(self, name: str) -> np.dtype:
        """Type of the values that `read` gives (not of the stored blocks; see `raw`)."""
        self._place(name)
        return np.dtype(np.float32)

    def read(self, name: str, out: np.ndarray | None = None) -> np.ndarray:
        """Float32 values, Hugging Face row order; into `out` (C-contiguous, any float) if given."""
        raw = self.raw(name)
        if out is None:
            out = np.empty(raw.shape, np.float32)
        if len(raw.shape) == 1:
            out[...] = dequantize(raw.blocks, raw.kind)
            return out
        for rows in pieces(len(raw.blocks), raw.blocks[0].nbytes, raw.release):
            if out.dtype == np.float32:
                dequantize(raw.blocks[rows], raw.kind, out[rows])
            else:
                out[rows] = dequantize(raw.blocks[rows], raw.kind)
        return out

    def raw(self, name: str) -> RawTensor:
        """Stored blocks, rows in Hugging Face order (a view of the file unless permuted)."""
        place = self._place(name)
        blocks = self.file.blocks(place.info.name)
        if place.expert is not None:
            blocks = blocks[place.expert]
        if place.permuted_heads:
            # llama.cpp rotates neighbouring pairs, so its converter interleaves the two halves of
            # every head's q and k rows. Whole rows move; the blocks inside a row stay as they are.
            rows = blocks.shape[0]
            split = blocks.reshape(
                place.permuted_heads, rows // place.permuted_heads // 2, 2, *blocks.shape[1:]
            )
            blocks = np.ascontiguousarray(split.swapaxes(1, 2)).reshape(blocks.shape)
        return RawTensor(place.info.type_name, place.shape, blocks, self.file.release)

    def _place(self, name: str) -> _Place:
        if name not in self._places:
            raise ModelFileError(
                f"{self.path}: tensor {name!r} is missing; the file is incomplete, convert the "
                "model again"
            )
        return self._places[name]

    def _map(self, info: TensorInfo) -> None:
        if info.type_name not in SUPPORTED:
            raise ModelFileError(
                f"{self.path}: tensor {info.name!r} is quantised as {info.type_name}, which is not "
                f"supported; use a file with {', '.join(SUPPORTED)}"
            )
        if info.name in _TOP:
            self._places[_TOP[info.name]] = _Place(info)
            return
        if info.name == _ROPE_FREQS:
            return  # read by `_rope`
        match = _LAYER_NAME.match(info.name)
        layer, part, kind = match.groups() if match else ("", "", "")
        if part in _LAYER:
            permuted = self.architecture == "llama" and part in ("attn_q", "attn_k")
            heads = self._heads(part) if permuted else 0
            if heads and info.shape[0] % (2 * heads):
                raise ModelFileError(
                    f"{self.path}: tensor {info.name!r} of shape {info.shape} does not divide into "
                    f"{heads} heads; convert the model again"
                )
            self._places[f"model.layers.{layer}.{_LAYER[part]}.{kind}"] = _Place(
                info, permuted_heads=heads
            )
        elif part in _EXPERTS and kind == "weight" and len(info.shape) == 3:
            for expert in range(info.shape[0]):
                name = f"model.layers.{layer}.mlp.experts.{expert}.{_EXPERTS[part]}.weight"
                self._places[name] = _Place(info, expert=expert)
        else:
            raise ModelFileError(
                f"{self.path}: tensor {info.name!r} is not part of a {self.architecture} model "
                "that is supported here; convert the model again or use its safetensors directory"
            )

    def _heads(self, part: str) -> int:
        queries = self._size("attention.head_count")
        return queries if part == "attn_q" else self._size("attention.head_count_kv", queries)

    def _required(self, key: str) -> Any:
        value = self.file.metadata.get(key)
        if value is None:
            raise ModelFileError(
                f"{self.path}: metadata key {key!r} is missing; convert the model again"
            )
        if isinstance(value, np.ndarray):
            if len(set(value.tolist())) != 1:
                raise ModelFileError(
                    f"{self.path}: {key} differs between layers, which is not supported; use "
                    "another model"
                )
            return value.tolist()[0]
        return value

    def _get(self, key: str, default: Any = None) -> Any:
        full = f"{self.architecture}.{key}"
        return self._required(full) if full in self.file.metadata else default

    def _number(self, key: str, default: float | None = None) -> float:
        value = self._get(key, default)
        if value is None:
            self._required(f"{self.architecture}.{key}")
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise self._bad(key, "a number belongs here; convert the model again")
        return _short(value) if isinstance(value, float) else value

    def _size(self, key: str, default: int | None = None, least: int = 1) -> int:
        value = self._number(key, default)
        if not isinstance(value, int) or value < least:
            raise self._bad(key, f"a whole number from {least} belongs here; convert it again")
        return value

    def _bad(self, key: str, why: str) -> ModelFileError:
        value = self.file.metadata.get(f"{self.architecture}.{key}")
        return ModelFileError(f"{self.path}: {self.architecture}.{key}={value!r:.60}: {why}")

    def _read_config(self) -> ModelConfig:
        if self._size("attention.sliding_window", 0, least=0):
            raise self._bad(
                "attention.sliding_window",
                "sliding windows are not supported; use a model with full attention",
            )
        hidden, heads = self._size("embedding_length"), self._size("attention.head_count")
        head_dim = self._size("attention.key_length", hidden // heads)
        for key in ("attention.value_length", "rope.dimension_count"):
            if self._size(key, head_dim) != head_dim:
                raise self._bad(key, f"differs from the head size {head_dim}; use another model")
        layers, experts = self._size("block_count"), self._size("expert_count", 0, least=0)
        present = sum(name.endswith(".input_layernorm.weight") for name in self._places)
        if layers != present:
            raise self._bad("block_count", f"the file holds {present} layers; convert it again")
        dense = tuple(
            i for i in range(layers) if f"model.layers.{i}.mlp.gate.weight" not in self._places
        )
        return ModelConfig(
            family=FAMILY_OF_ARCHITECTURE[self.architecture],
            vocab_size=self._place("model.embed_tokens.weight").shape[0],
            hidden_size=hidden,
            num_layers=layers,
            num_heads=heads,
            num_kv_heads=self._size("attention.head_count_kv", heads),
            head_dim=head_dim,
            ffn_size=self._size("feed_forward_length", 0 if experts else None, least=0),
            max_context=self._size("context_length"),
            rms_eps=float(self._number("attention.layer_norm_rms_epsilon")),
            rope=self._rope(head_dim),
            tie_embeddings="lm_head.weight" not in self._places,
            qkv_bias="model.layers.0.self_attn.q_proj.bias" in self._places,
            out_bias="model.layers.0.self_attn.o_proj.bias" in self._places,
            mlp_bias="model.layers.0.mlp.down_proj.bias" in self._places,
            qk_norm="model.layers.0.self_attn.q_norm.weight" in self._places,
            num_experts=experts,
            experts_per_token=self._size("expert_used_count") if experts else 0,
            moe_ffn_size=self._size("expert_feed_forward_length") if experts else 0,
            # llama.cpp always renormalises the chosen experts of this architecture, and stores no
            # flag for it.
            norm_topk_prob=bool(experts),
            dense_layers=dense if experts else (),
            eos_ids=self.eos_ids(),
            bos_id=self._token_id("bos"),
            pad_id=self._token_id("padding"),
            name=str(self.file.metadata.get("general.name", self.path.stem)),
        )

    def _token_id(self, role: str) -> int | None:
        key = f"tokenizer.ggml.{role}_token_id"
        value = self.file.metadata.get(key)
        if value is not None and not isinstance(value, int):
            raise ModelFileError(
                f"{self.path}: {key}={value!r:.60} is not a token id; convert the model again"
            )
        return value

    def eos_ids(self) -> tuple[int, ...]:
        """Ids that end a generation: end of sequence, of turn, of message, where there are such."""
        found = [self._token_id(role) for role in ("eos", "eot", "eom")]
        return tuple(dict.fromkeys(i for i in found if i is not None))

    def _rope(self, head_dim: int) -> RopeConfig:
        theta = float(self._number("rope.freq_base", 10_000.0))
        kind = self._get("rope.scaling.type", "none")
        factor = float(self._number("rope.scaling.factor", self._number("rope.scale_linear", 1.0)))
        if _ROPE_FREQS in self.file.tensors:
            if kind not in ("none", "llama3"):
                raise self._bad(
                    "rope.scaling.type", f"not with tensor {_ROPE_FREQS!r}; use another"
                )
            return self._llama3_rope(theta, head_dim)
        if kind == "yarn":
            for key, plain in (
                ("yarn_log_multiplier", 0.0),
                ("yarn_attn_factor", 1.0),
                ("attn_factor", 1.0),
            ):
                if self._number(f"rope.scaling.{key}", plain) != plain:
                    raise self._bad(f"rope.scaling.{key}", "not supported; use another model")
            return RopeConfig(
                theta=theta,
                kind="yarn",
                factor=factor,
                original_max_position=self._size("rope.scaling.original_context_length"),
                beta_fast=float(self._number("rope.scaling.yarn_beta_fast", 32.0)),
                beta_slow=float(self._number("rope.scaling.yarn_beta_slow", 1.0)),
            )
        if kind in ("none", "linear"):
            # Old files carry a factor without a type; it meant linear scaling.
            return RopeConfig(
                theta=theta, kind="linear" if factor != 1.0 else "default", factor=factor
            )
        raise self._bad("rope.scaling.type", "supported are none, linear, yarn and Llama 3's")

    def _llama3_rope(self, theta: float, head_dim: int) -> RopeConfig:
        """Parameters behind the baked divisors: all released models share 1, 4 and 8192."""
        info = self.file.tensors[_ROPE_FREQS]
        baked = dequantize(self.file.blocks(_ROPE_FREQS), info.type_name)
        rope = RopeConfig(
            theta=theta,
            kind="llama3",
            factor=_short(baked.max()),
            low_freq_factor=1.0,
            high_freq_factor=4.0,
            original_max_position=8_192,
        )
        expected = llama3_divisors(rope, head_dim)
        if baked.shape != expected.shape or not np.allclose(baked, expected, rtol=1e-4):
            raise ModelFileError(
                f"{self.path}: tensor {_ROPE_FREQS!r} does not hold Llama 3 scaling (1, 4, 8192); "
                "use the model's safetensors directory"
            )
        return rope


def llama3_divisors(rope: RopeConfig, head_dim: int) -> np.ndarray:
    """Divisors of the rotary frequencies, float32 [head_dim / 2], as llama.cpp bakes them in."""
    context, low, high = rope.original_max_position, rope.low_freq_factor, rope.high_freq_factor
    out = []
    for i in range(0, head_dim, 2):
        wavelength = 2 * math.pi * rope.theta ** (i / head_dim)
        smooth = (context / wavelength - low) / (high - low)
        between = 1.0 / ((1.0 - smooth) / rope.factor + smooth)
        short, long = wavelength < context / high, wavelength > context / low
        out.append(1.0 if short else rope.factor if long else between)
    return np.asarray(out, np.float32)


def _short(value: Any) -> float:
    """Shortest decimal of a stored float32: 1e-05, not 9.999999747378752e-06 (the same float32)."""
    return float(str(np.float32(value)))
