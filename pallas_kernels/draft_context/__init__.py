"""Drafter context of committed rows: see `api`."""

from pallas_kernels.draft_context.api import ContextLayer, draft_context, supported

__all__ = ["ContextLayer", "draft_context", "supported"]
