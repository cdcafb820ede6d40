"""Token trees: topology, builders, prompt lookup, merging and the acceptance walk."""

from jetspec_jax.tree.accept import Acceptance, accept
from jetspec_jax.tree.build import build_exact, build_tree
from jetspec_jax.tree.lookup import Chains, lookup_candidates
from jetspec_jax.tree.merge import lookup_tree, merge
from jetspec_jax.tree.topology import (
    BOTH,
    HEAD,
    LOOKUP,
    Candidates,
    Tree,
    ancestor_mask,
    depth_counts,
    expected_commit,
    prune,
    root_only,
)

__all__ = [
    "BOTH",
    "HEAD",
    "LOOKUP",
    "Acceptance",
    "Candidates",
    "Chains",
    "Tree",
    "accept",
    "ancestor_mask",
    "build_exact",
    "build_tree",
    "depth_counts",
    "expected_commit",
    "lookup_candidates",
    "lookup_tree",
    "merge",
    "prune",
    "root_only",
]
