"""Learns where vLLM's kernels keep the elements of a block. On CPU keys are packed as the instruction
set of the machine likes it; instead of knowing each packing, the engine's own kernel writes numbered
rows into a block of its own, and where the numbers land is the order."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from vllm import _custom_ops as ops

from prefixd import PagedRows
from prefixd.errors import FailedPrecondition

# Finite in float16 and bfloat16 alike when their bits are read as a number.
_MOST_NUMBERS = 0x7BFF


@dataclass(frozen=True)
class LayerCache:
    """One layer's part of the paged cache, and where its elements are."""

    index: int
    cache: torch.Tensor  # as the kernels see it, contiguous
    rows: PagedRows


def layer_caches(
    names: dict[str, int], caches: dict[str, torch.Tensor], layers: dict[str, Any]
) -> dict[str, LayerCache]:
    """Returns what `save_kv_layer` and `wait_for_layer_load` need, by name; `names` has each layer's
    index. All layers have one shape, so the first one's order is every one's."""
    learnt: PagedRows | None = None
    found = {}
    shape = None
    for name, index in names.items():
        cache = caches[name]
        if cache.ndim != 4 or not cache.is_contiguous() or cache.device.type != "cpu":
            raise FailedPrecondition(
                f"the cache of {name} is {tuple(cache.shape)} on {cache.device}, strides {cache.stride()}: the "
                "connector was tried with contiguous [blocks][heads][block_size][2 * head_size] on the CPU alone"
            )
        if learnt is None:
            shape = (cache.shape[1:], cache.dtype)
            learnt = learn(cache, str(layers[name].isa))
        if shape != (cache.shape[1:], cache.dtype):
            raise FailedPrecondition(f"the cache of {name} has another shape than the first layer's: not tried")
        found[name] = LayerCache(index, cache, learnt)
    return found


def learn(cache: torch.Tensor, isa: str) -> PagedRows:
    """Returns the order of a CPU cache [blocks][heads][block_size][2 * head_size], whose kernels are
    those of `isa`; FailedPrecondition when they do more than move rows."""
    _, heads, tokens, twice = cache.shape
    dim = twice // 2
    offsets = [places(part, tokens, dim, cache.dtype, isa) for part in ("key", "value")]
    rows = PagedRows(
        k_offsets=offsets[0],
        v_offsets=offsets[1],
        block_stride=cache.stride(0),
        head_stride=cache.stride(1),
        n_heads=heads,
        element_bytes=cache.element_size(),
    )
    _check(rows, heads, tokens, dim, cache.dtype, isa)
    return rows


def places(part: str, tokens: int, dim: int, dtype: torch.dtype, isa: str) -> np.ndarray:
    """Returns [tokens][dim]: where in one block and head each element of the keys or values lands."""
    if max(tokens, dim) > _MOST_NUMBERS:
        raise FailedPrecondition(f"blocks of {tokens} tokens and {dim} dimensions were not tried")
    number = torch.int32 if dtype == torch.float32 else torch.int16
    token = torch.arange(1, tokens + 1, dtype=number).repeat_interleave(dim).view(tokens, 1, dim)
    d = torch.arange(1, dim + 1, dtype=number).repeat(tokens).view(tokens, 1, dim)
    landed = []
    for numbers in (token, d):
        zeros = torch.zeros_like(numbers)
        key, value = (numbers, zeros) if part == "key" else (zeros, numbers)
        block = torch.zeros(1, 1, 2 * tokens, dim, dtype=number)
        _write(key.view(dtype), value.view(dtype), block.view(dtype), isa)
        landed.append(block.reshape(-1).numpy().astype(np.int64))
    filled = np.flatnonzero(landed[0])
    offsets = np.full(tokens * dim, -1, np.int64)
    if len(filled) == tokens * dim and (landed[1][filled] > 0).all():
        offsets[(landed[0][filled] - 1) * dim + landed[1][filled] - 1] = filled
    if (offsets < 0).any():
        raise FailedPrecondition(
            f"vLLM's kernels for '{isa}' do not keep each element of {part} rows in {dtype} at a place of its own, so "
            "prefixd cannot move them"
        )
    return offsets.reshape(tokens, dim).astype(np.uint64)


def _write(key: torch.Tensor, value: torch.Tensor, block: torch.Tensor, isa: str) -> None:
    k, v = block.chunk(2, dim=2)
    slots = torch.arange(key.shape[0], dtype=torch.int64)
    ops.cpu_attn_reshape_and_cache(key, value, k, v, slots, isa)


def _check(rows: PagedRows, heads: int, tokens: int, dim: int, dtype: torch.dtype, isa: str) -> None:
    """Compares what is gathered from two blocks that the kernel wrote with what was written."""
    generator = torch.Generator().manual_seed(1)
    k, v = (torch.randn(2 * tokens, heads, dim, generator=generator).to(dtype) for _ in range(2))
    cache = torch.zeros(2, heads, 2 * tokens, dim, dtype=dtype)
    _write(k, v, cache, isa)
    got: Any = [torch.empty_like(k), torch.empty_like(v)]
    blocks: Any = cache  # the extension's stub knows NumPy alone
    rows.gather(blocks, np.arange(2), 0, 2 * tokens, got[0], got[1])
    if not (torch.equal(got[0], k) and torch.equal(got[1], v)):
        raise FailedPrecondition(f"rows in {dtype} come back from vLLM's kernels for '{isa}' with other numbers")
