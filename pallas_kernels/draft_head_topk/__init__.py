"""Candidates of a drafted block: see `api`."""

from pallas_kernels.draft_head_topk.api import PathHead, draft_head_topk, supported

__all__ = ["PathHead", "draft_head_topk", "supported"]
