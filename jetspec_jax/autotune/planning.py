"""Profiles of GPUs that are not there, from data-sheet values: for planning, never for claims."""

from __future__ import annotations

from collections.abc import Sequence

from jetspec_jax.autotune.cost_model import Device, Profile, Shape
from jetspec_jax.errors import ConfigError
from pallas_kernels import roofline
from pallas_kernels.geometries import GEOMETRIES
from pallas_kernels.gpu_target import TARGETS

BUDGETS = (1, 2, 4, 8, 16, 32, 64, 128, 256)


def device_spec(name: str) -> Device:
    """A data sheet's values as a device, marked as planned. Raises ConfigError for others."""
    if name not in TARGETS:
        raise ConfigError(f"--device-spec {name}: not known; choose one of {', '.join(TARGETS)}")
    target = TARGETS[name]
    return Device(f"{target.name} (planned)", target.bandwidth, target.bf16_flops, planned=True)


def planned_profile(
    model: str,
    device: str,
    *,
    batch: int = 1,
    context: int = 1_024,
    budgets: Sequence[int] = BUDGETS,
    host_s: float = 0.0,
) -> Profile:
    """What a round takes at least on a GPU (pallas_kernels/roofline.py), as a profile.

    Args:
        model: a name of pallas_kernels/geometries.py.
        device: h100, h200 or rtx-pro-6000.
        batch, context: sequences, and cached tokens of each.
        budgets: node counts, from 1 on.
        host_s: seconds that a host adds to each round.
    """
    if model not in GEOMETRIES:
        raise ConfigError(f"model {model!r} has no geometry; choose one of {', '.join(GEOMETRIES)}")
    spec, g = device_spec(device), GEOMETRIES[model]
    target = TARGETS[device]
    half, layers = roofline.HALF, g.layers
    ffn = 3 * g.hidden * g.ffn
    attention = g.hidden * (g.qkv + g.q_width)
    dense = layers * (attention + (g.hidden * g.experts if g.experts else ffn)) + g.vocab * g.hidden
    d = g.draft
    # the projection of taps belongs to commit
    draft = roofline.draft_parameters(g) - d.taps * g.hidden**2
    work = roofline.draft_work(g, context, 1, max(budgets), batch=batch)

    def phase(name: str) -> float:
        return roofline.seconds([w for w in work if w.phase == name], target)

    verify = {
        n: roofline.seconds(roofline.forward_work(g, n, context, batch), target) for n in budgets
    }
    commit = phase("commit")
    return Profile(
        device=spec,
        shape=Shape(
            weight_bytes=half * dense,
            parameters=dense + layers * ffn * g.active,
            key_bytes=half * 2 * layers * g.kv_width,
            expert_bytes=half * layers * ffn * g.experts,
            experts=g.experts,
            active=g.active,
            draft_bytes=half * (draft + d.vocab * g.hidden),
            draft_parameters=draft + d.vocab * g.hidden,
            draft_key_bytes=half * 2 * d.layers * g.kv_width,
            draft_rows=d.block,
            depth=d.block - 1,
        ),
        label=f"{model}, bfloat16, planned",
        batch=batch,
        context=context,
        plain_s=verify[1] + commit,
        verify_s=verify,
        draft_s=phase("draft"),
        tree_s=phase("tree"),
        accept_s=0.0,
        commit_s=commit,
        host_s=host_s,
        rounds_per_call=1,
    )
