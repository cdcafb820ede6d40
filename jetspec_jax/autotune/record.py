"""Records what a drafter offers at every position of a text that the target wrote alone.

Greedy texts do not depend on how they are drafted, so one recording says what any budget, and any
rule that chooses budgets, would have accepted.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from jetspec_jax import costs
from jetspec_jax.config import SamplingParams, SpecConfig
from jetspec_jax.drafting import draft_tree, head_candidates
from jetspec_jax.errors import ConfigError, InputError
from jetspec_jax.plan import RoundPlan
from jetspec_jax.state import RUNNING, DecodeState, EngineParams
from jetspec_jax.typing import Array

if TYPE_CHECKING:
    from jetspec_jax.engine import LLM


@dataclasses.dataclass(frozen=True)
class Recording:
    """Of one text.

    Attributes:
        budgets: ascending node counts, root included.
        accepted: [positions][budgets] tokens that a round beginning at this position accepts.
        hits: [positions][depths] is the target's token among the head's candidates of that depth?
            Empty without a head. Positions are those whose whole block lies inside the text.
    """

    budgets: tuple[int, ...]
    accepted: tuple[tuple[int, ...], ...]
    hits: tuple[tuple[bool, ...], ...]


def record(
    llm: LLM,
    prompts: Sequence[Sequence[int]],
    tokens: int,
    spec: SpecConfig | None = None,
    budgets: Sequence[int] | None = None,
) -> list[Recording]:
    """Writes each prompt's greedy answer by plain rounds and drafts before every one of them.

    Args:
        llm: the engine.
        prompts: token ids.
        tokens: of an answer, at most.
        spec: who drafts; None: the engine's own settings.
        budgets: node counts; None: those that the engine chooses from.

    Raises:
        ConfigError: settings that draft nothing. InputError: a prompt that does not fit.
    """
    spec = llm.resolve(spec) if spec is not None else llm.spec
    plan = llm.plan_for(spec)
    if not plan.drafts:
        raise ConfigError("nothing to record: these settings draft nothing; give a drafter")
    counts = tuple(budgets) if budgets is not None else plan.budgets
    drafting = dataclasses.replace(plan, budgets=counts)
    plain = dataclasses.replace(plan, budgets=(1,))  # keeps the drafter's context, drafts nothing
    look = _look(drafting)
    found = []
    with llm.session(plain, 1, costs.unmeasured(plain)) as session:
        for ids in prompts:
            if len(ids) + tokens > llm.capacity:
                raise InputError(
                    f"a prompt of {len(ids)} tokens and {tokens} more do not fit the capacity of "
                    f"{llm.capacity}; shorten it"
                )
            ends = llm.model_config.eos_ids
            # drafting looks as deep at the end of the text as in its middle
            limit = min(len(ids) + tokens + plan.depth + 1, llm.capacity)
            session.admit(0, list(ids), limit, ends, SamplingParams(), True)
            offers = []
            while len(offers) < tokens and int(session.state.status[0]) == RUNNING:
                offers.append(jax.tree.map(np.asarray, look(session.params, session.state)))
                session.run(1)
            stop = len(ids) + len(offers)
            text, _ = session.ids(0, len(ids), stop)
            found.append(_recording(counts, text, offers))
    return found


def _look(plan: RoundPlan) -> Any:
    """A jitted function of (params, state): the tree's arrays, and the head's candidates [D, W]."""

    @jax.jit
    def look(params: EngineParams, state: DecodeState) -> dict[str, Array]:
        tree = draft_tree(plan, params, state, jnp.asarray(True))
        out = {"token": tree.token[0], "parent": tree.parent[0], "valid": tree.valid[0]}
        if plan.uses_head:
            anchor = jnp.take_along_axis(state.tokens, state.committed[:, None] - 1, axis=1)[:, 0]
            out["candidates"] = head_candidates(plan, params, state, anchor).tokens[0]
        return out

    return look


def _recording(
    budgets: tuple[int, ...], text: Sequence[int], offers: Sequence[dict[str, np.ndarray]]
) -> Recording:
    accepted, hits = [], []
    for at, offer in enumerate(offers):
        path = accepted_path(offer, text[at:])
        # slots are in order of score: a smaller budget holds the first of them
        accepted.append(tuple(sum(node < b for node in path) for b in budgets))
        rows = offer.get("candidates")
        if rows is not None and at + len(rows) <= len(text):
            ahead = text[at : at + len(rows)]
            hits.append(tuple(bool((r == t).any()) for r, t in zip(rows, ahead, strict=True)))
    return Recording(budgets, tuple(accepted), tuple(hits))


def accepted_path(tree: dict[str, np.ndarray], ahead: Sequence[int]) -> list[int]:
    """Slots of the tree that agree with the tokens `ahead`, from the root's child on."""
    here, path = 0, []
    for token in ahead:
        match = (tree["parent"] == here) & (tree["token"] == token) & tree["valid"]
        match[0] = False
        if not match.any():
            break
        here = int(match.argmax())
        path.append(here)
    return path


def tokens_by_budget(recordings: Sequence[Recording]) -> dict[int, float]:
    """Budget -> tau of rounds of that fixed budget, replayed over the texts
    (`cost_model.best_budget` takes it).

    Raises:
        InputError: nothing recorded, or recordings of different budgets.
    """
    if not recordings or not any(r.accepted for r in recordings):
        raise InputError("no recorded positions; record some text first")
    budgets = recordings[0].budgets
    if any(r.budgets != budgets for r in recordings):
        raise InputError("recordings of different budgets do not pool; record them together")
    found = {}
    for column, budget in enumerate(budgets):
        rounds = accepted = 0
        for r in recordings:
            at = 0
            while at < len(r.accepted):
                got = r.accepted[at][column]
                rounds, accepted, at = rounds + 1, accepted + got, at + got + 1
        found[budget] = 1.0 + accepted / rounds
    return found
