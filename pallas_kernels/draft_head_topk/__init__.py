"""Candidates of a drafted block: see `api`."""

from pallas_kernels.draft_head_topk.api import MarkovHead, draft_head_topk, supported

__all__ = ["MarkovHead", "draft_head_topk", "supported"]
