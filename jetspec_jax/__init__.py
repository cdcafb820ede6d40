"""Tree speculative decoding in JAX: `from jetspec_jax import LLM, SamplingParams, SpecConfig`."""

from typing import TYPE_CHECKING, Any

from jetspec_jax.config import EngineConfig, PolicyConfig, SamplingParams, SpecConfig
from jetspec_jax.errors import JetSpecError

if TYPE_CHECKING:
    from jetspec_jax.engine import LLM
    from jetspec_jax.results import GenerationResult, StreamChunk

__all__ = [
    "LLM",
    "EngineConfig",
    "GenerationResult",
    "JetSpecError",
    "PolicyConfig",
    "SamplingParams",
    "SpecConfig",
    "StreamChunk",
]


def __getattr__(name: str) -> Any:
    # Importing jax takes a second; a command line wants to speak before that.
    if name == "LLM":
        from jetspec_jax.engine import LLM

        return LLM
    if name in ("GenerationResult", "StreamChunk"):
        from jetspec_jax import results

        return getattr(results, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
