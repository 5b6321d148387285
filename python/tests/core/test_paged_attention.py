"""Tests attention over the blocks of an engine's paged cache, for every order of elements and every
dtype, against its definition in float64."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

import prefixd
from prefixd import _core
from tests.core.test_paged import BLOCK, Order, hnd, nhd, numbers, packed, tiled
from tests.prompts import DIM, KV_HEADS

Q_HEADS = 3 * KV_HEADS
TABLE = np.array([5, 2, 8, 1])  # in no order, block 0 is nobody's
DTYPES = {"f32": np.float32, "f16": np.float16, "bf16": np.uint16}


def widened(bits: np.ndarray, dtype: str) -> np.ndarray:
    if dtype == "bf16":
        return (bits.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    return bits.astype(np.float64)


def reference(
    own: Order,
    cache: np.ndarray,
    dtype: str,
    tokens: int,
    q: np.ndarray,
    scale: float,
    softcap: float,
    first: int = 0,
) -> tuple[np.ndarray, np.ndarray]:
    parts = [own.read(cache, block) for block in TABLE]
    k, v = (
        widened(np.concatenate([part[i] for part in parts], axis=1)[:, :tokens], dtype).repeat(3, axis=0)
        for i in (0, 1)
    )
    scores = scale * np.einsum("nhd,htd->nht", q.astype(np.float64), k)
    if softcap:
        scores = softcap * np.tanh(scores / softcap)
    at = tokens - len(q) + np.arange(len(q))
    seen = np.arange(tokens)
    scores = np.where((first <= seen) & (seen <= at[:, None, None]), scores, -np.inf)
    most = scores.max(-1, keepdims=True)
    weights = np.exp(scores - most)
    total = weights.sum(-1, keepdims=True)
    return np.einsum("nht,htd->nhd", weights / total, v), (most + np.log(total))[..., 0]


@pytest.mark.parametrize("softcap", [0.0, 1.5])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("order", [packed, tiled, nhd, hnd])
def test_attention_is_that_of_its_definition(order: Callable[[int], Order], dtype: str, softcap: float) -> None:
    size = np.dtype(DTYPES[dtype]).itemsize
    own = order(size)
    cache = numbers(DTYPES[dtype], own.shape)
    cache[np.isnan(widened(cache, dtype))] = 0
    random = np.random.default_rng(3)
    # One token; around the ends of blocks; a question of its own, and one longer than a task.
    for tokens, n in ((1, 1), (BLOCK - 1, 1), (BLOCK, 1), (BLOCK + 1, 2), (3 * BLOCK, 70), (100, 100), (128, 5)):
        q = random.standard_normal((n, Q_HEADS, DIM), dtype=np.float32) * 4
        want_y, want_lse = reference(own, cache, dtype, tokens, q, 0.25, softcap)
        for threads in (1, 3):
            y, lse = np.empty((n, Q_HEADS, DIM), np.float32), np.empty((n, Q_HEADS), np.float32)
            _core.attend_paged(own.rows, cache, dtype, TABLE, tokens, 0.25, softcap, threads, q, y, lse)
            np.testing.assert_allclose(y, want_y, rtol=2e-5, atol=2e-5)
            np.testing.assert_allclose(lse, want_lse, rtol=2e-6, atol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("order", [packed, hnd])
def test_the_first_tokens_may_be_left_out(order: Callable[[int], Order], dtype: str) -> None:
    own = order(np.dtype(DTYPES[dtype]).itemsize)
    cache = numbers(DTYPES[dtype], own.shape)
    cache[np.isnan(widened(cache, dtype))] = 0
    random = np.random.default_rng(4)
    tokens = 2 * BLOCK + 9
    for first, n in ((1, 1), (BLOCK - 1, BLOCK), (BLOCK, 2), (BLOCK + 5, 1), (2 * BLOCK + 3, 6), (tokens - 1, 1)):
        q = random.standard_normal((n, Q_HEADS, DIM), dtype=np.float32)
        want_y, want_lse = reference(own, cache, dtype, tokens, q, 0.25, 0.0, first)
        y, lse = np.empty((n, Q_HEADS, DIM), np.float32), np.empty((n, Q_HEADS), np.float32)
        table = np.where(np.arange(len(TABLE)) < first // BLOCK, 10**9, TABLE)  # they need no blocks
        _core.attend_paged(own.rows, cache, dtype, table, tokens, 0.25, 0.0, 1, q, y, lse, first)
        np.testing.assert_allclose(y, want_y, rtol=2e-5, atol=2e-5)
        np.testing.assert_allclose(lse, want_lse, rtol=2e-6, atol=1e-5)


def test_many_tokens_are_shared_by_threads() -> None:
    """As much work as makes a second thread begin."""
    own = packed(4)
    cache = numbers(np.float32, own.shape)
    tokens, heads = 4 * BLOCK, 64 * KV_HEADS
    q = np.random.default_rng(4).standard_normal((tokens, heads, DIM), dtype=np.float32)
    one, several = (np.empty_like(q) for _ in range(2))
    lse = np.empty((2, tokens, heads), np.float32)
    _core.attend_paged(own.rows, cache, "f32", TABLE, tokens, 0.25, 0.0, 1, q, one, lse[0])
    _core.attend_paged(own.rows, cache, "f32", TABLE, tokens, 0.25, 0.0, 4, q, several, lse[1])
    np.testing.assert_array_equal(one, several)
    np.testing.assert_array_equal(lse[0], lse[1])


def test_what_does_not_fit_is_refused() -> None:
    own = packed(4)
    cache = numbers(np.float32, own.shape)

    def attend(table: list[int], tokens: int, n: int, heads: int = Q_HEADS, dtype: str = "f32") -> None:
        q = np.zeros((n, heads, DIM), np.float32)
        y, lse = np.zeros_like(q), np.zeros((n, heads), np.float32)
        _core.attend_paged(own.rows, cache, dtype, np.array(table), tokens, 1.0, 0.0, 1, q, y, lse)

    with pytest.raises(prefixd.InvalidArgument, match="need 2 blocks"):
        attend([1], BLOCK + 1, 1)
    with pytest.raises(prefixd.InvalidArgument, match="outside"):
        attend([-1], 1, 1)
    with pytest.raises(prefixd.InvalidArgument, match="3 queries of tokens 0..2"):
        attend([1], 2, 3)
    with pytest.raises(prefixd.InvalidArgument, match="do not share"):
        attend([1], 1, 1, heads=KV_HEADS + 1)
    with pytest.raises(prefixd.InvalidArgument, match="not f16"):
        attend([1], 1, 1, dtype="f16")
    half = packed(2)
    q, lse = np.zeros((1, Q_HEADS, DIM), np.float32), np.zeros((1, Q_HEADS), np.float32)
    with pytest.raises(prefixd.InvalidArgument, match="not bf16"):
        _core.attend_paged(
            half.rows, numbers(np.float16, half.shape), "bf16", np.array([1]), 1, 1.0, 0.0, 1, q, q.copy(), lse
        )
