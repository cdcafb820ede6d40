"""A worker without an engine, parameters, and a judge: speeds are made up and known exactly."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

from jetspec_jax.autotune.candidate import Candidate
from jetspec_jax.autotune.key import DeploymentKey
from jetspec_jax.autotune.verdict import Verdict
from jetspec_jax.errors import WorkerError

KEY = DeploymentKey(
    batch=1,
    target="fake",
    target_family="llama",
    target_digest="0" * 16,
    drafter="none",
    device="fake cpu, 2 cores",
    kernels="cpu",
    weights="q4_1",
    arithmetic="integer",
    dtype="float32",
    context=256,
    suite="mixed",
)


@dataclasses.dataclass(frozen=True)
class Knob:
    name: str
    kind: str
    default: Any
    choices: tuple[Any, ...] = ()
    low: float | None = None
    high: float | None = None
    log: bool = False
    applies: Callable[..., bool] = bool  # real declarations hold functions


SPACE = (
    Knob("spec.width", "int", 8, low=1, high=12),
    Knob("spec.builder", "choice", "exact", choices=("exact", "accum_logp")),
    Knob("policy.first_credit", "float", 0.15, low=0.02, high=1.0, log=True),
    Knob("kernel.tree_attention.LEAD", "choice", 4, choices=(1, 2, 4, 8)),
    Knob("kernel.row_invariant_matmul.AHEAD", "choice", 64, choices=(16, 64, 256)),
    Knob("engine.draft_weights", "choice", "q8_0", choices=("q8_0", "stored")),
)


def compose(space: Sequence[Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """Everything that is not the default, as `space.params_of` does in the simple case."""
    defaults = {p.name: p.default for p in space}
    return {k: v for k, v in values.items() if v != defaults[k]}


def seconds(params: Mapping[str, Any]) -> float:
    """Of a prompt: width 4 and a lead of 8 are best, another builder costs, budget 1 costs more."""
    whole = {p.name: p.default for p in SPACE} | dict(params)
    spent = 1.0 + 0.05 * abs(whole["spec.width"] - 4)
    spent += 0.3 if whole["spec.builder"] != "exact" else 0.0
    spent += 0.5 if whole.get("spec.budget") == 1 else 0.0
    spent -= 0.1 if whole["kernel.tree_attention.LEAD"] == 8 else 0.0
    return spent


class FakeWorker:
    """Takes `seconds` for every prompt; `noise(call)` multiplies it."""

    started: ClassVar[list[FakeWorker]] = []
    wrong: ClassVar[Callable[[Mapping[str, Any]], bool]] = staticmethod(lambda params: False)
    dies: ClassVar[Callable[[Mapping[str, Any]], bool]] = staticmethod(lambda params: False)
    on_call: ClassVar[Callable[[int], float]] = staticmethod(lambda call: 1.0)
    calls: ClassVar[int] = 0

    def __init__(self, candidate: Candidate) -> None:
        if FakeWorker.dies(candidate.params):
            raise WorkerError("the worker ended by signal 11")
        self.candidate, self.closed = candidate, False
        self.asked: list[dict[str, Any]] = []
        self.warmed: list[dict[str, Any]] = []
        FakeWorker.started.append(self)

    def warm(
        self, batch: int = 1, overrides: Any = None, sampling: Any = (), timeout: float = 0
    ) -> float:
        self.warmed.append(dict(overrides or {}))
        return 0.0

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        max_tokens: int = 256,
        *,
        sampling: Any = None,
        overrides: Mapping[str, Any] | None = None,
        batch: int = 1,
        timeout: float = 0,
    ) -> list[dict[str, Any]]:
        if self.closed:
            raise WorkerError("this worker has ended; start another one")
        params = {**self.candidate.params, **(overrides or {})}
        self.asked.append(params)
        FakeWorker.calls += 1
        spent = seconds(params) * FakeWorker.on_call(FakeWorker.calls)
        shift = int(FakeWorker.wrong(params))
        return [
            {
                "token_ids": [p[0], p[0] + 1, p[0] + 2 + shift],
                "decode_s": spent,
                "prefill_s": 0.0,
                "rounds": 2,
                "tau": 1.5,
                "nodes": 8,
            }
            for p in prompts
        ]

    def close(self) -> None:
        self.closed = True


def verdict(
    incumbent: Candidate, candidate: Candidate, accepted: bool = True, **more: Any
) -> Verdict:
    """What a gate would say of the made-up speeds."""
    ratio = seconds(incumbent.params) / seconds(candidate.params)
    values: dict[str, Any] = {
        "accepted": accepted,
        "reason": "faster, and nothing changed" if accepted else "not faster",
        "candidate": candidate.id,
        "incumbent": incumbent.id,
        "tokens_identical": True,
        "bits_identical": True,
        "level": "bitwise",
        "asked": "bitwise",
        "positions": 6_000,
        "free_tokens": 500,
        "sampled_tokens": 100,
        "rows": 100,
        "logits": 100,
        "mismatches": (),
        "noise": None,
        "deviation": None,
        "speed_ratio": ratio,
        "speed_ratio_low": ratio * 0.98,
        "speed_ratio_high": ratio * 1.02,
        "pairs": 20,
        "clock": "engine",
        "prompts": ("a", "b"),
        "nonce": "n",
        "batch": 1,
        "seconds": 1.0,
    }
    return Verdict(**values | more)
