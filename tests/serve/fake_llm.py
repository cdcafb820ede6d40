"""An engine with the contract's API and no arithmetic: answers, times and acceptance are made up,
and known exactly."""

from __future__ import annotations

import types
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

import numpy as np

from jetspec_jax.autotune.lookup import heuristic
from jetspec_jax.config import EngineConfig, ModelConfig, SamplingParams, SpecConfig
from jetspec_jax.results import GenerationResult, RoundTrace, StreamChunk, Timings
from jetspec_jax.stats import SpecStats

MODEL = ModelConfig(
    family="llama",
    vocab_size=258,
    hidden_size=32,
    num_layers=8,
    num_heads=2,
    num_kv_heads=1,
    head_dim=16,
    ffn_size=64,
    max_context=4_096,
    eos_ids=(257,),
    pad_id=256,
)
GREEDY = SamplingParams()
PLAIN_S, SPEC_S = 0.10, 0.05  # seconds per decoded token


class ByteTokenizer:
    """One token per byte. Chat: `user: ...` lines."""

    eos_ids = (257,)

    def encode(self, text: str, add_special: bool = True) -> list[int]:
        return list(text.encode())

    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str:
        return bytes(i for i in ids if i < 256).decode(errors="replace")

    def chat(
        self,
        messages: Any,
        system: str | None = None,
        add_generation_prompt: bool = True,
        **kwargs: Any,
    ) -> list[int]:
        parts = [f"system: {system}\n"] if system else []
        parts += [f"{m['role']}: {m['content']}\n" for m in messages]
        return self.encode("".join(parts))

    def incremental(self) -> Any:
        return types.SimpleNamespace(push=lambda token: self.decode([token]))


class FakeLLM:
    """Answers every prompt with `answer`. In speculative mode three tokens of four are drafted and
    accepted."""

    answer = "def f(x):\n    return x + 1  # the answer to your question\n"
    differ_at: int | None = None  # token at which the speculative answer is made to differ
    interrupt_at: int | None = (
        None  # streamed chunk, or generate call, that raises KeyboardInterrupt
    )
    made: ClassVar[list[FakeLLM]] = []

    def __init__(
        self,
        model: Any = None,
        draft: Any = None,
        *,
        spec: SpecConfig | None = None,
        engine: EngineConfig | None = None,
        progress: Any = None,
        tuned: Any = None,
        batch: int = 1,
    ) -> None:
        self.asked = {"tuned": tuned, "batch": batch}
        self.tuned = heuristic("heuristic: no tuned entry for this deployment")
        self.model_config, self.draft_config = MODEL, None
        self.tokenizer = ByteTokenizer()
        self.spec, self.engine = spec or SpecConfig(), engine or EngineConfig()
        self.capacity = self.engine.capacity or 2_048
        self.calls: list[str] = []  # "plain" or "spec", one per generate call
        self.batches: list[int] = []
        self.prompts: list[list[int]] = []
        if progress is not None:
            progress("loading: fake weights")
        FakeLLM.made.append(self)

    def plan(self) -> dict[str, Any]:
        return {"model": "fake", "spec": {"budget": 4}, "memory": {"weights_mb": 1.5}}

    def warmup(
        self, batch: int = 1, spec: Any = None, sampling: Any = (), *, trace: bool = False
    ) -> float:
        return 0.25

    def measure_costs(self, batch: int = 1, spec: SpecConfig | None = None) -> dict[str, Any]:
        return {"t_plain_s": 0.1, "t_verify_s": {4: 0.15, 8: 0.2}, "t_draft_s": 0.02}

    def generate(
        self,
        prompts: Any,
        sampling: Any = GREEDY,
        *,
        spec: SpecConfig | None = None,
        trace: bool = False,
        group: int | None = None,
    ) -> list[Any]:
        prompts = [prompts] if isinstance(prompts, str) else list(prompts)
        prompts = [self.tokenizer.encode(p) if isinstance(p, str) else list(p) for p in prompts]
        each = [sampling] * len(prompts) if isinstance(sampling, SamplingParams) else list(sampling)
        on = (spec or self.spec).enabled
        self.calls.append("spec" if on else "plain")
        self.batches.append(len(prompts))
        self.prompts += prompts
        if FakeLLM.interrupt_at is not None and len(self.calls) > FakeLLM.interrupt_at:
            raise KeyboardInterrupt
        return [self._result(p, s, on, trace) for p, s in zip(prompts, each, strict=True)]

    def chat(
        self,
        messages: Any,
        sampling: Any,
        *,
        system: Any = None,
        template_kwargs: Any = None,
        spec: Any = None,
        trace: bool = False,
        group: int | None = None,
    ) -> list[Any]:
        return self.generate(
            [self.tokenizer.chat(m, system=system) for m in messages],
            sampling,
            spec=spec,
            trace=trace,
        )

    def stream(
        self, prompt: Any, sampling: Any, *, spec: SpecConfig | None = None, trace: bool = False
    ) -> Iterator[Any]:
        if not isinstance(prompt, str) and isinstance(prompt[0], dict):
            prompt = self.tokenizer.chat(prompt)
        result = self.generate([prompt], sampling, spec=spec, trace=trace)[0]
        starts = range(0, len(result.token_ids), 4)
        for number, start in enumerate(starts):
            if FakeLLM.interrupt_at == number:
                raise KeyboardInterrupt
            ids = result.token_ids[start : start + 4]
            last = start + 4 >= len(result.token_ids)
            yield StreamChunk(
                text=self.tokenizer.decode(ids),
                token_ids=ids,
                accepted=result.accepted[start : start + 4],
                rounds=number + 1,
                finished=last,
                result=result if last else None,
            )

    def _result(self, prompt: list[int], sampling: SamplingParams, on: bool, trace: bool) -> Any:
        ids = self.tokenizer.encode(self.answer)[: sampling.max_tokens]
        if on and FakeLLM.differ_at is not None and FakeLLM.differ_at < len(ids):
            ids[FakeLLM.differ_at] = ord("?")
        rounds = len(ids) // 4 if on else 0
        stats = SpecStats(rounds, (0, 0, 0, rounds), (rounds,) * 3, 4 * rounds, len(ids))
        decode_s = len(ids) * (SPEC_S if on else PLAIN_S)
        return GenerationResult(
            prompt_token_ids=tuple(prompt),
            text=self.tokenizer.decode(ids),
            token_ids=tuple(ids),
            finish_reason="length" if len(ids) == sampling.max_tokens else "stop",
            logprobs=None,
            timings=Timings(0.0, 0.0, 0.01, decode_s, 0.02, len(ids)),
            spec=stats,
            trace=tuple(self._round(ids, r) for r in range(rounds)) if trace else None,
            stop=None,
            accepted=tuple(on and i % 4 != 3 for i in range(len(ids))),
        )

    @staticmethod
    def _round(ids: list[int], index: int) -> RoundTrace:
        """A chain of three accepted nodes, and one rejected sibling at depth 1."""
        return RoundTrace(
            token=np.array([*ids[4 * index : 4 * index + 4], ord("z")]),
            parent=np.array([-1, 0, 1, 2, 0]),
            depth=np.array([0, 1, 2, 3, 1]),
            score=np.array([0.0, -0.1, -0.2, -0.4, -2.5], np.float32),
            source=np.array([0, 0, 2, 1, 0]),
            path=(0, 1, 2, 3),
            emitted=(*ids[4 * index + 1 : 4 * index + 4], ord("!")),
            budget=5,
        )
