"""Writes an accepted path's keys and values to the cache: see `api`."""

from pallas_kernels.accept_commit.api import accept_commit, unwritten

__all__ = ["accept_commit", "unwritten"]
