"""Projections and attention whose row results can be made independent of the other rows."""

from jetspec_jax.numerics.attention import fold_attention, online_attention
from jetspec_jax.numerics.compute import ComputeWeight, dot, trainable_dot
from jetspec_jax.numerics.kernel_weight import KernelWeight, for_kernels
from jetspec_jax.numerics.linear import linear, take_rows
from jetspec_jax.numerics.ordered import ordered_sum

__all__ = [
    "ComputeWeight",
    "KernelWeight",
    "dot",
    "fold_attention",
    "for_kernels",
    "linear",
    "online_attention",
    "ordered_sum",
    "take_rows",
    "trainable_dot",
]
