"""Where a sequence ends: stop ids and length on the device, stop strings on the host.

Both give the same answer however the tokens arrive (one by one, or several from an accepted block).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax.numpy as jnp
from jax import lax

from jetspec_jax.errors import ConfigError
from jetspec_jax.typing import Array

REASON_NONE, REASON_STOP, REASON_LENGTH = 0, 1, 2
FINISH_REASONS = {REASON_STOP: "stop", REASON_LENGTH: "length"}


def truncate_at_stop(
    tokens: Array, count: Array, stop_ids: Array, limit: Array
) -> tuple[Array, Array, Array]:
    """Cuts the tokens that a round commits at the earliest of stop id and length limit.

    Args:
        tokens: [B, T] int32 tokens of this round in order.
        count: [B] int32 how many of them are real.
        stop_ids: [B, E] int32 ids that end the sequence (EOS among them), padded with -1.
        limit: [B] int32 tokens the sequence may still emit (the smaller of max_tokens and what the
            context holds).

    Returns:
        count: [B] int32 tokens kept; a stop id is kept as the last one.
        finished: [B] bool.
        reason: [B] int32, one of REASON_*. A stop id that is also the last token allowed counts as
            a stop.
    """
    index = lax.broadcasted_iota(jnp.int32, tokens.shape, 1)
    allowed = jnp.minimum(count, jnp.maximum(limit, 0))
    stops = (tokens[:, :, None] == stop_ids[:, None, :]) & (stop_ids >= 0)[:, None, :]
    hit = jnp.any(stops, axis=-1) & (index < allowed[:, None])
    first = jnp.min(jnp.where(hit, index, tokens.shape[1]), axis=1)
    stopped = first < tokens.shape[1]
    kept = jnp.where(stopped, first + 1, allowed)
    full = kept >= limit
    reason = jnp.where(stopped, REASON_STOP, jnp.where(full, REASON_LENGTH, REASON_NONE)).astype(
        jnp.int32
    )
    return kept, stopped | full, reason


@dataclasses.dataclass(frozen=True)
class StopMatch:
    """A stop string found. `start` and `end` are character offsets in all the text fed so far."""

    stop: str
    start: int
    end: int


class StopDetector:
    """Finds stop strings in streamed text and holds back text that may be the start of one.

    The stop whose last character comes first wins, and among those that end together the longest,
    so the result is the same for any cutting of the text into pieces.

    Example:
        >>> detector = StopDetector(("END",))
        >>> detector.feed("one E"), detector.feed("ND two"), detector.match.start
        ('one ', '', 4)
    """

    def __init__(self, stops: Sequence[str]):
        """Args: stops: non-empty strings; none at all makes a detector that passes text through.

        Raises:
            ConfigError: an entry is empty or not text.
        """
        if isinstance(stops, str) or any(not isinstance(s, str) or not s for s in stops):
            raise ConfigError(
                f"stop={stops!r} must be a list of non-empty strings; drop the empty entries"
            )
        self._stops = tuple(stops)
        self._longest = max((len(s) for s in self._stops), default=0)
        self._held = ""  # fed but not yet released
        self._released = 0  # characters released
        self.match: StopMatch | None = None

    def feed(self, text: str) -> str:
        """Takes the next piece of text and returns what is certainly before any stop string.

        After a match (`self.match`) all further text is swallowed.
        """
        if self.match is not None or not text:
            return ""
        searched = len(self._held)
        self._held += text
        best: tuple[int, int, str] | None = None
        for stop in self._stops:
            # A match must end in the new text, else it would have been found before.
            at = self._held.find(stop, max(0, searched - len(stop) + 1))
            if at >= 0:
                found = (at + len(stop), at, stop)
                best = found if best is None else min(best, found)
        if best is not None:
            end, start, stop = best
            self.match = StopMatch(stop, self._released + start, self._released + end)
            return self._release(start, drop=True)
        return self._release(len(self._held) - self._open_prefix())

    def flush(self) -> str:
        """Text still held back, at the end of a sequence that no stop string ended."""
        return "" if self.match is not None else self._release(len(self._held))

    def _release(self, count: int, drop: bool = False) -> str:
        out, self._held = self._held[:count], "" if drop else self._held[count:]
        self._released += count
        return out

    def _open_prefix(self) -> int:
        """Length of the longest end of the held text that begins a stop string."""
        for size in range(min(len(self._held), self._longest - 1), 0, -1):
            tail = self._held[-size:]
            if any(stop.startswith(tail) for stop in self._stops):
                return size
        return 0
