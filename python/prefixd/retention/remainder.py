"""The moment estimator of what is not attended to exactly, as attention/estimators/remainder_moment.cc has
it: the tilted moments, with diagonal variances. Here all scores are known, so that
the moments are taken of the remainder itself."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

NEGLIGIBLE_VARIANCE = 1e-12
NEGLIGIBLE_GAP = 1e-5


@dataclass(frozen=True)
class Moments:
    """Of a remainder, for each query head and query [H, G, n]: its tokens, mean and variance of their scores;
    their mean value [H, G, n, dv] and its covariance with the scores, scale C^T q."""

    count: Tensor
    mean: Tensor
    variance: Tensor
    value: Tensor
    cross: Tensor


def hazard(t: Tensor) -> Tensor:
    """Returns the normal density over its distribution function."""
    return torch.exp(-t * t / 2 - 0.5 * math.log(2 * math.pi) - torch.special.log_ndtr(t))


def tilted(mean: Tensor, variance: Tensor, cut: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the log of the mean of exp(score) below `cut`, which may be infinite, and the lever on a
    value's regression on the score. float64."""
    sigma = variance.clamp(min=NEGLIGIBLE_VARIANCE).sqrt()
    depth = (cut - mean) / sigma - sigma
    log_mean = mean + sigma**2 / 2 + torch.special.log_ndtr(depth)
    lever = 1 - hazard(depth) / sigma
    room = (cut - mean > NEGLIGIBLE_GAP * (1 + cut.abs())) | (cut == torch.inf)
    spread = room & (variance > NEGLIGIBLE_VARIANCE)
    return torch.where(spread, log_mean, mean), torch.where(spread, lever, torch.zeros_like(lever))


def estimate(m: Moments, cut: Tensor | None, cross: bool) -> tuple[Tensor, Tensor]:
    """Returns the remainder's log Z [H, G, n] and its mean value [H, G, n, dv], float64. `cut` [H, G, n] is
    exact: no token of the remainder scores above it. Without one the largest of so many Gaussian scores
    takes its place, and only the lower side of the bracket holds. An empty remainder has log Z = -inf."""
    mean, variance, count = m.mean.double(), m.variance.double(), m.count.double()
    many = count.clamp(min=1)
    at = mean + variance.sqrt() * (2 * many.log()).sqrt() if cut is None else cut.double()
    log_mean, lever = tilted(mean, variance, torch.where(count > 1, at, mean))
    log_z = many.log() + log_mean
    if cut is not None:
        log_z = torch.minimum(log_z, many.log() + at)
    log_z = torch.maximum(log_z, many.log() + mean)
    value = m.value.double()
    if cross:
        value = value + lever[..., None] * m.cross.double()
    return torch.where(count > 0, log_z, -torch.inf), value
