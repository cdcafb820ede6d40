"""Paired measurement of plain and speculative decoding on one engine, and the arithmetic over it.

Every prompt is decoded plainly and with each variant back to back, in an order that alternates (A
B, then B A), so that a machine that slows down or warms up favours nobody. Compilation happens
before (warm-up), and what still falls into a run is subtracted by the engine and reported apart.
Speed-up is about decoding: prefill is apart, too.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jetspec_jax.config import SamplingParams, SpecConfig
from jetspec_jax.intervals import bootstrap
from jetspec_jax.stats import SpecStats, pooled, tokens_per_second
from serve.suites import SuitePrompt

PLAIN = "plain"
OFF = SpecConfig(mode="off")


@dataclasses.dataclass(frozen=True)
class Sample:
    """One prompt decoded one way. Times in seconds; with repeats they are medians."""

    token_ids: tuple[int, ...]
    decode_s: float
    prefill_s: float
    ttft_s: float
    compile_s: float
    group_decode_s: float  # of the whole batch the prompt ran in; equals decode_s at batch 1
    stats: SpecStats

    @property
    def tok_s(self) -> float | None:
        """Delivered tokens per second of decoding."""
        return tokens_per_second(len(self.token_ids), self.decode_s)


@dataclasses.dataclass(frozen=True)
class Row:
    """One prompt, decoded plainly and with every variant."""

    suite: str
    id: str
    group: int
    prompt_tokens: int
    plain: Sample
    variants: Mapping[str, Sample]
    first_difference: Mapping[str, int | None]  # per variant: token index, None when identical

    def identical(self, variant: str) -> bool:
        return self.first_difference[variant] is None

    def speedup(self, variant: str) -> float | None:
        return ratio(self.plain.decode_s, self.variants[variant].decode_s)


def ratio(above: float, below: float) -> float | None:
    """None where there is nothing to divide (a one-token answer has no decode time)."""
    return above / below if above > 0 and below > 0 else None


def first_difference(a: Sequence[int], b: Sequence[int]) -> int | None:
    """Index of the first token that differs; a missing token differs from any."""
    for index, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return index
    return None if len(a) == len(b) else min(len(a), len(b))


def measure(
    llm: Any,
    suite: str,
    prompts: Sequence[SuitePrompt],
    variants: Mapping[str, SpecConfig],
    sampling: SamplingParams,
    *,
    batch: int = 1,
    repeat: int = 1,
    template_kwargs: Mapping[str, Any] | None = None,
    first_group: int = 0,
    done: Callable[[int], None] = lambda prompts: None,
) -> list[Row]:
    """Runs the pairs. Warm the engine up first.

    Args:
        llm: the engine (jetspec_jax.LLM).
        suite: name put into the rows.
        prompts: what to ask.
        variants: label -> speculation; PLAIN is added by itself.
        sampling: the same for all.
        batch: prompts per engine call.
        repeat: times every run is made; times are medians, tokens must agree in all of them.
        template_kwargs: for the chat template.
        first_group: number of the first batch, so that a suite measured bit by bit still
            alternates.
        done: called with the number of prompts finished since the last call.

    Returns:
        One row per prompt, in order.
    """
    configs = {PLAIN: OFF, **variants}
    rows: list[Row] = []
    for group, start in enumerate(range(0, len(prompts), batch), first_group):
        members = prompts[start : start + batch]
        chats = [list(p.messages) for p in members]
        runs: dict[str, list[list[Any]]] = {label: [] for label in configs}
        for turn in range(repeat):
            order = list(configs) if (group + turn) % 2 == 0 else list(configs)[::-1]
            for label in order:
                spec = configs[label]
                runs[label].append(
                    llm.chat(chats, sampling, template_kwargs=template_kwargs, spec=spec)
                )
        for index, prompt in enumerate(members):
            made = {label: _sample(turns, index) for label, turns in runs.items()}
            plain = made.pop(PLAIN)
            # Any repeat that disagrees counts as a difference, not only the first.
            reference = runs[PLAIN][0][index].token_ids
            differs = {
                label: _any_difference(reference, [turn[index].token_ids for turn in turns])
                for label, turns in runs.items()
            }
            unstable = differs.pop(PLAIN)
            differs = {label: unstable if d is None else d for label, d in differs.items()}
            count = len(runs[PLAIN][0][index].prompt_token_ids)
            rows.append(Row(suite, prompt.id, group, count, plain, made, differs))
        done(len(members))
    return rows


def _any_difference(reference: Sequence[int], others: Sequence[Sequence[int]]) -> int | None:
    found = (first_difference(reference, other) for other in others)
    return next((index for index in found if index is not None), None)


def _sample(turns: Sequence[Sequence[Any]], index: int) -> Sample:
    results = [turn[index] for turn in turns]
    middle = lambda name: statistics.median(getattr(r.timings, name) for r in results)  # noqa: E731
    first = results[0]
    return Sample(
        token_ids=tuple(int(t) for t in first.token_ids),
        decode_s=middle("decode_s"),
        prefill_s=middle("prefill_s"),
        ttft_s=middle("ttft_s"),
        compile_s=sum(r.timings.compile_s for r in results),
        group_decode_s=statistics.median(max(r.timings.decode_s for r in turn) for turn in turns),
        stats=first.spec,
    )


def summarise(rows: Sequence[Row], variant: str) -> dict[str, Any]:
    """One suite's result for one variant. Keys are the schema of results.json (serve.bench's
    docstring)."""
    # Prompts of one batch share the clock: the batch, not the prompt, is the unit that is timed and
    # resampled.
    groups = {
        row.group: (row.plain.group_decode_s, row.variants[variant].group_decode_s) for row in rows
    }
    plain_s = [pair[0] for pair in groups.values()]
    spec_s = [pair[1] for pair in groups.values()]
    stats = pooled(row.variants[variant].stats for row in rows)
    identical = [row for row in rows if row.identical(variant)]
    odd = next((row for row in rows if not row.identical(variant)), None)
    plain_tokens = sum(len(row.plain.token_ids) for row in rows)
    spec_tokens = sum(len(row.variants[variant].token_ids) for row in rows)
    taus = [tau for row in rows if (tau := row.variants[variant].stats.tau) is not None]
    ups = [up for row in rows if (up := row.speedup(variant)) is not None]
    return {
        "prompts": len(rows),
        "speedup": ratio(sum(plain_s), sum(spec_s)),
        "speedup_interval": bootstrap(plain_s, spec_s),
        "speedup_of_medians": ratio(statistics.median(plain_s), statistics.median(spec_s)),
        "speedup_min": min(ups, default=None),
        "tau": stats.tau,
        "tau_median": statistics.median(taus) if taus else None,
        "tau_min": min(taus, default=None),
        "tau_max": max(taus, default=None),
        "identical": odd is None,
        "identical_share": len(identical) / len(rows),
        "first_different": None
        if odd is None
        else {"id": odd.id, "token": odd.first_difference[variant]},
        "acceptance": list(stats.acceptance_per_depth or ()),
        "accepted_hist": list(stats.accepted_hist),
        "rounds": stats.rounds,
        "node_efficiency": stats.node_efficiency,
        "nodes_per_round": stats.nodes / stats.rounds if stats.rounds else None,
        "plain_tok_s": ratio(plain_tokens, sum(plain_s)),
        "spec_tok_s": ratio(spec_tokens, sum(spec_s)),
        "plain_ttft_s": statistics.median(row.plain.ttft_s for row in rows),
        "spec_ttft_s": statistics.median(row.variants[variant].ttft_s for row in rows),
        "plain_decode_s": sum(plain_s),
        "spec_decode_s": sum(spec_s),
        "spec_prefill_s": sum(row.variants[variant].prefill_s for row in rows),
        "tokens": sum(len(row.variants[variant].token_ids) for row in rows),
        "compile_s": sum(row.plain.compile_s + row.variants[variant].compile_s for row in rows),
        "round_ms": 1_000 * sum(spec_s) / stats.rounds * _batch(rows) if stats.rounds else None,
    }


def _batch(rows: Sequence[Row]) -> float:
    """Mean prompts per batch: their rounds run side by side."""
    return len(rows) / len({row.group for row in rows})
