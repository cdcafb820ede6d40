"""From files to what a decode program needs: target parameters in their kernel's layout, tokenizer, geometry."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from jetspec_jax.config import EngineConfig, ModelConfig
from jetspec_jax.models import decoder
from jetspec_jax.models.spec import WeightSpec
from jetspec_jax.text import Tokenizer, load_tokenizer
from jetspec_jax.typing import Params
from jetspec_jax.weights import bundled_model_path, load_params, open_source
from pallas_kernels import row_invariant_matmul as rim


@dataclasses.dataclass(frozen=True)
class Target:
    """A loaded target model."""

    path: Path
    config: ModelConfig
    params: Params
    tokenizer: Tokenizer
    kernels: str  # which matmul runs: "cpu" (native) or "xla"
    bundled: bool


def weight_transform(engine: EngineConfig) -> tuple[Callable[[str, WeightSpec, np.ndarray], Any] | None, str]:
    """The repacking of projections for `engine.kernels`, and what will run ("cpu" or "xla")."""
    if engine.dtype != "float32":
        return None, "xla"
    chosen = rim.resolve(engine.kernels)  # type: ignore[arg-type]
    if chosen == "xla":
        return None, "xla"

    def transform(_: str, spec: WeightSpec, array: np.ndarray) -> Any:
        return rim.pack(array, "cpu") if spec.linear else array

    return transform, "cpu"


def load_target(
    model: str | Path | None, engine: EngineConfig, progress: Callable[[str], None] | None = None
) -> Target:
    """Read a model (None: the bundled one) and its tokenizer.

    Raises:
        ModelFileError: anything wrong with the files, in one line.
        KernelError: `engine.kernels="cpu"` where the native kernels cannot be built.
    """
    say = progress or (lambda _: None)
    path = bundled_model_path() if model is None else model
    source = open_source(path)
    config = source.config()
    say(f"loading {config.name or source.path.name} from {source.path}")
    transform, kernels = weight_transform(engine)
    params = load_params(source, decoder.declare(config), jnp.dtype(engine.dtype), transform=transform)
    return Target(source.path, config, params, load_tokenizer(source.path), kernels, model is None)
