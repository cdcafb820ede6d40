"""What the gate says about a candidate: a frozen record, as JSON and as a page of text."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

FAULT = 2_000  # one changed token in so many positions is what the gate must not miss


def miss_probability(positions: int, one_in: int = FAULT) -> float:
    """Probability that so many positions show nothing of a fault that changes one token in
    `one_in`, independently.
    """
    return (1.0 - 1.0 / one_in) ** positions


def positions_for(miss: float, one_in: int = FAULT) -> int:
    """Positions after which `miss_probability` is at most `miss`."""
    return math.ceil(math.log(miss) / math.log1p(-1.0 / one_in))


def rate_bound(positions: int) -> float:
    """Upper 95% bound of the rate of changed tokens after `positions` without one: about 3 /
    positions (the rule of three).
    """
    return 1.0 - 0.05 ** (1.0 / positions) if positions else 1.0


@dataclasses.dataclass(frozen=True)
class Verdict:
    """The gate's report.

    Attributes:
        accepted: kept or not.
        reason: one line.
        candidate, incumbent: ids.
        tokens_identical: every choice and every free-running token was the reference's.
        bits_identical: KV rows and logits were, too; None where it never came to that.
        level: "bitwise" or "certified", what holds; "none" where tokens differ or too few were
            compared.
        asked: the level that was asked for.
        positions: greedy choices that were compared one by one by token forcing.
        free_tokens, sampled_tokens: tokens of free-running greedy and sampled answers compared.
        rows, logits: KV rows and rows of logits compared in every bit.
        mismatches: (prompt id, index of the token in the answer, the reference's top-2 margin
            there, None for a sampled answer).
        noise, deviation: level certified: largest difference of a best logit or a margin between
            two implementations of the reference, and between reference and candidate.
        speed_ratio, speed_ratio_low, speed_ratio_high: incumbent's time / candidate's, median over
            pairs and 95% interval; None where it was not timed.
        pairs, clock: timed pairs, and whose clock: "engine" (decoding alone, by the trusted
            code) or "judge" (whole requests, by this process: the candidate's code was changed).
        prompts: ids of the prompts, in the order drawn.
        nonce: with the candidate's id it gives the draw again.
        batch: of the deployment.
        seconds: of the whole gate.
    """

    accepted: bool
    reason: str
    candidate: str
    incumbent: str
    tokens_identical: bool
    bits_identical: bool | None
    level: str
    asked: str
    positions: int
    free_tokens: int
    sampled_tokens: int
    rows: int
    logits: int
    mismatches: tuple[tuple[str, int, float | None], ...]
    noise: float | None
    deviation: float | None
    speed_ratio: float | None
    speed_ratio_low: float | None
    speed_ratio_high: float | None
    pairs: int
    clock: str
    prompts: tuple[str, ...]
    nonce: str
    batch: int
    seconds: float

    @property
    def miss(self) -> float:
        """See `miss_probability`."""
        return miss_probability(self.positions)

    @property
    def counter_example(self) -> dict[str, Any] | None:
        """The first mismatch, for the memory."""
        if not self.mismatches:
            return None
        prompt, position, margin = self.mismatches[0]
        return {"prompt": prompt, "position": position, "margin": margin}

    def to_json(self) -> dict[str, Any]:
        values = dataclasses.asdict(self)
        values["mismatches"] = [list(m) for m in self.mismatches]
        values["prompts"] = list(self.prompts)
        return {**values, "miss_probability": self.miss, "rate_bound": rate_bound(self.positions)}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Verdict:
        given = {f.name: value[f.name] for f in dataclasses.fields(cls)}
        given["mismatches"] = tuple((m[0], m[1], m[2]) for m in value["mismatches"])
        given["prompts"] = tuple(value["prompts"])
        return cls(**given)

    def text(self) -> str:
        """A page for people."""
        lines = [
            f"{'ACCEPTED' if self.accepted else 'REFUSED'}: {self.reason}",
            f"candidate {self.candidate} against incumbent {self.incumbent}, batch {self.batch}",
            f"level: {self.level} (asked for: {self.asked})",
            "",
            "Tokens",
            f"  token forcing: {self.positions} positions, {len(self.mismatches)} mismatches",
            f"  free running: {self.free_tokens} greedy and {self.sampled_tokens} sampled tokens",
            f"  a fault that changes one token in {FAULT} would pass with probability "
            f"{self.miss:.2%}",
            f"  rate of changed tokens, 95% bound: {rate_bound(self.positions):.2e}"
            if not self.mismatches
            else f"  rate of changed tokens: {len(self.mismatches)} in {self.positions}",
        ]
        for prompt, position, margin in self.mismatches[:10]:
            known = "sampled" if margin is None else f"margin {margin:.6g}"
            lines.append(f"    prompt {prompt}, token {position}, {known}")
        if len(self.mismatches) > 10:
            lines.append(f"    and {len(self.mismatches) - 10} more")
        bits = {True: "identical", False: "DIFFERENT", None: "not compared"}[self.bits_identical]
        lines += ["", "Bits", f"  {self.rows} KV rows and {self.logits} rows of logits: {bits}"]
        if self.noise is not None and self.deviation is not None:
            lines.append(
                f"  largest difference {self.deviation:.3g}; two implementations of the reference "
                f"differ by {self.noise:.3g}"
            )
        lines += ["", "Speed"]
        if self.speed_ratio is None:
            lines.append("  not measured")
        else:
            lines.append(
                f"  incumbent / candidate: {self.speed_ratio:.3f} "
                f"[{self.speed_ratio_low:.3f}, {self.speed_ratio_high:.3f}], "
                f"{self.pairs} pairs, clock of the {self.clock}"
            )
        lines += [
            "",
            f"{len(self.prompts)} unseen prompts, nonce {self.nonce}, {self.seconds:.1f} s: "
            + ", ".join(self.prompts[:12])
            + (", ..." if len(self.prompts) > 12 else ""),
        ]
        return "\n".join(lines) + "\n"
