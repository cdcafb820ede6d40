"""Intervals of paired times. Used by the benchmark and by the autotuner's gate."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

BOOTSTRAP_DRAWS = 2_000


def bootstrap(
    plain: Sequence[float], spec: Sequence[float], draws: int = BOOTSTRAP_DRAWS
) -> tuple[float, float] | None:
    """95% interval of sum(plain) / sum(spec) over resampled prompts (percentile bootstrap, fixed
    seed).

    None for fewer than two prompts: one prompt says nothing about the spread.
    """
    a, b = np.asarray(plain, float), np.asarray(spec, float)
    if len(a) < 2 or not (a.sum() > 0 and b.sum() > 0):
        return None
    pick = np.random.default_rng(0).integers(0, len(a), size=(draws, len(a)))
    below = b[pick].sum(axis=1)
    ratios = a[pick].sum(axis=1)[below > 0] / below[below > 0]
    low, high = np.percentile(ratios, [2.5, 97.5])
    return float(low), float(high)


def median_ratio(
    before: Sequence[float], after: Sequence[float], draws: int = BOOTSTRAP_DRAWS
) -> tuple[float, float, float] | None:
    """Median of before[i] / after[i] over pairs, and its 95% interval (percentile bootstrap over
    pairs, fixed seed). A pair that another process disturbed moves the median little.

    Args:
        before, after: seconds, > 0, pair by pair.
        draws: resamples.

    Returns:
        (median, low, high); None for fewer than two pairs.
    """
    a, b = np.asarray(before, float), np.asarray(after, float)
    if len(a) < 2 or not ((a > 0).all() and (b > 0).all()):
        return None
    ratios = a / b
    pick = np.random.default_rng(0).integers(0, len(a), size=(draws, len(a)))
    low, high = np.percentile(np.median(ratios[pick], axis=1), [2.5, 97.5])
    return float(np.median(ratios)), float(low), float(high)
