"""The gate: no candidate is kept that changes a token (pilot.md section 5). No flag skips any part.

The reference is plain decoding (`spec.mode="off"`) by the trusted source tree, with the kernels'
own build parameters and the incumbent's engine settings, that is, its numerics. A candidate is
asked over a pipe (`client.Worker`); what it must produce stays here until it has answered:

1. Free running on unseen prompts, incumbent and candidate in turn (A B, B A, ...). Each prompt is
   asked once a side, so an answer that was remembered is no use. The same runs are the speed pairs.
2. The reference's tokens and KV rows for the same prompts, by plain decoding.
3. Token forcing: with the reference's stream as context, the candidate's choice at every position,
   in its own rounds, and a digest of every KV row that it committed.
4. Sampled answers (temperature, top-p, seeds), the other batch regime, and digests of the logits.
5. More prompts by token forcing, until a fault that changes one token in 2,000 would have shown.

A patched tree's own clock is not believed: whole requests are timed here instead.
"""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from jetspec_jax.autotune.candidate import Candidate
from jetspec_jax.autotune.client import Worker
from jetspec_jax.autotune.comparison import Comparison
from jetspec_jax.autotune.prompts import Prompt, draw, split
from jetspec_jax.autotune.supervise import Limits
from jetspec_jax.autotune.tally import Effort, Found, Refused
from jetspec_jax.autotune.verdict import Verdict
from jetspec_jax.autotune.worker import FACTORY
from jetspec_jax.config import EngineConfig, SpecConfig
from jetspec_jax.errors import ConfigError

LEVELS = ("bitwise", "certified")


def judge(
    incumbent: Candidate,
    candidate: Candidate,
    *,
    suite: Sequence[Prompt],
    model: str | Path | None = None,
    draft: str | Path | None = None,
    spec: SpecConfig | None = None,
    engine: EngineConfig | None = None,
    tree: Path | None = None,
    base_tree: Path | None = None,
    batch: int = 1,
    level: str = "bitwise",
    seed: int | None = None,
    budget_seconds: float = 600.0,
    effort: Effort | None = None,
    limits: Limits | None = None,
    env: Mapping[str, str] | None = None,
    factory: str = FACTORY,
    say: Callable[[str], None] = lambda _: None,
) -> Verdict:
    """Decides whether a candidate replaces the incumbent.

    Args:
        incumbent: what runs now; without patch.
        candidate: what should; if it has a patch, `tree` is the patched tree.
        suite: all prompts there are; the gate takes from its own half (`prompts.split`).
        model, draft, spec, engine: what both are applied to.
        tree: source tree of the candidate; None: the trusted one.
        base_tree: the trusted source tree; None: the one that this process runs.
        batch: sequences decoded together in the deployment.
        level: "bitwise": tokens, KV rows and logits equal the reference's in every bit.
            "certified": tokens equal everywhere, and numbers differ by no more than two
            implementations of the reference do.
        seed: fixes the draw of prompts, for tests; None: a nonce made now.
        budget_seconds: for everything. Where it ends before enough is compared, the candidate is
            refused.
        effort: see `Effort`.
        limits, env: of the candidate's process, where it runs code that nobody trusts.
        factory: see `client.Worker`.
        say: gets one line per phase.

    Returns:
        The verdict. A candidate whose process fails is refused; a reference that fails raises.

    Raises:
        ConfigError: unknown level, batch below 1, or a patch without its tree.
    """
    started = time.monotonic()
    if level not in LEVELS:
        raise ConfigError(f"level={level!r} is not known; choose one of {', '.join(LEVELS)}")
    if batch < 1:
        raise ConfigError(f"batch={batch} is no number of sequences; give at least 1")
    if incumbent.patch is not None or (candidate.patch is not None and tree is None):
        raise ConfigError("a patch is judged in its patched tree; give tree, and no patch before")
    nonce = secrets.token_hex(8) if seed is None else str(seed)
    drawn = draw(split(suite)[1], candidate.id, nonce)
    found, asked = Found(), effort or Effort()
    used: list[str] = []
    with contextlib.ExitStack() as stack:

        def start(
            change: Candidate, base: EngineConfig, where: Path | None, trusted: bool
        ) -> Worker:
            worker = Worker(
                model=model,
                draft=draft,
                candidate=change,
                spec=spec,
                engine=base,
                tree=where or base_tree,
                limits=None if trusted else limits,
                env=None if trusted else env,
                factory=factory,
            )
            return stack.enter_context(worker)

        run = Comparison(
            incumbent,
            candidate,
            (spec or SpecConfig()).mode,
            engine or EngineConfig(),
            tree,
            batch,
            level,
            asked,
            started + budget_seconds,
            drawn,
            start,
            say,
            found,
            used,
        )
        try:
            run.everything()
            reason, accepted = run.decide(), True
        except Refused as refused:
            reason, accepted = str(refused), False
    identical = not found.mismatches and found.positions + found.free_tokens > 0
    reached = "none"
    if identical and found.compared:
        reached = (
            "bitwise" if found.bits else "certified" if found.deviation is not None else "none"
        )
    speed = found.speed or (None, None, None)
    return Verdict(
        accepted=accepted,
        reason=reason,
        candidate=candidate.id,
        incumbent=incumbent.id,
        tokens_identical=identical,
        bits_identical=found.bits,
        level=reached,
        asked=level,
        positions=found.positions,
        free_tokens=found.free_tokens,
        sampled_tokens=found.sampled_tokens,
        rows=found.rows,
        logits=found.logits,
        mismatches=tuple(found.mismatches),
        noise=found.noise,
        deviation=found.deviation,
        speed_ratio=speed[0],
        speed_ratio_low=speed[1],
        speed_ratio_high=speed[2],
        pairs=len(found.before),
        clock="engine" if tree is None else "judge",
        prompts=tuple(used),
        nonce=nonce,
        batch=batch,
        seconds=time.monotonic() - started,
    )
