"""transformers on torch as a peer: float32, from a Hugging Face directory with exactly our
dequantised weights.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from jetspec_jax.weights import open_source
from serve.peer_worker import Worker

FLAG = "--torch-python"
PACKAGES = "torch transformers"

_SCRIPT = """
def load(path, threads):
    import inspect, torch, transformers
    torch.set_num_threads(int(threads))
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None  # write on after the end of text
    named = "cache" in inspect.signature(model.forward).parameters  # renamed in 5.x
    cache = "cache" if named else "past_key_values"

    @torch.inference_mode()
    def decode(ids, max_tokens):
        ids = torch.tensor([ids])
        keys = model(ids[:, :-1], use_cache=True).past_key_values
        began = time.perf_counter()
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, pad_token_id=0,
            max_new_tokens=max_tokens, **{cache: keys})
        return out[0, ids.shape[1]:].tolist(), time.perf_counter() - began

    hello = {"torch": torch.__version__, "transformers": transformers.__version__}
    return hello | {"threads": torch.get_num_threads()}, decode
"""


def start(python: str, folder: Path, threads: int) -> Worker:
    """transformers on a directory that `write_reference` made. Raises what `Worker` raises."""
    return Worker(FLAG, python, _SCRIPT, (folder, threads), PACKAGES)


def write_reference(source: Path, folder: Path) -> None:
    """The dequantised float32 weights of a Llama GGUF as a Hugging Face directory."""
    reader = open_source(source)
    cfg = reader.config()
    folder.mkdir(parents=True, exist_ok=True)
    save_file(
        {n: np.asarray(reader.read(n), np.float32) for n in reader.names()},
        str(folder / "model.safetensors"),
        metadata={"format": "pt"},
    )
    values = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": cfg.vocab_size,
        "hidden_size": cfg.hidden_size,
        "intermediate_size": cfg.ffn_size,
        "num_hidden_layers": cfg.num_layers,
        "num_attention_heads": cfg.num_heads,
        "num_key_value_heads": cfg.num_kv_heads,
        "head_dim": cfg.head_dim,
        "rms_norm_eps": cfg.rms_eps,
        "rope_theta": cfg.rope.theta,
        "max_position_embeddings": cfg.max_context,
        "tie_word_embeddings": cfg.tie_embeddings,
        "eos_token_id": list(cfg.eos_ids),
        "bos_token_id": cfg.bos_id,
        "hidden_act": "silu",
        "torch_dtype": "float32",
    }
    (folder / "config.json").write_text(json.dumps(values), encoding="utf-8")
