"""From files to what a decode program needs: target parameters in their kernel's layout, tokenizer,
geometry.
"""

from __future__ import annotations

import ctypes
import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jetspec_jax import drafter
from jetspec_jax.config import DraftConfig, EngineConfig, ModelConfig
from jetspec_jax.errors import ConfigError, KernelError, ModelFileError
from jetspec_jax.models import decoder
from jetspec_jax.models.spec import WeightSpec
from jetspec_jax.numerics import take_rows
from jetspec_jax.text import Tokenizer, load_tokenizer
from jetspec_jax.typing import Array, Params, PyTree
from jetspec_jax.weights import bundled_model_path, load_params, open_source, resolve_model
from pallas_kernels import native, tree_attention
from pallas_kernels import row_invariant_matmul as rim


@dataclasses.dataclass(frozen=True)
class Target:
    """A loaded target model."""

    path: Path
    config: ModelConfig
    params: Params
    tokenizer: Tokenizer
    kernels: str  # which kernels run: "cpu" (native) or "xla"
    bundled: bool

    @property
    def nbytes(self) -> int:
        """Bytes of all parameters."""
        return sum(x.nbytes for x in jax.tree.leaves(self.params))


@dataclasses.dataclass(frozen=True)
class Head:
    """A loaded draft head with the rows of the target's LM head that it scores."""

    path: Path
    config: DraftConfig
    params: Params
    lm_rows: (
        PyTree  # [Vd, H], packed or not; the target's own array where the vocabulary is not reduced
    )
    ids: Array | None  # [Vd] int32 target ids of those rows; None: the whole vocabulary

    @property
    def nbytes(self) -> int:
        """Bytes of the head's own parameters."""
        return sum(x.nbytes for x in jax.tree.leaves(self.params))


def weight_transform(
    engine: EngineConfig,
) -> tuple[Callable[[str, WeightSpec, np.ndarray], Any] | None, str]:
    """The repacking of projections for `engine.kernels`, and what will run ("cpu" or "xla").

    Raises:
        ConfigError: native kernels asked for in a dtype they are not wired for.
        KernelError: native kernels asked for, and they cannot be built here.
    """
    if engine.dtype != "float32":
        if engine.kernels == "cpu":
            raise ConfigError(
                f"kernels='cpu' run float32, not {engine.dtype}; drop --kernels cpu or --dtype"
            )
        return None, "xla"
    wanted: Any = engine.kernels
    try:
        # matmul and attention go together: the bits of a row depend on both
        chosen = {rim.resolve(wanted), tree_attention.resolve(wanted)}
    except native.KernelError as err:
        raise KernelError(str(err)) from err
    if chosen != {"cpu"}:
        return None, "xla"

    def transform(_: str, spec: WeightSpec, array: np.ndarray) -> Any:
        return rim.pack(array, "cpu") if spec.linear else array

    return transform, "cpu"


def _return_memory() -> None:
    """Gives freed conversion buffers back to the system (glibc keeps them: 90 MB after loading the
    bundled model).
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


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
    params = load_params(
        source, decoder.declare(config), jnp.dtype(engine.dtype), transform=transform
    )
    _return_memory()
    return Target(source.path, config, params, load_tokenizer(source.path), kernels, model is None)


def bundled_head_path() -> Path:
    """Folder of the draft head that ships for the bundled model.

    Raises:
        ModelFileError: the package was installed without it.
    """
    path = Path(__file__).with_name("assets") / "smollm2-135m-draft"
    if not (path / "config.json").is_file():
        raise ModelFileError(
            f"the bundled draft head is missing at {path}; reinstall, or run with --draft none"
        )
    return path


def load_head(
    path: str | Path,
    target: Target,
    engine: EngineConfig,
    progress: Callable[[str], None] | None = None,
) -> Head:
    """Read a draft head for `target` and gather the LM-head rows that it scores.

    Raises:
        ModelFileError: damaged files, or a head of another target.
    """
    folder = resolve_model(path)
    (progress or (lambda _: None))(f"loading draft head from {folder}")
    transform, _ = weight_transform(engine)
    loaded = drafter.load_draft(folder, target.config, jnp.dtype(engine.dtype), transform=transform)
    return make_head(folder, loaded.config, loaded.params, loaded.id_map, target)


def make_head(
    path: Path, config: DraftConfig, params: Params, id_map: np.ndarray | None, target: Target
) -> Head:
    """A `Head` from its parts: gathers, and packs for the target's kernels, the LM-head rows of the
    id map.
    """
    whole = decoder.lm_head_weight(target.params)
    if id_map is None:
        return Head(path, config, params, whole, None)
    rows = take_rows(whole, jnp.asarray(id_map))
    lm_rows = rim.pack(np.asarray(rows), "cpu") if target.kernels == "cpu" else rows
    return Head(path, config, params, lm_rows, jnp.asarray(id_map, jnp.int32))
