"""Policies that let one token go at each step, by what queries gave to it so far: TOVA (the last query's
attention) and H2O (attention added up, with half the budget for the newest tokens)."""

from __future__ import annotations

from abc import abstractmethod

import numpy as np
import torch
from numpy.typing import NDArray

from prefixd.retention.policy import Policy
from prefixd.retention.seen import Seen

BLOCK = 64  # steps whose scores are computed together
Floats = NDArray[np.float32]
Ints = NDArray[np.int64]


class Greedy(Policy):
    """Keeps for each KV head the positions of its exact tokens, ascending, and what they count for."""

    def __init__(self, budget: int) -> None:
        super().__init__(budget)
        self._at: Ints = np.empty((0, 0), np.int64)  # [H, tokens that are exact]
        self._worth: Floats = np.empty((0, 0), np.float32)

    @abstractmethod
    def _of_prompt(self, seen: Seen) -> Floats:
        """Returns what each token of the prompt counts for when it has been read: [H, prompt]."""

    @abstractmethod
    def _after(self, worth: Floats, given: Floats) -> Floats:
        """Returns what tokens [H, C] count for after a query that gave them `given` [H, C], the mean over
        the group's heads; worth is 0 for the query's own token."""

    def _newest(self) -> int:
        """Returns how many of the newest tokens, the next query's own among them, do not leave."""
        return 0

    def _begin(self, seen: Seen) -> None:
        worth = self._of_prompt(seen.upto(seen.prompt))
        count = min(self.budget - 1, seen.prompt)
        order = worth.copy()
        if (newest := self._newest() - 1) > 0:
            order[:, -newest:] = np.inf
        # Of equals the newer one stays.
        ranked = np.argsort(order, axis=1, kind="stable")[:, ::-1]
        self._at = np.sort(ranked[:, :count], axis=1)
        self._worth = np.take_along_axis(worth, self._at, 1)
        gone = torch.from_numpy(ranked[:, count:].copy())
        self.leaves.scatter_(1, gone, seen.prompt)

    def _advance(self, seen: Seen, before: int) -> None:
        if before == 0:
            self._begin(seen)
        for first in range(max(before, seen.prompt), seen.tokens, BLOCK):
            self._block(seen, first, min(first + BLOCK, seen.tokens))

    def _block(self, seen: Seen, first: int, last: int) -> None:
        heads, held, steps = seen.heads, self._at.shape[1], last - first
        leaves = self.leaves.numpy()  # the same memory
        at = np.concatenate([self._at, np.tile(np.arange(first, last), (heads, 1))], 1)
        keys = seen.k.gather(1, torch.from_numpy(at)[..., None].expand(-1, -1, seen.k.shape[2]))
        scores = (torch.einsum("hgnd,hcd->nhgc", seen.q[:, :, first:last], keys) * seen.scale).numpy()
        worth = np.concatenate([self._worth, np.zeros((heads, steps), np.float32)], 1)
        gone = np.zeros(at.shape, bool)
        closed = np.zeros((heads, 1, at.shape[1]), np.float32)  # -inf where a token left or is to come
        closed[:, :, held:] = -np.inf
        count, row = held, np.arange(heads)
        for step in range(steps):
            closed[:, :, held + step] = 0
            count += 1
            given = scores[step] + closed
            given -= given.max(-1, keepdims=True)
            np.exp(given, out=given)
            given /= given.sum(-1, keepdims=True)
            worth = self._after(worth, given.mean(1))
            if count < self.budget:
                continue
            order = worth + (-closed[:, 0])  # what is not there anymore is worth infinitely much
            order[at > first + step + 1 - self._newest()] = np.inf
            leaving = order.argmin(1)
            gone[row, leaving] = True
            closed[row, 0, leaving] = -np.inf
            leaves[row, at[row, leaving]] = first + step + 1
            count -= 1
        stay = np.flatnonzero(~gone.reshape(-1))
        self._at = at.reshape(-1)[stay].reshape(heads, -1)
        self._worth = worth.reshape(-1)[stay].reshape(heads, -1)


class Tova(Greedy):
    """The token leaves that the newest query attends to least, itself not excepted."""

    def _of_prompt(self, seen: Seen) -> Floats:
        scores = torch.einsum("hgd,htd->hgt", seen.q[:, :, -1], seen.k) * seen.scale
        return _array(scores.softmax(-1).mean(1))

    def _after(self, worth: Floats, given: Floats) -> Floats:
        return given


class H2O(Greedy):
    """The token leaves to which all queries together gave least; half the budget is for the newest."""

    def _newest(self) -> int:
        return self.budget // 2

    def _of_prompt(self, seen: Seen) -> Floats:
        total = torch.zeros(seen.k.shape[:2])
        for first in range(0, seen.tokens, 256):
            last = min(first + 256, seen.tokens)
            scores = torch.einsum("hgnd,htd->hgnt", seen.q[:, :, first:last], seen.k[:, :last]) * seen.scale
            behind = torch.arange(last)[None, :] > torch.arange(first, last)[:, None]
            total[:, :last] += scores.masked_fill(behind, -torch.inf).softmax(-1).mean(1).sum(1)
        return _array(total)

    def _after(self, worth: Floats, given: Floats) -> Floats:
        return worth + given


def _array(x: torch.Tensor) -> Floats:
    array: Floats = x.float().numpy()
    return array
