"""KVpop's target: how much attention a token will receive after it left the window. A scorer learns to
foresee it; a policy that knows it (`Foreseen`) says how far any fixed ranking of tokens can get."""

from __future__ import annotations

import torch
from torch import Tensor

from prefixd.retention.seen import Seen

EPSILON = 1e-8
BLOCK = 256


def log_normaliser(seen: Seen) -> Tensor:
    """Returns the log-sum-exp of every query over all that it may see: [Hkv, G, n]. Dense, hence exact,
    where the paper takes its sparse attention's."""
    lse = torch.empty(seen.q.shape[:3])
    for first in range(0, seen.tokens, BLOCK):
        last = min(first + BLOCK, seen.tokens)
        scores = torch.einsum("hgnd,htd->hgnt", seen.q[:, :, first:last], seen.k[:, :last]) * seen.scale
        behind = torch.arange(last)[None, :] > torch.arange(first, last)[:, None]
        lse[:, :, first:last] = scores.masked_fill(behind, -torch.inf).logsumexp(-1)
    return lse


def future_attention(seen: Seen, window: int, normalise: bool = True) -> Tensor:
    """Returns log(eps + m) [Hkv, n]: m is the mean attention of the queries at t + window and later, the
    largest of the group's heads; their sum where not `normalise`. One pass with keys in the place of
    queries: tokens whose window never ends have nothing to come, log(eps)."""
    lse, n = log_normaliser(seen), seen.tokens
    out = torch.full((seen.heads, n), -torch.inf)
    for first in range(0, n, BLOCK):
        last = min(first + BLOCK, n)
        if first + window >= n:
            break
        queries = torch.arange(first + window, n)
        logits = torch.einsum("htd,hgnd->hgtn", seen.k[:, first:last], seen.q[:, :, first + window :]) * seen.scale
        logits -= lse[:, :, None, first + window :]
        early = queries[None, :] < torch.arange(first, last)[:, None] + window
        out[:, first:last] = logits.masked_fill(early, -torch.inf).logsumexp(-1).amax(1)
    if normalise:
        out = out - (n - window - torch.arange(n)).clamp(min=1).log()
    return torch.logaddexp(out, torch.tensor(EPSILON).log())


class Foreseen:
    """Scores tokens by their target [H, n] of the whole text: it looks ahead, as nobody can."""

    def __init__(self, target: Tensor, log_decay: float = 0.0) -> None:
        self.log_decay = torch.full((len(target),), log_decay)
        self._target = target

    def scores(self, seen: Seen, before: int, window: int) -> Tensor:
        return self._target[:, max(0, before - window) : max(0, seen.tokens - window)]
