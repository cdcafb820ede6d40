"""Gumbel noise of tokens at positions: see `api`."""

from pallas_kernels.gumbel_noise.api import gumbel_noise

__all__ = ["gumbel_noise"]
