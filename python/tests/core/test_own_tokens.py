"""Attention to an engine's own tokens, merged into the state over a stored prefix, against float64."""

from __future__ import annotations

import numpy as np
import pytest

import prefixd
from prefixd.errors import InvalidArgument

BATCH, Q_HEADS, KV_HEADS, DIM, VALUES = 2, 6, 2, 24, 16


def truth(q, k, v, y, lse, scale, softcap, seen):
    """Joins the softmax over own tokens with the state (y, lse), in float64."""
    out, norm = np.zeros(y.shape), np.zeros(lse.shape)
    for b, h in np.ndindex(*lse.shape):
        kv = h // (q.shape[1] // k.shape[1])
        keep = slice(None) if seen is None else seen[b].astype(bool)
        scores = scale * k[b, kv].astype(np.float64)[keep] @ q[b, h].astype(np.float64)
        if softcap:
            scores = softcap * np.tanh(scores / softcap)
        logs = np.append(scores, float(lse[b, h]))
        values = np.vstack([v[b, kv].astype(np.float64)[keep], y[b, h]])
        if np.all(np.isneginf(logs)):
            norm[b, h] = -np.inf
            continue
        top = logs.max()
        weights = np.exp(logs - top)
        norm[b, h] = top + np.log(weights.sum())
        out[b, h] = weights @ values / weights.sum()
    return out, norm


def case(rng, tokens, dtype=np.float32):
    q = rng.standard_normal((BATCH, Q_HEADS, DIM), dtype=np.float32)
    k = rng.standard_normal((BATCH, KV_HEADS, tokens, DIM)).astype(dtype)
    v = rng.standard_normal((BATCH, KV_HEADS, tokens, VALUES)).astype(dtype)
    y = rng.standard_normal((BATCH, Q_HEADS, VALUES), dtype=np.float32)
    lse = rng.standard_normal((BATCH, Q_HEADS), dtype=np.float32)
    return q, k, v, y, lse


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@pytest.mark.parametrize("tokens", [0, 1, 7, 200])
def test_equals_one_softmax(tokens, dtype):
    rng = np.random.default_rng()
    q, k, v, y, lse = case(rng, tokens, dtype)
    lse[0, 0], y[0, 0] = -np.inf, 0  # nothing stored for this head
    for softcap in (0.0, 5.0):
        for seen in (None, rng.integers(0, 2, (BATCH, tokens), dtype=np.uint8)):
            want = truth(q, k, v, y, lse, 0.2, softcap, seen)
            got_y, got_lse = y.copy(), lse.copy()
            prefixd.merge_own_tokens(q, k, v, got_y, got_lse, scale=0.2, softcap=softcap, seen=seen)
            np.testing.assert_allclose(got_y, want[0], atol=2e-5)
            np.testing.assert_allclose(got_lse, want[1], atol=2e-5)


def test_rows_are_taken_as_they_lie():
    q, k, v, y, lse = case(np.random.default_rng(), 50)
    base = y.copy(), lse.copy()
    prefixd.merge_own_tokens(q, k, v, y, lse, scale=0.2)
    # Token-major memory, and a window of a larger cache.
    spread = np.ascontiguousarray(k.transpose(0, 2, 1, 3)).transpose(0, 2, 1, 3)
    larger = np.full((BATCH, KV_HEADS, 80, VALUES), np.nan, np.float32)
    larger[:, :, 10:60] = v
    prefixd.merge_own_tokens(q, spread, larger[:, :, 10:60], *base, scale=0.2)
    np.testing.assert_array_equal(base[0], y)
    np.testing.assert_array_equal(base[1], lse)


def test_what_does_not_fit_is_refused():
    q, k, v, y, lse = case(np.random.default_rng(), 5)
    for wrong in (
        (q[:, :5], k, v, y, lse),
        (q, k, v[:, :, :4], y, lse),
        (q, k, v.astype(np.float16), y, lse),
        (q, k[..., ::2], v, y, lse),
        (q[..., :10], k, v, y, lse),
        (q, k, v, y[:, :, :3].copy(), lse),
        (q, k.astype(np.float64), v.astype(np.float64), y, lse),
    ):
        with pytest.raises(InvalidArgument, match="own tokens|must be float32"):
            prefixd.merge_own_tokens(*wrong, scale=0.2)
    with pytest.raises(InvalidArgument, match="own tokens"):
        prefixd.merge_own_tokens(q, k, v, y, lse, scale=0.2, seen=np.ones((BATCH, 4), np.uint8))
    k[1, 1, 3, 2] = np.nan
    with pytest.raises(InvalidArgument):
        prefixd.merge_own_tokens(q, k, v, y, lse, scale=0.2)
