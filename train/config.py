"""Training configuration: frozen dataclasses from a TOML file, with dotted overrides
(`optim.lr=3e-4`)."""

from __future__ import annotations

import dataclasses
import difflib
import json
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, get_type_hints

from jetspec_jax.config import PATH_HEADS
from jetspec_jax.errors import ConfigError
from train.losses import LossConfig


@dataclasses.dataclass(frozen=True)
class DataConfig:
    """What is read, and how positions are drawn from it."""

    path: str = "data"  # folder of shards (train/data.py)
    target: str = ""  # model the answers come from; empty: the bundled one
    target_dtype: str = "float32"  # of its weights here, where features are computed on the fly
    sequences: int = 4  # per step
    anchors: int = 48  # per sequence and step
    max_tokens: int = 512  # of a sequence that are used; the rest is cut off
    bucket: int = 128  # sequence lengths are padded to a multiple of it (one compiled step each)
    held_out: float = 0.03  # share of the sequences, chosen by content hash
    limit: int = 0  # training sequences that are used, chosen by content hash; 0: all
    seed: int = 0


@dataclasses.dataclass(frozen=True)
class DraftSection:
    """Shape of the head; zero and empty mean: as the target's."""

    layers: int = 2
    block_size: int = 8
    causal: bool = True
    draft_shift: bool = False
    target_layer_ids: tuple[
        int, ...
    ] = ()  # empty: those of the data, else the published choice for `taps`
    taps: int = 3
    heads: int = 0
    kv_heads: int = 0
    ffn_size: int = 0
    vocab: int = 12_288  # draft vocabulary; 0: the whole target vocabulary
    path_head: str = "markov"
    path_rank: int = 64
    mask_token_id: int = (
        -1
    )  # -1: the first id that is a special token, but no pad, BOS or EOS (train/head_setup.py)
    init_layers: tuple[
        int, ...
    ] = ()  # target layers that the draft layers start from; empty: random


@dataclasses.dataclass(frozen=True)
class OptimConfig:
    """AdamW or Muon, with warm-up and a cosine schedule."""

    optimiser: str = (
        "adamw"  # adamw, or muon for the matrices of the backbone and adamw for the rest
    )
    lr: float = 6e-4
    steps: int = 2_000
    warmup: float = 0.04  # share of the steps
    final: float = 0.1  # share of lr at the end
    beta1: float = 0.9
    beta2: float = 0.95
    weight_decay: float = 0.01
    clip: float = 1.0
    accumulate: int = 1  # parts a step's sequences are cut into, one after the other
    remat: bool = False  # recompute layers in the backward pass: less memory, a third more work
    devices: int = 1  # that share a step's sequences; 0: all there are
    ema: float = 0.0  # decay of the averaged weights that are evaluated and exported; 0: off
    precision: str = "bfloat16"  # of the matrix products; master weights are float32


@dataclasses.dataclass(frozen=True)
class RunConfig:
    """Where the run lives and when it stops; these may change between a run and its resumption."""

    out: str = "runs/draft"
    max_seconds: float = 0.0  # wall time after which the run stops with a checkpoint; 0: no limit
    save_every: int = 200
    eval_every: int = 200
    eval_sequences: int = 48
    eval_anchors: int = 8  # per held-out sequence
    keep: int = 2  # checkpoints besides the best one
    warm_start: str = ""  # a head directory whose weights the run starts from (not a resumption)


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    """All sections."""

    data: DataConfig = DataConfig()
    draft: DraftSection = DraftSection()
    loss: LossConfig = dataclasses.field(default_factory=LossConfig)
    optim: OptimConfig = OptimConfig()
    run: RunConfig = RunConfig()


def _unknown(key: str, known: Sequence[str]) -> ConfigError:
    near = difflib.get_close_matches(key, known, 1, 0.4)
    return ConfigError(
        f"unknown training key {key!r}; "
        + (f"did you mean {near[0]!r}?" if near else f"known: {', '.join(known)}")
    )


def known_keys() -> dict[str, Any]:
    """Dotted key -> default value."""
    return {
        f"{s}.{k}": v
        for s, section in dataclasses.asdict(TrainConfig()).items()
        for k, v in section.items()
    }


def _convert(key: str, value: Any, kind: Any) -> Any:
    bad = ConfigError(
        f"{key}={value!r} does not fit; give a value of type {getattr(kind, '__name__', kind)}"
    )
    if kind == tuple[int, ...]:
        if not isinstance(value, (list, tuple)) or not all(type(v) is int for v in value):
            raise ConfigError(
                f"{key}={value!r} does not fit; give a list of whole numbers such as [1, 14, 27]"
            )
        return tuple(value)
    if kind is float and type(value) is int:
        return float(value)
    if type(value) is not kind:
        raise bad
    return value


def build(values: Mapping[str, Any]) -> TrainConfig:
    """TrainConfig from dotted keys.

    Raises:
        ConfigError: unknown key (names the nearest), wrong type or a value out of range.
    """
    known = known_keys()
    sections: dict[str, dict[str, Any]] = {}
    for key, value in values.items():
        if key not in known:
            raise _unknown(key, list(known))
        section, name = key.split(".", 1)
        owner = type(getattr(TrainConfig(), section))
        sections.setdefault(section, {})[name] = _convert(key, value, get_type_hints(owner)[name])
    default = TrainConfig()
    cfg = dataclasses.replace(
        default, **{s: dataclasses.replace(getattr(default, s), **v) for s, v in sections.items()}
    )
    _check(cfg)
    return cfg


def _check(cfg: TrainConfig) -> None:
    for key, low in (
        ("data.sequences", 1),
        ("data.anchors", 1),
        ("data.max_tokens", 8),
        ("data.bucket", 1),
        ("data.limit", 0),
        ("draft.layers", 1),
        ("draft.block_size", 2),
        ("draft.taps", 1),
        ("optim.steps", 1),
        ("optim.accumulate", 1),
        ("optim.devices", 0),
        ("loss.chunk", 1),
        ("run.save_every", 1),
        ("run.eval_every", 1),
        ("run.keep", 1),
    ):
        section, name = key.split(".")
        value = getattr(getattr(cfg, section), name)
        if value < low:
            raise ConfigError(f"{key}={value} is too small; give at least {low}")
    if not 0 <= cfg.data.held_out < 1:
        raise ConfigError(
            f"data.held_out={cfg.data.held_out} is no share; give 0 up to (not including) 1"
        )
    if cfg.optim.lr <= 0 or cfg.loss.temperature <= 0:
        raise ConfigError(
            f"optim.lr={cfg.optim.lr} and loss.temperature={cfg.loss.temperature} must be above 0"
        )
    terms = {k: getattr(cfg.loss, k) for k in ("ce", "kl", "tv", "acceptance", "nodes")}
    for key, value in terms.items():
        if value < 0:
            raise ConfigError(f"loss.{key}={value} is negative; give 0 to leave the term out")
    if not any(terms[k] > 0 for k in ("ce", "kl", "tv", "acceptance")):
        raise ConfigError(
            "loss.ce, loss.kl, loss.tv and loss.acceptance leave nothing to learn; give one above 0"
        )
    if not 0 <= cfg.loss.survival <= 1:
        raise ConfigError(f"loss.survival={cfg.loss.survival} is no share; give 0 to 1")
    if cfg.draft.path_head not in PATH_HEADS:
        raise ConfigError(
            f"draft.path_head={cfg.draft.path_head!r} is not known; choose {', '.join(PATH_HEADS)}"
        )
    if cfg.data.target_dtype not in ("float32", "bfloat16"):
        raise ConfigError(
            f"data.target_dtype={cfg.data.target_dtype!r} is not known; choose float32 or bfloat16"
        )
    if cfg.optim.optimiser not in ("adamw", "muon"):
        raise ConfigError(
            f"optim.optimiser={cfg.optim.optimiser!r} is not known; choose adamw or muon"
        )
    if cfg.optim.precision not in ("float32", "bfloat16"):
        raise ConfigError(
            f"optim.precision={cfg.optim.precision!r} is not known; choose float32 or bfloat16"
        )


def _literal(text: str) -> Any:
    try:
        return tomllib.loads(f"v = {text}")["v"]
    except tomllib.TOMLDecodeError:
        return text  # a bare word is a string: run.out=runs/a


def load_config(path: str | Path | None, overrides: Sequence[str] = ()) -> TrainConfig:
    """Read a TOML file and apply `section.key=value` overrides.

    Raises:
        ConfigError: missing or damaged file, unknown key, wrong type.
    """
    values: dict[str, Any] = {}
    if path is not None:
        try:
            parsed = tomllib.loads(Path(path).read_text(encoding="utf-8"))
        except OSError as err:
            raise ConfigError(
                f"{path}: cannot be read ({err.strerror or err}); give a TOML file such as "
                "configs/train/*.toml"
            ) from err
        except tomllib.TOMLDecodeError as err:
            raise ConfigError(f"{path}: not valid TOML ({err}); correct the file") from err
        for section, inner in parsed.items():
            if not isinstance(inner, dict):
                raise _unknown(section, list(known_keys()))
            values |= {f"{section}.{key}": value for key, value in inner.items()}
    for override in overrides:
        key, sep, text = override.partition("=")
        if not sep:
            raise ConfigError(
                f"override {override!r} has no '='; write section.key=value, for example "
                "optim.lr=3e-4"
            )
        values[key] = _literal(text)
    return build(values)


def to_json(cfg: TrainConfig) -> dict[str, Any]:
    """Plain nested dict, as JSON would give it back."""
    return json.loads(json.dumps(dataclasses.asdict(cfg)))


def changed_keys(
    old: Mapping[str, Any], new: Mapping[str, Any], free: Sequence[str] = ("run",)
) -> list[str]:
    """Dotted keys outside the `free` sections that differ between two configurations
    (`to_json`)."""
    sections = [s for s in {**old, **new} if s not in free]
    return [
        f"{s}.{k}"
        for s in sections
        for k in {**old.get(s, {}), **new.get(s, {})}
        if old.get(s, {}).get(k) != new.get(s, {}).get(k)
    ]
