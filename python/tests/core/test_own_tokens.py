"""Tests sessions that take own tokens with NumPy alone: embedded and against the real daemon."""

from __future__ import annotations

import time

import numpy as np
import pytest

import prefixd
from tests.prompts import DIM, FULL, KV_HEADS, LAYERS, Q_HEADS, Prompt


def test_a_session_keeps_the_engines_tokens(store: prefixd.Store) -> None:
    prompt = Prompt()
    prompt.put(store)
    rng = np.random.default_rng(7)
    own_k = rng.standard_normal((6, KV_HEADS, DIM), np.float32)
    own_v = rng.standard_normal((6, KV_HEADS, DIM), np.float32)
    scale = DIM**-0.5

    def want(session: prefixd.Session, layer: int, q: np.ndarray, n: int) -> tuple[np.ndarray, np.ndarray]:
        """Merges a plain step with the engine's own attention, as it is done without own tokens."""
        y, lse = session.step(layer, q)
        keys = np.ascontiguousarray(own_k[:n].transpose(1, 0, 2))[None]
        values = np.ascontiguousarray(own_v[:n].transpose(1, 0, 2))[None]
        y, lse = y[None], lse[None]
        prefixd.merge_own_tokens(q[None], keys, values, y, lse, scale=scale)
        return y[0], lse[0]

    with store.attach("m", prompt.tokens, policy=FULL) as session:
        assert session.layer_shape(0).key_dim == DIM
        geometry = session.info["geometry"]
        scale = geometry["layers"][0]["scale"]
        for layer in range(LAYERS):
            session.append(layer, own_k[:3], own_v[:3])
            y, lse = session.attend_exact(layer, prompt.q[:3])
            for i in range(3):
                want_y, want_lse = want(session, layer, prompt.q[i], i + 1)
                np.testing.assert_allclose(y[i], want_y, atol=1e-5)
                np.testing.assert_allclose(lse[i], want_lse, atol=1e-5)
            y, lse = session.step_append(layer, prompt.q[0], own_k[3], own_v[3])
            want_y, want_lse = want(session, layer, prompt.q[0], 4)
            np.testing.assert_allclose(y, want_y, atol=1e-5)
            np.testing.assert_allclose(lse, want_lse, atol=1e-5)
        assert session.own_tokens == 4
        with session.fork() as fork:
            session.truncate(2)
            assert (session.own_tokens, fork.own_tokens) == (2, 4)
            y, _ = fork.step_append(0, prompt.q[1], own_k[4], own_v[4])
            np.testing.assert_allclose(y, want(fork, 0, prompt.q[1], 5)[0], atol=1e-5)
        half = Q_HEADS // KV_HEADS
        y, _ = session.step_append(1, prompt.q[1][:half], own_k[2, :1], own_v[2, :1], heads=(0, 1))
        np.testing.assert_allclose(y, want(session, 1, prompt.q[1], 3)[0][:half], atol=1e-5)
        with pytest.raises(prefixd.InvalidArgument, match="own tokens"):
            session.truncate(100)
        with pytest.raises(prefixd.InvalidArgument):
            session.step_append(0, prompt.q[0], own_k[0, :1], own_v[0, :1])
        with pytest.raises(prefixd.InvalidArgument, match="same n"):
            session.append(0, own_k[0], own_v[0])
        bad = own_v.copy()
        bad[1, 0, 0] = np.nan
        with pytest.raises(prefixd.InvalidArgument, match="own token 1"):
            session.append(0, own_k[:2], bad[:2])
        session.truncate(0)
        assert session.own_tokens == 0


def test_own_tokens_beyond_a_bound_move_to_the_store(store: prefixd.Store) -> None:
    prompt = Prompt()
    prompt.put(store)
    rng = np.random.default_rng(9)
    rows = rng.standard_normal((2, 900, KV_HEADS, DIM), np.float32)
    with pytest.raises(prefixd.InvalidArgument, match="own_memory_tokens"):
        store.attach("m", prompt.tokens, own_memory_tokens=255)
    with (
        store.attach("m", prompt.tokens, policy=FULL) as whole,
        store.attach("m", prompt.tokens, policy=FULL, own_memory_tokens=256) as session,
    ):
        assert session.info["own_memory_tokens"] == 256
        for layer in range(LAYERS):
            for s in (whole, session):
                s.append(layer, rows[0], rows[1])
        deadline = time.monotonic() + 30
        while session.own_moved < 900 - 256 and time.monotonic() < deadline:
            time.sleep(0.005)
        assert session.own_moved >= 900 - 256
        assert session.own_tokens == 900
        for layer in range(LAYERS):
            want = whole.step_append(layer, prompt.q[0], rows[0, 5], rows[1, 5])
            got = session.step_append(layer, prompt.q[0], rows[0, 5], rows[1, 5])
            for a, b in zip(got, want, strict=True):
                np.testing.assert_allclose(a, b, atol=1e-5)
        with pytest.raises(prefixd.FailedPrecondition, match="own_memory_tokens"):
            session.step(0, prompt.q[0])


def test_a_policy_keeps_some_of_them_in_memory(store: prefixd.Store) -> None:
    prompt = Prompt()
    prompt.put(store)
    rng = np.random.default_rng(10)
    rows = rng.standard_normal((2, 900, KV_HEADS, DIM), np.float32)
    with pytest.raises(prefixd.InvalidArgument, match="retain.by.*there is no retention policy 'lru'"):
        store.attach("m", prompt.tokens, policy=prefixd.Policy(retain={"tokens": 8, "by": "lru"}))
    # Whatever is not retained is retrieved.
    policy = prefixd.Policy(k=1 << 20, estimator="none", retain={"tokens": 30, "by": "local"})
    with (
        store.attach("m", prompt.tokens, policy=FULL) as whole,
        store.attach("m", prompt.tokens, policy=policy, own_memory_tokens=256) as session,
    ):
        assert session.policy["retain"] == {"tokens": 30, "by": "local"}
        for layer in range(LAYERS):
            for s in (whole, session):
                s.append(layer, rows[0], rows[1])
        deadline = time.monotonic() + 30
        while session.own_retained < 30 and time.monotonic() < deadline:
            time.sleep(0.005)
        assert session.own_retained == 30
        for layer in range(LAYERS):
            want = whole.step_append(layer, prompt.q[0], rows[0, 5], rows[1, 5])
            got = session.step_append(layer, prompt.q[0], rows[0, 5], rows[1, 5])
            for a, b in zip(got, want, strict=True):
                np.testing.assert_allclose(a, b, atol=1e-5)
        total = session.report()["total"]
        assert total["retained_tokens"] == 30 * KV_HEADS * LAYERS


def test_a_session_persists_them_and_goes_on(store: prefixd.Store) -> None:
    prompt = Prompt()
    prompt.put(store)
    rng = np.random.default_rng(8)
    own_k = rng.standard_normal((40, KV_HEADS, DIM), np.float32)
    own_v = rng.standard_normal((40, KV_HEADS, DIM), np.float32)
    ids = [90000 + i for i in range(40)]
    n = len(prompt.tokens)
    session = store.attach("m", prompt.tokens, policy=FULL)
    with store.attach("m", prompt.tokens, policy=FULL) as whole:
        for layer in range(LAYERS):
            session.append(layer, own_k[:30], own_v[:30])
            whole.append(layer, own_k[:30], own_v[:30])
        with pytest.raises(prefixd.FailedPrecondition, match="Persist"):
            session.fork_persisted()
        with pytest.raises(prefixd.InvalidArgument, match="own tokens"):
            session.persist(ids)
        stored = session.persist(ids[:30], label="answer", wait=1.0)
        assert (stored.n_tokens, stored.stored_tokens, stored.exact_tokens) == (n + 30, 30, n + 30)
        store.wait_ready(stored.prefix)
        with session:
            session = session.fork_persisted(window=4)
        assert (session.n_tokens, session.own_tokens) == (n + 26, 4)
        for layer in range(LAYERS):
            y, lse = session.step_append(layer, prompt.q[0], own_k[30], own_v[30])
            want_y, want_lse = whole.step_append(layer, prompt.q[0], own_k[30], own_v[30])
            np.testing.assert_allclose(y, want_y, atol=1e-5)
            np.testing.assert_allclose(lse, want_lse, atol=1e-5)
        stored = session.persist(ids[26:31], encoding="int8")
        assert stored.stored_tokens == 1
        with session:
            session = session.fork_persisted()
        assert (session.n_tokens, session.own_tokens) == (n + 31, 0)
        # A step that reads less marks what follows it.
        session.set_policy(prefixd.Policy(mode="anchors"))
        for layer in range(LAYERS):
            session.step_append(layer, prompt.q[1], own_k[31], own_v[31])
        stored = session.persist([90031])
        assert (stored.stored_tokens, stored.exact_tokens) == (1, n + 31)
        tokens = [*prompt.tokens, *ids[:31], 90031]
        assert store.match("m", tokens).n_tokens == n + 31
        assert store.match("m", tokens, lineage=stored.lineage).n_tokens == n + 32
        session.detach()


def test_batches_append(store: prefixd.Store) -> None:
    prompt = Prompt()
    prompt.put(store)
    rng = np.random.default_rng(9)
    k = rng.standard_normal((2, 3, KV_HEADS, DIM), np.float32)  # of two tokens of three sessions
    v = rng.standard_normal((2, 3, KV_HEADS, DIM), np.float32)
    batch = [store.attach("m", prompt.tokens, policy=FULL) for _ in range(3)]
    alone = store.attach("m", prompt.tokens, policy=FULL)
    for token in range(2):
        y, lse = prefixd.step_batch(batch, 0, prompt.q[:3], k=k[token], v=v[token])
        want_y, want_lse = alone.step_append(0, prompt.q[1], k[token, 1], v[token, 1])
        np.testing.assert_allclose(y[1], want_y, atol=1e-6)
        np.testing.assert_allclose(lse[1], want_lse, atol=1e-6)
    assert [session.own_tokens for session in batch] == [2, 2, 2]
    with pytest.raises(prefixd.InvalidArgument, match="both k and v"):
        prefixd.step_batch(batch, 0, prompt.q[:3], k=k[0])
    with pytest.raises(prefixd.InvalidArgument):
        prefixd.step_batch(batch, 0, prompt.q[:3], k=k[0, :2], v=v[0, :2])
    assert [session.own_tokens for session in batch] == [2, 2, 2]
    for session in [*batch, alone]:
        session.detach()
