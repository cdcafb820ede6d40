"""What can be tuned of the policy: the fields of `PolicyConfig` that decide how drafting is tried.
They are data of the compiled program, so a new value costs a trial nothing, and no value can change
a token. What drafting may lose (`first_loss` to `least_loss`) is a promise to the user, on texts
that no suite holds: it is not tuned.
"""

from typing import Any

from jetspec_jax.config import PolicyConfig
from pallas_kernels.parameters import Parameter


def _chooses(facts: Any) -> bool:
    """Whether rounds of this engine choose anything (`policy.update` runs)."""
    return facts.spec.enabled and len(facts.budgets) > 1


def _number(
    field: str, low: float, high: float, why: str, *, log: bool = False, kind: Any = "float"
) -> Parameter:
    return Parameter(
        f"policy.{field}",
        kind,
        getattr(PolicyConfig(), field),
        why,
        low=low,
        high=high,
        log=log,
        applies=_chooses,
        here=lambda facts: {"default": getattr(facts.spec.policy, field)},
        setup="none",
        only=(("spec.mode", ("auto",)),),
    )


PARAMETERS = (
    _number("first_pause", 1, 8, "rounds without drafting after it did not pay", kind="int"),
    _number("longest_pause", 8, 256, "longest pause, in rounds", log=True, kind="int"),
    _number("decay", 0.5, 0.98, "memory of the running gain: quick or sure to give up"),
    _number("first_credit", 0.02, 1.0, "running gain that a sequence starts with", log=True),
    _number("later_credit", 0.01, 0.5, "running gain after a pause", log=True),
    _number("trust_decay", 0.5, 0.98, "memory of accepted to promised tokens"),
    _number("trust_low", 0.1, 1.0, "least factor on what the scores promise", log=True),
    _number("trust_high", 1.0, 4.0, "largest factor on what the scores promise", log=True),
)
