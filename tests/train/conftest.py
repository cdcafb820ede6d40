"""A tiny random target in a Hugging Face directory, and shards of its own greedy answers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

from jetspec_jax.config import ModelConfig, RopeConfig
from jetspec_jax.models import decoder
from jetspec_jax.models.spec import flatten, init_params
from jetspec_jax.typing import Params

TAPS = (0, 2)
CONFIG = ModelConfig(
    family="llama",
    vocab_size=64,
    hidden_size=32,
    num_layers=4,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    ffn_size=48,
    max_context=128,
    rms_eps=1e-5,
    rope=RopeConfig(theta=1e4),
    tie_embeddings=True,
    eos_ids=(2,),
    bos_id=1,
    pad_id=2,
)


class Tiny(NamedTuple):
    """The target and where it lies."""

    path: Path
    config: ModelConfig
    params: Params
    data: Path  # shards with features
    bare: Path  # the same shards without features


def write_target(path: Path, params: Params) -> None:
    """config.json and model.safetensors as Hugging Face's llama."""
    path.mkdir(parents=True, exist_ok=True)
    flat, tensors = flatten(params), {}
    sizes = {
        "qkv": [CONFIG.q_width, CONFIG.kv_width, CONFIG.kv_width],
        "gate_up": [CONFIG.ffn_size] * 2,
    }
    for name, spec in decoder.declare(CONFIG).items():
        parts = sizes.get(name.rsplit(".", 1)[-1], [spec.shape[0]])
        for source, piece in zip(
            spec.sources, np.split(np.asarray(flat[name]), np.cumsum(parts)[:-1]), strict=True
        ):
            tensors[str(source)] = np.ascontiguousarray(piece)
    safetensors.numpy.save_file(tensors, path / "model.safetensors")
    values: dict[str, Any] = {
        "model_type": "llama",
        "vocab_size": 64,
        "hidden_size": 32,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "intermediate_size": 48,
        "max_position_embeddings": 128,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e4,
        "tie_word_embeddings": True,
        "eos_token_id": 2,
        "bos_token_id": 1,
        "pad_token_id": 2,
    }
    (path / "config.json").write_text(json.dumps(values))


def greedy_answers(
    params: Params, count: int, rows: int, prompt: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """tokens [count, rows], taps and final as bfloat16 bits."""
    forward = jax.jit(lambda p, t: decoder.forward_full(p, CONFIG, t, taps=TAPS))
    tokens = np.random.default_rng(5).integers(3, 64, (count, rows)).astype(np.int32)
    for at in range(prompt, rows):
        logits = np.asarray(forward(params, jnp.asarray(tokens)).logits)
        tokens[:, at] = logits[:, at - 1].argmax(-1)
    out = forward(params, jnp.asarray(tokens))
    taps, final = (
        np.asarray(x).astype(ml_dtypes.bfloat16).view(np.uint16) for x in (out.taps, out.hidden)
    )
    return tokens, taps, final


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    root = tmp_path_factory.mktemp("tiny")
    params = init_params(decoder.declare(CONFIG), jax.random.key(1), std=0.3)
    write_target(root / "target", params)
    tokens, taps, final = greedy_answers(params, 24, 32, 6)
    lengths = np.full(24, 32, np.int32)
    lengths[:4] = [20, 17, 6, 29]  # one without an answer
    for name, features in (("data", {"taps": taps, "final": final}), ("bare", {})):
        (root / name).mkdir()
        lines = []
        for shard in range(2):
            part = slice(12 * shard, 12 * shard + 12)
            arrays = {
                "tokens": tokens,
                "length": lengths,
                "prompt_len": np.full(24, 6, np.int32),
                **features,
            }
            file = f"shard-{shard}.npz"
            np.savez(root / name / file, **{k: v[part] for k, v in arrays.items()})
            lines.append(json.dumps({"verdict": "done", "shard": file, "ids": []}))
        lines.append(json.dumps({"verdict": "skipped", "ids": ["x"]}))
        (root / name / "manifest.jsonl").write_text("\n".join(lines) + "\n")
        (root / name / "meta.json").write_text(json.dumps({"taps": list(TAPS)}))
    return Tiny(root / "target", CONFIG, params, root / "data", root / "bare")


@pytest.fixture
def overrides(tiny: Tiny, tmp_path: Path) -> list[str]:
    """Settings of a run that takes seconds."""
    return [
        f"data.path={str(tiny.data)!r}",
        f"data.target={str(tiny.path)!r}",
        f"run.out={str(tmp_path / 'run')!r}",
        "data.sequences=2",
        "data.anchors=6",
        "data.bucket=32",
        "data.held_out=0.2",
        "draft.layers=1",
        "draft.block_size=4",
        "draft.vocab=48",
        "draft.path_rank=8",
        "draft.mask_token_id=3",
        "optim.steps=20",
        "optim.precision=float32",
        "optim.lr=3e-3",
        "loss.chunk=4",
        "run.save_every=10",
        "run.eval_every=10",
    ]
