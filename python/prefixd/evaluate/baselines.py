"""Runs Quest, SnapKV and StreamingLLM over the same stored rows, in PyTorch.

Each is a LayerSplice (prefixd.transformers.attention): it returns (y, lse) for the stored part, so
that the model runs as it does with prefixd. Sets are chosen per query head, as the originals do on
keys that are repeated for the group, and each head may read `tokens` tokens. The page bounds that
Quest reads, and the union of a group's sets, are not charged to them.

Quest: Tang et al., 2024, Algorithm 1 (pages of 16, dense in the first two layers).
SnapKV: Li et al., 2024, Listing 1 (window 16, average pooling over 5).
StreamingLLM: Xiao et al., 2024, section 3.2 (16 sinks, positions counted inside the cache).
The settings are those with which the completion paper compares them (its Appendix E.1)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicLayer

from prefixd.transformers.attention import mark

PAGE = 16
DENSE_LAYERS = 2
WINDOW, KERNEL = 16, 5
SINKS = 16


@dataclass
class StoredLayer:
    """Holds keys and values [Hkv, N, d] of the stored part, float32, and what SnapKV observes:
    queries [Hq, w, d] of the prompt's last tokens (the question's), and the keys [Hkv, m, d] of all
    tokens after the stored part up to the last of these."""

    keys: Tensor
    values: Tensor
    scale: float
    observed: Tensor | None = None
    own_keys: Tensor | None = None


def attend(q: Tensor, layer: StoredLayer, chosen: Tensor, shift: Tensor | None = None
           ) -> tuple[Tensor, Tensor]:
    """Attends q [Hq, n, d] over chosen [Hq or Hq x n, N] bool -> y [Hq, n, dv], lse [Hq, n].
    `shift` gives other keys for the chosen tokens (StreamingLLM's)."""
    keys = layer.keys if shift is None else shift
    heads, n, _ = q.shape
    grouped = q.unflatten(0, (len(keys), -1))  # [Hkv, G, n, d]
    scores = (grouped @ keys[:, None].transpose(-1, -2) * layer.scale).flatten(0, 1)
    visible = chosen if chosen.ndim == 3 else chosen[:, None]
    scores = scores.masked_fill(~visible, -torch.inf)
    lse = torch.logsumexp(scores, -1)
    weights = torch.exp(scores - lse.masked_fill(lse == -torch.inf, 0)[..., None])
    y = weights.unflatten(0, (len(keys), -1)) @ layer.values[:, None]
    return y.flatten(0, 1), lse


def quest_bounds(q: Tensor, keys: Tensor) -> Tensor:
    """Returns upper bounds of q.k over each page: q [Hq, n, d], keys [Hkv, N, d] -> [Hq, n,
    pages]."""
    pad = -keys.shape[1] % PAGE
    low = torch.nn.functional.pad(keys, (0, 0, 0, pad), value=torch.inf)
    high = torch.nn.functional.pad(keys, (0, 0, 0, pad), value=-torch.inf)
    low = low.unflatten(1, (-1, PAGE)).amin(2)[:, None]  # [Hkv, 1, pages, d]
    high = high.unflatten(1, (-1, PAGE)).amax(2)[:, None]
    grouped = q.unflatten(0, (len(keys), -1))
    # Each dimension adds max(q_j low_j, q_j high_j): positive parts of q meet the maxima, negative
    # ones the minima.
    bound = grouped.clamp_min(0) @ high.transpose(-1, -2)
    bound = bound + grouped.clamp_max(0) @ low.transpose(-1, -2)
    both: Tensor = bound.flatten(0, 1)
    return both


def quest(q: Tensor, layer: StoredLayer, tokens: int, index: int) -> tuple[Tensor, Tensor]:
    n = layer.keys.shape[1]
    if index < DENSE_LAYERS:
        return attend(q, layer, torch.ones(len(q), n, dtype=torch.bool, device=q.device))
    bounds = quest_bounds(q, layer.keys)
    pages = min(bounds.shape[-1], max(1, tokens // PAGE))
    best = bounds.topk(pages, dim=-1).indices
    chosen = torch.zeros_like(bounds, dtype=torch.bool).scatter_(-1, best, True)
    return attend(q, layer, chosen.repeat_interleave(PAGE, -1)[..., :n])


def snapkv_set(layer: StoredLayer, tokens: int) -> Tensor:
    """Returns the chosen tokens [Hq, N]: the prompt's last window votes, and its own stored part is
    kept."""
    assert layer.observed is not None and layer.own_keys is not None
    n, w, own = layer.keys.shape[1], layer.observed.shape[1], layer.own_keys.shape[1]
    keys = torch.cat((layer.keys, layer.own_keys), 1)
    grouped = layer.observed.unflatten(0, (len(keys), -1))
    scores = (grouped @ keys[:, None].transpose(-1, -2) * layer.scale).flatten(0, 1)
    hidden = torch.ones(w, own, dtype=torch.bool).triu(own - w + 1)
    scores[..., n:] = scores[..., n:].masked_fill(hidden, -torch.inf)
    votes = torch.softmax(scores, -1)[..., :n].sum(1)  # [Hq, N]
    pooled = torch.nn.functional.avg_pool1d(
        votes[:, None], KERNEL, stride=1, padding=KERNEL // 2
    )[:, 0]
    best = pooled.topk(min(tokens, n), dim=-1).indices
    return torch.zeros_like(pooled, dtype=torch.bool).scatter_(-1, best, True)


def rotate(keys: Tensor, by: int, frequencies: Tensor) -> Tensor:
    """Moves the RoPE of keys [..., d] by `by` positions; frequencies [d / 2] (rotate-half;
    dimensions beyond 2 x len(frequencies) are not rotated)."""
    half = len(frequencies)
    angle = by * frequencies.double()
    cos, sin = angle.cos().to(keys.dtype), angle.sin().to(keys.dtype)
    a, b, rest = keys[..., :half], keys[..., half : 2 * half], keys[..., 2 * half :]
    return torch.cat((a * cos - b * sin, b * cos + a * sin, rest), -1)


def streaming(
    q: Tensor, layer: StoredLayer, tokens: int, frequencies: Tensor | None
) -> tuple[Tensor, Tensor]:
    n = layer.keys.shape[1]
    tokens = min(tokens, n)
    sinks = min(SINKS, tokens // 2)
    recent = tokens - sinks
    chosen = torch.zeros(len(q), n, dtype=torch.bool, device=q.device)
    chosen[:, :sinks] = True
    chosen[:, n - recent :] = True
    if frequencies is None or tokens == n:
        return attend(q, layer, chosen)
    # Positions count inside the cache: tokens before the gap move up to it.
    keys = layer.keys.clone()
    keys[:, :sinks] = rotate(keys[:, :sinks], n - recent - sinks, frequencies)
    return attend(q, layer, chosen, keys)


class BaselineLayer(DynamicLayer):
    """Attends the stored part through a baseline and later tokens in memory."""

    def __init__(self, owner: BaselineCache, index: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # transformers' constructor
        self.owner, self.index = owner, index
        self._set: Tensor | None = None

    def update(self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
               ) -> tuple[Tensor, Tensor]:
        keys, values = super().update(key_states, value_states)
        return mark(keys, self), values

    def get_seq_length(self) -> int:
        return self.owner.columns + int(super().get_seq_length())

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return int(super().get_seq_length()) + query_length, self.owner.columns

    def observe(self, query: Tensor) -> None:
        pass

    def prefix_state(self, query: Tensor) -> tuple[Tensor, Tensor]:
        o = self.owner
        layer = o.stored[self.index]
        q = query[0].to(layer.keys)
        if o.method == "quest":
            y, lse = quest(q, layer, o.tokens, self.index)
        elif o.method == "snapkv":
            if self._set is None:
                self._set = snapkv_set(layer, o.tokens)
            y, lse = attend(q, layer, self._set)
        else:
            y, lse = streaming(q, layer, o.tokens, o.frequencies)
        return y[None].to(query.device), lse[None].to(query.device)


@dataclass
class BaselineCache(Cache):
    """Runs one prompt whose stored part a baseline attends. `own`: keys and values [1, Hkv, n, d]
    of the tokens after it that have been run already."""

    method: str
    stored: Sequence[StoredLayer]
    tokens: int
    own: Sequence[tuple[Tensor, Tensor]] = ()
    frequencies: Tensor | None = None
    columns: int = field(init=False)

    def __post_init__(self) -> None:
        self.columns = self.stored[0].keys.shape[1]
        layers: list[Any] = [BaselineLayer(self, i) for i in range(len(self.stored))]
        for layer, (keys, values) in zip(layers, self.own, strict=False):
            DynamicLayer.update(layer, keys, values)
        super().__init__(layers=layers)


def rope_frequencies(model: torch.nn.Module) -> Tensor | None:
    """Returns the frequencies of a model with one kind of RoPE; None where layers differ (their
    positions stay)."""
    found = [x for m in model.modules() if isinstance(x := getattr(m, "inv_freq", None), Tensor)]
    return found[0].float().cpu() if len(found) == 1 else None
