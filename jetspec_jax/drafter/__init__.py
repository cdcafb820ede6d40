"""The draft head (algorithm.md sections 2 and 3): one backbone pass drafts a whole tree's
candidates."""

from jetspec_jax.drafter.candidates import candidates
from jetspec_jax.drafter.checkpoint import (
    DraftHead,
    check_target,
    default_layer_ids,
    load_draft,
    read_draft_config,
    save_draft,
)
from jetspec_jax.drafter.head import context_kv, declare, draft_block, draft_scores, fuse
from jetspec_jax.drafter.inputs import BlockInputs, block_inputs, depth_slots
from jetspec_jax.drafter.native import block_candidates, extend, takes_native
from jetspec_jax.drafter.path import conditional_logits, parent_features, path_correction, path_gate

__all__ = [
    "BlockInputs",
    "DraftHead",
    "block_candidates",
    "block_inputs",
    "candidates",
    "check_target",
    "conditional_logits",
    "context_kv",
    "declare",
    "default_layer_ids",
    "depth_slots",
    "draft_block",
    "draft_scores",
    "extend",
    "fuse",
    "load_draft",
    "parent_features",
    "path_correction",
    "path_gate",
    "read_draft_config",
    "save_draft",
    "takes_native",
]
