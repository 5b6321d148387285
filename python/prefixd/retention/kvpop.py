"""KVpop's retention: sinks, a window, and of what left the window the k tokens of highest score, less what
its decay took. Scores come from a scorer (scorers.py), once for each token, when it leaves the window."""

from __future__ import annotations

import heapq
from typing import Protocol

import torch
from torch import Tensor

from prefixd.errors import InvalidArgument
from prefixd.retention.policy import Policy
from prefixd.retention.seen import Seen


class Scorer(Protocol):
    """Scores tokens in order. It sees keys and values up to the query behind which a token leaves the window
    of w tokens, and nothing later."""

    log_decay: Tensor  # [H]: log gamma

    def scores(self, seen: Seen, before: int, window: int) -> Tensor:
        """Returns [H, m] for the tokens that leave the window with the queries `before` to n - 1, which are
        max(0, before - w) to n - 1 - w. Calls go on where the last one ended."""


def effective(score: Tensor, at: Tensor, query: int, log_decay: Tensor, step: int = 1) -> Tensor:
    """Returns scores [H, C] of tokens at positions `at` [C] as a query sees them: `step` tokens of age take
    log_decay [H] off."""
    return score + ((query - at) // step).to(score.dtype) * log_decay[:, None]


def priority(score: Tensor, at: Tensor, log_decay: Tensor) -> Tensor:
    """Returns what orders tokens as `effective` does under every query, for a step of one: it does not
    change, so that a heap can hold it."""
    return score - at.to(score.dtype) * log_decay[:, None]


class KVpop(Policy):
    def __init__(self, budget: int, scorer: Scorer, sinks: int = 4, window: int = 64) -> None:
        super().__init__(budget)
        self.sinks, self.window, self.scorer = sinks, window, scorer
        self.best = budget - sinks - window
        if self.best < 1:
            raise InvalidArgument(
                f"a budget of {budget} tokens has no room beside {sinks} sinks and a window of {window}"
            )
        # Per head the best tokens, the worst of them first. Of equals the newer one stays.
        self._heaps: list[list[tuple[float, int]]] = []

    def _advance(self, seen: Seen, before: int) -> None:
        scores = self.scorer.scores(seen, before, self.window).double()
        first = max(0, before - self.window)
        at = torch.arange(first, first + scores.shape[1])
        order = priority(scores, at, self.scorer.log_decay.double()).tolist()
        self._heaps = self._heaps or [[] for _ in range(seen.heads)]
        for head, row in enumerate(order):
            heap = self._heaps[head]
            for t, value in enumerate(row, first):
                if t < self.sinks:
                    continue
                if len(heap) < self.best:
                    heapq.heappush(heap, (value, t))
                    continue
                _, out = heapq.heappushpop(heap, (value, t))
                self.leaves[head, out] = max(seen.prompt, t + self.window)
