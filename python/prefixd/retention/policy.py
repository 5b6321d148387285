"""The interface of retention policies: they say when a token leaves the exact set, for each KV head by
itself. A token that left does not come back, as in the papers: what a query wants all the same is
retrieved for it alone (attend.py)."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch

from prefixd.errors import InvalidArgument
from prefixd.retention.seen import NEVER, Seen


class Policy(ABC):
    """Holds `budget` tokens for each KV head, the query's own token among them. Of the prompt, which is
    attended to in full while it is prefilled, leaves at once what does not fit.

    leaves [Hkv, n]: position of the first query that no longer finds a token exact; NEVER as far as is
    known. What it says of queries up to n - 1 is final."""

    def __init__(self, budget: int) -> None:
        if budget < 1:
            raise InvalidArgument(f"a budget of {budget} tokens keeps nothing; at least 1")
        self.budget = budget
        self.leaves = torch.empty((0, 0), dtype=torch.int64)

    def advance(self, seen: Seen) -> None:
        """Takes in the tokens that are new in `seen`, which begins where the last one did. Any cut into
        calls gives the same answer, as long as the prompt comes in one piece."""
        before = self.leaves.shape[1]
        if before == 0 and seen.tokens < seen.prompt:
            raise InvalidArgument("a policy receives the whole prompt at first")
        new = torch.full((seen.heads, seen.tokens - before), NEVER, dtype=torch.int64)
        self.leaves = torch.cat([self.leaves.reshape(seen.heads, -1), new], 1)
        self._advance(seen, before)

    @abstractmethod
    def _advance(self, seen: Seen, before: int) -> None:
        """Sets `leaves` for the queries from `before` on, or from the end of the prompt."""
