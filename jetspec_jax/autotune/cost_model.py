"""What a round costs, what it must cost at least, and which budget is best (pilot.md section 2).

Pure functions over a `Profile`: times measured phase by phase on one deployment (`profile.py`), or
planned from data-sheet values of a GPU that is not there (`planning.py`). A round of `nodes` tree
nodes a sequence takes

    T_draft + T_tree + T_verify(batch * nodes) + T_accept + T_commit + T_host

and commits tau tokens a sequence; plain decoding takes T_plain a token. So the speed-up is
tau * T_plain / round, and every term has a least time that no implementation goes below.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

from jetspec_jax.errors import InputError

VERSION = 1  # of the JSON form


@dataclasses.dataclass(frozen=True)
class Device:
    """What the hardware gives.

    Attributes:
        name: for people.
        bandwidth: bytes a second.
        flops: operations a second (a multiply-add is two) of its best matmul.
        planned: values of a data sheet, not measured.
    """

    name: str
    bandwidth: float
    flops: float
    planned: bool = False


@dataclasses.dataclass(frozen=True)
class Shape:
    """Bytes and operations that a deployment cannot avoid.

    Attributes:
        weight_bytes: of what one plain step of the target reads, in their format in memory; of a
            mixture of experts without its experts.
        expert_bytes: of all experts of all layers.
        parameters: that take part in one row's products (active ones of a mixture of experts).
        experts, active: of a layer, and how many a row takes; 0 for dense models.
        key_bytes: keys and values of one cached token, all layers.
        state_bytes: recurrent state read and written by a step of one sequence.
        draft_bytes: of the draft head with the LM head rows that it reads.
        draft_parameters: that take part in one drafted slot.
        draft_key_bytes: keys and values of one cached token in the drafter's context.
        draft_rows: slots that the head computes a round and sequence.
        depth: D, most drafted tokens that a round accepts.
    """

    weight_bytes: float
    parameters: float
    key_bytes: float
    expert_bytes: float = 0.0
    experts: int = 0
    active: int = 0
    state_bytes: float = 0.0
    draft_bytes: float = 0.0
    draft_parameters: float = 0.0
    draft_key_bytes: float = 0.0
    draft_rows: int = 0
    depth: int = 0


@dataclasses.dataclass(frozen=True)
class Profile:
    """Seconds of every phase of a round on one deployment.

    Attributes:
        device, shape: what it ran on and what it has to do.
        label: drafter, weights and arithmetic, for people.
        batch: sequences decoded at once.
        context: cached tokens while it was measured.
        plain_s: a plain round (draws nothing, verifies one node), acceptance and commit included.
        verify_s: node count a sequence -> target forward and choice of a round (acceptance and
            commit left out), ascending; 1 is among them.
        draft_s: the head's forward and its candidates; 0 without a head.
        tree_s: building the tree, prompt lookup and merging.
        accept_s: the walk along the target's choices, stop and length cuts.
        commit_s: accepted rows into the caches of target and drafter.
        host_s: what a call from Python costs, beside the rounds that it runs.
        rounds_per_call: rounds of a call.
    """

    device: Device
    shape: Shape
    label: str
    batch: int
    context: int
    plain_s: float
    verify_s: Mapping[int, float]
    draft_s: float
    tree_s: float
    accept_s: float
    commit_s: float
    host_s: float
    rounds_per_call: int = 64

    def __post_init__(self) -> None:
        counts = list(self.verify_s)
        if not counts or counts[0] != 1 or counts != sorted(set(counts)):
            raise InputError(
                f"a profile's verify_s is of node counts {counts}; give ascending ones from 1 on"
            )
        times = [self.plain_s, self.draft_s, self.tree_s, self.accept_s, self.commit_s, self.host_s]
        if not all(0 <= t < math.inf for t in (*times, *self.verify_s.values())):
            raise InputError("a profile holds a time that is negative or not finite; measure again")

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values."""
        times = {str(n): t for n, t in self.verify_s.items()}
        return {"version": VERSION} | dataclasses.asdict(self) | {"verify_s": times}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Profile:
        """Raises InputError where this is no profile, or one of another version."""
        if not isinstance(value, Mapping) or value.get("version") != VERSION:
            raise InputError(
                f"this is no cost profile of version {VERSION}; measure it again with this version"
            )
        try:
            rest = {k: v for k, v in value.items() if k != "version"}
            rest["device"], rest["shape"] = Device(**rest["device"]), Shape(**rest["shape"])
            rest["verify_s"] = {int(n): float(t) for n, t in rest["verify_s"].items()}
            return cls(**rest)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise InputError(f"this cost profile is damaged ({error}); measure it again") from error


def experts_touched(experts: int, active: int, rows: float) -> float:
    """Expected different experts that `rows` rows read, choosing `active` of `experts` evenly and
    independently: E (1 - (1 - k / E)^M) (pilot.md section 2)."""
    return experts * (1.0 - (1.0 - active / experts) ** rows) if experts else 0.0


def read_bytes(shape: Shape, rows: float, batch: int, context: int) -> float:
    """Bytes that a target forward of `rows` rows in all must read: weights once, the experts that
    are touched, every sequence's keys and values, recurrent states."""
    share = experts_touched(shape.experts, shape.active, rows) / max(shape.experts, 1)
    caches = batch * (context * shape.key_bytes + shape.state_bytes)
    return shape.weight_bytes + share * shape.expert_bytes + caches


def verify_floor(device: Device, shape: Shape, nodes: float, batch: int, context: int) -> float:
    """Least seconds of a target forward over `nodes` nodes of each sequence."""
    rows = batch * nodes
    memory = read_bytes(shape, rows, batch, context) / device.bandwidth
    return max(memory, 2.0 * shape.parameters * rows / device.flops)


def draft_floor(device: Device, shape: Shape, batch: int, context: int) -> float:
    """Least seconds of the head's pass: its weights, its LM head rows and its context once."""
    memory = (shape.draft_bytes + batch * context * shape.draft_key_bytes) / device.bandwidth
    rows = batch * shape.draft_rows
    return max(memory, 2.0 * shape.draft_parameters * rows / device.flops)


def at_batch(profile: Profile, batch: int) -> Profile:
    """The same deployment with another number of sequences, as far as its times tell.

    A forward's time depends on its rows in all, and on the keys that each sequence adds. What a
    head's pass adds a sequence is the target's own time a row, by their parameters.
    """
    if batch == profile.batch:
        return profile
    device, shape = profile.device, profile.shape
    rows = [profile.batch * n for n in profile.verify_s]
    caches = (batch - profile.batch) * profile.context * shape.key_bytes / device.bandwidth

    def verify(nodes: int) -> float:
        return _line(rows, list(profile.verify_s.values()), batch * nodes) + caches

    table = {n: verify(n) for n in profile.verify_s}
    rest = profile.accept_s + profile.commit_s
    # seconds that a row adds to the target where rows are many
    slope = (profile.verify_s[max(profile.verify_s)] - profile.verify_s[1]) / (rows[-1] - rows[0])
    share = shape.draft_parameters / shape.parameters
    more = (batch - profile.batch) * shape.draft_rows * slope * share
    return dataclasses.replace(
        profile,
        batch=batch,
        verify_s=table,
        plain_s=table[1] + rest,
        draft_s=max(profile.draft_s + more, draft_floor(device, shape, batch, profile.context))
        if profile.draft_s
        else 0.0,
        tree_s=profile.tree_s * batch / profile.batch,
    )


def _line(xs: Sequence[float], ys: Sequence[float], x: float) -> float:
    """Piecewise linear through ascending points, going on with the last piece, never falling."""
    if len(xs) == 1:
        return ys[0]
    i = next((i for i in range(1, len(xs) - 1) if x <= xs[i]), len(xs) - 1)
    at = ys[i - 1] + (ys[i] - ys[i - 1]) * (x - xs[i - 1]) / (xs[i] - xs[i - 1])
    return max(at, 1e-9) if x <= xs[-1] else max(at, ys[-1])


def verify_time(profile: Profile, nodes: float) -> float:
    """Seconds of the target's forward over `nodes` nodes a sequence (a mean need not be whole)."""
    return _line(list(profile.verify_s), list(profile.verify_s.values()), nodes)


def predict_round(profile: Profile, nodes: float, *, drafts: bool = True) -> float:
    """Seconds of a round that verifies `nodes` nodes of each sequence.

    Args:
        profile: of this number of sequences (`at_batch`).
        nodes: verified nodes a sequence, root included; a mean over rounds is fine.
        drafts: False for a plain round.
    """
    if nodes < 1:
        raise InputError(f"nodes={nodes}: a round verifies at least its root; give 1 or more")
    before = profile.draft_s + profile.tree_s if drafts else 0.0
    rest = profile.accept_s + profile.commit_s + profile.host_s / profile.rounds_per_call
    return before + verify_time(profile, nodes) + rest


def predict_plain(profile: Profile) -> float:
    """Seconds of a plain round."""
    return profile.plain_s + profile.host_s / profile.rounds_per_call


@dataclasses.dataclass(frozen=True)
class Prediction:
    """One budget. Seconds of a round, tokens a round and sequence, and plain time over its own."""

    budget: int
    round_s: float
    tau: float
    speedup: float


def budgets_ranked(profile: Profile, tokens: Mapping[int, float]) -> list[Prediction]:
    """Every budget of a recorded acceptance profile, the fastest first; plain decoding (budget 1,
    tau 1, no drafting) is always among them.

    Args:
        profile: of this number of sequences.
        tokens: budget -> expected tokens a round (tau), as recorded with this head.
    """
    plain = predict_plain(profile)
    rows = [Prediction(1, plain, 1.0, 1.0)]
    for budget, tau in tokens.items():
        if budget > 1:
            spent = predict_round(profile, budget)
            rows.append(Prediction(budget, spent, tau, tau * plain / spent))
    return sorted(rows, key=lambda r: (-r.speedup, r.budget))


def best_budget(profile: Profile, tokens: Mapping[int, float]) -> Prediction:
    """The budget with the most tokens a second; 1 where drafting does not pay."""
    return budgets_ranked(profile, tokens)[0]


@dataclasses.dataclass(frozen=True)
class Gap:
    """One line of the gap table.

    Attributes:
        phase: of the round, or "tau".
        measured, ceiling: seconds; of "tau" tokens a round, and the most that its candidates allow.
        gap: seconds of a round that closing it would save.
        share: of the round's time.
        speedup: of the whole, if this gap alone were closed.
        planned: the measured value is itself planned.
    """

    phase: str
    measured: float
    ceiling: float
    gap: float
    share: float
    speedup: float
    planned: bool


def gap_table(
    profile: Profile, nodes: int, tau: float, tau_ceiling: float | None = None
) -> list[Gap]:
    """Where a round's time is above what it must take, the largest gap first.

    Args:
        profile: of this number of sequences.
        nodes: verified nodes a sequence.
        tau: tokens a round as measured.
        tau_ceiling: of the drafter's own candidates (`oracle_tau`); None: depth + 1.
    """
    device, shape = profile.device, profile.shape
    spent = predict_round(profile, nodes)
    batch, context = profile.batch, profile.context
    moved = 4.0 * batch * tau * shape.key_bytes / 2.0  # read and written, keys and values of tau
    phases = (
        (
            "verify",
            verify_time(profile, nodes),
            verify_floor(device, shape, nodes, batch, context),
        ),
        ("draft", profile.draft_s, draft_floor(device, shape, batch, context)),
        ("tree", profile.tree_s, 0.0),
        ("accept", profile.accept_s, 0.0),
        ("commit", profile.commit_s, moved / device.bandwidth),
        ("host", profile.host_s / profile.rounds_per_call, 0.0),
    )
    rows = []
    for phase, measured, ceiling in phases:
        gap = max(measured - ceiling, 0.0)
        rows.append(
            Gap(phase, measured, ceiling, gap, gap / spent, spent / (spent - gap), device.planned)
        )
    most = min(tau_ceiling or math.inf, shape.depth + 1.0)
    if most > tau:
        saved = spent * (1 - tau / most)
        rows.append(Gap("tau", tau, most, saved, saved / spent, most / tau, device.planned))
    return sorted(rows, key=lambda r: -r.gap)


def oracle_tau(hits: Sequence[Sequence[bool]]) -> float:
    """Tokens a round if every depth's candidates were chosen by an oracle: 1 + the mean run of
    depths, from the first on, whose candidates hold the target's token.

    Args:
        hits: a row per position: is the target's token among the candidates of depth 1, 2, ...?
    """
    if not hits:
        raise InputError("no recorded positions; record some text first")
    runs = 0
    for row in hits:
        for hit in row:
            if not hit:
                break
            runs += 1
    return 1.0 + runs / len(hits)
