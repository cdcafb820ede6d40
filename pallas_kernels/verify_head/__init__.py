"""LM head and greedy choice without logits in memory: see `api`."""

from pallas_kernels.verify_head.api import Choice, verify_head

__all__ = ["Choice", "verify_head"]
