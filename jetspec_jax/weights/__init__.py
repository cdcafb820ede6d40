"""Checkpoints: Hugging Face directories and GGUF files, read lazily under one set of names."""

from jetspec_jax.weights.bundled import bundled_model_path
from jetspec_jax.weights.gguf import GGUFSource
from jetspec_jax.weights.hf import HFSource
from jetspec_jax.weights.load import check_source, load_params
from jetspec_jax.weights.source import RawTensor, TensorSource, open_source, resolve_model

__all__ = [
    "GGUFSource",
    "HFSource",
    "RawTensor",
    "TensorSource",
    "bundled_model_path",
    "check_source",
    "load_params",
    "open_source",
    "resolve_model",
]
