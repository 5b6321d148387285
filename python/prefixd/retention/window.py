"""Sinks and a window (StreamingLLM): the first tokens and the newest ones. It is what prefixd by itself keeps in
memory of a session's own tokens (docs/decisions/053)."""

from __future__ import annotations

import torch

from prefixd.retention.policy import Policy
from prefixd.retention.seen import NEVER, Seen


class SinksAndWindow(Policy):
    def __init__(self, budget: int, sinks: int = 4) -> None:
        super().__init__(budget)
        self.sinks = min(sinks, budget - 1)

    def _advance(self, seen: Seen, before: int) -> None:
        at = torch.arange(seen.tokens)
        leaves = (at + self.budget - self.sinks).clamp(min=seen.prompt)
        leaves[: self.sinks] = NEVER
        self.leaves[:] = leaves
