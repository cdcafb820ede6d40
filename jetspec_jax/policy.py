"""How many nodes to verify, round by round, on the device.

The tree's nodes are sorted by path log-probability, so its first n nodes are the best tree of n
nodes and 1 + sum exp(score) over them is the drafter's own estimate of the tokens a round commits
(algorithm.md section 4). A round takes the budget with the most expected tokens per unit of
measured time; where drafting has not paid lately it pauses, for a few rounds at first, twice as
long each time it fails again. An allowance bounds what all of this may lose against plain decoding,
whatever the drafter claims: a round is drafted only if the allowance covers it. Tokens do not
depend on any of this: every choice is lossless.
The numbers behind it are `config.PolicyConfig`, handed to the program as data (`Knobs`).
"""

from __future__ import annotations

import dataclasses
from typing import Any

import flax.struct
import jax.numpy as jnp
from jax import lax

from jetspec_jax.config import PolicyConfig
from jetspec_jax.state import Control
from jetspec_jax.typing import Array


@flax.struct.dataclass
class Costs:
    """Times in units of a plain step, measured on this device (`engine.measure_costs`)."""

    verify: Array  # [n budgets] float32, verify, accept and commit with that many nodes
    draft: Array  # [] float32, draft and tree


@flax.struct.dataclass
class Knobs:
    """`PolicyConfig` as data of the program; fields as there, each [] float32 or int32."""

    first_pause: Array  # int32
    longest_pause: Array  # int32
    decay: Array
    first_credit: Array
    later_credit: Array
    trust_decay: Array
    trust_low: Array
    trust_high: Array
    first_loss: Array
    loss_share: Array
    most_loss: Array
    memory: Array
    least_loss: Array


def knobs(config: PolicyConfig) -> Knobs:
    """The arrays that a round reads of `config`: whole numbers as int32, others as float32."""

    def array(field: dataclasses.Field[Any]) -> Array:
        # a float field holds an int where the user wrote one: the declared type decides
        dtype = jnp.int32 if field.type == "int" else jnp.float32
        return jnp.asarray(getattr(config, field.name), dtype)

    return Knobs(**{f.name: array(f) for f in dataclasses.fields(config)})


def fresh_control(config: PolicyConfig, allowance: float | None = None) -> Control:
    """Control of a sequence that begins: drafting gets the benefit of the doubt.

    Args:
        config: the policy's numbers.
        allowance: plain steps that it may lose; None: `first_loss`.
    """
    return Control(
        gain=jnp.asarray(config.first_credit, jnp.float32),
        cooldown=jnp.zeros((), jnp.int32),
        pause=jnp.asarray(config.first_pause, jnp.int32),
        trust=jnp.ones((), jnp.float32),
        allowance=jnp.asarray(config.first_loss if allowance is None else allowance, jnp.float32),
    )


def next_allowance(config: PolicyConfig, allowance: float, left: float) -> float:
    """What the next request of an engine may lose, after one that began with `allowance` and ended
    with `left`: where drafting did not pay lately, the next one tries less of it."""
    moved = allowance + config.memory * (min(left, config.first_loss) - allowance)
    return min(max(moved, config.least_loss), config.first_loss)


def affordable(costs: Costs, control: Control) -> Array:
    """Which budgets a drafted round may take, [n budgets] bool: those that would not lose more than
    the allowance if nothing were accepted."""
    return costs.draft + costs.verify - costs.verify[0] <= control.allowance


def may_draft(costs: Costs, control: Control) -> Array:
    """Whether the drafter runs in this round, [] bool: no pause, and a tree that can be paid."""
    return (control.cooldown == 0) & jnp.any(affordable(costs, control)[1:])


def choose_budget(
    scores: Array,
    valid: Array,
    active: Array,
    budgets: tuple[int, ...],
    costs: Costs,
    control: Control,
) -> tuple[Array, Array]:
    """Index of the budget to verify, int32 [], and the accepted tokens that the scores promise.

    Args:
        scores: [B, N] float32 path log-probabilities, sorted within a sequence.
        valid: [B, N] bool.
        active: [B] bool, sequences that are running.
        budgets: ascending node counts, the last is N.
        costs: measured times.
        control: `trust` is accepted tokens per promised one, lately: a head's probabilities are
            off by a factor that depends on the text. `allowance` limits the choice.
    """
    p = jnp.where(valid & active[:, None], jnp.exp(scores), 0.0)
    tokens = jnp.cumsum(p.sum(0))  # the root's p is 1: it stands for the bonus token
    running = active.sum().astype(jnp.float32)
    promised = tokens[jnp.asarray([b - 1 for b in budgets], jnp.int32)] - running
    expected = running + control.trust * promised
    rate = expected / (costs.draft + costs.verify)
    # plain verification after all is always there: what drafting cost is spent by then
    allowed = affordable(costs, control).at[0].set(True)
    index = jnp.argmax(jnp.where(allowed, rate, 0.0)).astype(jnp.int32)
    return index, promised[index]


def update(
    knobs: Knobs,
    control: Control,
    drafted: Array,
    committed: Array,
    active: Array,
    promised: Array,
    spent: Array,
    plain: Array,
) -> Control:
    """Control after a round.

    Args:
        knobs: the policy's numbers.
        control: before.
        drafted: [] bool, the drafter ran.
        committed: [] int32 tokens of all active sequences.
        active: [] int32 number of active sequences.
        promised: [] float32 accepted tokens that the scores promised (`choose_budget`).
        spent: [] float32 cost of the round, plain: [] cost of a plain round, in plain steps.
    """
    # plain rounds would have needed `committed / active` steps for the same tokens
    written = committed.astype(jnp.float32) / jnp.maximum(active, 1).astype(jnp.float32) * plain
    saved = written - spent
    allowance = control.allowance + jnp.where(drafted, saved, 0.0) + knobs.loss_share * written
    # nearly half of the rounds of a drafter that pays accept nothing: the gain remembers many
    gain = jnp.where(drafted, knobs.decay * control.gain + (1 - knobs.decay) * saved, control.gain)
    failed = drafted & (gain < 0)
    cooldown = jnp.where(failed, control.pause, jnp.maximum(control.cooldown - 1, 0))
    longer = jnp.minimum(control.pause * 2, knobs.longest_pause)
    paid = drafted & (saved > 0)
    pause = jnp.where(failed, longer, jnp.where(paid, knobs.first_pause, control.pause))
    # after a pause one round decides anew
    gain = jnp.where(failed, knobs.later_credit, gain)
    ratio = ((committed - active).astype(jnp.float32) + 0.5) / (promised + 0.5)
    trust = knobs.trust_decay * control.trust + (1 - knobs.trust_decay) * ratio
    trust = jnp.clip(trust, knobs.trust_low, knobs.trust_high)
    return Control(
        gain,
        lax.convert_element_type(cooldown, jnp.int32),
        lax.convert_element_type(pause, jnp.int32),
        jnp.where(drafted & (promised > 0), trust, control.trust),
        jnp.minimum(allowance, knobs.most_loss),
    )
