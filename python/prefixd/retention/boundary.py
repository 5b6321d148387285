"""The loss by which KVpop's scorers learn: does the token that leaves the window belong among the k best, as
a teacher that knows the future ranks them?"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from prefixd.retention.kvpop import priority


@dataclass(frozen=True)
class Boundary:
    """At queries [n], for each head [N, n]: the token that just left the window, the last one that the teacher
    retains, whether it retains the new one (+1, else -1), and by how much."""

    new: Tensor  # [n]
    last: Tensor
    label: Tensor
    margin: Tensor


def boundaries(target: Tensor, log_decay: Tensor, queries: Tensor, sinks: int, window: int, best: int) -> Boundary:
    """Returns the teacher's decisions. target [N, T]; queries stand at sinks + window + best or behind."""
    at = torch.arange(target.shape[1])
    order = priority(target, at, log_decay)
    new = queries - window
    eligible = (at[None, :] >= sinks) & (at[None, :] <= new[:, None])  # [n, T]
    ranked = order[:, None].masked_fill(~eligible, -torch.inf)
    value, last = ranked.topk(best, -1)
    value, last = value[..., -1], last[..., -1]
    margin = order[:, new] - value
    label = torch.where(margin >= 0, 1.0, -1.0)
    return Boundary(new, last, label, margin.abs())


def weights(b: Boundary, least: float = 0.1, softness: float = 1.0, clip: tuple[float, float] = (0.5, 4.0)) -> Tensor:
    """Returns a weight for each decision [N, n]: near ties count less, and those to keep as much as those to
    drop, per head. Their mean is 1."""
    close = least + (1 - least) * torch.sigmoid(b.margin / softness)
    keep = (b.label > 0).double().mean(-1, keepdim=True)
    share = torch.where(b.label > 0, keep, 1 - keep)
    even = (1 / (2 * share)).clamp(*clip).to(close.dtype)
    return close * even / (close * even).mean()


def boundary_loss(new: Tensor, last: Tensor, label: Tensor, weight: Tensor, temperature: float = 1.0) -> Tensor:
    """Returns the mean of w softplus(-label (new - last) / temperature) over decisions; `new` and `last` are
    effective scores [N, n]."""
    return (weight * torch.nn.functional.softplus(-label * (new - last) / temperature)).mean()
