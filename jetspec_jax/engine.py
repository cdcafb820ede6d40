"""`LLM`: loads a target and a draft head, and turns requests into rounds and rounds into text."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from jetspec_jax import costs, drafter
from jetspec_jax.autotune.key import key_of
from jetspec_jax.autotune.lookup import Choice, Lookup, Tuned
from jetspec_jax.cache import KVCache, alloc
from jetspec_jax.config import (
    SCRIPTED,
    DraftConfig,
    EngineConfig,
    ModelConfig,
    PolicyConfig,
    SamplingParams,
    SpecConfig,
)
from jetspec_jax.errors import ConfigError, InputError, JetSpecError
from jetspec_jax.loading import (
    Head,
    Target,
    bundled_head_path,
    load_head,
    load_target,
    resolve_kernels,
    weight_arithmetic,
    weight_formats,
)
from jetspec_jax.models.decoder import Numerics, takes_stack
from jetspec_jax.numerics.probe import ProbeReport, probe
from jetspec_jax.plan import RoundPlan
from jetspec_jax.policy import Costs, knobs
from jetspec_jax.programs import Programs
from jetspec_jax.request import Request, check_prompt, round_trace
from jetspec_jax.results import GenerationResult, StreamChunk, Timings
from jetspec_jax.session import MAX_STOP_IDS, Session, new_state
from jetspec_jax.state import RUNNING, EngineParams
from pallas_kernels import parameters

# Node counts that the automatic budget chooses from. With the native decoder stack rows are data:
# one program serves all of them, so the steps are fine. Else each count is a branch of the program.
STACK_BUDGETS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24)
# Depths that the head drafts there: verification is so cheap that drafting counts, and few rounds
# reach further (lookup's continuations may).
STACK_HEAD_DEPTH = 4
BRANCH_BUDGETS = {"cpu": (1, 4, 8, 16), "gpu": (1, 16, 64), "xla": (1, 4, 8)}
DEFAULT_CAPACITY = 2_048  # tokens a sequence, where the model's context allows
LOOKUP_DEPTH = 8  # drafted tokens per round where no head sets the depth
_BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
_ALL_ROUNDS = (
    64  # rounds per call of the whole-generation driver: an interrupt is seen between calls
)
_REFILL_ROUNDS = 8  # while prompts wait for a slot
_SLACK = 64  # cache slots above the capacity, enough for the writes of any plan

Messages = Sequence[dict[str, Any]]


class LLM:
    """A target model with a drafter.

    Args:
        model: directory, GGUF file or hub id; None: the bundled SmolLM2-135M-Instruct.
        draft: directory of a draft head, "none", or None: the bundled head if the model is the
            bundled one.
        spec: default speculation settings.
        engine: sizes and numerics.
        progress: gets one line per slow step (loading, compiling), and what was tuned.
        tuned: where tuned entries lie (`autotune.tuned`): None for the user's cache folder and
            those that are shipped, "off" for the heuristic, a folder, or one file. What `spec` and
            `engine` say explicitly wins.
        batch: sequences decoded together for which kernels and numerics are looked up. Trees and
            policies are looked up for every batch that comes.

    Raises:
        ModelFileError, ConfigError, KernelError: in one line what is wrong and what to do.
    """

    def __init__(
        self,
        model: str | Path | None = None,
        draft: str | Path | None = None,
        *,
        spec: SpecConfig | None = None,
        engine: EngineConfig | None = None,
        progress: Callable[[str], None] | None = None,
        tuned: str | Path | None = None,
        batch: int = 1,
    ) -> None:
        started = time.perf_counter()
        engine, say = engine or EngineConfig(), progress or (lambda _: None)
        lookup = Lookup(tuned, say)
        self._setup(*_open(model, draft, engine, say), spec, engine, say)
        self._tune(lookup, engine, lambda other: _open(model, draft, other, say), batch)
        self.load_s = time.perf_counter() - started

    @classmethod
    def from_parts(
        cls,
        target: Target,
        head: Head | None = None,
        *,
        spec: SpecConfig | None = None,
        engine: EngineConfig | None = None,
        progress: Callable[[str], None] | None = None,
        tuned: str | Path | None = "off",
        batch: int = 1,
    ) -> LLM:
        """An engine from parts that are loaded already (tests, training). What a tuned entry says
        of weights and arithmetic is then not used: the parts are what they are.
        """
        self = cls.__new__(cls)
        engine, say = engine or EngineConfig(), progress or (lambda _: None)
        self._setup(target, head, spec, engine, say)
        self._tune(Lookup(tuned, say), engine, None, batch)
        self.load_s = 0.0
        return self

    def _setup(
        self,
        target: Target,
        head: Head | None,
        spec: SpecConfig | None,
        engine: EngineConfig,
        say: Callable[[str], None],
    ) -> None:
        most = target.config.max_context
        self.capacity = engine.capacity or min(DEFAULT_CAPACITY, most)
        if self.capacity > most:
            raise ConfigError(
                f"capacity={self.capacity} is more than the model's context of {most}; "
                "give at most that"
            )
        self.engine, self._say, self._target, self._head = engine, say, target, head
        self.tokenizer = target.tokenizer
        native = target.kernels == "cpu"
        self.weights = weight_formats(target.params)  # bytes by format
        self.arithmetic = weight_arithmetic(target.params)  # "float" or "integer"
        self._stack = native and takes_stack(target.params, target.config)
        self._native_head = (
            self._stack
            and head is not None
            and drafter.takes_native(head.params, head.config, head.lm_rows)
        )
        # both kinds of kernels give rows whose bits do not depend on the number of rows
        exact = target.kernels in ("cpu", "gpu")
        self.bitwise = exact if engine.numerics is None else engine.numerics == "bitwise"
        self.model_config: ModelConfig = target.config
        self.draft_config: DraftConfig | None = head.config if head is not None else None
        self.programs = Programs(say)
        self._caches: dict[tuple[str, int], KVCache] = {}
        self._costs: dict[tuple[RoundPlan, int], Costs] = {}
        # what requests so far left of what drafting may lose (policy.next_allowance)
        self._allowances: dict[tuple[RoundPlan, int, PolicyConfig | None], float] = {}
        self.probed: dict[
            tuple[int, ...], ProbeReport
        ] = {}  # with bitwise numerics: what was found, by budgets
        self.script: Any = None  # see EngineParams; set by testing.script
        self._given, self._tuned = spec or SpecConfig(), Tuned()
        self.spec = self.resolve(self._given)

    def _tune(
        self,
        lookup: Lookup,
        engine: EngineConfig,
        load: Callable[[EngineConfig], tuple[Target, Head | None]] | None,
        batch: int,
    ) -> None:
        """Puts a tuned entry in: first what the engine is, then what it speculates with."""
        loaded = ("weights", "draft_weights", "arithmetic")
        tuned = Tuned(lookup, engine, lambda: key_of(self, 1, self.capacity), self._say)
        wanted = tuned.engine(self._given, _bucket(batch))
        if load is None:  # the parts are what they are
            wanted = dataclasses.replace(wanted, **{n: getattr(engine, n) for n in loaded})
        if wanted.kernel_params != engine.kernel_params:
            try:
                resolve_kernels(wanted)  # builds them
            except JetSpecError as error:
                self._say(f"kernels of the tuned entry not used: {error}")
                wanted = dataclasses.replace(wanted, kernel_params=engine.kernel_params)
        if wanted != engine:
            parts = self._target, self._head
            if load is not None and any(getattr(wanted, n) != getattr(engine, n) for n in loaded):
                del self._target, self._head, parts  # not both in memory
                parts = load(wanted)
            self._setup(*parts, self._given, wanted, self._say)
        self._tuned = tuned
        self.spec = self.resolve(self._given, batch)

    @property
    def tuned(self) -> Choice:
        """What the engine started with: a tuned entry or the heuristic, and why."""
        return self._tuned.chosen

    # ---- settings --------------------------------------------------------------------------------

    def resolve(self, spec: SpecConfig, batch: int = 1) -> SpecConfig:
        """Fills what `spec` leaves open, and refuses what cannot be honoured. What a tuned entry
        for `batch` sequences says comes first, then the heuristic.

        Raises:
            ConfigError: a head that is not loaded, or settings that contradict each other.
        """
        return self._tuned.resolve(spec, _bucket(batch), self._resolve)

    def _resolve(self, spec: SpecConfig) -> SpecConfig:
        """The same without tuned entries."""
        head = self.draft_config
        kind = spec.drafter or ("hybrid" if head is not None else "lookup")
        if spec.mode == "off":
            kind = "none"
        if kind in ("head", "hybrid") and head is None:
            raise ConfigError(
                f"drafter {kind!r} needs a draft head and none is loaded; give --draft DIR or"
                " --drafter lookup"
            )
        if spec.mode == "chain" and spec.builder not in ("exact", "chain"):
            raise ConfigError(
                f"mode 'chain' and builder {spec.builder!r} contradict each other; drop one of them"
            )
        if kind == SCRIPTED and self.script is None:
            raise ConfigError(
                "drafter 'scripted' is a test double; choose head, lookup, hybrid or none"
            )
        if spec.depth is not None and spec.depth >= _SLACK:
            raise ConfigError(
                f"depth={spec.depth} is more than a round can write; give at most {_SLACK - 1}"
            )
        if head is None or kind not in ("head", "hybrid"):
            return dataclasses.replace(
                spec,
                drafter=kind,
                depth=spec.depth or LOOKUP_DEPTH,
                builder="chain" if spec.mode == "chain" else spec.builder,
            )
        depth = spec.depth or head.depth
        if depth > head.depth:
            raise ConfigError(
                f"depth={depth} is more than the draft head's {head.depth}; give at most"
                f" {head.depth}"
            )
        if spec.head_depth is not None and spec.head_depth > depth:
            raise ConfigError(
                f"head_depth={spec.head_depth} is more than depth={depth}; give at most that"
            )
        free = spec.depth is None and spec.mode == "auto" and kind == "hybrid"
        return dataclasses.replace(
            spec,
            drafter=kind,
            depth=depth,
            head_depth=spec.head_depth
            or (min(STACK_HEAD_DEPTH, depth) if free and self._stack else depth),
            width=min(spec.width, head.head_vocab_size),
            builder="chain" if spec.mode == "chain" else spec.builder,
        )

    def budgets(self, spec: SpecConfig) -> tuple[int, ...]:
        """Node counts, root included, that rounds under a resolved `spec` may verify."""
        if not spec.enabled:
            return (1,)
        depth = spec.depth or LOOKUP_DEPTH
        if spec.mode == "chain":
            return (min(spec.budget or depth + 1, depth + 1),)
        if spec.mode == "tree":
            return (spec.budget or 8,)
        steps = STACK_BUDGETS if self._stack else BRANCH_BUDGETS[self._target.kernels]
        most = spec.budget or steps[-1]
        return (*(b for b in steps if b < most), most)

    def plan_for(self, spec: SpecConfig, sampling: Sequence[SamplingParams] = ()) -> RoundPlan:
        """The static part of the programs that a resolved `spec` runs for requests with these
        settings.
        """
        logprobs = [s.logprobs for s in sampling if s.logprobs is not None]
        native, gpu = (self._target.kernels == kind for kind in ("cpu", "gpu"))
        bitwise = self.bitwise
        return RoundPlan(
            model=self.model_config,
            head=self._planned_head(spec),
            # the policy is data: specs that differ in it share a program and a cost table
            spec=dataclasses.replace(spec, policy=PolicyConfig()),
            budgets=self.budgets(spec),
            depth=(spec.depth or 0) if spec.enabled else 0,
            # XLA's row bits change with the number of rows: every forward of this engine then has
            # as many rows as its largest tree, plain decoding included
            pad_rows=self.budgets(self.spec)[-1] if bitwise and not (native or gpu) else 1,
            prefill_chunk=self.engine.prefill_chunk,
            numerics=Numerics(
                bitwise=bitwise,
                gpu=gpu,
                native=native,
                stack=self._stack,
                head=self._native_head,
                attention_chunk=self.engine.attention_chunk,
                kernel_params=self.engine.kernel_params,
            ),
            sampled=any(s.temperature > 0 for s in sampling),
            logprobs=max(logprobs) if logprobs else None,
        )

    def _planned_head(self, spec: SpecConfig) -> DraftConfig | None:
        """The head as rounds under a resolved `spec` use it."""
        head = self.draft_config if spec.drafter in ("head", "hybrid") else None
        if head is None or spec.path_head:
            return head
        return dataclasses.replace(head, path_head="none", path_rank=0)

    def plan(self) -> dict[str, Any]:
        """What would run: resolved settings, memory in bytes, kernels."""
        plan = self.plan_for(self.spec)
        cfg, size = self.model_config, self._allocated()
        item = jnp.dtype(self.engine.dtype).itemsize
        head = self._head
        return {
            "model": cfg.name or self._target.path.name,
            "path": str(self._target.path),
            "draft": None if head is None else str(head.path),
            "dtype": self.engine.dtype,
            "kernels": {
                "cpu": "native CPU kernels (XLA FFI)",
                "gpu": "GPU kernels (Pallas Mosaic or Triton)",
                "xla": "XLA",
            }[self._target.kernels],
            "numerics": "bitwise" if self.bitwise else "fast",
            "capacity": self.capacity,
            "spec": dataclasses.asdict(self.spec),
            "budgets": list(plan.budgets),
            "tuned": self.tuned.to_json(),
            "kernel_params": dict(self.engine.kernel_params),
            "memory": {
                "target_bytes": self._target.nbytes,
                "draft_bytes": 0 if head is None else head.nbytes,
                "cache_bytes_per_sequence": 2 * cfg.num_layers * cfg.kv_width * size * item,
            },
        }

    # ---- sessions --------------------------------------------------------------------------------

    def _allocated(self) -> int:
        chunk = self.engine.attention_chunk
        return -(-(self.capacity + max(_SLACK, self.engine.prefill_chunk)) // chunk) * chunk

    def _take_cache(self, kind: str, batch: int) -> KVCache:
        kept = self._caches.pop((kind, batch), None)
        if kept is not None:
            return kept
        cfg: Any = self.model_config if kind == "target" else self.draft_config
        dtype = jnp.dtype(self.engine.dtype)
        with parameters.using(self.engine.kernel_params):
            return alloc(
                cfg.num_layers,
                batch,
                cfg.num_kv_heads,
                self._allocated(),
                cfg.head_dim,
                dtype,
                # the drafter's context is read by XLA where the head is not native
                native=self._stack if kind == "target" else self._native_head,
            )

    def params_for(
        self, plan: RoundPlan, table: Costs | None = None, policy: PolicyConfig | None = None
    ) -> EngineParams:
        """Arrays that the programs of `plan` read; `policy`: None for the default."""
        head = self._head if plan.head is not None else None
        return EngineParams(
            target=self._target.params,
            draft=head.params if head is not None else None,
            draft_lm=head.lm_rows if head is not None else None,
            draft_ids=head.ids if head is not None else None,
            costs=table if table is not None else costs.unmeasured(plan),
            policy=knobs(policy or PolicyConfig()),
            script=self.script if plan.spec.drafter == SCRIPTED else None,
        )

    @contextlib.contextmanager
    def session(
        self,
        plan: RoundPlan,
        batch: int,
        table: Costs | None = None,
        policy: PolicyConfig | None = None,
    ) -> Iterator[Session]:
        """Slots that run `plan`; the caches are lent to the session and come back at its end.

        Args:
            plan, batch: which programs.
            table: measured costs, None where there is nothing to choose.
            policy: None for the default.
        """
        states, key = [], (plan, batch, policy)
        allowance = self._allowances.get(key)
        for rows in (batch,) if batch == 1 else (batch, 1):
            context = self._take_cache("draft", rows) if plan.head is not None else None
            cache = self._take_cache("target", rows)
            states.append(new_state(plan, rows, cache, context, policy, allowance))
        params = self.params_for(plan, table, policy)
        one = states[1] if len(states) > 1 else None
        session = Session(self.programs, plan, params, states[0], one, policy, allowance)
        try:
            yield session
            self._allowances[key] = session.learn()
        finally:
            for state in session.states():
                rows = state.tokens.shape[0]
                if state.cache.k[0].is_deleted():
                    # a program failed after taking these buffers; the next session allocates new
                    # ones
                    continue
                self._caches["target", rows] = state.cache
                if state.context is not None:
                    self._caches["draft", rows] = state.context

    def probe(self, spec: SpecConfig | None = None) -> ProbeReport:
        """Whether node logits equal plain decoding's, bit for bit, with the shapes that `spec` runs
        on this device.
        """
        plan = self.plan_for(self.resolve(spec or self._given))
        return probe(plan, self._target.params, dtype=jnp.dtype(self.engine.dtype))

    def _table(self, plan: RoundPlan, batch: int) -> Costs | None:
        """Measured costs of `plan`'s budgets; None where there is nothing to choose."""
        if self.engine.numerics == "bitwise" and plan.drafts and plan.budgets not in self.probed:
            self._say("probing row invariance ...")
            report = self.probed[plan.budgets] = probe(
                plan, self._target.params, dtype=jnp.dtype(self.engine.dtype)
            )
            self._say(str(report))
        if len(plan.budgets) == 1:
            return None
        # log-probabilities add the same to every budget: one table serves both. Sampling does not:
        # drafting then ranks with the target's noise, and every depth of the tree has noise.
        plan = dataclasses.replace(plan, logprobs=None)
        key = (plan, batch)
        if key not in self._costs:
            self._costs[key] = costs.load_or_measure(self, plan, batch, self._say)
        return self._costs[key]

    def warmup(
        self,
        batch: int = 1,
        spec: SpecConfig | None = None,
        sampling: Sequence[SamplingParams] = (),
        *,
        trace: bool = False,
    ) -> float:
        """Compiles what `generate` with this batch, sampling and trace needs and measures its
        costs; returns seconds of compilation.
        """
        before = self.programs.seconds
        plan = self.plan_for(self.resolve(spec or self._given, batch), sampling)
        batch = _bucket(batch)
        table = self._table(plan, batch)
        with self.session(plan, batch, table) as session:
            session.compile(details=trace or plan.logprobs is not None)
        return self.programs.seconds - before

    def measure_costs(self, batch: int = 1, spec: SpecConfig | None = None) -> dict[str, Any]:
        """Seconds of a plain step, of verification by budget, and of drafting, measured now."""
        plan = self.plan_for(self.resolve(spec or self._given, batch))
        return costs.measure(self, plan, _bucket(batch))

    # ---- requests --------------------------------------------------------------------------------

    def _request(
        self, prompt: str | Sequence[int] | Messages, sampling: SamplingParams, trace: bool
    ) -> Request:
        ids = self.encode(prompt)
        check_prompt(ids, self.model_config.vocab_size, self.capacity)
        ends = () if sampling.ignore_eos else self.model_config.eos_ids
        stop_ids = tuple(dict.fromkeys((*ends, *sampling.stop_token_ids)))
        if len(stop_ids) > MAX_STOP_IDS:
            raise ConfigError(f"{len(stop_ids)} stop ids are too many; give at most {MAX_STOP_IDS}")
        limit = min(len(ids) + sampling.max_tokens, self.capacity)
        return Request(ids, sampling, self.tokenizer, stop_ids, limit, [] if trace else None)

    def encode(self, prompt: str | Sequence[int] | Messages) -> list[int]:
        """Token ids of a text, of chat messages (through the model's template), or of ids as they
        are.
        """
        if isinstance(prompt, str):
            if not prompt.strip():
                raise InputError("the prompt is empty; give some text")
            return self.tokenizer.encode(prompt)
        items: list[Any] = list(prompt)
        if items and isinstance(items[0], dict):
            return self.tokenizer.chat(items)
        return [int(i) for i in items]

    def generate(
        self,
        prompts: str | Sequence[Any],
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        spec: SpecConfig | None = None,
        trace: bool = False,
        group: int | None = None,
    ) -> list[GenerationResult]:
        """Completes one prompt or many (texts or token ids), in batches, in order.

        Args:
            prompts: a text, token ids, or a sequence of either.
            sampling: for all, or one per prompt.
            spec: overrides the engine's speculation settings for this call.
            trace: keep every round's tree.
            group: sequences decoded together; None: all of them, up to `EngineConfig.max_batch`.
                A fixed number keeps the programs of a last, smaller group.

        Raises:
            InputError: a prompt that cannot be served; nothing has been generated then.
        """
        if not isinstance(prompts, (str, Sequence, np.ndarray)):
            raise InputError(
                f"prompts={prompts!r} is no text and no list; give a text, token ids or a list"
            )
        single = isinstance(prompts, str) or (
            len(prompts) > 0 and isinstance(prompts[0], (int, np.integer))
        )
        items = [prompts] if single else list(prompts)
        return self._run(items, sampling, spec, trace, group)

    def chat(
        self,
        messages: Sequence[Any],
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        system: str | None = None,
        template_kwargs: dict[str, Any] | None = None,
        spec: SpecConfig | None = None,
        trace: bool = False,
    ) -> list[GenerationResult]:
        """Answers one conversation (a list of messages) or many, through the model's chat
        template.
        """
        if not messages:
            raise InputError("messages are empty; give at least one message")
        many = [messages] if isinstance(messages[0], dict) else list(messages)
        ids = [self.tokenizer.chat(list(m), system=system, **(template_kwargs or {})) for m in many]
        return self._run(ids, sampling, spec, trace)

    def stream(
        self,
        prompt: str | Sequence[int] | Messages,
        sampling: SamplingParams | None = None,
        *,
        spec: SpecConfig | None = None,
        trace: bool = False,
    ) -> Iterator[StreamChunk]:
        """One prompt (text, ids or chat messages), a chunk per round; the last chunk carries the
        result.
        """
        request = self._request(prompt, sampling or SamplingParams(), trace)
        # not a generator itself: a request that cannot be served is refused here, not at the first
        # chunk
        return self._stream(request, self.resolve(spec or self._given))

    def _stream(self, request: Request, spec: SpecConfig) -> Iterator[StreamChunk]:
        plan = self.plan_for(spec, [request.sampling])
        compiled = self.programs.seconds
        table = self._table(plan, 1)
        with self.session(plan, 1, table, spec.policy) as session:
            details = _details(request)
            session.compile(details=details)
            compile_s, first = self.programs.seconds - compiled, None
            _admit(session, 0, request, spec)
            while request.finish_reason is None:
                text, new = _advance(session, [request], 1)[0]
                first = first if first is not None else session.prefill_s + session.decode_s
                done = request.finish_reason is not None
                result = None
                if done:
                    timings = Timings(
                        self.load_s, compile_s, session.prefill_s, session.decode_s, first
                    )
                    result = request.result(timings, session.stats(0))
                start = len(request.ids) - new
                yield StreamChunk(
                    text,
                    tuple(request.ids[start:]),
                    tuple(request.accepted[start:]),
                    session.rounds,
                    done,
                    result,
                )

    def _run(
        self,
        prompts: list[Any],
        sampling: SamplingParams | Sequence[SamplingParams] | None,
        spec: SpecConfig | None,
        trace: bool,
        group: int | None = None,
    ) -> list[GenerationResult]:
        if not prompts:
            raise InputError("no prompts; give at least one")
        each = (
            list(sampling)
            if isinstance(sampling, Sequence)
            else [sampling or SamplingParams()] * len(prompts)
        )
        if len(each) != len(prompts):
            raise InputError(
                f"{len(each)} sampling settings for {len(prompts)} prompts; give one, or one per"
                " prompt"
            )
        requests = [self._request(p, s, trace) for p, s in zip(prompts, each, strict=True)]
        batch = _bucket(group or min(len(requests), self.engine.max_batch))
        resolved = self.resolve(spec or self._given, batch)
        plan = self.plan_for(resolved, each)
        compiled = self.programs.seconds
        table = self._table(plan, batch)
        results: list[GenerationResult | None] = [None] * len(requests)
        slots: list[int | None] = [None] * batch
        queue = iter(range(len(requests)))
        with self.session(plan, batch, table, resolved.policy) as session:
            # both where both are asked for: once the detailed requests have ended, the rest runs
            # without
            for details in sorted({_details(r) for r in requests}):
                session.compile(details=details)
            compile_s = self.programs.seconds - compiled
            started: dict[int, tuple[float, float]] = {}
            ttft: dict[int, float] = {}
            waiting = True
            while True:
                for slot in range(batch):
                    if waiting and slots[slot] is None:
                        index = next(queue, None)
                        if index is None:
                            waiting = False
                            break
                        started[index] = (session.prefill_s, session.decode_s)
                        slots[slot] = index
                        _admit(session, slot, requests[index], resolved)
                live = [None if i is None else requests[i] for i in slots]
                if not any(live):
                    break
                fresh = any(i is not None and i not in ttft for i in slots)
                _advance(session, live, 1 if fresh else _REFILL_ROUNDS if waiting else _ALL_ROUNDS)
                for slot, index in enumerate(slots):
                    if index is None:
                        continue
                    prefill_0, decode_0 = started[index]
                    spent = session.prefill_s - prefill_0 + session.decode_s - decode_0
                    ttft.setdefault(index, spent)
                    if requests[index].finish_reason is not None:
                        timings = Timings(
                            self.load_s,
                            compile_s,
                            session.prefill_s - prefill_0,
                            session.decode_s - decode_0,
                            ttft[index],
                        )
                        results[index] = requests[index].result(timings, session.stats(slot))
                        slots[slot] = None
        return [r for r in results if r is not None]


def _open(
    model: str | Path | None,
    draft: str | Path | None,
    engine: EngineConfig,
    say: Callable[[str], None],
) -> tuple[Target, Head | None]:
    """The parts of an engine from their files; arguments and errors as those of `LLM`."""
    target = load_target(model, engine, say)
    if draft is None and target.bundled:
        draft = bundled_head_path()
    if draft is None or str(draft) == "none":
        return target, None
    return target, load_head(draft, target, engine, say)


def _bucket(batch: int) -> int:
    """The smallest compiled batch that holds `batch` sequences."""
    return next((b for b in _BATCHES if b >= batch), _BATCHES[-1])


def _details(request: Request) -> bool:
    """Whether rounds must be run one by one with their details."""
    return request.trace is not None or request.sampling.logprobs is not None


def _admit(session: Session, slot: int, request: Request, spec: SpecConfig) -> None:
    session.admit(
        slot, request.prompt, request.limit, request.stop_ids, request.sampling, spec.enabled
    )


def _advance(
    session: Session, slots: Sequence[Request | None], rounds: int
) -> list[tuple[str, int]]:
    """Runs rounds and hands their ids to the requests; per slot the new text and the number of new
    ids.
    """
    live = [r for r in slots if r is not None]
    details = any(_details(r) for r in live)
    out = None
    if details:
        out = session.step()
    else:
        # a stop string may end any round, and no round after it should count
        session.run(1 if any(r.sampling.stop for r in live) else rounds)
    committed, status = session.status()
    news: list[tuple[str, int]] = []
    for slot, request in enumerate(slots):
        if request is None:
            news.append(("", 0))
            continue
        before = len(request.ids)
        ids, drafted = session.ids(slot, request.committed, int(committed[slot]))
        text = request.take(ids, drafted, int(status[slot]), RUNNING)
        if out is not None:
            if request.sampling.logprobs is not None:
                k = request.sampling.logprobs
                logprob, top_ids, top = (
                    np.asarray(x)[slot] for x in (out.logprob, out.top_ids, out.top_logprobs)
                )
                request.add_logprobs(logprob, top_ids[:, :k], top[:, :k], before)
            if request.trace is not None:
                request.trace.append(round_trace(out, slot))
        if request.finish_reason is not None and int(status[slot]) == RUNNING:
            session.free(slot)
        news.append((text, len(request.ids) - before))
    return news
