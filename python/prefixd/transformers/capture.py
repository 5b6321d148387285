"""Captures the queries, keys and values that a model's attention sees (after RoPE and any norms of them,
unscaled) through the attention interface, where the splice takes them, too."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import sdpa_mask

from prefixd.errors import InvalidArgument
from prefixd.transformers.attention import attention
from prefixd.transformers.identity import attention_layers

NAME = "prefixd-capture"
_ATTRIBUTE = "_prefixd_capture"
# A sink receives (layer, q [B, Hq, n, dh], k [B, Hkv, m, dh], v [B, Hkv, m, dv]) of each layer, as it
# attends.
Sink = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], None]


def _attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *args: Any,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    getattr(module, _ATTRIBUTE)(query, key, value)
    return attention(module, query, key, value, *args, **kwargs)


@contextmanager
def captured(model: PreTrainedModel, sink: Sink) -> Iterator[None]:
    """Passes every forward pass inside the block to `sink`. The model attends as before and is left
    unchanged."""
    config = model.config.get_text_config(decoder=True)
    modules = attention_layers(model, config)[1]
    before = config._attn_implementation
    AttentionInterface.register(NAME, _attention)
    AttentionMaskInterface.register(NAME, sdpa_mask)

    def tap(index: int) -> Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None]:
        return lambda query, key, value: sink(index, query, key, value)

    try:
        for index, module in enumerate(modules):
            setattr(module, _ATTRIBUTE, tap(index))
        model.set_attn_implementation(NAME)
        if config._attn_implementation != NAME:
            raise InvalidArgument(
                f"{type(model).__name__} does not take its attention from AttentionInterface, so its "
                "queries and keys cannot be captured"
            )
        yield
    finally:
        model.set_attn_implementation(before)
        for module in modules:
            delattr(module, _ATTRIBUTE)
