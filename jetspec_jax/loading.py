"""From files to what a decode program needs: target parameters in their kernel's layout, tokenizer,
geometry.
"""

from __future__ import annotations

import ctypes
import dataclasses
import logging
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
from jetspec_jax.numerics import for_kernels, take_rows
from jetspec_jax.text import Tokenizer, load_tokenizer, tokenizer_from_gguf
from jetspec_jax.typing import Array, Params, PyTree
from jetspec_jax.weights import (
    GGUFSource,
    TensorSource,
    bundled_model_path,
    load_params,
    open_source,
    resolve_model,
)
from jetspec_jax.weights.packed import Packer
from pallas_kernels import dispatch, native, parameters, triton_call
from pallas_kernels import row_invariant_matmul as rim
from pallas_kernels.row_invariant_matmul.specs import Arithmetic

_logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Target:
    """A loaded target model."""

    path: Path
    config: ModelConfig
    params: Params
    tokenizer: Tokenizer
    kernels: str  # which kernels run: "cpu" (native), "gpu" (Pallas, Triton) or "xla"
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


def _check_gpu_kernels() -> None:
    """Raises native.KernelError unless there are kernels for this GPU: Hopper's, or Triton's."""
    here = dispatch.device()
    if here.allows("mosaic_gpu"):
        return
    if not here.allows("triton"):
        raise native.KernelError(
            f"an NVIDIA GPU of compute capability 8.0 or later is needed, not {here.kind!r}"
        )
    triton_call.load("tree_attention")


def resolve_kernels(engine: EngineConfig) -> str:
    """What `engine.kernels` means here: "cpu" (native), "gpu" (Pallas or Triton) or "xla".

    Raises:
        ConfigError: kernels asked for in a dtype they are not wired for, or kernel parameters that
            are unknown or of kernels that do not run here.
        KernelError: kernels asked for, and they cannot be built or run here; or kernels that the
            compiler refuses with these parameters.
    """
    if not engine.kernel_params:
        return _resolve_kernels(engine)
    try:
        values = parameters.check(dict(engine.kernel_params))
    except parameters.ParameterError as err:
        raise ConfigError(str(err)) from err
    with parameters.using(values):
        if engine.dtype == "float32" and engine.kernels != "xla":
            try:
                native.library()  # never XLA in silence where parameters of kernels are given
            except native.KernelError as err:
                raise KernelError(f"kernel_params {dict(values)}: {err}") from err
        kernels = _resolve_kernels(engine)
    for name, _ in values:
        needed = "cpu" if parameters.is_build(name) else "gpu"
        if kernels != needed:
            raise ConfigError(
                f"kernel parameter {name!r} is of the {needed} kernels, and kernels={kernels!r} "
                "run here; drop it"
            )
    return kernels


def _resolve_kernels(engine: EngineConfig) -> str:
    if engine.kernels == "gpu" and engine.dtype != "bfloat16":
        raise ConfigError(
            f"kernels='gpu' multiply bfloat16, not {engine.dtype}; give dtype bfloat16"
        )
    if engine.kernels == "gpu" or (
        engine.kernels == "auto" and engine.dtype == "bfloat16" and jax.default_backend() == "gpu"
    ):
        try:
            _check_gpu_kernels()
        except native.KernelError as err:
            if engine.kernels == "gpu":
                raise KernelError(f"kernels='gpu': {err}; drop it, or run on such a GPU") from err
            _logger.warning("XLA instead of GPU kernels: %s", err)
            return "xla"
        return "gpu"
    if engine.dtype != "float32":
        if engine.kernels == "cpu":
            raise ConfigError(
                f"kernels='cpu' run float32, not {engine.dtype}; drop --kernels cpu or --dtype"
            )
        return "xla"
    wanted: Any = engine.kernels
    try:
        # all ops are one library: what one of them can have, all can
        return rim.resolve(wanted)
    except native.KernelError as err:
        raise KernelError(str(err)) from err


def resolve_arithmetic(engine: EngineConfig, kernels: str) -> Arithmetic:
    """What `engine.arithmetic` means here, for weights that have both.

    Args:
        engine: the settings.
        kernels: what `resolve_kernels` gave.

    Raises:
        ConfigError: integer arithmetic asked for where the native kernels do not run.
    """
    if engine.arithmetic == "integer" and kernels != "cpu":
        reason = (
            f"dtype {engine.dtype}"
            if engine.dtype != "float32"
            else "kernels 'xla'"
            if engine.kernels == "xla"
            else "they could not be built"
        )
        raise ConfigError(
            "arithmetic='integer' is of the native float32 kernels, which do not run here "
            f"({reason}); drop one of the two"
        )
    if engine.arithmetic == "float" or kernels != "cpu":
        return "float"
    return "integer" if engine.arithmetic == "integer" or rim.integer_pays() else "float"


def weight_transform(
    engine: EngineConfig,
) -> tuple[Callable[[str, WeightSpec, np.ndarray], Any] | None, str]:
    """The packing of projections that are arrays in memory already, and what will run.

    Raises:
        ConfigError, KernelError: as `resolve_kernels`.
    """
    if resolve_kernels(engine) != "cpu":
        return None, "xla"

    def transform(_: str, spec: WeightSpec, array: np.ndarray) -> Any:
        return rim.pack(array, "cpu") if spec.linear else array

    return transform, "cpu"


def weight_formats(params: PyTree) -> dict[str, int]:
    """Bytes of parameters by format ("q4_1", "float32", ...), largest first."""
    sizes: dict[str, int] = {}
    for leaf in jax.tree.leaves(params, is_leaf=lambda x: isinstance(x, rim.PackedWeight)):
        name = str(leaf.format if isinstance(leaf, rim.PackedWeight) else leaf.dtype)
        name = {"f32": "float32", "bf16": "bfloat16"}.get(name, name)
        sizes[name] = sizes.get(name, 0) + leaf.nbytes
    return dict(sorted(sizes.items(), key=lambda item: -item[1]))


def weight_arithmetic(params: PyTree) -> Arithmetic:
    """ "integer" if any weight is multiplied so."""
    leaves = jax.tree.leaves(params, is_leaf=lambda x: isinstance(x, rim.PackedWeight))
    packed = [x for x in leaves if isinstance(x, rim.PackedWeight)]
    return "integer" if any(x.arithmetic == "integer" for x in packed) else "float"


def format_line(params: PyTree) -> str:
    """`weight_formats` in words: "q4_1 66 MB, q8_0 30 MB, float32 0.1 MB"."""
    return ", ".join(
        f"{name} {size / 1e6:.{0 if size >= 1e6 else 1}f} MB"
        for name, size in weight_formats(params).items()
    )


def _return_memory() -> None:
    """Gives freed conversion buffers back to the system (glibc keeps them: 90 MB after loading the
    bundled model).
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def tokenizer_of(source: TensorSource) -> Tokenizer:
    """The tokenizer of a model file or directory.

    Raises:
        ModelFileError: there is none, or none that can be read.
    """
    if isinstance(source, GGUFSource):
        return tokenizer_from_gguf(source)
    return load_tokenizer(source.path)


def load_target(
    model: str | Path | None, engine: EngineConfig, progress: Callable[[str], None] | None = None
) -> Target:
    """Read a model (None: the bundled one) and its tokenizer.

    Raises:
        ModelFileError: anything wrong with the files, in one line.
        KernelError: `engine.kernels="cpu"` where the native kernels cannot be built.
        ConfigError: `engine.arithmetic="integer"` where nothing can be multiplied so.
    """
    with parameters.using(engine.kernel_params):
        return _load_target(model, engine, progress or (lambda _: None))


def _load_target(
    model: str | Path | None, engine: EngineConfig, say: Callable[[str], None]
) -> Target:
    path = bundled_model_path() if model is None else model
    source = open_source(path)
    config = source.config()
    say(f"loading {config.name or source.path.name} from {source.path}")
    kernels = resolve_kernels(engine)
    arithmetic = resolve_arithmetic(engine, kernels)
    # before the weights: what it needs while it is built does not add to the peak
    tokenizer = tokenizer_of(source)
    pack = None
    if kernels == "cpu":
        pack = Packer(engine.weights == "stored", arithmetic=arithmetic)
    params = load_params(source, decoder.declare(config), jnp.dtype(engine.dtype), pack=pack)
    _tell_formats(say, "weights", params, pack)
    if engine.arithmetic == "integer" and weight_arithmetic(params) == "float":
        raise ConfigError(
            f"arithmetic='integer' needs Q4_1, Q4_0 or Q8_0 weights, and {source.path.name} has "
            "none; drop --arithmetic"
        )
    if kernels == "gpu":
        params = for_kernels(params)
    _return_memory()
    return Target(source.path, config, params, tokenizer, kernels, model is None)


def _tell_formats(
    say: Callable[[str], None], what: str, params: Params, pack: Packer | None
) -> None:
    say(f"{what}: {format_line(params)}")
    expanded = pack.expanded_line() if pack is not None else None
    if expanded is not None:
        say(expanded)


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
    with parameters.using(engine.kernel_params):
        return _load_head(path, target, engine, progress or (lambda _: None))


def _load_head(
    path: str | Path, target: Target, engine: EngineConfig, say: Callable[[str], None]
) -> Head:
    folder = resolve_model(path, "a draft head's directory (config.json + safetensors)")
    say(f"loading draft head from {folder}")
    pack = None
    kernels = resolve_kernels(engine)
    arithmetic = resolve_arithmetic(engine, kernels)
    if kernels == "cpu":
        quantise = engine.draft_weights == "q8_0"
        pack = Packer(engine.weights == "stored", quantise, arithmetic)
    loaded = drafter.load_draft(folder, target.config, jnp.dtype(engine.dtype), pack=pack)
    _tell_formats(say, "draft head weights", loaded.params, pack)
    return make_head(folder, loaded.config, loaded.params, loaded.id_map, target)


def make_head(
    path: Path, config: DraftConfig, params: Params, id_map: np.ndarray | None, target: Target
) -> Head:
    """A `Head` from its parts: gathers the LM-head rows of the id map, in their format."""
    whole = decoder.lm_head_weight(target.params)
    if id_map is None:
        return Head(path, config, params, whole, None)
    packed = isinstance(whole, rim.PackedWeight)
    lm_rows = rim.gather(whole, id_map) if packed else take_rows(whole, jnp.asarray(id_map))
    return Head(path, config, params, lm_rows, jnp.asarray(id_map, jnp.int32))
