"""Scores of what an observation window of the newest queries attends to: the local score of the papers,
SnapKV's pooled form of it, and the forms that join it with the past (global scores)."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

Form = Literal["sum", "max", "mean"]
ROWS = 64  # keys whose likenesses to all others lie in a core's cache


def local_score(q: Tensor, k: Tensor, q_at: Tensor, k_at: Tensor, scale: float) -> Tensor:
    """Returns S [H, C] for queries q [H, G, w, d] at positions q_at [w] and keys k [H, C, d] at k_at
    [H, C]: softmax attention over these keys alone, the largest of the group's heads, the mean over the
    queries."""
    scores = torch.einsum("hgwd,hcd->hgwc", q, k) * scale
    behind = k_at[:, None, None, :] > q_at[None, None, :, None]
    return scores.masked_fill(behind, -torch.inf).softmax(-1).amax(1).mean(1)


def pooled(scores: Tensor, width: int) -> Tensor:
    """Returns the largest score among the `width` neighbours of each token, itself in their middle."""
    edge = width // 2
    return torch.nn.functional.pad(scores, (edge, edge), value=-torch.inf).unfold(1, width, 1).amax(-1)


def normalised(scores: Tensor) -> Tensor:
    """Returns scores over their largest, per head."""
    return scores / scores.amax(-1, keepdim=True).clamp(min=torch.finfo(scores.dtype).tiny)


def joined(form: Form, past: Tensor, now: Tensor, alpha: float) -> Tensor:
    """Returns the global score: `now` is the normalised local score, `past` the last global one, NaN for
    tokens that have none, which count for `now`."""
    if form == "sum":
        both = alpha * past + now
    elif form == "max":
        both = torch.maximum(alpha * past, now)
    else:
        both = alpha * past + (1 - alpha) * now
    return torch.where(past.isnan(), now, both)


def redundancy(k: Tensor, newest: int, threshold: float) -> Tensor:
    """Returns R' [H, C] of keys k [H, C, d], in order of their positions: how alike a key is to the others,
    as a softmax over tokens, over its largest. Likenesses below `threshold` do not count, and those of the
    `newest` tokens: they are nobody's older double. The mean, where the paper prints a sum, so that the
    softmax does not sharpen with the length."""
    unit = k / (k.norm(dim=-1, keepdim=True) + 1e-8)
    total = torch.zeros(k.shape[:2])
    older = total[:, : max(0, k.shape[1] - newest)]
    for part in unit.split(ROWS, 1):
        alike = torch.matmul(part, unit[:, : older.shape[1]].transpose(1, 2))
        older += torch.nn.functional.threshold(alike, threshold, 0).sum(1)
    mean = total / k.shape[1]
    # The largest of a softmax over it is what the largest mean has.
    return torch.exp(mean - mean.amax(-1, keepdim=True))
