"""Candidates of a drafted block: see `api` for packed weights (CPU), `arrays` for plain ones."""

from pallas_kernels.draft_head_topk.api import PathHead, draft_head_topk, supported
from pallas_kernels.draft_head_topk.arrays import candidates

__all__ = ["PathHead", "candidates", "draft_head_topk", "supported"]
