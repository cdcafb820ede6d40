"""Test doubles that ship with the package: tiny random models, a byte tokenizer, and scripted
drafters.

Most tests of the engine need no trained weights: a two-layer random model speaks nonsense,
deterministically, and a drafter that is told what to draft reaches every branch of verification.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import tokenizers

from jetspec_jax import drafter
from jetspec_jax.config import (
    DraftConfig,
    EngineConfig,
    ModelConfig,
    RopeConfig,
    SamplingParams,
    SpecConfig,
)
from jetspec_jax.engine import LLM
from jetspec_jax.loading import Head, Target, make_head, weight_transform
from jetspec_jax.models import decoder
from jetspec_jax.models.spec import Declaration, flatten, init_params, nest
from jetspec_jax.text import Tokenizer
from jetspec_jax.tokenizer_files import FastBackend
from jetspec_jax.typing import Params

_CONTINUATIONS = 3  # per prompt: fixed, so that a new script needs no new program
EOS, MASK = 256, 257
VOCAB = 260  # 256 bytes, end, mask, and two that are never used


_TEMPLATE = (
    "{% for m in messages %}{% if m.role not in ['system', 'user', 'assistant'] %}{{"
    " raise_exception('unknown role ' + m.role) }}{% endif %}[{{ m.role }}] {{ m.content }}\n{%"
    " endfor %}{% if add_generation_prompt %}[assistant] {% endif %}"
)


def byte_tokenizer() -> Tokenizer:
    """One token per byte (id = byte), then `<eos>` and `<mask>`; text of any ids is their bytes."""
    # tokenizers' own printable stand-ins for bytes, in byte order
    alphabet = {i: chr(i) for i in (*range(33, 127), *range(161, 173), *range(174, 256))}
    alphabet |= {b: chr(256 + i) for i, b in enumerate(b for b in range(256) if b not in alphabet)}
    inner = tokenizers.Tokenizer(tokenizers.models.BPE({alphabet[b]: b for b in range(256)}, []))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(
        add_prefix_space=False, use_regex=False
    )
    inner.decoder = tokenizers.decoders.ByteLevel()
    inner.add_special_tokens(["<eos>", "<mask>"])
    return Tokenizer(
        FastBackend(inner), eos_ids=(EOS,), special={"eos_token": "<eos>"}, chat_template=_TEMPLATE
    )


def tiny_config(family: str = "qwen3", **changes: Any) -> ModelConfig:
    """A two-layer model of any family over bytes."""
    values: dict[str, Any] = {
        "family": family,
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "num_layers": 2,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 16,
        # whole panels, so that the native decoder stack takes it; qwen2 runs op by op
        "ffn_size": 48 if family == "qwen2" else 96,
        "max_context": 512,
        "rope": RopeConfig(theta=10_000.0),
        "tie_embeddings": family != "qwen3",
        "qkv_bias": family == "qwen2",
        "qk_norm": family.startswith("qwen3"),
        "eos_ids": (EOS,),
        "name": f"tiny-{family}",
    }
    if family == "qwen3_moe":
        values |= {
            "num_experts": 4,
            "experts_per_token": 2,
            "moe_ffn_size": 24,
            "norm_topk_prob": True,
        }
    return ModelConfig(**{**values, **changes})


def _params(decl: Declaration, seed: int, engine: EngineConfig, std: float) -> tuple[Params, str]:
    transform, kernels = weight_transform(engine)
    flat = flatten(init_params(decl, jax.random.key(seed), jnp.dtype(engine.dtype), std=std))
    if transform is not None:
        flat = {k: transform(k, decl[k], np.asarray(v)) for k, v in flat.items()}
        flat = {k: jnp.asarray(v) if isinstance(v, np.ndarray) else v for k, v in flat.items()}
    return nest(flat), kernels


def tiny_target(
    config: ModelConfig | None = None, *, seed: int = 0, engine: EngineConfig | None = None
) -> Target:
    """A random target. Its weights are large enough that greedy decoding does not fall into one
    loop at once, at any width.
    """
    config = config or tiny_config()
    std = 0.3 * (32 / config.hidden_size) ** 0.5
    params, kernels = _params(decoder.declare(config), seed, engine or EngineConfig(), std)
    return Target(Path("tiny"), config, params, byte_tokenizer(), kernels, False)


def tiny_head(
    target: Target, *, seed: int = 1, engine: EngineConfig | None = None, **changes: Any
) -> Head:
    """A random draft head for a tiny target: proposes nonsense, but through every part of
    drafting.
    """
    cfg = target.config
    values: dict[str, Any] = {
        "hidden_size": cfg.hidden_size,
        "num_layers": 1,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 16,
        "ffn_size": 64,
        "target_hidden_size": cfg.hidden_size,
        "num_target_layers": cfg.num_layers,
        "target_layer_ids": (0, 1),
        "vocab_size": cfg.vocab_size,
        "mask_token_id": MASK,
        "block_size": 6,
    }
    config = DraftConfig(**{**values, **changes})
    std = 0.3 * (32 / config.hidden_size) ** 0.5
    params, _ = _params(drafter.declare(config), seed, engine or EngineConfig(), std)
    ids = None
    if config.draft_vocab_size is not None:
        ids = np.sort(
            np.random.default_rng(seed).permutation(cfg.vocab_size)[: config.draft_vocab_size]
        ).astype(np.int32)
    return make_head(Path("tiny-head"), config, params, ids, target)


def tiny_llm(
    family: str = "qwen3",
    *,
    head: bool = True,
    spec: SpecConfig | None = None,
    engine: EngineConfig | None = None,
    **changes: Any,
) -> LLM:
    """An engine over a tiny random model; `changes` go to `tiny_config`."""
    engine = engine or EngineConfig(capacity=192, attention_chunk=64, prefill_chunk=32)
    target = tiny_target(tiny_config(family, **changes), engine=engine)
    return LLM.from_parts(
        target, tiny_head(target, engine=engine) if head else None, spec=spec, engine=engine
    )


def scripted(llm: LLM, scripts: Mapping[tuple[int, ...], Sequence[Sequence[int]]]) -> SpecConfig:
    """Makes `llm` draft given continuations; returns the speculation settings to use (mode tree).

    Args:
        llm: an engine; its script is replaced.
        scripts: prompt ids -> up to 3 continuations. Prompts must differ in their first id, which
            selects the script. Continuation ids are placed right after the prompt, by absolute
            position; -1 drafts nothing there.
    """
    size = llm.capacity + 64
    table = np.full((llm.model_config.vocab_size, _CONTINUATIONS, size), -1, np.int32)
    for prompt, continuations in scripts.items():
        for r, tokens in enumerate(continuations):
            table[prompt[0], r, len(prompt) : len(prompt) + len(tokens)] = tokens
    llm.script = jnp.asarray(table)
    return SpecConfig(mode="tree", drafter="scripted", budget=8, depth=5)


def oracle(
    llm: LLM, prompts: Sequence[Sequence[int]], tokens: int = 96, *, wrong: bool = False
) -> SpecConfig:
    """A drafter that says exactly what the target will say, or (`wrong`) never does."""
    plain = llm.generate(
        list(prompts),
        SamplingParams(max_tokens=tokens, ignore_eos=True),
        spec=SpecConfig(mode="off"),
    )
    vocab = llm.model_config.vocab_size
    scripts = {
        tuple(p): [[(t + 1) % vocab for t in r.token_ids] if wrong else list(r.token_ids)]
        for p, r in zip(prompts, plain, strict=True)
    }
    return scripted(llm, scripts)


def with_budget(spec: SpecConfig, **changes: Any) -> SpecConfig:
    """`spec` with other fields (budget, depth, builder, ...)."""
    return dataclasses.replace(spec, **changes)
