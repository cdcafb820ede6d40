"""Frozen configuration dataclasses. Every value that reaches a compiled program as a constant lives
here.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Mapping
from typing import Any, Self

from jetspec_jax.errors import ConfigError

FAMILIES = ("llama", "qwen2", "qwen3", "qwen3_moe")
ROPE_KINDS = ("default", "linear", "llama3", "yarn")
SPEC_MODES = ("auto", "tree", "chain", "off")
DRAFTERS = ("head", "lookup", "hybrid", "none")
SCRIPTED = "scripted"  # a test double (testing.py): drafts given tokens
BUILDERS = ("exact", "chain", "accum_logp", "top2gap", "depth_rank_histogram")
MAX_LOSS = 1e12  # plain steps: more than a cost table holds for what must never be chosen
MAX_PAUSE = 1_000_000  # rounds: for ever
MAX_BUDGET = 256  # tree nodes; the published systems go no further
NUMERICS = ("fast", "bitwise")
KERNELS = ("auto", "cpu", "gpu", "xla")
WEIGHTS = ("stored", "float32")
DRAFT_WEIGHTS = ("q8_0", "stored")
ARITHMETIC = ("auto", "float", "integer")
PATH_HEADS = ("none", "markov", "pairwise")
DTYPES = ("float32", "bfloat16", "float16")


class _FromMapping:
    """Adds `from_mapping` to a frozen dataclass: unknown keys are errors that name the nearest
    key.
    """

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> Self:
        names = [f.name for f in dataclasses.fields(cls)]  # type: ignore[arg-type]
        for key in values:
            if key not in names:
                near = difflib.get_close_matches(key, names, 1)
                hint = f"did you mean {near[0]!r}?" if near else f"known keys: {', '.join(names)}"
                raise ConfigError(f"unknown key {key!r} in {cls.__name__}; {hint}")
        made = cls(**values)
        # no field: it is not part of what a config is, and a changed copy does not inherit it
        object.__setattr__(made, "_given", frozenset(values))
        return made


def explicit(config: Any) -> frozenset[str]:
    """Names of fields that somebody asked for: those that `from_mapping` got, also where they say
    the default, and those that differ from the default.
    """
    given = getattr(config, "_given", frozenset())
    changed = {
        f.name
        for f in dataclasses.fields(config)
        if f.default is not dataclasses.MISSING and getattr(config, f.name) != f.default
    }
    return frozenset(given | changed)


def _one_of(owner: str, name: str, value: Any, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        near = difflib.get_close_matches(str(value), allowed, 1)
        hint = f"did you mean {near[0]!r}?" if near else f"choose one of {', '.join(allowed)}"
        raise ConfigError(f"{owner}.{name}={value!r} is not known; {hint}")


def _at_least(owner: str, name: str, value: Any, low: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not value >= low:
        raise ConfigError(
            f"{owner}.{name}={value!r} is no whole number or too small; give at least {low}"
        )


@dataclasses.dataclass(frozen=True)
class RopeConfig(_FromMapping):
    """Rotary position embedding. `kind` as in Hugging Face `rope_scaling`: default, linear, llama3,
    yarn.
    """

    theta: float = 10_000.0
    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    original_max_position: int = 8_192  # llama3, yarn
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    attention_factor: float | None = (
        None  # yarn; None: derived from `factor` (and mscale, when given)
    )
    mscale: float | None = None  # yarn (DeepSeek style)
    mscale_all_dim: float | None = None  # yarn
    truncate: bool = True  # yarn: round the correction range to whole dimensions

    def __post_init__(self) -> None:
        _one_of("RopeConfig", "kind", self.kind, ROPE_KINDS)


@dataclasses.dataclass(frozen=True)
class ModelConfig(_FromMapping):
    """Geometry of a target model. Sizes are counts of elements."""

    family: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ffn_size: int
    max_context: int
    rms_eps: float = 1e-6
    rope: RopeConfig = RopeConfig()
    tie_embeddings: bool = False
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    num_experts: int = 0  # 0: dense
    experts_per_token: int = 0
    moe_ffn_size: int = 0
    norm_topk_prob: bool = False
    dense_layers: tuple[int, ...] = ()  # layers of a MoE model that use a dense MLP
    eos_ids: tuple[int, ...] = ()
    bos_id: int | None = None
    pad_id: int | None = None
    name: str = ""

    def __post_init__(self) -> None:
        _one_of("ModelConfig", "family", self.family, FAMILIES)
        for field in (
            "vocab_size",
            "hidden_size",
            "num_layers",
            "num_heads",
            "num_kv_heads",
            "head_dim",
            "max_context",
        ):
            _at_least("ModelConfig", field, getattr(self, field), 1)
        if self.num_heads % self.num_kv_heads:
            raise ConfigError(
                f"num_heads={self.num_heads} is not a multiple of num_kv_heads={self.num_kv_heads};"
                " check num_attention_heads and num_key_value_heads in the model's config.json"
            )

    @property
    def q_width(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_width(self) -> int:
        return self.num_kv_heads * self.head_dim

    def is_moe_layer(self, layer: int) -> bool:
        return self.num_experts > 0 and layer not in self.dense_layers


@dataclasses.dataclass(frozen=True)
class DraftConfig(_FromMapping):
    """Geometry of a draft head (algorithm.md section 2, plus our optional path head and reduced
    vocabulary).
    """

    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ffn_size: int
    target_hidden_size: int
    num_target_layers: int
    target_layer_ids: tuple[int, ...]
    vocab_size: int  # of the target
    mask_token_id: int
    block_size: int = 16
    causal: bool = True
    draft_shift: bool = False  # True: slot k predicts the token at position k + 1
    rms_eps: float = 1e-6
    rope: RopeConfig = RopeConfig()
    draft_vocab_size: int | None = None  # None: the target's whole vocabulary
    path_head: str = "none"  # none | markov | pairwise
    path_rank: int = 0

    def __post_init__(self) -> None:
        _one_of("DraftConfig", "path_head", self.path_head, PATH_HEADS)
        _at_least("DraftConfig", "block_size", self.block_size, 2)
        if self.path_head != "none":
            _at_least("DraftConfig", "path_rank", self.path_rank, 1)

    @property
    def depth(self) -> int:
        """Depths drafted per round: one less than the block, whose slot 0 is the anchor (in-place
        convention).
        """
        return self.block_size if self.draft_shift else self.block_size - 1

    @property
    def head_vocab_size(self) -> int:
        return self.draft_vocab_size or self.vocab_size


def _between(owner: str, name: str, value: Any, low: float, high: float) -> None:
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not (number and low <= value <= high):
        raise ConfigError(
            f"{owner}.{name}={value!r} is out of range; give a number from {low} to {high}"
        )


@dataclasses.dataclass(frozen=True)
class PolicyConfig(_FromMapping):
    """When drafting pays (`policy`, mode auto). Values are data of the compiled program: another
    value compiles nothing. Times are in plain steps.
    """

    first_pause: int = 4  # rounds without drafting after it did not pay
    longest_pause: int = 16  # rounds; a pause doubles up to here while drafting goes on failing
    decay: float = 0.9  # of the running gain, per drafted round: it remembers 1 / (1 - decay)
    first_credit: float = 0.15  # running gain that a sequence starts with
    later_credit: float = 0.03  # running gain after a pause
    trust_decay: float = 0.9  # of the running ratio of accepted to promised tokens
    trust_low: float = 0.25
    trust_high: float = 2.0
    # A sequence never loses more time against plain decoding than first_loss plain steps and
    # loss_share of its tokens; what drafting gained before counts too, up to most_loss.
    first_loss: float = 4.0
    loss_share: float = 0.015
    most_loss: float = 6.0
    # What earlier requests of an engine left of their allowance moves first_loss of the next, by
    # this weight, not below least_loss.
    memory: float = 0.5
    least_loss: float = 1.5

    def __post_init__(self) -> None:
        name = "PolicyConfig"
        _at_least(name, "first_pause", self.first_pause, 0)
        _at_least(name, "longest_pause", self.longest_pause, self.first_pause)
        _between(name, "longest_pause", self.longest_pause, 0, MAX_PAUSE)
        for field in ("decay", "trust_decay", "memory", "loss_share"):
            _between(name, field, getattr(self, field), 0.0, 1.0)
        for field in ("first_credit", "later_credit"):
            _between(name, field, getattr(self, field), 0.0, 1_000.0)
        _between(name, "trust_low", self.trust_low, 0.0, 1_000.0)
        _between(name, "trust_high", self.trust_high, self.trust_low, 1_000.0)
        _between(name, "least_loss", self.least_loss, 0.0, MAX_LOSS)
        _between(name, "first_loss", self.first_loss, self.least_loss, MAX_LOSS)
        _between(name, "most_loss", self.most_loss, self.first_loss, MAX_LOSS)


@dataclasses.dataclass(frozen=True)
class SpecConfig(_FromMapping):
    """What to speculate with. `None` means: take the drafter's or the device's own best value.

    A `policy` given as a mapping (a table of a config file) becomes a PolicyConfig.
    """

    mode: str = "auto"  # auto | tree | chain | off
    drafter: str | None = (
        None  # head | lookup | hybrid | none; None: hybrid with a head, lookup without
    )
    budget: int | None = None  # tree nodes verified per round, root included
    depth: int | None = None  # longest path below the root; None: all the drafter gives
    head_depth: int | None = None  # depths drafted by the head (lookup may go on to `depth`);
    # None: all where depth, mode or drafter ask for trees of their own, else the device's best
    width: int = 8  # candidates kept per depth
    path_head: bool = True  # score a candidate under its parent, where the head has learnt to
    builder: str = "exact"
    lookup_ngram: int = 3  # longest n-gram that prompt lookup matches
    lookup_branches: int = 2  # continuations that prompt lookup offers
    top2gap_beta: float = 2.0
    top2gap_g0: float = 1.0
    histogram: tuple[tuple[float, ...], ...] | None = (
        None  # depth x rank acceptance, for depth_rank_histogram
    )
    histogram_threshold: float = 0.02
    policy: PolicyConfig = PolicyConfig()  # data, not part of a compiled program

    def __post_init__(self) -> None:
        if isinstance(self.policy, Mapping):
            object.__setattr__(self, "policy", PolicyConfig.from_mapping(self.policy))
        if not isinstance(self.policy, PolicyConfig):
            raise ConfigError(
                f"SpecConfig.policy={self.policy!r} is no PolicyConfig and no mapping; "
                "give one of them"
            )
        _one_of("SpecConfig", "mode", self.mode, SPEC_MODES)
        if self.drafter is not None:
            _one_of("SpecConfig", "drafter", self.drafter, (*DRAFTERS, SCRIPTED))
        _one_of("SpecConfig", "builder", self.builder, BUILDERS)
        if not isinstance(self.path_head, bool):
            raise ConfigError(
                f"SpecConfig.path_head={self.path_head!r} is no truth value; give true or false"
            )
        for field, low in (("width", 1), ("lookup_ngram", 1), ("lookup_branches", 1)):
            _at_least("SpecConfig", field, getattr(self, field), low)
        for field in ("budget", "depth", "head_depth"):
            if getattr(self, field) is not None:
                _at_least("SpecConfig", field, getattr(self, field), 1)
        if self.budget is not None and self.budget > MAX_BUDGET:
            raise ConfigError(
                f"budget={self.budget} is more nodes than a round holds; give at most {MAX_BUDGET}"
            )
        if self.builder == "depth_rank_histogram" and self.histogram is None:
            raise ConfigError(
                "SpecConfig.builder='depth_rank_histogram' needs a recorded acceptance table; "
                "give SpecConfig.histogram or choose builder='exact'"
            )

    @property
    def enabled(self) -> bool:
        return self.mode != "off" and self.drafter != "none"


@dataclasses.dataclass(frozen=True)
class SamplingParams(_FromMapping):
    """How tokens are chosen. temperature 0 is greedy (lowest id wins ties)."""

    temperature: float = 0.0
    top_k: int = 0  # 0: off
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    max_tokens: int = 256
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None  # None: off; k: the k best alternatives beside the chosen token

    def __post_init__(self) -> None:
        checks = (
            ("temperature", self.temperature, 0.0, 100.0),
            ("top_k", self.top_k, 0, 2**31 - 1),
            ("min_p", self.min_p, 0.0, 1.0),
            ("seed", self.seed, 0, 2**32 - 1),
            ("max_tokens", self.max_tokens, 1, 2**31 - 1),
        )
        for name, value, low, high in checks:
            ok = (
                isinstance(value, (int, float))
                and not isinstance(value, bool)
                and low <= value <= high
            )
            if not ok:
                raise ConfigError(
                    f"{name}={value!r} is out of range; give a number from {low} to {high}"
                )
        if not (isinstance(self.top_p, (int, float)) and 0.0 < self.top_p <= 1.0):
            raise ConfigError(
                f"top_p={self.top_p!r} is out of range; give a number above 0 and up to 1"
            )
        if self.logprobs is not None and not 0 <= self.logprobs <= 20:
            raise ConfigError(f"logprobs={self.logprobs!r} is out of range; give 0 to 20")
        if any(not isinstance(s, str) or not s for s in self.stop):
            raise ConfigError(
                f"stop={list(self.stop)!r} holds an empty or non-text stop; give non-empty strings"
            )


def _pairs(value: Any) -> tuple[tuple[str, int], ...]:
    """Kernel parameters in the order of their names, from a mapping or from pairs."""
    pairs = list(value.items() if isinstance(value, Mapping) else value)
    for pair in pairs:
        name, number = pair if isinstance(pair, (tuple, list)) and len(pair) == 2 else (pair, None)
        if not isinstance(name, str) or isinstance(number, bool) or not isinstance(number, int):
            raise ConfigError(
                f"EngineConfig.kernel_params holds {pair!r}; "
                'give pairs like ("tree_attention.LEAD", 128)'
            )
    if len({name for name, _ in pairs}) < len(pairs):
        raise ConfigError("EngineConfig.kernel_params names a parameter twice; give it once")
    return tuple(sorted((name, number) for name, number in pairs))


@dataclasses.dataclass(frozen=True)
class EngineConfig(_FromMapping):
    """Sizes and numerics of an engine; these fix which programs are compiled.

    `weights` is what projections are in memory where the native kernels run: "stored", the format
    of the file (GGUF blocks, bfloat16) wherever a kernel decodes it, or "float32", expanded at
    load. The values are the same, and so are the tokens; only memory and speed differ. With XLA
    weights are arrays of `dtype` in both cases.

    `draft_weights` is the same for the draft head, or "q8_0": rounded to 8 bits at load. What the
    head drafts decides how many tokens a round commits, never which.

    `arithmetic` is how Q4_1, Q4_0 and Q8_0 weights are multiplied where the native kernels run:
    "float", sums of float32 products, "integer", exact integer sums of every 32 inputs, which make
    several rows cheaper, or "auto", integer where the CPU has AVX-512 VNNI. Logits differ in their
    last bits; both are as close to exact sums, and both give plain and tree decoding equal bits.

    `kernel_params` are values of kernel parameters (`pallas_kernels.parameters`), as pairs of
    ("<op>.<NAME>", value) or a mapping, e.g. {"tree_attention.LEAD": 128}. Native kernels are
    compiled anew for a set of values that this machine has not had.
    """

    capacity: int | None = (
        None  # tokens per sequence, prompt and answer together; None: up to 2,048
    )
    dtype: str = "float32"
    numerics: str | None = None  # fast | bitwise; None: bitwise where it is free (native kernels)
    kernels: str = "auto"  # auto | cpu (native, XLA FFI) | gpu (Pallas, Triton) | xla
    weights: str = "stored"  # stored | float32
    draft_weights: str = "q8_0"  # q8_0 | stored (as `weights`)
    arithmetic: str = "auto"  # auto | float | integer
    max_batch: int = 32
    prefill_chunk: int = 64
    attention_chunk: int = 256
    kernel_params: tuple[tuple[str, int], ...] = ()  # by name; names are checked at load

    def __post_init__(self) -> None:
        object.__setattr__(self, "kernel_params", _pairs(self.kernel_params))
        _one_of("EngineConfig", "dtype", self.dtype, DTYPES)
        if self.numerics is not None:
            _one_of("EngineConfig", "numerics", self.numerics, NUMERICS)
        _one_of("EngineConfig", "kernels", self.kernels, KERNELS)
        _one_of("EngineConfig", "weights", self.weights, WEIGHTS)
        _one_of("EngineConfig", "draft_weights", self.draft_weights, DRAFT_WEIGHTS)
        _one_of("EngineConfig", "arithmetic", self.arithmetic, ARITHMETIC)
        if self.arithmetic == "integer" and self.weights == "float32":
            raise ConfigError(
                "arithmetic='integer' multiplies quantised weights, not weights='float32'; "
                "drop one of them"
            )
        for field in ("capacity", "max_batch", "prefill_chunk", "attention_chunk"):
            if getattr(self, field) is not None:
                _at_least("EngineConfig", field, getattr(self, field), 1)
