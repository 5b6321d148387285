"""One layer's attention of own tokens, as a model with a policy inside computes them: the same numbers as
attend.py has for chosen queries, made block by block, without touching more rows than an answer needs."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from prefixd.retention.attend import ESTIMATORS
from prefixd.retention.policy import Policy
from prefixd.retention.remainder import Moments, estimate
from prefixd.retention.seen import Seen, causal, kept

CHUNK = 16  # queries whose scores with all tokens lie in a core's cache


class Grown:
    """Rows [H, n, d] to which more are added."""

    def __init__(self, rows: Tensor) -> None:
        self._all, self._n = rows, rows.shape[1]

    def add(self, rows: Tensor) -> None:
        end = self._n + rows.shape[1]
        if end > self._all.shape[1]:
            more = torch.empty(rows.shape[0], 2 * end, rows.shape[2], dtype=rows.dtype)
            more[:, : self._n] = self.rows
            self._all = more
        self._all[:, self._n : end] = rows
        self._n = end

    @property
    def rows(self) -> Tensor:
        return self._all[:, : self._n]


class Attending:
    """Attends under a policy; `retrieved` tokens of what left are found again for each query, `estimators` [Hkv] are
    numbers of ESTIMATORS for the rest, `read` is the prompt. Keys and values are taken relative to the prompt's
    means, so that float32 sums do not cancel."""

    def __init__(self, policy: Policy, retrieved: int, estimators: Tensor, read: Seen) -> None:
        self._policy, self._retrieved = policy, retrieved
        self._prompt, self._scale = read.prompt, read.scale
        self._q = Grown(read.q.flatten(0, 1))
        self._key_mean, self._value_mean = read.k.mean(1, keepdim=True), read.v.mean(1, keepdim=True)
        self._values, self._keys = Grown(read.v - self._value_mean), Grown(read.k - self._key_mean)
        names = [ESTIMATORS[int(e)] for e in estimators]
        self._estimated = torch.tensor([name != "none" for name in names])
        self._crossed = torch.tensor([name == "moment/full" for name in names])
        self._sums = torch.zeros(len(names), 1, 0, dtype=torch.float64)
        if bool(self._estimated.any()):
            k, v = self._keys.rows, self._values.rows
            self._rows = Grown(torch.cat([v, k, k * k], -1))
            self._sums = self._rows.rows.sum(1, keepdim=True, dtype=torch.float64)
            self._cross = torch.bmm(k.transpose(1, 2).double(), v.double())  # [H, dk, dv]

    def __call__(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Returns the output [1, n, Hq, dv] of the newest n tokens; query [1, Hq, n, dk], key and value
        [1, Hkv, T, d] of all tokens so far."""
        k, v, n = key[0], value[0], query.shape[2]
        self._q.add(query[0])
        self._keys.add(k[:, -n:] - self._key_mean)
        self._values.add(v[:, -n:] - self._value_mean)
        seen = Seen(self._q.rows.unflatten(0, (k.shape[0], -1)), k, v, self._prompt, self._scale)
        self._policy.advance(seen)
        at = torch.arange(seen.tokens - n, seen.tokens)
        q = seen.q[:, :, at] * self._scale
        if not self._retrieved:
            y = self._among_kept(q, at)
        else:
            parts = torch.split(torch.arange(n), CHUNK)
            moments = self._all_moments(q, at)
            y = torch.cat(
                [self._among_all(q[:, :, p], at[p], tuple(m[..., p, :] for m in moments)) for p in parts], 2
            )
        y = y + self._value_mean[:, None]
        return y.flatten(0, 1).transpose(0, 1)[None].contiguous()

    def _among_kept(self, q: Tensor, at: Tensor) -> Tensor:
        """Returns the output [H, G, n, dv] where nothing is retrieved: only rows that some query keeps are scored."""
        leaves = self._policy.leaves
        here = (leaves > at[0]).nonzero()[:, 1].reshape(len(leaves), -1)  # [H, C], as many for each head
        exact = (here[:, None] <= at[:, None]) & (leaves.gather(1, here)[:, None] > at[:, None])  # [H, n, C]
        wide = here[..., None]
        keys, values = (x.gather(1, wide.expand(-1, -1, x.shape[2])) for x in (self._keys.rows, self._values.rows))
        scores = _scores(q, keys)
        moments = self._all_moments(q, at)
        rows = torch.cat([values, keys, keys * keys], -1) if moments else values
        return self._answer(q, scores, exact, values, rows, moments, at, None)

    def _among_all(self, q: Tensor, at: Tensor, moments: tuple[Tensor, ...]) -> Tensor:
        """Returns the output where the best of all tokens that left are exact, too."""
        tokens = int(at[-1]) + 1
        keys, values = self._keys.rows[:, :tokens], self._values.rows[:, :tokens]
        scores = _scores(q, keys)
        exact = kept(self._policy.leaves[:, :tokens], at)
        # Heads of a group rank by the largest of their normalised scores (attention/, RankByGroupMax).
        away = causal(at, tokens)[None] & ~exact
        ranked = _open(scores, away).log_softmax(-1)
        best = ranked.amax(1)  # [H, n, T]
        last = max(0, tokens - self._retrieved)
        least = torch.from_numpy(np.partition(best.numpy(), last, -1)[..., last].copy())
        exact = exact | ((best >= least[..., None]) & away)
        top = best.argmax(-1)[:, None, :, None].expand(-1, q.shape[1], -1, -1)
        normaliser = (scores.gather(3, top) - ranked.gather(3, top))[..., 0]
        rows = self._rows.rows[:, :tokens] if moments else values
        return self._answer(q, scores, exact, values, rows, moments, at, normaliser + least[:, None])

    def _all_moments(self, q: Tensor, at: Tensor) -> tuple[Tensor, ...]:
        """Returns sums over all that each query sees: of rows [H, n, dv + 2 dk], and of values by scores
        [H, G, n, dv]. Takes in the newest tokens, `at`. Nothing where nothing is estimated."""
        if not self._sums.shape[2]:
            return ()
        k, v = self._keys.rows[:, at], self._values.rows[:, at]
        new = torch.cat([v, k, k * k], -1)
        self._rows.add(new)
        sums = self._sums + new.double().cumsum(1)
        self._sums = sums[:, -1:]
        own = _scores(q, k).masked_fill_(~causal(at - at[0], len(at)), 0)
        cross = torch.einsum("hgnd,hde->hgne", q, self._cross.float()) + _over_tokens(own, v)
        self._cross += torch.bmm(k.transpose(1, 2).double(), v.double())
        return sums.float(), cross

    def _answer(
        self, q: Tensor, scores: Tensor, exact: Tensor, values: Tensor, rows: Tensor, moments: tuple[Tensor, ...],
        at: Tensor, cut: Tensor | None,
    ) -> Tensor:  # fmt: skip
        """Returns the output [H, G, n, dv] for scores [H, G, n, C] with tokens of which `exact` [H, n, C] are
        attended to, the others among all being estimated. A query has at least one exact token."""
        opened = _open(scores, exact)
        weights = opened.softmax(-1)
        y = _over_tokens(weights, values)
        if not moments:
            return y
        lse = opened.amax(-1) - weights.amax(-1).log()
        of = exact.float()
        count = (at + 1).float() - of.sum(-1)  # [H, n]
        some = count.clamp(min=1)[..., None]
        value, key, square = ((moments[0] - torch.bmm(of, rows)) / some).split(
            [values.shape[2], q.shape[3], q.shape[3]], -1
        )
        mean = torch.einsum("hgnd,hnd->hgn", q, key)
        variance = torch.einsum("hgnd,hnd->hgn", q * q, (square - key * key).clamp(min=0))
        value = value[:, None].expand(-1, q.shape[1], -1, -1)
        cross = torch.zeros_like(value)
        if bool(self._crossed.any()):
            away = moments[1] - _over_tokens(scores * of[:, None], values)
            cross = (away / some[:, None] - mean[..., None] * value) * self._crossed[:, None, None, None]
        rest = Moments(count[:, None].expand_as(mean), mean, variance, value, cross)
        log_z, value = estimate(rest, cut, True)
        share = torch.sigmoid(log_z - lse.double()) * self._estimated[:, None, None]
        return (y + share[..., None] * (value - y)).float()


def _open(scores: Tensor, to: Tensor) -> Tensor:
    """Returns scores [H, G, n, C] with all but the tokens `to` [H, n, C] closed. Sums, since torch.exp and masks
    that are broadcast take several times as long."""
    return scores + torch.where(to, 0.0, -torch.inf)[:, None]


def _scores(q: Tensor, keys: Tensor) -> Tensor:
    """Returns [H, G, n, C] of queries [H, G, n, d] with keys [H, C, d]."""
    heads, group, n, width = q.shape
    return torch.bmm(q.reshape(heads, group * n, width), keys.transpose(1, 2)).reshape(heads, group, n, -1)


def _over_tokens(weights: Tensor, rows: Tensor) -> Tensor:
    """Returns sums [H, G, n, d] of rows [H, C, d] by weights [H, G, n, C]."""
    return torch.bmm(weights.flatten(1, 2), rows).reshape(*weights.shape[:3], -1)
