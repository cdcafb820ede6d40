"""A key and a pattern to take apart. Imports no jax: child processes of tests use it, too."""

import dataclasses

from jetspec_jax.autotune.candidate import Candidate
from jetspec_jax.autotune.key import DeploymentKey
from jetspec_jax.autotune.memory import Pattern

KEY = DeploymentKey(
    batch=1,
    target="tiny",
    target_family="qwen3",
    target_digest="0" * 16,
    drafter="none",
    device="Some CPU, 2 cores",
    kernels="cpu",
    weights="q4_1",
    arithmetic="integer",
    dtype="float32",
    context=256,
    suite="mixed",
)


def pattern(width: int = 4, *, accepted: bool = True, low: float = 1.1, **changes) -> Pattern:
    return Pattern(
        dataclasses.replace(KEY, **changes),
        Candidate({"spec.width": width}, origin="builtin:tree"),
        accepted,
        predicted=1.3,
        measured=low + 0.1,
        low=low,
        high=low + 0.2,
        report={"level": "bitwise"},
        counter_example=None if accepted else {"prompt": "p", "position": 7, "margin": 0.01},
        code="c0de",
        shapes={"decoder_stack": [16, 576]},
    )
