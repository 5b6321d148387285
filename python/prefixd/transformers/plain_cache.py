"""Reads the rows of transformers' own caches, where these hold what was computed."""

from __future__ import annotations

import torch
from transformers.cache_utils import Cache, DynamicLayer, DynamicSlidingWindowLayer

from prefixd.errors import InvalidArgument
from prefixd.model import ModelSpec
from prefixd.transformers.cache import PrefixCache

# Subclasses quantise or offload.
_PLAIN = (DynamicLayer, DynamicSlidingWindowLayer)


def plain_layers(
    cache: Cache, spec: ModelSpec, batch: int, tokens: int
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Returns keys and values [B, Hkv, n, d] of each layer, n at least `tokens`."""
    if isinstance(cache, PrefixCache):
        raise InvalidArgument("a PrefixCache stores by itself: use its stored() and persist()")
    if len(cache.layers) != len(spec.layers):
        raise InvalidArgument(
            f"the cache has {len(cache.layers)} layers, this model {len(spec.layers)}"
        )
    plain = []
    for index, layer in enumerate(cache.layers):
        kind = type(layer).__name__
        if not isinstance(layer, DynamicLayer) or type(layer) not in _PLAIN:
            raise InvalidArgument(
                f"layer {index} of the cache is a {kind}, whose rows are not those that were computed "
                "(static, quantised and offloaded caches are not stored); prefill with a DynamicCache"
            )
        keys, values = layer.keys, layer.values
        held = int(layer.get_seq_length())
        if keys is None or values is None or keys.shape[2] != held:
            raise InvalidArgument(
                f"layer {index} of the cache (a {kind}) has dropped tokens outside of its window; prefill "
                "with Splice.cache, which stores them as they are computed"
            )
        if len(keys) != batch:
            raise InvalidArgument(f"the cache holds {len(keys)} prompts, and {batch} were given")
        if held < tokens:
            raise InvalidArgument(
                f"layer {index} of the cache holds {held} of the prompt's {tokens} tokens"
            )
        plain.append((keys, values))
    return plain
