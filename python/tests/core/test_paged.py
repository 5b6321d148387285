"""Tests that rows move between stores and the paged caches of engines, for every order of elements and
every dtype, against NumPy."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest

import prefixd
from prefixd import _core
from tests.prompts import DIM, FULL, KV_HEADS, LAYERS, TOKENS, Prompt

BLOCK, BLOCKS = 32, 9


@dataclass
class Order:
    """A cache of BLOCKS blocks, and NumPy's own way to read its rows."""

    rows: prefixd.PagedRows
    shape: tuple[int, ...]
    read: Callable[[np.ndarray, int], tuple[np.ndarray, np.ndarray]]  # block -> [heads][tokens][dim] twice


def grid(token: int, dim: int, first: int = 0) -> np.ndarray:
    at = first + np.arange(BLOCK)[:, None] * token + np.arange(DIM)[None, :] * dim
    return at.astype(np.uint64)


def packed(size: int) -> Order:
    """Keys by column, then values by row, as kernels for vectors have them."""

    def read(cache: np.ndarray, block: int) -> tuple[np.ndarray, np.ndarray]:
        both = cache[block].reshape(KV_HEADS, 2, BLOCK * DIM)
        keys = both[:, 0].reshape(KV_HEADS, DIM, BLOCK).transpose(0, 2, 1)
        return keys, both[:, 1].reshape(KV_HEADS, BLOCK, DIM)

    head = 2 * BLOCK * DIM
    rows = prefixd.PagedRows(grid(1, BLOCK), grid(DIM, 1, BLOCK * DIM), KV_HEADS * head, head, KV_HEADS, size)
    return Order(rows, (BLOCKS, KV_HEADS, BLOCK, 2 * DIM), read)


def tiled(size: int) -> Order:
    """Pairs of dimensions beside each other, 16 tokens a tile, as kernels for tiles have them."""

    def places() -> np.ndarray:
        token, d = np.meshgrid(np.arange(BLOCK), np.arange(DIM), indexing="ij")
        tile = token // 16 * (16 * DIM) + d // 2 * 32 + token % 16 * 2 + d % 2
        return tile.astype(np.uint64)

    def read(cache: np.ndarray, block: int) -> tuple[np.ndarray, np.ndarray]:
        tiles = cache[block].reshape(KV_HEADS, 2, BLOCK // 16, DIM // 2, 16, 2)
        both = tiles.transpose(1, 0, 2, 4, 3, 5).reshape(2, KV_HEADS, BLOCK, DIM)
        return both[0], both[1]

    head = 2 * BLOCK * DIM
    rows = prefixd.PagedRows(places(), places() + np.uint64(BLOCK * DIM), KV_HEADS * head, head, KV_HEADS, size)
    return Order(rows, (BLOCKS, KV_HEADS, BLOCK, 2 * DIM), read)


def nhd(size: int) -> Order:
    """[2][blocks][tokens][heads][dim]."""

    def read(cache: np.ndarray, block: int) -> tuple[np.ndarray, np.ndarray]:
        return cache[0, block].transpose(1, 0, 2), cache[1, block].transpose(1, 0, 2)

    block = BLOCK * KV_HEADS * DIM
    rows = prefixd.PagedRows(
        grid(KV_HEADS * DIM, 1), grid(KV_HEADS * DIM, 1, BLOCKS * block), block, DIM, KV_HEADS, size
    )
    return Order(rows, (2, BLOCKS, BLOCK, KV_HEADS, DIM), read)


def hnd(size: int) -> Order:
    """[blocks][2][heads][tokens][dim]."""

    def read(cache: np.ndarray, block: int) -> tuple[np.ndarray, np.ndarray]:
        return cache[block, 0], cache[block, 1]

    half = KV_HEADS * BLOCK * DIM
    rows = prefixd.PagedRows(grid(DIM, 1), grid(DIM, 1, half), 2 * half, BLOCK * DIM, KV_HEADS, size)
    return Order(rows, (BLOCKS, 2, KV_HEADS, BLOCK, DIM), read)


def numbers(dtype: type, shape: tuple[int, ...], seed: int = 0) -> np.ndarray:
    random = np.random.default_rng(seed)
    if dtype is np.uint16:  # the bits of bfloat16
        return (random.standard_normal(shape).astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    return random.standard_normal(shape).astype(dtype)


@pytest.mark.parametrize("dtype", [np.float32, np.float16, np.uint16])
@pytest.mark.parametrize("order", [packed, tiled, nhd, hnd])
def test_rows_leave_and_enter_blocks(order: Callable[[int], Order], dtype: type) -> None:
    own = order(np.dtype(dtype).itemsize)
    cache = numbers(dtype, own.shape)
    table = np.array([5, 2, 8, 1])  # in no order, block 0 is nobody's
    for first, n in ((0, 1), (0, BLOCK), (31, 2), (33, 31), (7, 96), (0, 4 * BLOCK), (127, 1), (5, 0)):
        want_k, want_v = np.empty((2, n, KV_HEADS, DIM), dtype)
        for i in range(n):
            k, v = own.read(cache, table[(first + i) // BLOCK])
            want_k[i], want_v[i] = k[:, (first + i) % BLOCK], v[:, (first + i) % BLOCK]
        got_k, got_v = np.empty((2, n, KV_HEADS, DIM), dtype)
        own.rows.gather(cache, table, first, n, got_k, got_v)
        np.testing.assert_array_equal(got_k, want_k)
        np.testing.assert_array_equal(got_v, want_v)

        # What is scattered comes back, and nothing beside it changes.
        changed, k, v = cache.copy(), numbers(dtype, want_k.shape, 1), numbers(dtype, want_v.shape, 2)
        own.rows.scatter(changed, table, first, n, k, v)
        own.rows.gather(changed, table, first, n, got_k, got_v)
        np.testing.assert_array_equal(got_k, k)
        np.testing.assert_array_equal(got_v, v)
        own.rows.scatter(changed, table, first, n, want_k, want_v)
        np.testing.assert_array_equal(changed, cache)


@pytest.mark.parametrize("order", [packed, nhd])
def test_a_prompt_goes_from_blocks_through_a_store_into_blocks(
    order: Callable[[int], Order], store: prefixd.Store
) -> None:
    prompt = Prompt()
    own = order(prompt.k[0].dtype.itemsize)
    n = min(TOKENS, (BLOCKS - 1) * BLOCK)
    tokens, table = prompt.tokens[:n], np.arange(BLOCKS - 1, 0, -1)
    caches = [np.zeros(own.shape, prompt.k[0].dtype) for _ in range(LAYERS)]
    with store.begin_put("m", tokens) as put:
        for layer, cache in enumerate(caches):
            own.rows.scatter(cache, table, 0, n, prompt.k[layer][:n].copy(), prompt.v[layer][:n].copy())
            put.write_blocks(layer, 0, 37, own.rows, cache, table)
            put.write_blocks(layer, 37, n - 37, own.rows, cache, table)
    with store.attach("m", tokens, policy=FULL) as session:
        assert session.n_tokens == n
        for run in session.restore():
            np.testing.assert_array_equal(run.k, prompt.k[run.layer][run.begin : run.end])
            np.testing.assert_array_equal(run.v, prompt.v[run.layer][run.begin : run.end])
        # From a token in the middle of a block on, in small runs, into other blocks.
        other = np.roll(table, 3)
        restore = session.restore(40, n, buffer_bytes=1 << 12)
        for layer in range(LAYERS):
            cache = np.zeros(own.shape, prompt.k[0].dtype)
            restore.fill_layer(layer, own.rows, cache, other)
            k, v = np.empty((2, n, KV_HEADS, DIM), cache.dtype)
            own.rows.gather(cache, other, 0, n, k, v)
            assert not k[:40].any() and not v[:40].any()
            np.testing.assert_array_equal(k[40:], prompt.k[layer][40:n])
            np.testing.assert_array_equal(v[40:], prompt.v[layer][40:n])
        with pytest.raises(prefixd.InvalidArgument, match="in order"):
            restore.fill_layer(0, own.rows, caches[0], other)


def test_blocks_are_not_filled_from_rows_of_another_order(store: prefixd.Store) -> None:
    """A head-major run has as many bytes as a token-major one: only its order tells."""
    prompt = Prompt()
    prompt.put(store)
    own = packed(prompt.k[0].dtype.itemsize)
    n = (BLOCKS - 1) * BLOCK
    cache = np.zeros(own.shape, prompt.k[0].dtype)
    with store.attach("m", prompt.tokens, policy=FULL) as session:
        with session.restore(0, n, head_major=True) as restore:
            with pytest.raises(prefixd.InvalidArgument, match="head-major"):
                restore.fill_layer(0, own.rows, cache, np.arange(1, BLOCKS))
            assert not cache.any()
            run = next(iter(restore))  # iterating goes on
            np.testing.assert_array_equal(run.k, prompt.k[0][run.begin : run.end].transpose(1, 0, 2))


def test_nothing_is_written_into_a_copy(store: prefixd.Store) -> None:
    """An array that is written to must be the caller's own, not one that was made contiguous for the call."""
    own = packed(4)
    rows = np.ones((BLOCK, KV_HEADS, DIM), np.float32)
    gaps = np.zeros((*own.shape, 2), np.float32)[..., 0]
    assert gaps.shape == own.shape and not gaps.flags.c_contiguous
    with pytest.raises(TypeError):
        own.rows.scatter(gaps, np.array([1]), 0, BLOCK, rows, rows)
    k = np.zeros((2 * BLOCK, KV_HEADS, DIM), np.float32)[::2]
    with pytest.raises(TypeError):
        own.rows.gather(np.ones(own.shape, np.float32), np.array([1]), 0, BLOCK, k, rows.copy())
    q, y, lse = (
        np.zeros((1, KV_HEADS, DIM), np.float32),
        np.zeros((1, KV_HEADS, 2 * DIM), np.float32),
        np.zeros((1, KV_HEADS), np.float32),
    )
    with pytest.raises(TypeError):
        _core.attend_paged(own.rows, gaps.copy(), "f32", np.array([1]), 1, 1.0, 0.0, 1, q, y[..., ::2], lse)
    prompt = Prompt()
    prompt.put(store)
    half = packed(prompt.k[0].dtype.itemsize)
    cache = np.zeros((*half.shape, 2), prompt.k[0].dtype)[..., 0]
    with store.attach("m", prompt.tokens, policy=FULL) as session:
        with pytest.raises(TypeError):
            session.restore(0, BLOCK).fill_layer(0, half.rows, cache, np.array([1]))


def test_what_does_not_fit_is_refused(store: prefixd.Store) -> None:
    own = packed(4)
    cache, rows = np.zeros(own.shape, np.float32), np.zeros((BLOCK, KV_HEADS, DIM), np.float32)
    for table, what in (([0], "need 2 blocks"), ([0, BLOCKS], "outside"), ([0, -1], "outside")):
        with pytest.raises(prefixd.InvalidArgument, match=what):
            own.rows.gather(cache, np.array(table), BLOCK, BLOCK, rows, rows.copy())
        with pytest.raises(prefixd.InvalidArgument, match=what):
            own.rows.scatter(cache, np.array(table), BLOCK, BLOCK, rows, rows)
    with pytest.raises(prefixd.InvalidArgument, match=r"k must be \[n\]"):
        own.rows.gather(cache, np.array([0]), 0, BLOCK, rows[1:].copy(), rows)
    with pytest.raises(prefixd.InvalidArgument, match="one place twice"):
        prefixd.PagedRows(grid(1, 1), grid(DIM, 1), BLOCK * DIM, 1, 1, 4)
    with pytest.raises(prefixd.InvalidArgument, match="2 or 4 bytes"):
        prefixd.PagedRows(grid(DIM, 1), grid(DIM, 1), BLOCK * DIM, 1, 1, 8)
    prompt = Prompt()
    put = store.begin_put("m", prompt.tokens)
    with pytest.raises(prefixd.InvalidArgument, match="outside"):
        put.write_blocks(0, 0, BLOCK, own.rows, cache.astype(prompt.k[0].dtype), np.array([BLOCKS])).result()
    put.abort()
