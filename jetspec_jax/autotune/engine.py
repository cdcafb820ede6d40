"""The real engine behind a worker: free running, token forcing, and digests of the KV cache."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from jetspec_jax.autotune.candidate import Candidate, apply, tuples
from jetspec_jax.config import EngineConfig, SamplingParams, SpecConfig
from jetspec_jax.engine import LLM
from jetspec_jax.errors import ConfigError
from jetspec_jax.plan import RoundPlan
from jetspec_jax.policy import Costs
from jetspec_jax.session import Session
from jetspec_jax.state import LENGTH, RUNNING

_ROUNDS = 64  # per call of the whole-generation driver


def load(
    *,
    model: str | None,
    draft: str | None,
    candidate: Mapping[str, Any] | None,
    spec: Mapping[str, Any] | None,
    engine: Mapping[str, Any] | None,
) -> LLMEngine:
    """Loads model files and applies a candidate to the base configurations.

    Raises:
        JetSpecError: files, fields or values that are no good.
    """
    change = Candidate.from_json(candidate) if candidate else Candidate()
    base_spec = SpecConfig.from_mapping(_decoded(spec or {}))
    made_spec, made_engine = apply(
        change, base_spec, EngineConfig.from_mapping(_decoded(engine or {}))
    )
    llm = LLM(model, draft, spec=made_spec, engine=made_engine, tuned="off")
    return LLMEngine(llm, change, base_spec)


def _decoded(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: tuples(value) for name, value in values.items()}


class LLMEngine:
    """`worker.Engine` over an `LLM`.

    Args:
        llm: the engine, with the candidate's engine settings.
        candidate: what was applied when it was loaded.
        spec: the base speculation settings, before the candidate.
    """

    def __init__(self, llm: LLM, candidate: Candidate, spec: SpecConfig) -> None:
        self.llm, self._candidate, self._spec = llm, candidate, spec

    def facts(self) -> dict[str, Any]:
        return {
            "arithmetic": self.llm.arithmetic,
            "weights": self.llm.weights,
            "kernels": self.llm.plan()["kernels"],
            "bitwise": self.llm.bitwise,
            "capacity": self.llm.capacity,
            "vocab": self.llm.model_config.vocab_size,
        }

    def _resolved(self, params: Mapping[str, Any]) -> SpecConfig:
        """The speculation settings of a request."""
        whole = {**self._candidate.params, **params}
        fixed = {k: v for k, v in whole.items() if k.partition(".")[0] in ("engine", "kernel")}
        mine = {k: v for k, v in self._candidate.params.items() if k in fixed}
        if fixed != mine:
            name = next(k for k in fixed if fixed[k] != mine.get(k))
            raise ConfigError(
                f"parameter {name!r} is fixed when an engine is loaded; start another worker"
            )
        return self.llm.resolve(apply(Candidate(whole), self._spec, self.llm.engine)[0])

    def warm(
        self, params: Mapping[str, Any], batch: int, sampling: Sequence[Mapping[str, Any]]
    ) -> dict[str, Any]:
        spec = self._resolved(params)
        return {"seconds": self.llm.warmup(batch, spec, [_sampling(s) for s in sampling])}

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: Sequence[Mapping[str, Any]],
        params: Mapping[str, Any],
        batch: int,
    ) -> list[dict[str, Any]]:
        made = self.llm.generate(
            [list(p) for p in prompts],
            [_sampling(s) for s in sampling],
            spec=self._resolved(params),
            # a candidate may decode fewer together
            group=min(batch, self.llm.engine.max_batch),
        )
        return [
            {
                "token_ids": list(r.token_ids),
                "decode_s": r.timings.decode_s,
                "prefill_s": r.timings.prefill_s,
                "rounds": r.spec.rounds,
                "tau": r.spec.tau,
                "nodes": r.spec.nodes,
            }
            for r in made
        ]

    def encode(self, conversations: Sequence[Sequence[Mapping[str, Any]]]) -> list[list[int]]:
        return [self.llm.tokenizer.chat([dict(m) for m in talk]) for talk in conversations]

    def _groups(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: Sequence[Mapping[str, Any]],
        params: Mapping[str, Any],
        batch: int,
        logprobs: int | None = None,
        *,
        details: bool,
    ) -> Iterator[tuple[Session, list[int], list[SamplingParams], SpecConfig]]:
        """Sessions of whole batches, the slots still empty, with the prompts' indices."""
        llm, spec = self.llm, self._resolved(params)
        each = [dataclasses.replace(_sampling(s), logprobs=logprobs) for s in sampling]
        plan = llm.plan_for(spec, each)
        size = next(b for b in (1, 2, 4, 8, 16, 32, 64, 128, 256) if b >= batch)
        table = self._any_table(plan, size)
        for at in range(0, len(prompts), size):
            with llm.session(plan, size, table, spec.policy) as session:
                session.compile(details=details)
                yield session, list(range(at, min(at + size, len(prompts)))), each, spec

    def _any_table(self, plan: RoundPlan, batch: int) -> Costs | None:
        """Costs by which rounds choose their budgets: of this batch where they are measured, else
        of another batch of the same plan. A table decides how fast a check runs, never its tokens,
        and measuring one takes longer than the check.
        """
        llm = self.llm
        wanted = dataclasses.replace(plan, logprobs=None, sampled=False)
        for (known, size), table in llm._costs.items():
            if size != batch and dataclasses.replace(known, sampled=False) == wanted:
                return llm._costs.get((dataclasses.replace(plan, logprobs=None), batch), table)
        return llm._table(plan, batch)

    def state(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: Sequence[Mapping[str, Any]],
        params: Mapping[str, Any],
        batch: int,
    ) -> list[dict[str, Any]]:
        made: list[dict[str, Any]] = []
        ends = self.llm.model_config.eos_ids
        groups = self._groups(prompts, sampling, params, batch, details=False)
        for session, members, each, spec in groups:
            for slot, i in enumerate(members):
                stops = () if each[i].ignore_eos else tuple(ends)
                limit = min(len(prompts[i]) + each[i].max_tokens, self.llm.capacity)
                session.admit(slot, list(prompts[i]), limit, stops, each[i], spec.enabled)
            while (session.status()[1] == RUNNING).any():
                session.run(_ROUNDS)
            committed, _ = session.status()
            for slot, i in enumerate(members):
                ids, _ = session.ids(slot, len(prompts[i]), int(committed[slot]))
                made.append({"token_ids": ids, "rows": row_digests(session, slot)})
        return made

    def force(
        self,
        prompts: Sequence[Sequence[int]],
        streams: Sequence[Sequence[int]],
        sampling: Sequence[Mapping[str, Any]],
        params: Mapping[str, Any],
        batch: int,
        logits: bool,
    ) -> list[dict[str, Any]]:
        """See `worker.Engine`. Rounds run as they would; where a round chose another token than the
        stream has, it is cut back to the tokens before, the stream's token is committed instead,
        and the next round goes on from there. So every position's choice is that of the candidate's
        own trees, budgets and kernels, with nothing but the stream as context.
        """
        made: list[dict[str, Any]] = [{} for _ in prompts]
        groups = self._groups(prompts, sampling, params, batch, 1 if logits else None, details=True)
        for session, members, each, spec in groups:
            for slot, i in enumerate(members):
                limit = len(prompts[i]) + len(streams[i])
                if limit > self.llm.capacity or not streams[i]:
                    raise ConfigError(
                        f"prompt and stream have {limit} tokens, {len(streams[i])} of them the "
                        f"stream's; give at least one, and together up to {self.llm.capacity}"
                    )
                session.admit(slot, list(prompts[i]), limit, (), each[i], spec.enabled)
                made[i] = {"choices": []}
                if logits:
                    made[i] |= {"best": [], "margin": [], "digests": []}
            slots = dict(enumerate(members))
            while any(len(made[i]["choices"]) < len(streams[i]) for i in members):
                _forced_round(session, slots, prompts, streams, made, logits)
            for slot, i in slots.items():
                made[i]["rows"] = row_digests(session, slot)
        return made


def _forced_round(
    session: Session,
    slots: Mapping[int, int],
    prompts: Sequence[Sequence[int]],
    streams: Sequence[Sequence[int]],
    made: Sequence[dict[str, Any]],
    logits: bool,
) -> None:
    """One round of all slots; appends what it chose and puts the streams' tokens back."""
    out = session.step()
    count, emitted = np.asarray(out.count), np.asarray(out.emitted)
    rows = np.asarray(out.logits) if logits else None
    for slot, i in slots.items():
        found, stream = made[i], streams[i]
        for step in range(int(count[slot])):
            at = len(found["choices"])
            choice = int(emitted[slot, step])
            found["choices"].append(choice)
            if rows is not None:
                row = rows[slot, step]
                second, best = np.partition(row, -2)[-2:]
                found["best"].append(float(best))
                found["margin"].append(float(best - second))
                found["digests"].append(hashlib.blake2b(row, digest_size=8).hexdigest())
            if choice != stream[at]:
                _cut(session, slot, len(prompts[i]) + at, int(stream[at]), at + 1 == len(stream))
                break


def _cut(session: Session, slot: int, position: int, token: int, last: bool) -> None:
    """Ends a slot's sequence with `token` at `position`; the tokens before stay."""
    state = session.state
    session.state = dataclasses.replace(
        state,
        tokens=state.tokens.at[slot, position].set(jnp.int32(token)),
        committed=state.committed.at[slot].set(position + 1),
        # keys of the tokens before: the round computed them for exactly those tokens
        cached=state.cached.at[slot].set(position),
        status=state.status.at[slot].set(LENGTH if last else RUNNING),
    )


def row_digests(session: Session, slot: int) -> list[str]:
    """A digest of every live KV row of a slot, all layers' keys and values of a position."""
    count, cache = int(np.asarray(session.state.cached)[slot]), session.state.cache
    layers = [np.asarray(x)[slot, :, :count] for x in (*cache.k, *cache.v)]
    if count == 0:
        return []
    rows = np.ascontiguousarray(np.stack(layers).transpose(2, 0, 1, 3))  # [count, 2L, K, h]
    return [hashlib.blake2b(row.tobytes(), digest_size=8).hexdigest() for row in rows]


def _sampling(values: Mapping[str, Any]) -> SamplingParams:
    given = {name: tuple(v) if isinstance(v, list) else v for name, v in values.items()}
    return SamplingParams.from_mapping(given)
