"""KVpop's scorers, for a batch of KV heads at once: a small network over a token's key and value, and a
memory (mLSTM) that has seen the window behind the token when it is asked about it."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from prefixd.retention.seen import Seen

LOG_DECAY = (math.log(0.999), math.log(0.999999))
CHUNK = 64  # tokens that the memory reads at once
State = tuple[Tensor, Tensor, Tensor]  # C [N, dk, dv] and z [N, dk], both over exp(m [N])


def hedgehog(x: Tensor) -> Tensor:
    """Returns positive features, twice as many as x has."""
    return torch.cat([x.softmax(-1), (-x).softmax(-1)], -1)


def empty_state(heads: int, keys: int, values: int) -> State:
    return torch.zeros(heads, keys, values), torch.zeros(heads, keys), torch.full((heads,), -torch.inf)


def read_memory(q: Tensor, k: Tensor, v: Tensor, log_i: Tensor, log_f: Tensor, state: State) -> tuple[Tensor, State]:
    """Returns h [N, T, dv] and the state behind the last token: C <- f C + i k (x) v, z <- f z + i k, then
    h = q C / q z, for q, k [N, T, dk], v [N, T, dv] and the gates' logarithms [N, T]. Chunks of tokens are
    read together; all weights are taken relative to the largest one a query sees."""
    out = []
    for first in range(0, q.shape[1], CHUNK):
        part = slice(first, first + CHUNK)
        h, state = _read_chunk(q[:, part], k[:, part], v[:, part], log_i[:, part], log_f[:, part], state)
        out.append(h)
    return torch.cat(out, 1), state


def _read_chunk(q: Tensor, k: Tensor, v: Tensor, log_i: Tensor, log_f: Tensor, state: State) -> tuple[Tensor, State]:
    c, z, m = state
    n = q.shape[1]
    forgot = log_f.cumsum(1)  # [N, n]
    written = log_i - forgot
    later = torch.ones(n, n, dtype=torch.bool).triu(1)
    weights = (forgot[:, :, None] + written[:, None, :]).masked_fill(later, -torch.inf)
    before = forgot + m[:, None]
    top = torch.maximum(weights.amax(-1), before).detach()  # any shift gives the same h
    inside = torch.matmul(q, k.transpose(1, 2)) * torch.exp(weights - top[..., None])
    outside = torch.exp(before - top)
    above = torch.matmul(inside, v) + outside[..., None] * torch.matmul(q, c)
    below = inside.sum(-1) + outside * torch.matmul(q, z[..., None])[..., 0]
    end = forgot[:, -1:]
    m_new = torch.maximum(end[:, 0] + m, (end + written).amax(1)).detach()
    kept, new = torch.exp(end[:, 0] + m - m_new), torch.exp(end + written - m_new[:, None])
    weighted = k * new[..., None]
    state = (
        kept[:, None, None] * c + torch.matmul(weighted.transpose(1, 2), v),
        kept[:, None] * z + weighted.sum(1),
        m_new,
    )
    return above / below.clamp(min=1e-30)[..., None], state


class Heads(nn.Module):
    """What both scorers share: inputs x = [k; v], each channel relative to its mean and deviation over the
    texts of the training, and a decay for each head. `heads` may span several layers."""

    mean: Tensor
    scale: Tensor

    def __init__(self, heads: int, width: int) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(heads, 1, width))
        self.register_buffer("scale", torch.ones(heads, 1, width))
        self.decay = nn.Parameter(torch.zeros(heads))

    @property
    def log_decay(self) -> Tensor:
        low, high = LOG_DECAY
        return low + torch.sigmoid(self.decay) * (high - low)

    def inputs(self, k: Tensor, v: Tensor) -> Tensor:
        return (torch.cat([k, v], -1) - self.mean) / self.scale


class Mlp(Heads):
    """score = w2 SiLU(w1 x + b1) + b2."""

    def __init__(self, heads: int, width: int, hidden: int = 64) -> None:
        super().__init__(heads, width)
        self.w1 = nn.Parameter(torch.randn(heads, width, hidden) / math.sqrt(width))
        self.b1 = nn.Parameter(torch.zeros(heads, 1, hidden))
        self.w2 = nn.Parameter(torch.zeros(heads, hidden, 1))
        self.b2 = nn.Parameter(torch.zeros(heads, 1))

    def forward(self, x: Tensor) -> Tensor:
        """Returns scores [N, T] of inputs [N, T, width]."""
        hidden = torch.nn.functional.silu(torch.baddbmm(self.b1, x, self.w1))
        return torch.matmul(hidden, self.w2)[..., 0] + self.b2


class Mlstm(Heads):
    """score = a SiLU(h) + b, h what the memory gives to the leaving token's own query, read when the memory
    has seen the window behind it."""

    def __init__(self, heads: int, width: int) -> None:
        super().__init__(heads, width)
        half = width // 4  # of a head's dimension, which is half of the width
        self.wq, self.wk, self.wv = (
            nn.Parameter(torch.randn(heads, width, half) / math.sqrt(width)) for _ in range(3)
        )
        self.wi, self.wf = (nn.Parameter(torch.zeros(heads, width, 1)) for _ in range(2))
        self.bi = nn.Parameter(torch.zeros(heads, 1))
        self.bf = nn.Parameter(torch.full((heads, 1), 5.0))  # remembers some 150 tokens at first
        self.a = nn.Parameter(torch.zeros(heads, half, 1))
        self.b = nn.Parameter(torch.zeros(heads, 1))

    def forward(self, x: Tensor, asked: Tensor, state: State | None = None) -> tuple[Tensor, State]:
        """Returns scores [N, T] for the tokens `asked` [N, T, width], each read behind the token of x
        [N, T, width] beside it, and the state at the end."""
        q, k = hedgehog(asked @ self.wq), hedgehog(x @ self.wk)
        log_i = (x @ self.wi)[..., 0] + self.bi
        log_f = torch.nn.functional.logsigmoid((x @ self.wf)[..., 0] + self.bf)
        v = x @ self.wv
        state = state or empty_state(k.shape[0], k.shape[2], v.shape[2])
        h, state = read_memory(q, k, v, log_i, log_f, state)
        return torch.matmul(torch.nn.functional.silu(h), self.a)[..., 0] + self.b, state

    def delayed(self, x: Tensor, window: int) -> Tensor:
        """Returns the scores [N, T - window] of the tokens that left a window, of a whole text."""
        asked = torch.nn.functional.pad(x[:, : x.shape[1] - window], (0, 0, window, 0))
        return self.forward(x, asked)[0][:, window:]


class MlpScorer:
    """Scores the tokens of one layer (kvpop.Scorer)."""

    def __init__(self, heads: Mlp) -> None:
        self._heads, self.log_decay = heads, heads.log_decay.detach()

    @torch.no_grad()
    def scores(self, seen: Seen, before: int, window: int) -> Tensor:
        part = slice(max(0, before - window), max(0, seen.tokens - window))
        scores: Tensor = self._heads(self._heads.inputs(seen.k[:, part], seen.v[:, part]))
        return scores


class MlstmScorer:
    """Scores the tokens of one layer in order (kvpop.Scorer)."""

    def __init__(self, heads: Mlstm) -> None:
        self._heads, self.log_decay = heads, heads.log_decay.detach()
        self._state: State | None = None

    @torch.no_grad()
    def scores(self, seen: Seen, before: int, window: int) -> Tensor:
        x = self._heads.inputs(seen.k, seen.v)
        asked = torch.nn.functional.pad(x, (0, 0, window, 0))[:, before : seen.tokens]
        scores, self._state = self._heads.forward(x[:, before:], asked, self._state)
        return scores[:, max(0, window - before) :]
