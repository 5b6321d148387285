"""Intervals: Wilson's for shares of right answers, the bootstrap for means and differences."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np


def wilson(right: float, n: int, z: float = 1.959964) -> tuple[float, float]:
    """The 95% score interval of a share right / n (Wilson, 1927)."""
    if n == 0:
        return 0.0, 1.0
    p = right / n
    centre = p + z * z / (2 * n)
    spread = z * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    low, high = (centre - spread) / (1 + z * z / n), (centre + spread) / (1 + z * z / n)
    return max(0.0, low), min(1.0, high)


def bootstrap(
    values: Sequence[float], clusters: Sequence[object] | None = None, draws: int = 2000,
    seed: int = 0,
) -> tuple[float, float]:
    """The 95% percentile interval of the mean. With `clusters` (of each value: the document it comes
    from) whole clusters are drawn, since values of one document are alike."""
    x = np.asarray(values, float)
    if len(x) == 0:
        return math.nan, math.nan
    labels = list(range(len(x))) if clusters is None else list(clusters)
    names = {c: i for i, c in enumerate(dict.fromkeys(labels))}
    at = np.array([names[c] for c in labels])
    sums, counts = np.bincount(at, x), np.bincount(at)
    drawn = np.random.default_rng(seed).integers(0, len(names), (draws, len(names)))
    means = sums[drawn].sum(1) / counts[drawn].sum(1)
    low, high = np.quantile(means, [0.025, 0.975])
    return float(low), float(high)
