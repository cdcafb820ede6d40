"""What can be tuned of trees and of prompt lookup. Trees decide speed alone, never a token."""

from collections.abc import Callable, Mapping
from typing import Any

from pallas_kernels.parameters import Parameter

WITH_HEAD = (("spec.drafter", ("head", "hybrid")),)
WITH_LOOKUP = (("spec.drafter", ("lookup", "hybrid")),)
# changing one of these changes what leaving depth, budget or head depth out means
MODES = ("spec.mode", "spec.drafter", "spec.depth")
LONGEST_LOOKUP = 24  # drafted tokens; a round writes no more than 63


def drafts(facts: Any) -> bool:
    """Whether this engine speculates at all."""
    return facts.spec.enabled


def has_head(facts: Any) -> bool:
    """Whether a draft head is loaded and speculation is on."""
    return drafts(facts) and facts.head is not None


def resolved(field: str) -> Callable[[Any], Mapping[str, Any]]:
    """The default is what the base settings resolve to."""
    return lambda facts: {"default": getattr(facts.spec, field)}


def _depth(facts: Any) -> Mapping[str, Any]:
    # a head drafts no further than it was trained; lookup alone is free to
    most = LONGEST_LOOKUP if facts.head is None else facts.head.depth
    return {"default": facts.spec.depth, "high": max(most, facts.spec.depth)}


def _width(facts: Any) -> Mapping[str, Any]:
    return {"default": facts.spec.width, "high": min(16, facts.head.head_vocab_size)}


PARAMETERS = (
    Parameter(
        "spec.mode",
        "choice",
        "auto",
        "auto chooses a budget every round; tree and chain have a fixed one and no pauses",
        ("auto", "tree", "chain"),
        applies=drafts,
        here=resolved("mode"),
    ),
    Parameter(
        "spec.budget",
        "choice",
        24,
        "most nodes verified a round: tokens a round against its time",
        (2, 3, 4, 6, 8, 10, 12, 16, 20, 24, 32, 48),
        applies=drafts,
        here=lambda facts: {"default": facts.budgets[-1]},
        with_=MODES,
    ),
    Parameter(
        "spec.builder",
        "choice",
        "exact",
        "which nodes a tree takes (the published builders beside the exact one)",
        ("exact", "accum_logp", "top2gap", "chain"),
        applies=has_head,
        here=resolved("builder"),
        only=(("spec.mode", ("auto", "tree")), *WITH_HEAD),
    ),
    Parameter(
        "spec.width",
        "int",
        8,
        "candidates kept per depth: better trees against time to rank and build them",
        low=1,
        high=16,
        applies=has_head,
        here=_width,
        only=WITH_HEAD,
    ),
    Parameter(
        "spec.depth",
        "int",
        7,
        "longest drafted path: what a round can deliver against rows written and paths walked",
        low=1,
        high=LONGEST_LOOKUP,
        applies=drafts,
        here=_depth,
        with_=("spec.drafter",),
    ),
    Parameter(
        "spec.lookup_ngram",
        "int",
        3,
        "longest n-gram that prompt lookup matches: surer matches against more of them",
        low=1,
        high=8,
        applies=drafts,
        here=resolved("lookup_ngram"),
        only=WITH_LOOKUP,
    ),
    Parameter(
        "spec.lookup_branches",
        "int",
        2,
        "continuations that prompt lookup offers",
        low=1,
        high=6,
        applies=drafts,
        here=resolved("lookup_branches"),
        only=WITH_LOOKUP,
    ),
    Parameter(
        "spec.top2gap_beta",
        "float",
        2.0,
        "how fast a sure depth loses branches (builder top2gap)",
        low=0.25,
        high=8.0,
        log=True,
        applies=has_head,
        here=resolved("top2gap_beta"),
        only=(("spec.builder", ("top2gap",)), *WITH_HEAD),
    ),
    Parameter(
        "spec.top2gap_g0",
        "float",
        1.0,
        "the gap of log-probabilities that counts as sure (builder top2gap)",
        low=0.1,
        high=4.0,
        log=True,
        applies=has_head,
        here=resolved("top2gap_g0"),
        only=(("spec.builder", ("top2gap",)), *WITH_HEAD),
    ),
)
