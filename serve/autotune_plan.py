"""`serve.autotune --device-spec` (plans for GPUs that are not here) and `--check-model`."""

from __future__ import annotations

import argparse
import dataclasses

from jetspec_jax.autotune import cost_model, planning
from serve import cli

_MODEL = "qwen3-8b"
_NODES, _TAU = 64, 6.0  # of the round whose gaps are shown


def planned(args: argparse.Namespace) -> int:
    """The gap table of a round on a GPU from its data sheet: planned, never measured."""
    from serve.autotune_survey import gap_lines

    model = args.model or _MODEL
    profile = planning.planned_profile(model, args.device_spec, batch=args.batch_size)
    gaps = cost_model.gap_table(profile, _NODES, _TAU)
    if args.json:
        document = {"planned": True, "profile": profile.to_json()}
        print(cli.dump_json(document | {"gaps": [dataclasses.asdict(g) for g in gaps]}))
        return 0
    print(
        f"{model} on {profile.device.name}, batch {profile.batch}, {profile.context} cached tokens"
    )
    print(f"a round of {_NODES} nodes and {_TAU:g} tokens, from the data sheet alone:")
    print("\n".join(gap_lines(gaps)))
    return 0
