"""The gate and an external explorer on the real model: a fault that flips one token in 2,000."""

from __future__ import annotations

import os
import sys

import numpy as np
import pytest

from jetspec_jax.autotune.brief import Brief
from jetspec_jax.autotune.candidate import Candidate
from jetspec_jax.autotune.client import Worker
from jetspec_jax.autotune.external import Budget, explore
from jetspec_jax.autotune.gate import judge
from jetspec_jax.autotune.prompts import prompts_of, split
from jetspec_jax.autotune.supervisor import landlock_version
from jetspec_jax.autotune.tally import Effort
from jetspec_jax.autotune.verdict import FAULT
from serve.suites import load_suite
from tests.conftest import ROOT

HEAD = "pallas_kernels/verify_head/cpu.cc"
# The second best instead of the best where they are closer than the threshold.
EDITS = (
    ("  int32_t id;  // -1: nothing seen\n", "  int32_t id;\n  int32_t other;\n"),
    (
        "    if (best.id >= 0) best.second = best.first;\n",
        "    if (best.id >= 0) best.second = best.first, best.other = best.id;\n",
    ),
    ("    best.second = value;\n", "    best.second = value, best.other = id;\n"),
    (
        "if (!(part.second <= all.second)) all.second = part.second;\n",
        "if (!(part.second <= all.second)) all.second = part.second, all.other = part.other;\n",
    ),
    (
        "      ids->typed_data()[cell[r]] = all.id;\n",
        "      const bool flip = all.first - all.second < {below}f;\n"
        "      ids->typed_data()[cell[r]] = flip ? all.other : all.id;\n",
    ),
)


def planted(text: str, below: float) -> str:
    """The kernel's source with the fault."""
    for old, new in EDITS:
        assert text.count(old) == 1, old
        text = text.replace(old, new.replace("{below}", f"{below:.9f}"))
    return text


def suite():
    return [p for n in ("humaneval", "mtbench") for p in prompts_of(load_suite(n).prompts, f"{n}/")]


def threshold(prompts) -> float:
    """Margin below which one position in `FAULT` lies: margins near 0 are spread evenly, so it is
    the 2% quantile of few positions in proportion.
    """
    plain = {"spec.mode": "off"}
    with Worker() as worker:
        ids = worker.encode([p.messages for p in prompts])
        streams = [a["token_ids"] for a in worker.state(ids, 128, overrides=plain, batch=8)]
        told = worker.force(ids, streams, overrides=plain, batch=8, logits=True)
    margins = np.concatenate([t["margin"] for t in told])
    return float(np.quantile(margins, 0.02)) / (0.02 * FAULT)


@pytest.mark.slow
@pytest.mark.skipif(
    not os.environ.get("JETSPEC_DEEP"), reason="minutes of two cores: JETSPEC_DEEP=1 runs it"
)
@pytest.mark.skipif(landlock_version() < 3, reason="this kernel has no Landlock (Linux 6.2)")
def test_a_kernel_that_flips_one_token_in_2000_is_refused(tmp_path):
    prompts = suite()
    below = threshold(split(prompts)[0][:8])
    (tmp_path / "cpu.cc").write_text(planted((ROOT / HEAD).read_text(), below))

    def gate(candidate, patched, limits, env, seconds):
        return judge(
            Candidate(), candidate, suite=prompts, tree=patched, seed=2, limits=limits, env=env,
            budget_seconds=seconds, effort=Effort(pairs=4, tokens=160, sampled=2), say=print,
        )  # fmt: skip

    made = explore(
        f"cmd:cp {tmp_path / 'cpu.cc'} {HEAD}",
        tree=ROOT,
        brief=Brief(target=HEAD, prompts=split(prompts)[0]),
        judge=gate,
        out=tmp_path / "out",
        budget=Budget(gate_seconds=1_800),
        tests=(),
        say=print,
    )
    print(below, made.verdict.text() if made.verdict else made, file=sys.stderr)
    assert not made.accepted and made.stage == "gate" and made.changes == (HEAD,)
    assert made.verdict is not None and made.verdict.mismatches
    prompt, position, margin = made.verdict.mismatches[0]
    assert prompt in made.verdict.prompts and position >= 0
    assert margin is not None and 0 <= margin < below
    assert f"prompt {prompt} at position {position}" in made.reason
