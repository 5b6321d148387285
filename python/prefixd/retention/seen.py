"""What one layer's attention has seen so far, and which of it a query still finds exact."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

NEVER = 1 << 60


@dataclass(frozen=True)
class Seen:
    """Queries q [Hkv, G, n, dk], keys k [Hkv, n, dk] and values v [Hkv, n, dv] of the tokens 0 to n - 1,
    as the attention has them. The first `prompt` tokens were prefilled: their queries attend to all that
    stands before them, whatever a policy says."""

    q: Tensor
    k: Tensor
    v: Tensor
    prompt: int
    scale: float

    @property
    def heads(self) -> int:
        return int(self.k.shape[0])

    @property
    def tokens(self) -> int:
        return int(self.k.shape[1])

    def upto(self, n: int) -> Seen:
        """Returns what had been seen when there were n tokens."""
        return Seen(self.q[:, :, :n], self.k[:, :n], self.v[:, :n], self.prompt, self.scale)


def causal(at: Tensor, tokens: int) -> Tensor:
    """Returns which of `tokens` tokens stand not behind the queries at positions `at` [n]: [n, tokens]."""
    return torch.arange(tokens)[None, :] <= at[:, None]


def kept(leaves: Tensor, at: Tensor) -> Tensor:
    """Returns which tokens [H, n, tokens] the queries at positions `at` [n] find exact. leaves [H, tokens]
    is the position of the first query that no longer does."""
    return causal(at, leaves.shape[1])[None] & (leaves[:, None, :] > at[None, :, None])
