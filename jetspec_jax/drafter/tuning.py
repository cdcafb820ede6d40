"""What can be tuned of the drafter: who drafts, how far the head goes, and what it costs. None of
it can change a token.
"""

from collections.abc import Mapping
from typing import Any

from jetspec_jax.tree.tuning import MODES, WITH_HEAD, has_head, resolved
from pallas_kernels.parameters import Parameter


def _head_depth(facts: Any) -> Mapping[str, Any]:
    return {"default": facts.spec.head_depth or facts.head.depth, "high": facts.head.depth}


PARAMETERS = (
    Parameter(
        "spec.drafter",
        "choice",
        "hybrid",
        "who drafts: the head, prompt lookup (no model at all), or both in one tree",
        ("hybrid", "head", "lookup"),
        applies=has_head,
        here=resolved("drafter"),
    ),
    Parameter(
        "spec.head_depth",
        "int",
        4,
        "depths drafted by the head: longer paths against the time of drafting",
        low=1,
        high=15,
        applies=has_head,
        here=_head_depth,
        only=WITH_HEAD,
        with_=MODES,
    ),
    Parameter(
        "spec.path_head",
        "choice",
        True,
        "whether the head scores a candidate under its parent: better paths against time",
        (True, False),
        applies=lambda facts: has_head(facts) and facts.head.path_head != "none",
        here=resolved("path_head"),
        only=WITH_HEAD,
    ),
    Parameter(
        "engine.draft_weights",
        "choice",
        "q8_0",
        "the head's weights in memory: 8 bits, or as in its file",
        ("q8_0", "stored"),
        applies=lambda facts: has_head(facts) and facts.kernels == "cpu",
        here=lambda facts: {"default": facts.engine.draft_weights},
        setup="engine",
    ),
)
