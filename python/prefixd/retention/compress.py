"""Policies that rank what is exact every `interval` tokens, by the attention of the newest queries. The
papers let the exact set grow from b to b + interval in between. Here the lowest of the last ranking leave
one by one, as tokens come: every query finds `budget` = b + interval, and rankings are made among the same
tokens as theirs."""

from __future__ import annotations

from abc import abstractmethod

import torch
from torch import Tensor

from prefixd.errors import InvalidArgument
from prefixd.retention.observed import Form, joined, local_score, normalised, pooled, redundancy
from prefixd.retention.policy import Policy
from prefixd.retention.seen import Seen

INTERVAL, OBSERVATION = 128, 16  # as in the paper


class Compressing(Policy):
    def __init__(self, budget: int, interval: int | None = None, observation: int = OBSERVATION) -> None:
        """`interval`: 128 tokens where nothing is named, and at most a quarter of the budget."""
        super().__init__(budget)
        self.interval = max(1, min(INTERVAL, budget // 4)) if interval is None else interval
        self.observation = observation
        if self.interval + observation >= budget:
            raise InvalidArgument(
                f"a budget of {budget} tokens is less than an interval of {self.interval} and the "
                f"{observation} queries that are observed"
            )
        self._next = 0  # number of tokens at which the next ranking is made

    @abstractmethod
    def _score(self, local: Tensor, keys: Tensor, at: Tensor) -> Tensor:
        """Returns what tokens count for: local scores [H, C], their keys [H, C, d] and positions [H, C]."""

    def _advance(self, seen: Seen, before: int) -> None:
        if before == 0:
            self._next = seen.prompt
        while self._next <= seen.tokens:
            self._rank(seen.upto(self._next))
            self._next += self.interval

    def _rank(self, seen: Seen) -> None:
        n, w = seen.tokens, min(self.observation, seen.tokens)
        here = self.leaves[:, :n] > n  # as many for each head
        at = here.nonzero()[:, 1].reshape(seen.heads, -1)
        keys = seen.k.gather(1, at[..., None].expand(-1, -1, seen.k.shape[2]))
        local = local_score(seen.q[:, :, n - w :], keys, torch.arange(n - w, n), at, seen.scale)
        score = self._score(local, keys, at)
        score = score.masked_fill(at >= n - w, torch.inf)
        # Of equals the newer one stays.
        order = score.flip(1).argsort(dim=1, descending=True, stable=True)
        ranked = at.flip(1).gather(1, order)
        # With the j-th token behind this ranking (j from 0) budget - 1 - j of what is ranked still fit.
        stays = self.budget - self.interval
        leaving = ranked[:, stays:]
        until = n + (self.budget - 1 - torch.arange(stays, stays + leaving.shape[1])).clamp(min=0)
        self.leaves.scatter_(1, leaving, until.expand(seen.heads, -1))
        self._kept(ranked[:, :stays], n - w)

    def _kept(self, stay: Tensor, observed: int) -> None:
        """Receives the positions that remain until the next ranking at least; tokens from `observed` on were
        not ranked."""


class Local(Compressing):
    def _score(self, local: Tensor, keys: Tensor, at: Tensor) -> Tensor:
        return local


class SnapKV(Compressing):
    """The local score, pooled over neighbours."""

    def __init__(
        self, budget: int, interval: int | None = None, observation: int = OBSERVATION, pooling: int = 5
    ) -> None:
        super().__init__(budget, interval, observation)
        self.pooling = pooling

    def _score(self, local: Tensor, keys: Tensor, at: Tensor) -> Tensor:
        return pooled(local, self.pooling)


class Global(Compressing):
    """A local score that remembers the windows before it."""

    def __init__(
        self, budget: int, form: Form, alpha: float = 0.8, interval: int | None = None,
        observation: int = OBSERVATION,
    ) -> None:
        super().__init__(budget, interval, observation)
        self.form: Form = form
        self.alpha = alpha
        self._past = torch.empty((0, 0))  # [H, n] NaN: none
        self._now = torch.empty((0, 0))

    def _score(self, local: Tensor, keys: Tensor, at: Tensor) -> Tensor:
        heads, n = at.shape[0], int(self.leaves.shape[1])
        more = torch.full((heads, n - self._past.shape[1]), torch.nan)
        self._past = torch.cat([self._past.reshape(heads, -1), more], 1)
        now = joined(self.form, self._past.gather(1, at), normalised(local), self.alpha)
        self._now = torch.full((heads, n), torch.nan).scatter(1, at, now)
        return now

    def _kept(self, stay: Tensor, observed: int) -> None:
        past = torch.full_like(self._now, torch.nan).scatter(1, stay, self._now.gather(1, stay))
        past[:, observed:] = torch.nan
        self._past = past


class GKV(Global):
    """The global score's max form, less what doubles other keys (`sign` -1) or, as the paper prints it,
    plus that (+1)."""

    def __init__(
        self, budget: int, sign: int = -1, weight: float = 0.9, alpha: float = 0.8, threshold: float = 0.5,
        interval: int | None = None, observation: int = OBSERVATION,
    ) -> None:
        super().__init__(budget, "max", alpha, interval, observation)
        self.sign, self.weight, self.threshold = sign, weight, threshold

    def _score(self, local: Tensor, keys: Tensor, at: Tensor) -> Tensor:
        score = super()._score(local, keys, at)
        double = redundancy(keys, self.observation, self.threshold)
        return self.weight * score + self.sign * (1 - self.weight) * double
