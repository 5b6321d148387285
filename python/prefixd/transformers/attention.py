"""Defines the attention function that Hugging Face models call under the implementation "prefixd".

Keys that come out of a PrefixCache carry their layer's splice. Everything else (a model without a
cache, sliding-window layers, training) gets native attention, just as with "sdpa", softcap
included."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from prefixd import arrays
from prefixd.errors import InvalidArgument
from prefixd.session import merge_own_tokens

NAME = "prefixd"
_ATTRIBUTE = "_prefixd_splice"
# This many scores exist at once in attention over the own tokens, so that a long question after a
# long conversation does not need memory for all of them.
_SCORES_AT_ONCE = 1 << 24


class LayerSplice(Protocol):
    """Describes the stored part to a PrefixCache's layer."""

    def observe(self, query: torch.Tensor) -> None:
        """Receives the queries [B, Hq, n, dh] of the tokens that were just appended."""

    def prefix_state(self, query: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Returns (y [B, Hq, n, dv], lse [B, Hq, n]) float32 over the stored prefix; None without
        one."""


def mark(keys: torch.Tensor, splice: LayerSplice) -> torch.Tensor:
    """Returns a view of `keys` that names its splice."""
    marked = keys.view(keys.shape)
    setattr(marked, _ATTRIBUTE, splice)
    return marked


def register() -> None:
    """Registers both interfaces: without the second the mask silently vanishes."""
    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, sdpa_mask)


def attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    softcap: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attends query [B, Hq, n, dh], key and value [B, Hkv, m, d] -> [B, n, Hq, dv]."""
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    splice: LayerSplice | None = getattr(key, _ATTRIBUTE, None)
    if splice is not None:
        if torch.is_grad_enabled() and query.requires_grad:
            raise InvalidArgument(
                "gradients do not flow through a stored prefix; run the model under torch.no_grad()"
            )
        if kwargs.get("s_aux") is not None or kwargs.get("position_bias") is not None:
            raise InvalidArgument(
                "attention with learned sinks or position biases cannot be spliced"
            )
        splice.observe(query)
        prefix = splice.prefix_state(query)
        if prefix is not None:
            if _on_host(query, key, value, attention_mask):
                return _merge_one(query, key, value, attention_mask, scale, softcap, prefix), None
            own = partial_state(query, key, value, attention_mask, scale, softcap)
            return merge(own, prefix).transpose(1, 2).to(query.dtype).contiguous(), None
    if softcap is None:
        output: torch.Tensor = sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scale, **kwargs
        )[0]
        return output, None
    y, _ = partial_state(query, key, value, attention_mask, scale, softcap)
    return y.transpose(1, 2).to(query.dtype).contiguous(), None


def _on_host(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None
) -> bool:
    """Whether one new token of each row attends to own tokens in host memory."""
    return (
        query.shape[2] == 1
        and all(t.device.type == "cpu" for t in (query, key, value))
        and key.dtype == value.dtype
        and arrays.dtype_name(key.dtype) is not None
        and (mask is None or (mask.dtype == torch.bool and mask.shape[1] == 1))
    )


def _merge_one(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float,
    softcap: float | None,
    prefix: tuple[torch.Tensor, torch.Tensor],
) -> torch.Tensor:
    """Returns attention [B, 1, Hq, dv] of one token over both parts."""
    y, lse = (t.squeeze(2).contiguous() for t in prefix)
    seen = None
    if mask is not None:
        seen = mask[:, 0, -1, -key.shape[2] :].expand(len(key), -1).contiguous().view(torch.uint8)
    merge_own_tokens(
        query[:, :, 0], key.detach(), value.detach(), y, lse, scale=scale, softcap=softcap or 0.0, seen=seen
    )
    return y.unsqueeze(1).to(query.dtype)


def partial_state(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float,
    softcap: float | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Computes exact attention with its normaliser: y [B, Hq, n, dv] and lse [B, Hq, n], float32.
    With mask None the n queries belong to the last of the keys' tokens. A query that sees nothing
    has lse = -inf and y = 0."""
    batch, q_heads, n, _ = query.shape
    kv_heads, m = key.shape[1], key.shape[2]
    group = q_heads // kv_heads
    keys, values = key.float().unsqueeze(2), value.float().unsqueeze(2)  # [B, Hkv, 1, m, d]
    grouped = query.float().unflatten(1, (kv_heads, group))  # [B, Hkv, G, n, dh]
    y = torch.empty((batch, q_heads, n, value.shape[-1]), device=query.device)
    lse = torch.empty((batch, q_heads, n), device=query.device)
    step = max(1, _SCORES_AT_ONCE // max(1, batch * q_heads * m))
    for begin in range(0, n, step):
        end = min(n, begin + step)
        scores = torch.matmul(grouped[..., begin:end, :], keys.transpose(-1, -2)) * scale
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        scores = scores.flatten(1, 2)  # [B, Hq, n', m]
        if mask is None:
            last = torch.arange(begin, end, device=query.device)[:, None] + (m - n)
            visible = torch.arange(m, device=query.device)[None, :] <= last
            scores = scores.masked_fill(~visible, -torch.inf)
        elif mask.dtype == torch.bool:
            scores = scores.masked_fill(~mask[..., begin:end, :], -torch.inf)
        else:
            scores = scores + mask[..., begin:end, :].float()
        part = torch.logsumexp(scores, dim=-1)
        weights = torch.exp(scores - part.masked_fill(part == -torch.inf, 0).unsqueeze(-1))
        weights = weights.unflatten(1, (kv_heads, group))
        y[:, :, begin:end] = torch.matmul(weights, values).flatten(1, 2)
        lse[:, :, begin:end] = part
    return y, lse


def merge(
    a: tuple[torch.Tensor, torch.Tensor], b: tuple[torch.Tensor, torch.Tensor]
) -> torch.Tensor:
    """Joins both parts in one softmax: y [..., dv], lse [...] (natural log); either may be empty
    (-inf)."""
    (y_a, lse_a), (y_b, lse_b) = a, b
    both = torch.logaddexp(lse_a, lse_b)
    both = both.masked_fill(both == -torch.inf, 0)
    return y_a * torch.exp(lse_a - both).unsqueeze(-1) + y_b * torch.exp(lse_b - both).unsqueeze(-1)
