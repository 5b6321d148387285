"""Tests steps with NumPy alone: embedded and against the real daemon."""

from __future__ import annotations

import dataclasses
import threading
from pathlib import Path

import numpy as np
import pytest

import prefixd
from tests.prompts import DIM, FULL, KV_HEADS, LAYERS, Q_HEADS, SMALL, TOKENS, Prompt, spec


def test_full_steps_are_attention_over_the_prompt(store: prefixd.Store) -> None:
    prompt = Prompt()
    seen: list[tuple[int, int]] = []
    result = prompt.put(
        store, label="text", progress=lambda done, total: seen.append((done, total))
    )
    assert result.stored_tokens == TOKENS and len(result.prefix) == 32
    assert seen[-1] == (LAYERS * TOKENS, LAYERS * TOKENS)
    with store.attach("m", prompt.tokens, policy=FULL) as session:
        assert session.n_tokens == TOKENS
        for layer in range(LAYERS):
            y, lse = session.step(layer, prompt.q[0])
            want_y, want_lse = prompt.reference(layer, prompt.q[0])
            np.testing.assert_allclose(y, want_y, atol=1e-4)
            np.testing.assert_allclose(lse, want_lse, atol=1e-4)
            block_y, block_lse = session.attend_exact(layer, prompt.q)
            np.testing.assert_allclose(block_y[0], y, atol=1e-5)
            assert block_lse.shape == (3, Q_HEADS)
        batch_y, _ = prefixd.step_batch([session, session], 0, prompt.q[:2])
        np.testing.assert_allclose(batch_y[1], prompt.reference(0, prompt.q[1])[0], atol=1e-4)
    report = session.report()  # the last one, after detach
    assert report["total"]["steps"] == (LAYERS + 2) * KV_HEADS
    with pytest.raises(prefixd.FailedPrecondition, match="attach again"):
        session.step(0, prompt.q[0])


@pytest.mark.parametrize("queries", [True, False])
def test_the_choice_leaves_the_last_token_to_selection(tmp_path: Path, queries: bool) -> None:
    """Returns a budget of one token beyond the anchors, which a summary shared by 1000 steps would
    use up."""
    prompt = Prompt()
    with prefixd.open(tmp_path / "store", **SMALL) as store:
        store.register_model(spec())
        with store.begin_put("m", prompt.tokens) as put:
            for layer in range(LAYERS):
                put.write(layer, 0, prompt.k[layer], prompt.v[layer])
                if queries:
                    put.write_queries(layer, TOKENS - 3, prompt.q)
        store.wait_ready(put.result().prefix)

        def completes(budget: float) -> bool:
            policies = [
                prefixd.Policy(budget=budget, l_gen=1000, estimator=estimator)
                for estimator in ("auto", "none")
            ]
            states = []
            for policy in policies:
                with store.attach("m", prompt.tokens, policy=policy) as session:
                    states.append(session.step(0, prompt.q[0])[1])
            return bool((states[0] > states[1] + 1e-6).any())

        assert not completes(21 / TOKENS)
        assert completes(23 / TOKENS)

        # The budget also pays for the neighbours that a shared set may add; the best third of one
        # token is none.
        sharing = {"block": 16, "similarity": 0.8, "dilation": 1}
        for tokens, k in ((1, 1), (2, 2), (3, 2), (5, 3), (12, 8), (80, 48)):
            policy = prefixd.Policy(budget=(20 + tokens) / TOKENS, estimator="none", sharing=sharing)
            with store.attach("m", prompt.tokens, policy=policy) as session:
                session.step(0, prompt.q[0])
                total = session.report()["total"]
            assert total["retrieved_tokens"] == k * KV_HEADS, tokens


def test_queries_may_be_of_tokens_that_do_not_follow_one_another(tmp_path: Path) -> None:
    prompt = Prompt(tokens=1400)
    choices = []
    for listed in (False, True):
        with prefixd.open(tmp_path / str(listed), **SMALL) as store:
            store.register_model(spec())
            with store.begin_put("m", prompt.tokens) as put:
                for layer in range(LAYERS):
                    put.write(layer, 0, prompt.k[layer], prompt.v[layer])
                    if listed:
                        put.write_queries(layer, [1200, 1390, 1391], prompt.q)
                    else:
                        put.write_queries(layer, 1390, prompt.q[1:])
                        put.write_queries(layer, 1200, prompt.q[:1])
            store.wait_ready(put.result().prefix)
            choices.append(store.prefix(put.result().prefix)["choices"])
    assert choices[0]
    assert choices[0] == choices[1]
    with prefixd.open(tmp_path / "True", **SMALL) as store:
        put = store.begin_put("m", prompt.tokens[:100])
        with pytest.raises(prefixd.InvalidArgument, match="queries of 3 tokens, and 2 tokens"):
            put.write_queries(0, [80, 81], prompt.q)
        put.abort()


def test_a_budget_is_spread_or_divided_evenly(store: prefixd.Store) -> None:
    prompt = Prompt(tokens=1400)
    prompt.k[:, :, 0] *= 3  # one head of two attends to few tokens
    prompt.put(store)
    read: dict[bool, list[float]] = {}
    for spread in (False, True):
        with store.attach("m", prompt.tokens, policy=prefixd.Policy(budget=0.05, spread=spread)) as session:
            for layer in range(LAYERS):
                session.step(layer, prompt.q[0])
            heads = session.report()["per_head"]
        read[spread] = [h["retrieved_tokens"] + h["anchor_tokens"] + h["summary_tokens"] for h in heads]
    assert len(read[True]) == LAYERS * KV_HEADS
    assert read[True] != read[False]
    assert sum(read[True]) <= len(read[True]) * 0.05 * 1400
    assert max(read[False]) <= 0.05 * 1400


def test_estimators_may_be_fixed_for_heads(store: prefixd.Store) -> None:
    prompt = Prompt(tokens=1400)
    prompt.put(store)
    fixed = [{"layer": 0, "kv_head": 1, "estimator": "none"}]
    policy = prefixd.Policy(budget=0.05, estimator="moment", fixed=fixed, spread=False)
    with store.attach("m", prompt.tokens, policy=policy) as session:
        session.step(0, prompt.q[0])
        summaries = [head["summary_tokens"] for head in session.report()["per_head"][:KV_HEADS]]
    assert summaries[0] > 0 and summaries[1] == 0
    beyond = [{"layer": LAYERS, "kv_head": 0, "estimator": "none"}]
    with pytest.raises(prefixd.InvalidArgument, match="fixed"):
        store.attach("m", prompt.tokens, policy=prefixd.Policy(fixed=beyond))


def test_prefetched_rows_change_no_answer(store: prefixd.Store) -> None:
    prompt = Prompt()
    prompt.put(store)
    states = []
    for prefetch in (None, {"forward": 4}):
        policy = prefixd.Policy(k=5, estimator="none", prefetch=prefetch)
        with store.attach("m", prompt.tokens, policy=policy) as session:
            states.append([session.step(layer, prompt.q[0]) for layer in range(LAYERS)])
        total = session.report()["total"]
        assert total["prefetch_used_bytes"] <= total["prefetched_bytes"]
    for (y, lse), (ahead_y, ahead_lse) in zip(*states, strict=True):
        np.testing.assert_array_equal(y, ahead_y)
        np.testing.assert_array_equal(lse, ahead_lse)
    with pytest.raises(prefixd.InvalidArgument, match="prefetch.forward"):
        store.attach("m", prompt.tokens, policy=prefixd.Policy(prefetch={"forward": 65}))


def test_layers_may_differ(store: prefixd.Store) -> None:
    rng = np.random.default_rng(5)
    layers = [
        prefixd.Layer(0.25),
        prefixd.Layer(0.5, n_q_heads=3, n_kv_heads=3, key_dim=8, value_dim=12),
        prefixd.Layer(0.25, stored=False),
    ]
    model = prefixd.ModelSpec("layers", layers, Q_HEADS, KV_HEADS, DIM, "f32")
    store.register_model(model)
    assert store.model("layers") == dataclasses.replace(model, layers=tuple(layers), value_dim=DIM)
    tokens = rng.integers(0, 50000, TOKENS, dtype=np.uint32)
    rows = {}
    with store.begin_put("layers", tokens) as put:
        for layer in (0, 1):
            own = model.shape(layer)
            shape = (TOKENS, own.n_kv_heads)
            k = rng.standard_normal((*shape, own.key_dim), dtype=np.float32)
            v = rng.standard_normal((*shape, own.value_dim), dtype=np.float32)
            put.write(layer, 0, k, v)
            rows[layer] = k, v
    with store.attach("layers", tokens, policy=FULL) as session:
        assert session.layer_shape(1) == prefixd.LayerShape(3, 3, 8, 12)
        assert session.layer_shape(2) == prefixd.LayerShape(0, 0, 0, 0)
        q = rng.standard_normal((2, 3, 8), dtype=np.float32)
        k, v = (x.astype(np.float64) for x in rows[1])
        scores = 0.5 * np.einsum("hd,thd->ht", q[0].astype(np.float64), k)
        weights = np.exp(scores)
        y, lse = session.step(1, q[0])
        assert y.shape == (3, 12)
        np.testing.assert_allclose(lse, np.log(weights.sum(1)), atol=1e-4)
        want = np.einsum("ht,thd->hd", weights / weights.sum(1, keepdims=True), v)
        np.testing.assert_allclose(y, want, atol=1e-4)
        block, _ = session.attend_exact(1, q)
        np.testing.assert_allclose(block[0], y, atol=1e-5)
        batch, _ = prefixd.step_batch([session, session], 1, q)
        np.testing.assert_allclose(batch[0], y, atol=1e-5)
        part, _ = session.step(1, q[0][1:], heads=(1, 0))
        np.testing.assert_array_equal(part, y[1:])
        read = session.read_range(1, 2, 5, 9)
        np.testing.assert_array_equal(read.keys, rows[1][0][5:9, 2])
        np.testing.assert_array_equal(read.values, rows[1][1][5:9, 2])
        seen = []
        restored = {}
        for run in session.restore(progress=lambda done, total, _: seen.append((done, total))):
            restored.setdefault(run.layer, []).append(run)
        assert sorted(restored) == [0, 1] and seen[-1][0] == seen[-1][1]
        for layer, runs in restored.items():
            for i, name in enumerate(("k", "v")):
                whole = np.concatenate([getattr(run, name) for run in runs])
                np.testing.assert_array_equal(whole, rows[layer][i])
        with pytest.raises(prefixd.InvalidArgument, match="layer 2 has no rows"):
            session.step(2, q[0][:0])
        with pytest.raises(prefixd.InvalidArgument, match="layer 7"):
            session.step(7, q[0])


def test_ranks_put_and_step_their_own_heads(store: prefixd.Store) -> None:
    prompt = Prompt()
    store.register_model(spec())
    group = Q_HEADS // KV_HEADS
    puts = [
        store.begin_put("m", prompt.tokens, heads=(rank, 1), wait=60) for rank in range(KV_HEADS)
    ]
    for rank, put in enumerate(puts):
        for layer in range(LAYERS):
            own = slice(rank, rank + 1)
            put.write(
                layer,
                0,
                np.ascontiguousarray(prompt.k[layer][:, own]),
                np.ascontiguousarray(prompt.v[layer][:, own]),
            )
    results = [future.result(60) for future in [put.commit() for put in puts]]
    assert len({result.prefix for result in results}) == 1
    assert [result.stored_tokens for result in results] == [TOKENS] * KV_HEADS
    with store.attach("m", prompt.tokens, policy=FULL) as session:
        y, lse = session.step(0, prompt.q[0])
        want_y, _ = prompt.reference(0, prompt.q[0])
        np.testing.assert_allclose(y, want_y, atol=1e-4)
        block_y, _ = session.attend_exact(0, prompt.q)
        for rank in range(KV_HEADS):
            own = slice(rank * group, (rank + 1) * group)
            part_y, part_lse = session.step(0, prompt.q[0][own], heads=(rank, 1))
            np.testing.assert_array_equal(part_y, y[own])
            np.testing.assert_array_equal(part_lse, lse[own])
            queries = np.ascontiguousarray(prompt.q[:, own])
            exact_y, _ = session.attend_exact(0, queries, heads=(rank, 1))
            np.testing.assert_array_equal(exact_y, block_y[:, own])
            batch_y, _ = prefixd.step_batch([session] * 3, 0, queries, heads=(rank, 1))
            np.testing.assert_array_equal(batch_y[0], y[own])
        with pytest.raises(prefixd.InvalidArgument, match=r"not all among the 2 of layer 0"):
            session.step(0, prompt.q[0], heads=(KV_HEADS, 0))
        with pytest.raises(prefixd.InvalidArgument, match="q has"):
            session.step(0, prompt.q[0], heads=(0, 1))


def test_merging_with_own_tokens_is_one_softmax(store: prefixd.Store) -> None:
    whole, stored = Prompt(), Prompt()
    stored.tokens = whole.tokens[:200]
    stored.k, stored.v = whole.k[:, :200], whole.v[:, :200]
    stored.put(store)
    with store.attach("m", whole.tokens, policy=FULL) as session:
        assert session.n_tokens == 200
        y, lse = session.step(0, whole.q[0])
    own = Prompt()
    own.k, own.v = whole.k[:, 200:], whole.v[:, 200:]
    own_y, own_lse = (a.astype(np.float32) for a in own.reference(0, whole.q[0]))
    prefixd.merge_states(y, lse, own_y, own_lse)
    want_y, want_lse = whole.reference(0, whole.q[0])
    np.testing.assert_allclose(y, want_y, atol=1e-4)
    np.testing.assert_allclose(lse, want_lse, atol=1e-4)


def test_two_threads_step_one_session(store: prefixd.Store) -> None:
    prompt = Prompt()
    prompt.put(store)
    with store.attach("m", prompt.tokens, policy=FULL) as session:
        want = [prompt.reference(layer, prompt.q[0])[0] for layer in range(LAYERS)]
        failures: list[str] = []

        def work(layer: int) -> None:
            for _ in range(20):
                if not np.allclose(session.step(layer, prompt.q[0])[0], want[layer], atol=1e-4):
                    failures.append("wrong")

        threads = [threading.Thread(target=work, args=(i % LAYERS,)) for i in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not failures
