"""Tests one layer of a batch of attached requests: own tokens in an engine's blocks and stored prefixes
under several policies, against attention over all of it."""

from __future__ import annotations

import numpy as np
import pytest

import prefixd
from prefixd import _core
from tests.core.test_paged import BLOCK, packed
from tests.prompts import DIM, FULL, KV_HEADS, LAYERS, Q_HEADS, Prompt

OWN = BLOCK + 5


def attend_all(k: np.ndarray, v: np.ndarray, q: np.ndarray) -> np.ndarray:
    """Attends q [Hq][d] over k and v [tokens][heads][d], in float64."""
    k, v = (rows.repeat(Q_HEADS // KV_HEADS, axis=1).astype(np.float64) for rows in (k, v))
    scores = 0.25 * np.einsum("hd,thd->ht", q.astype(np.float64), k)
    weights = np.exp(scores - scores.max(1, keepdims=True))
    y: np.ndarray = np.einsum("ht,thd->hd", weights / weights.sum(1, keepdims=True), v)
    return y


class Own:
    """Tokens behind a prefix, in two blocks of a cache."""

    def __init__(self, seed: int, cache: np.ndarray, table: list[int]) -> None:
        random = np.random.default_rng(seed)
        self.k, self.v = random.standard_normal((2, OWN, KV_HEADS, DIM), dtype=np.float32)
        self.table = np.array(table)
        packed(4).rows.scatter(cache, self.table, 0, OWN, self.k, self.v)

    def want(self, prompt: Prompt, layer: int, q: np.ndarray, tokens: int) -> np.ndarray:
        k = np.concatenate([prompt.k[layer], self.k[:tokens]])
        return attend_all(k, np.concatenate([prompt.v[layer], self.v[:tokens]]), q)


def test_one_call_attends_to_a_batch(store: prefixd.Store) -> None:
    prompts = [Prompt(seed) for seed in (1, 2)]
    for prompt in prompts:
        prompt.put(store)
    order = packed(4)
    cache = np.zeros(order.shape, np.float32)
    owns = [Own(10, cache, [3, 7]), Own(11, cache, [5, 1])]
    q = np.random.default_rng(5).standard_normal((6, Q_HEADS, DIM), dtype=np.float32)
    with (
        store.attach("m", prompts[0].tokens, policy=FULL) as first,
        store.attach("m", prompts[1].tokens, policy=prefixd.Policy(k=32, estimator="none")) as second,
    ):
        for layer in range(LAYERS):
            batch = _core.AttachedBatch()
            # Row 0 is another request's. Rows 1 and 2 are generated tokens, 3 to 5 a question.
            batch.add(first.core, 1, 1, OWN, owns[0].table, False)
            batch.add(second.core, 2, 1, OWN, owns[1].table, False)
            batch.add(second.core, 3, 3, OWN - 1, owns[1].table, True)
            y = np.full((6, Q_HEADS, DIM), 7, np.float32)
            failed = batch.attend(layer, order.rows, cache, "f32", 0.25, 0.0, (0, 0), 2, q, y)
            assert failed == []
            assert (y[0] == 7).all()
            np.testing.assert_allclose(y[1], owns[0].want(prompts[0], layer, q[1], OWN), atol=2e-5)
            for i in range(3):
                want = owns[1].want(prompts[1], layer, q[3 + i], OWN - 3 + i)
                np.testing.assert_allclose(y[3 + i], want, atol=2e-5)
            # By policy: the session's own step, merged with the own tokens.
            state, lse = second.step(layer, q[2])
            k, v = (rows[None].swapaxes(1, 2).copy() for rows in (owns[1].k, owns[1].v))
            got, got_lse = state[None].copy(), lse[None].copy()
            prefixd.merge_own_tokens(q[2][None], k, v, got, got_lse, scale=0.25)
            np.testing.assert_allclose(y[2], got[0], atol=2e-5)


def test_tokens_are_handed_over(store: prefixd.Store) -> None:
    """A session gets all own tokens but a window, several with the first step, then one with each."""
    prompt = Prompt(1)
    prompt.put(store)
    order = packed(4)
    cache = np.zeros(order.shape, np.float32)
    own = Own(10, cache, [3, 7])
    window = 3
    with store.attach("m", prompt.tokens, policy=FULL) as session:
        had = 0
        for tokens in range(BLOCK - 2, OWN + 1):
            q = np.random.default_rng(tokens).standard_normal((1, Q_HEADS, DIM), dtype=np.float32)
            handed = tokens - window
            # What was handed over before may be anybody's by now.
            taken = had // BLOCK * BLOCK
            if taken:
                own.table[0] = 10**9
            for layer in range(LAYERS):
                batch = _core.AttachedBatch()
                batch.add(session.core, 0, 1, tokens, own.table, False, had, handed)
                y = np.empty((1, Q_HEADS, DIM), np.float32)
                assert batch.attend(layer, order.rows, cache, "f32", 0.25, 0.0, (0, 0), 2, q, y) == []
                np.testing.assert_allclose(y[0], own.want(prompt, layer, q[0], tokens), atol=2e-5)
            had = handed
            assert session.own_tokens == handed
        batch = _core.AttachedBatch()
        for rows, exact, before, after in ((1, True, 0, 1), (2, False, 0, 1), (1, False, 1, 1), (1, False, 0, OWN)):
            with pytest.raises(prefixd.InvalidArgument, match="handed over"):
                batch.add(session.core, 0, rows, OWN, own.table, exact, before, after)


def test_one_that_fails_leaves_the_others(store: prefixd.Store) -> None:
    prompt = Prompt(1)
    prompt.put(store)
    order = packed(4)
    cache = np.zeros(order.shape, np.float32)
    own = Own(10, cache, [3, 7])
    q = np.random.default_rng(6).standard_normal((2, Q_HEADS, DIM), dtype=np.float32)
    y = np.empty_like(q)
    with store.attach("m", prompt.tokens, policy=FULL) as good:
        bad = store.attach("m", prompt.tokens, policy=FULL)
        batch = _core.AttachedBatch()
        batch.add(bad.core, 0, 1, OWN, own.table, False)
        batch.add(good.core, 1, 1, OWN, own.table, False)
        bad.detach()  # behind the batch's back
        failed = batch.attend(0, order.rows, cache, "f32", 0.25, 0.0, (0, 0), 1, q, y)
        assert [(i, code) for i, code, _ in failed] == [(0, "failed_precondition")]
        np.testing.assert_allclose(y[1], own.want(prompt, 0, q[1], OWN), atol=2e-5)
        np.testing.assert_allclose(y[0], attend_all(own.k, own.v, q[0]), atol=2e-5)
        # It stays left out, and is named once.
        assert batch.attend(1, order.rows, cache, "f32", 0.25, 0.0, (0, 0), 1, q, y) == []
        without = _core.AttachedBatch()
        without.add(None, 0, 1, OWN, own.table, True)
        assert without.attend(0, order.rows, cache, "f32", 0.25, 0.0, (0, 0), 1, q, y) == []
        np.testing.assert_allclose(y[0], attend_all(own.k, own.v, q[0]), atol=2e-5)
        with pytest.raises(prefixd.InvalidArgument, match="do not fit"):
            batch.attend(0, order.rows, cache, "f32", 0.25, 0.0, (0, 0), 1, q[:1], y[:1])


def test_policies_are_read_without_a_store() -> None:
    assert '"budget"' in _core.read_policy("{}")
    with pytest.raises(prefixd.InvalidArgument):
        _core.read_policy('{"mode": "everything"}')
