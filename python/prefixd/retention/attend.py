"""Attention of chosen queries over an exact set and what is estimated of the rest, beside attention over
everything."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from prefixd.retention.remainder import Moments, estimate
from prefixd.retention.seen import Seen, causal

# What stands for the tokens that are not exact: nothing, their mean value, or the regression of values on
# scores, too (moment/full).
ESTIMATORS = ("none", "moment", "moment/full")


def _sums(rows: Tensor, at: Tensor) -> Tensor:
    """Returns sums [H, n, d] of rows [H, T, d] up to the ascending positions `at` [n], these among them."""
    first, last = int(at[0]), int(at[-1])
    before = rows[:, :first].sum(1, keepdim=True, dtype=torch.float64)
    return (before + rows[:, first : last + 1].double().cumsum(1)[:, at - first]).float()


class Asked:
    """Holds the scores of the queries at ascending positions `at` [n]. Scores are taken relative to their mean over all
    that a query sees, keys and values relative to theirs, so that float32 sums do not cancel."""

    def __init__(self, seen: Seen, at: Tensor) -> None:
        self.at, self.tokens = at, seen.tokens
        self.visible = causal(at, seen.tokens)  # [n, T]
        self.count = (at + 1).float()
        self.q = seen.q[:, :, at] * seen.scale
        scores = torch.einsum("hgnd,htd->hgnt", self.q, seen.k)
        mean = scores.masked_fill(~self.visible, 0).sum(-1) / self.count
        self.scores = (scores - mean[..., None]).masked_fill_(~self.visible, 0)  # [H, G, n, T]
        self.top = self.scores.masked_fill(~self.visible, -torch.inf).amax(-1)
        self.weights = torch.exp(self.scores - self.top[..., None]) * self.visible
        self._value_mean = seen.v.mean(1)[:, None, None, :]
        self.v = seen.v - seen.v.mean(1, keepdim=True)
        k = seen.k - seen.k.mean(1, keepdim=True)
        # [H, T, dv + 2 dk]: whatever is summed over tokens without regard to the query.
        self._rows = torch.cat([self.v, k, k * k], -1)
        self.y = self._over_tokens(self.weights, self.v) / self.weights.sum(-1, keepdim=True) + self._value_mean

    @functools.cached_property
    def _all_rows(self) -> Tensor:
        return _sums(self._rows, self.at)

    @functools.cached_property
    def _all_cross(self) -> Tensor:
        return self._over_tokens(self.scores, self.v)

    @staticmethod
    def _over_tokens(weights: Tensor, rows: Tensor) -> Tensor:
        """Returns sums [H, G, n, d] of rows [H, T, d] by weights [H, G, n, T]."""
        heads, group, n, tokens = weights.shape
        return torch.bmm(weights.reshape(heads, group * n, tokens), rows).reshape(heads, group, n, -1)

    def moments(self, exact: Tensor) -> Moments:
        """Returns those of all visible tokens but the exact ones [H, n, T]."""
        of = exact.float()
        count = self.count - of.sum(-1)  # [H, n]
        some = count.clamp(min=1)[..., None]
        value, key, square = ((self._all_rows - torch.bmm(of, self._rows)) / some).split(
            [self.v.shape[-1], self.q.shape[-1], self.q.shape[-1]], -1
        )
        spread = (square - key * key).clamp(min=0)
        inside = self.scores * of[:, None]
        mean = -inside.sum(-1) / some[:, None, :, 0]
        value = value[:, None].expand(-1, self.q.shape[1], -1, -1)
        cross = (self._all_cross - self._over_tokens(inside, self.v)) / some[:, None] - mean[..., None] * value
        variance = (self.q**2 * spread[:, None]).sum(-1)
        return Moments(count[:, None].expand_as(mean), mean, variance, value, cross)

    def _exactly(self, exact: Tensor) -> tuple[Tensor, Tensor]:
        """Returns lse [H, G, n] (relative, as scores are) and y over the exact tokens."""
        weights, top = self.weights * exact[:, None], self.top
        z = weights.sum(-1)
        if bool((z < 1e-20).any()):  # the exact tokens lie far below the best one
            scores = self.scores.masked_fill(~exact[:, None], -torch.inf)
            top = scores.amax(-1)
            weights = torch.exp(scores - top[..., None])
            z = weights.sum(-1)
        return top + z.log(), self._over_tokens(weights, self.v) / z[..., None]

    def answers(
        self, exact: Tensor, cut: Tensor | None = None, names: Sequence[str] = ESTIMATORS
    ) -> dict[str, Tensor]:
        """Returns the output [H, G, n, dv] by each named estimator for the rest, exact [H, n, T] being attended to
        exactly. Each query has at least one exact token."""
        lse, y = self._exactly(exact)
        out = {"none": y + self._value_mean} if "none" in names else {}
        estimated = [name for name in names if name != "none"]
        if not estimated:
            return out
        moments = self.moments(exact)
        for name in estimated:
            log_z, value = estimate(moments, cut, name == "moment/full")
            share = torch.sigmoid(log_z - lse.double())[..., None]
            out[name] = (y + share * (value - y)).float() + self._value_mean
        return out

    def retrieve(self, retained: Tensor, tokens: int) -> tuple[Tensor, Tensor]:
        """Returns the exact set [H, n, T] with the best `tokens` of those that are not retained, and its cut
        [H, G, n]. Heads of a group rank by the largest of their normalised scores (attention/, RankByGroupMax)."""
        away = self.visible[None] & ~retained
        scores = self.scores.masked_fill(~away[:, None], -torch.inf)
        normaliser = scores.logsumexp(-1)
        best = (scores - normaliser.nan_to_num(neginf=0.0)[..., None]).amax(1)
        top, index = best.topk(min(tokens, self.tokens), -1)
        found = torch.zeros_like(retained).scatter(2, index, top > -torch.inf)
        return retained | found, normaliser + top[:, None, :, -1]


def error(y: Tensor, true: Tensor) -> Tensor:
    """Returns the l1 error of outputs [..., dv] over the l1 norm of the true ones."""
    return (y - true).abs().sum(-1) / true.abs().sum(-1).clamp(min=1e-9)


def entropy(asked: Asked) -> Tensor:
    """Returns each query head's entropy [H, G] over the logarithm of the number of tokens, mean over
    queries."""
    p = asked.weights / asked.weights.sum(-1, keepdim=True)
    each: Tensor = torch.special.entr(p).sum(-1) / asked.count.log()
    return each.mean(-1)
