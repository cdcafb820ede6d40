"""The static half of a decode program: everything that is a constant of the compiled round."""

from __future__ import annotations

import dataclasses

from jetspec_jax.config import DraftConfig, ModelConfig, SpecConfig
from jetspec_jax.errors import ConfigError
from jetspec_jax.models.decoder import FAST, Numerics


@dataclasses.dataclass(frozen=True)
class RoundPlan:
    """Hashable key of a compiled round.

    Attributes:
        model: target geometry.
        head: draft head geometry; None when there is no head (its context is then not kept).
        spec: resolved speculation settings (drafter, builder, width, lookup).
        budgets: node counts (root included) that a round may verify, ascending; (1,) is plain
            decoding.
        depth: longest path below the root, D; 0 for plain decoding.
        pad_rows: rows every forward is padded to (bitwise numerics: plain and tree rounds then run
            the same shapes); 1 = no padding.
        prefill_chunk: rows per prefill step.
        numerics: fast or bitwise.
        sampled: some sequence may have a temperature above 0; a greedy-only program is traced and
            compiled in half the time.
        logprobs: how many alternatives per token a round reports; None = none at all.
    """

    model: ModelConfig
    head: DraftConfig | None
    spec: SpecConfig
    budgets: tuple[int, ...]
    depth: int
    pad_rows: int = 1
    prefill_chunk: int = 64
    numerics: Numerics = FAST
    sampled: bool = False
    logprobs: int | None = None

    @property
    def taps(self) -> tuple[int, ...]:
        return self.head.target_layer_ids if self.head is not None else ()

    @property
    def head_config(self) -> DraftConfig:
        """The head's geometry, where the caller knows that there is one."""
        if self.head is None:
            raise ConfigError("this plan has no draft head; give --draft DIR or --drafter lookup")
        return self.head

    @property
    def drafts(self) -> bool:
        return self.budgets[-1] > 1

    @property
    def uses_head(self) -> bool:
        return self.drafts and self.spec.drafter in ("head", "hybrid")

    @property
    def path_rows(self) -> int:
        """Rows of an accepted path, padded: the anchor and up to `depth` accepted nodes."""
        return self.depth + 1

    @property
    def slack(self) -> int:
        """Cache slots needed above the last live key, for writes of a fixed number of rows."""
        return max(self.prefill_chunk, self.path_rows)
