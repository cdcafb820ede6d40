"""Attention of tree rows over the cache and themselves: see `api`."""

from pallas_kernels.tree_attention.api import resolve, tree_attention

__all__ = ["resolve", "tree_attention"]
