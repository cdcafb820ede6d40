"""A batch of slots on the device: admission, rounds, and reading back what is new."""

from __future__ import annotations

import dataclasses
import time

import jax
import jax.numpy as jnp
import numpy as np

from jetspec_jax.cache import KVCache
from jetspec_jax.config import PolicyConfig, SamplingParams
from jetspec_jax.plan import RoundPlan
from jetspec_jax.policy import fresh_control, next_allowance
from jetspec_jax.programs import Programs, int32
from jetspec_jax.sampling import sampling_state
from jetspec_jax.state import (
    IDLE,
    RUNNING,
    DecodeState,
    EngineParams,
    RoundOut,
    empty_counters,
)
from jetspec_jax.stats import SpecStats

MAX_STOP_IDS = 16


def new_state(
    plan: RoundPlan,
    batch: int,
    cache: KVCache,
    context: KVCache | None,
    policy: PolicyConfig | None = None,
    allowance: float | None = None,
) -> DecodeState:
    """All slots idle; cache contents are kept, but nothing of them is live."""
    size = cache.allocated
    return DecodeState(
        tokens=jnp.zeros((batch, size), jnp.int32),
        drafted=jnp.zeros((batch, size), bool),
        committed=jnp.ones((batch,), jnp.int32),
        cached=jnp.zeros((batch,), jnp.int32),
        limit=jnp.ones((batch,), jnp.int32),
        status=jnp.full((batch,), IDLE, jnp.int32),
        speculate=jnp.zeros((batch,), bool),
        stop_ids=jnp.full((batch, MAX_STOP_IDS), -1, jnp.int32),
        sampling=sampling_state([SamplingParams()] * batch),
        cache=cache,
        context=context,
        counters=empty_counters(batch, plan.depth, len(plan.budgets)),
        control=fresh_control(policy or PolicyConfig(), allowance),
    )


class Session:
    """B slots that run one plan. `one` is the single-sequence state in which prompts are prefilled
    when B > 1.
    """

    def __init__(
        self,
        programs: Programs,
        plan: RoundPlan,
        params: EngineParams,
        state: DecodeState,
        one: DecodeState | None,
        policy: PolicyConfig | None = None,
        allowance: float | None = None,
    ) -> None:
        self.programs, self.plan, self.params, self.state, self._one = (
            programs,
            plan,
            params,
            state,
            one,
        )
        self.policy = policy or PolicyConfig()
        # plain steps that the next sequence may lose by drafting
        self.allowance = self.policy.first_loss if allowance is None else allowance
        self.batch = state.tokens.shape[0]
        self.prefill_s = self.decode_s = 0.0
        self.rounds = 0  # asked for, over all calls
        self._learnt = 0  # of them, rounds that `allowance` has seen

    def states(self) -> list[DecodeState]:
        """The states whose caches the engine lent."""
        return [self.state] if self._one is None else [self.state, self._one]

    def learn(self) -> float:
        """The allowance after the rounds since the last call (`policy.next_allowance`)."""
        if self.rounds > self._learnt and len(self.plan.budgets) > 1:
            left = float(self.state.control.allowance)
            self.allowance = next_allowance(self.policy, self.allowance, left)
        self._learnt = self.rounds
        return self.allowance

    def compile(self, *, details: bool) -> None:
        """Builds the programs this session needs, before any clock runs."""
        first = self.state if self._one is None else self._one
        self.programs.get("prefill", self.plan, first.tokens.shape[0], self.params, first)
        if self._one is not None:
            self.programs.get("insert", self.plan, self.batch, self.state, self._one, int32(0))
        name, extra = ("step", ()) if details else ("rounds", (int32(1),))
        self.programs.get(name, self.plan, self.batch, self.params, self.state, *extra)

    def admit(
        self,
        slot: int,
        ids: list[int],
        limit: int,
        stop_ids: tuple[int, ...],
        sampling: SamplingParams,
        speculate: bool,
    ) -> None:
        """Prefills a prompt and puts it into an idle slot."""
        started = time.perf_counter()
        first = self.state if self._one is None else self._one
        # several sequences share one control, which lives as long as the session
        control = first.control
        if self._one is None:
            control = fresh_control(self.policy, self.learn())
        tokens = np.zeros(first.tokens.shape, np.int32)
        tokens[0, : len(ids)] = ids
        padded = np.full((1, MAX_STOP_IDS), -1, np.int32)
        padded[0, : len(stop_ids)] = stop_ids
        ready = dataclasses.replace(
            first,
            tokens=jnp.asarray(tokens),
            drafted=jnp.zeros(first.drafted.shape, bool),
            committed=jnp.asarray([len(ids)], jnp.int32),
            cached=jnp.zeros((1,), jnp.int32),
            limit=jnp.asarray([limit], jnp.int32),
            status=jnp.asarray([RUNNING], jnp.int32),
            speculate=jnp.asarray([speculate]),
            stop_ids=jnp.asarray(padded),
            sampling=sampling_state([sampling]),
            counters=empty_counters(1, self.plan.depth, len(self.plan.budgets)),
            control=control,
        )
        ready = self.programs.get("prefill", self.plan, 1, self.params, ready)(self.params, ready)
        if self._one is None:
            self.state = ready
        else:
            program = self.programs.get(
                "insert", self.plan, self.batch, self.state, ready, int32(0)
            )
            self.state = program(self.state, ready, int32(slot))
            self._one = ready
        jax.block_until_ready(self.state.cached)
        self.prefill_s += time.perf_counter() - started

    def free(self, slot: int) -> None:
        """Ends a slot from the host (a stop string, a client that left)."""
        self.state = dataclasses.replace(self.state, status=self.state.status.at[slot].set(IDLE))

    def run(self, rounds: int) -> None:
        """Up to `rounds` rounds on the device, fewer when every slot has ended."""
        started = time.perf_counter()
        program = self.programs.get(
            "rounds", self.plan, self.batch, self.params, self.state, int32(1)
        )
        self.state = program(self.params, self.state, int32(rounds))
        jax.block_until_ready(self.state.committed)
        self.rounds += rounds
        self.decode_s += time.perf_counter() - started

    def step(self) -> RoundOut:
        """One round, with its details."""
        started = time.perf_counter()
        program = self.programs.get("step", self.plan, self.batch, self.params, self.state)
        self.state, out = program(self.params, self.state)
        jax.block_until_ready(self.state.committed)
        self.rounds += 1
        self.decode_s += time.perf_counter() - started
        return out

    def status(self) -> tuple[np.ndarray, np.ndarray]:
        """committed [B] and status [B] on the host."""
        return np.asarray(self.state.committed), np.asarray(self.state.status)

    def ids(self, slot: int, start: int, stop: int) -> tuple[list[int], list[bool]]:
        """Committed ids from position `start` to `stop`, and whether each was drafted."""
        tokens = np.asarray(self.state.tokens)[slot, start:stop]
        drafted = np.asarray(self.state.drafted)[slot, start:stop]
        return [int(t) for t in tokens], [bool(d) for d in drafted]

    def stats(self, slot: int) -> SpecStats:
        """Counts of a slot since its admission."""
        c = self.state.counters
        return SpecStats.from_counts(
            np.asarray(c.accepted)[slot], np.asarray(c.had_node)[slot], np.asarray(c.nodes)[slot], 0
        )
