"""Computes intervals: Wilson's for shares of right answers, the bootstrap for means and
differences, and Student's where there are too few documents to draw from (the bootstrap of a
handful is far too narrow)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np


def wilson(right: float, n: int, z: float = 1.959964) -> tuple[float, float]:
    """Returns the 95% score interval of a share right / n (Wilson, 1927)."""
    if n == 0:
        return 0.0, 1.0
    p = right / n
    centre = p + z * z / (2 * n)
    spread = z * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    low, high = (centre - spread) / (1 + z * z / n), (centre + spread) / (1 + z * z / n)
    return max(0.0, low), min(1.0, high)


def of_mean(parts: Sequence[tuple[float, float, float]]) -> tuple[float, float]:
    """Returns the interval of the plain mean of independent quantities, each (value, low, high):
    their distances to the limits add up in squares (MOVER; Zou and Donner, 2008)."""
    middle = sum(v for v, _, _ in parts) / len(parts)
    below = math.sqrt(sum((v - low) ** 2 for v, low, _ in parts)) / len(parts)
    above = math.sqrt(sum((high - v) ** 2 for v, _, high in parts)) / len(parts)
    return middle - below, middle + above


FEW = 10
# The 0.975 quantiles of Student's t for 1 to FEW - 2 degrees of freedom.
_T = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306)


def jackknife(
    statistic: Callable[[np.ndarray], float], count: int
) -> tuple[float, float]:
    """Returns Student's 95% interval of a statistic of `count` clusters, 2 to FEW - 1. The
    statistic receives the mask of the clusters that stay; leaving out one at a time gives its
    spread (Efron, 1982)."""
    whole = np.ones(count, bool)
    middle = statistic(whole)
    left = np.array([statistic(whole & (np.arange(count) != i)) for i in range(count)])
    spread = math.sqrt((count - 1) / count * float(((left - left.mean()) ** 2).sum()))
    reach = _T[count - 2] * spread
    return middle - reach, middle + reach


def interval(
    values: Sequence[float], clusters: Sequence[object] | None = None, draws: int = 2000,
    seed: int = 0,
) -> tuple[float, float]:
    """Returns the 95% interval of the mean from the bootstrap's percentiles. `clusters` gives each
    value's document: whole documents are drawn, because values of one document are alike. Fewer
    than FEW of them give Student's interval; a single one has no spread and gives not-a-number."""
    x = np.asarray(values, float)
    labels = list(range(len(x))) if clusters is None else list(clusters)
    names = {c: i for i, c in enumerate(dict.fromkeys(labels))}
    if len(names) < 2:
        return math.nan, math.nan
    at = np.array([names[c] for c in labels])
    sums, counts = np.bincount(at, x), np.bincount(at)
    if len(names) < FEW:
        return jackknife(lambda kept: float(sums[kept].sum() / counts[kept].sum()), len(names))
    drawn = np.random.default_rng(seed).integers(0, len(names), (draws, len(names)))
    means = sums[drawn].sum(1) / counts[drawn].sum(1)
    low, high = np.quantile(means, [0.025, 0.975])
    return float(low), float(high)


def ratio_interval(
    above: Sequence[float], below: Sequence[float], draws: int = 2000, seed: int = 0
) -> tuple[float, float]:
    """Returns the 95% interval of sum(above) / sum(below), whose entries belong together by document:
    whole documents are drawn, so that a long hard one weighs in both. Fewer than FEW documents give
    Student's interval; a single one gives not-a-number."""
    a, b = np.asarray(above, float), np.asarray(below, float)
    if len(a) < 2:
        return math.nan, math.nan
    if len(a) < FEW:
        return jackknife(lambda kept: float(a[kept].sum() / b[kept].sum()), len(a))
    drawn = np.random.default_rng(seed).integers(0, len(a), (draws, len(a)))
    ratios = a[drawn].sum(1) / b[drawn].sum(1)
    low, high = np.quantile(ratios, [0.025, 0.975])
    return float(low), float(high)
