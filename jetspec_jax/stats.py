"""The one definition of every speculation figure (interfaces.md section 4); everything else quotes
it.

Counts are taken at verification, before stop and length cuts. The token that prefill chooses is not
counted.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any, Self

from jetspec_jax.errors import InputError

NOT_AVAILABLE = "n/a"


@dataclasses.dataclass(frozen=True)
class SpecStats:
    """Counts of the verify rounds of one or more sequences, and the figures derived from them.

    Attributes:
        rounds: verify rounds.
        accepted_hist: entry a = rounds that accepted exactly a drafted tokens (0..D).
        had_node: entry k-1 = rounds whose tree had at least one node at depth k (1..D).
        nodes: tree nodes verified, roots included.
        delivered: tokens handed to the user (after stop and length cuts, the prefill's token
            included).
    """

    rounds: int = 0
    accepted_hist: tuple[int, ...] = (0,)
    had_node: tuple[int, ...] = ()
    nodes: int = 0
    delivered: int = 0

    def __post_init__(self) -> None:
        if (
            sum(self.accepted_hist) != self.rounds
            or len(self.accepted_hist) != len(self.had_node) + 1
        ):
            raise InputError(
                f"accepted_hist={self.accepted_hist} does not describe rounds={self.rounds} "
                f"of depth {len(self.had_node)}; its D+1 entries must sum to the number of rounds"
            )

    @classmethod
    def from_counts(
        cls, accepted_hist: Sequence[Any], had_node: Sequence[Any], nodes: Any, delivered: Any
    ) -> Self:
        """From device counters: accepted_hist [D+1], had_node [D], scalars; any integer array
        type.
        """
        hist = tuple(int(n) for n in accepted_hist)
        return cls(sum(hist), hist, tuple(int(n) for n in had_node), int(nodes), int(delivered))

    @property
    def depth(self) -> int:
        """D, the deepest level counted."""
        return len(self.had_node)

    @property
    def accepted(self) -> int:
        """Drafted tokens accepted, over all rounds."""
        return sum(length * rounds for length, rounds in enumerate(self.accepted_hist))

    @property
    def drafted(self) -> int:
        """Drafted nodes verified: `nodes` without the roots (vLLM's num_draft_tokens)."""
        return self.nodes - self.rounds

    @property
    def tau(self) -> float | None:
        """Mean tokens per verify round, 1 + accepted / rounds (bonus counted). None without
        rounds.
        """
        return 1.0 + self.accepted / self.rounds if self.rounds else None

    @property
    def accepted_at(self) -> tuple[int, ...]:
        """Entry k-1 = rounds that accepted a node at depth k, that is, at least k tokens.
        Non-increasing.
        """
        return tuple(sum(self.accepted_hist[k:]) for k in range(1, self.depth + 1))

    @property
    def acceptance_rate_per_position(self) -> tuple[float, ...] | None:
        """Accepted at depth k / all rounds. Non-increasing; 1 + its sum = tau. None without
        rounds.
        """
        return tuple(n / self.rounds for n in self.accepted_at) if self.rounds else None

    @property
    def acceptance_per_depth(self) -> tuple[float | None, ...] | None:
        """Accepted at depth k / rounds that had a node at depth k; None at depths never drafted.

        Equals `acceptance_rate_per_position` when every round drafts to the full depth. None
        without rounds.
        """
        if not self.rounds:
            return None
        return tuple(
            a / n if n else None for a, n in zip(self.accepted_at, self.had_node, strict=True)
        )

    @property
    def node_efficiency(self) -> float | None:
        """Accepted tokens / nodes verified. None without rounds."""
        return self.accepted / self.nodes if self.nodes else None

    def merge(self, *others: SpecStats) -> SpecStats:
        """Pools counts; depths may differ. Figures of the result are pooled over rounds, not
        averaged over prompts.
        """
        every = (self, *others)
        depth = max(s.depth for s in every)

        def total(rows: Iterable[tuple[int, ...]], size: int) -> tuple[int, ...]:
            sums = [0] * size
            for row in rows:
                for i, value in enumerate(row):
                    sums[i] += value
            return tuple(sums)

        return SpecStats(
            rounds=sum(s.rounds for s in every),
            accepted_hist=total((s.accepted_hist for s in every), depth + 1),
            had_node=total((s.had_node for s in every), depth),
            nodes=sum(s.nodes for s in every),
            delivered=sum(s.delivered for s in every),
        )

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready: counts and figures, None where there is no figure."""
        return {
            "rounds": self.rounds,
            "accepted": self.accepted,
            "drafted": self.drafted,
            "nodes": self.nodes,
            "delivered": self.delivered,
            "tau": self.tau,
            "accepted_hist": list(self.accepted_hist),
            "acceptance_rate_per_position": _listed(self.acceptance_rate_per_position),
            "acceptance_per_depth": _listed(self.acceptance_per_depth),
            "node_efficiency": self.node_efficiency,
        }

    def summary(self) -> str:
        """One line for people, for example `tau 2.31, 118 rounds, 12% of nodes accepted`."""
        efficiency = None if self.node_efficiency is None else 100.0 * self.node_efficiency
        return (
            f"tau {shown(self.tau)}, {self.rounds} rounds, "
            f"{shown(efficiency, 0)}{'%' if efficiency is not None else ''} of nodes accepted"
        )


def pooled(stats: Iterable[SpecStats]) -> SpecStats:
    """Pools any number of statistics (none gives empty statistics)."""
    return SpecStats().merge(*stats)


def tokens_per_second(delivered: int, seconds: float) -> float | None:
    """Delivered tokens / seconds; None when no time passed."""
    return delivered / seconds if seconds > 0 else None


def shown(value: float | None, digits: int = 2) -> str:
    """A figure for people; `n/a` where there is none."""
    return NOT_AVAILABLE if value is None else f"{value:.{digits}f}"


def _listed(values: tuple[Any, ...] | None) -> list[Any] | None:
    return None if values is None else list(values)
