"""How many nodes to verify, round by round, on the device.

The tree's nodes are sorted by path log-probability, so its first n nodes are the best tree of n
nodes and 1 + sum exp(score) over them is the drafter's own estimate of the tokens a round commits
(algorithm.md section 4). A round takes the budget with the most expected tokens per unit of
measured time; where drafting has not paid lately it pauses, for 4 rounds at first, twice as long
each time it fails again. Tokens do not depend on any of this: every choice is lossless.
"""

from __future__ import annotations

import flax.struct
import jax.numpy as jnp
from jax import lax

from jetspec_jax.state import Control
from jetspec_jax.typing import Array

FIRST_PAUSE, LONGEST_PAUSE = 4, 64  # rounds
# Running gain, in plain steps saved per drafted round: it remembers about ten rounds, since nearly
# half of the rounds of a drafter that pays accept nothing. A sequence starts with some credit, and
# has less after a pause, when one good round must speak for more.
_DECAY, FIRST_CREDIT, LATER_CREDIT = 0.9, 0.15, 0.03
_TRUST_DECAY, _TRUST_RANGE = 0.9, (0.25, 2.0)


@flax.struct.dataclass
class Costs:
    """Times in units of a plain step, measured on this device (`engine.measure_costs`)."""

    verify: Array  # [n budgets] float32, verify, accept and commit with that many nodes
    draft: Array  # [] float32, draft and tree


def fresh_control() -> Control:
    """Control of a sequence that begins: drafting gets the benefit of the doubt."""
    return Control(
        gain=jnp.asarray(FIRST_CREDIT, jnp.float32),
        cooldown=jnp.zeros((), jnp.int32),
        pause=jnp.asarray(FIRST_PAUSE, jnp.int32),
        trust=jnp.ones((), jnp.float32),
    )


def choose_budget(
    scores: Array,
    valid: Array,
    active: Array,
    budgets: tuple[int, ...],
    costs: Costs,
    trust: Array,
) -> tuple[Array, Array]:
    """Index of the budget to verify, int32 [], and the accepted tokens that the scores promise.

    Args:
        scores: [B, N] float32 path log-probabilities, sorted within a sequence.
        valid: [B, N] bool.
        active: [B] bool, sequences that are running.
        budgets: ascending node counts, the last is N.
        costs: measured times.
        trust: accepted tokens per promised one, lately (`Control.trust`): a head's probabilities
            are off by a factor that depends on the text.
    """
    p = jnp.where(valid & active[:, None], jnp.exp(scores), 0.0)
    tokens = jnp.cumsum(p.sum(0))  # the root's p is 1: it stands for the bonus token
    running = active.sum().astype(jnp.float32)
    promised = tokens[jnp.asarray([b - 1 for b in budgets], jnp.int32)] - running
    expected = running + trust * promised
    index = jnp.argmax(expected / (costs.draft + costs.verify)).astype(jnp.int32)
    return index, promised[index]


def update(
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
        control: before.
        drafted: [] bool, the drafter ran.
        committed: [] int32 tokens of all active sequences.
        active: [] int32 number of active sequences.
        promised: [] float32 accepted tokens that the scores promised (`choose_budget`).
        spent: [] float32 cost of the round, plain: [] cost of a plain round, in plain steps.
    """
    # plain rounds would have needed `committed / active` steps for the same tokens
    saved = (
        committed.astype(jnp.float32) / jnp.maximum(active, 1).astype(jnp.float32) * plain - spent
    )
    gain = jnp.where(drafted, _DECAY * control.gain + (1 - _DECAY) * saved, control.gain)
    failed = drafted & (gain < 0)
    cooldown = jnp.where(failed, control.pause, jnp.maximum(control.cooldown - 1, 0))
    longer = jnp.minimum(control.pause * 2, LONGEST_PAUSE)
    pause = jnp.where(failed, longer, jnp.where(drafted & (saved > 0), FIRST_PAUSE, control.pause))
    # after a pause one round decides anew
    gain = jnp.where(failed, LATER_CREDIT, gain)
    ratio = ((committed - active).astype(jnp.float32) + 0.5) / (promised + 0.5)
    trust = jnp.clip(_TRUST_DECAY * control.trust + (1 - _TRUST_DECAY) * ratio, *_TRUST_RANGE)
    return Control(
        gain,
        lax.convert_element_type(cooldown, jnp.int32),
        lax.convert_element_type(pause, jnp.int32),
        jnp.where(drafted & (promised > 0), trust, control.trust),
    )
