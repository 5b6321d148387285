"""Tests the package's core with NumPy alone: embedded and against the real daemon."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from pathlib import Path

import numpy as np
import pytest

import prefixd
from tests.prompts import (
    DIM,
    FULL,
    KV_HEADS,
    LAYERS,
    Q_HEADS,
    SMALL,
    TOKENS,
    Prompt,
    spec,
)


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


def test_matches_that_nobody_waits_for(store: prefixd.Store) -> None:
    prompt = Prompt()
    prompt.put(store)
    pending = store.match_async("m", prompt.tokens, deadline=60)
    assert pending.result() == store.match("m", prompt.tokens)
    assert pending.ready()
    # Without patience there is an answer or none, but no waiting; a little later there is one.
    hurried = store.match_async("m", prompt.tokens, deadline=0)
    assert hurried.ready()
    with contextlib.suppress(prefixd.DeadlineExceeded):
        assert hurried.result() == pending.result()
    with pytest.raises(prefixd.NotFound, match="no model named 'x'"):
        store.match_async("x", prompt.tokens, deadline=60).result()


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
        with pytest.raises(prefixd.InvalidArgument, match=r"not all among the model's"):
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


class Elsewhere:
    """Imitates an array of another library, in host memory or (as it claims) on a device."""

    def __init__(self, data: np.ndarray, kind: int = 1) -> None:
        self.data, self.kind = data, kind

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.kind, 0

    def __dlpack__(self, **options: object) -> object:
        return self.data.__dlpack__(**options)


def test_arrays_of_other_libraries_and_on_devices(store: prefixd.Store) -> None:
    prompt = Prompt()
    prompt.put(store)
    with store.attach("m", Elsewhere(prompt.tokens), policy=FULL) as session:
        want = session.step(0, prompt.q[0])
        np.testing.assert_array_equal(session.step(0, Elsewhere(prompt.q[0]))[0], want[0])
        with pytest.raises(prefixd.InvalidArgument, match=r"Elsewhere lies on device 0 \(CUDA\)"):
            session.step(0, Elsewhere(prompt.q[0], kind=2))
    other = Prompt(seed=1)
    with (
        pytest.raises(prefixd.InvalidArgument, match="CUDA"),
        store.begin_put("m", other.tokens) as put,
    ):
        put.write(0, 0, Elsewhere(other.k[0], kind=2), other.v[0])
    assert len(store.list_prefixes().prefixes) == 1


def test_rows_selection_and_listing(store: prefixd.Store) -> None:
    prompt = Prompt()
    prefix = prompt.put(store, label="text").prefix
    with store.attach("m", prefix=prefix, n_tokens=250, policy=FULL) as session:
        assert session.n_tokens == 250
        rows = session.read_range(1, 1, 7, 9)
        np.testing.assert_array_equal(rows.keys, prompt.k[1, 7:9, 1])
        np.testing.assert_array_equal(rows.values, prompt.v[1, 7:9, 1])
        np.testing.assert_array_equal(
            session.read_rows(1, 1, [0, 249]).keys, prompt.k[1, [0, 249], 1]
        )
        ids, cuts = session.select(0, 0, prompt.q[0, :2], 20)
        scores = 0.25 * prompt.q[0, :2] @ prompt.k[0, :250, 0].T
        unread = np.setdiff1d(np.arange(4, 250 - 16), ids)
        assert len(ids) == 20 and (np.diff(ids) > 0).all()
        for head, cut in enumerate(cuts):
            assert cut.kind == "exact" and scores[head, unread].max() <= cut.score + 1e-5
    assert store.match("m", prompt.tokens[:100]).n_tokens == 100
    assert [p["label"] for p in store.list_prefixes().prefixes] == ["text"]
    assert store.list_models().models == [spec_as_stored()]
    store.set_lifetime(prefix, pinned=True)
    assert store.prefix(prefix)["summary"]["pinned"]
    assert store.verify()["damaged"] == [] and store.stats()["puts"] == 1
    page = store.list_prefixes(limit=1, tenant="")
    assert len(page.prefixes) == 1 and page.next == ""
    with pytest.raises(prefixd.InvalidArgument, match="after"):
        store.list_prefixes(after="x")
    assert store.model("m") == spec_as_stored()
    with pytest.raises(prefixd.FailedPrecondition, match="used by 1 stored"):
        store.remove_model("m")
    store.remove(prefix)
    assert store.list_prefixes().prefixes == []
    store.remove_model("m")
    with pytest.raises(prefixd.NotFound):
        store.model("m")


def test_derived_rows_serve_who_asks(store: prefixd.Store) -> None:
    prompt, answer = Prompt(tokens=200), Prompt(seed=5, tokens=60)
    prompt.put(store)
    whole = Prompt(tokens=260)
    whole.tokens = np.concatenate([prompt.tokens, answer.tokens])
    derived = whole.put(store, derived=True)
    assert derived.exact_tokens == 200 and len(derived.lineage) == 32
    assert store.match("m", whole.tokens).n_tokens == 200
    for asked in ({"lineage": derived.lineage}, {"accept_approximate": True}):
        match = store.match("m", whole.tokens, **asked)
        assert match.n_tokens == 260 and match.exact_tokens == 200 and match.derived
        with store.attach("m", whole.tokens, policy=FULL, **asked) as session:
            assert session.n_tokens == 260 and session.derives
        with store.attach("m", prefix=derived.prefix, policy=FULL, **asked) as session:
            assert session.n_tokens == 260
    with store.attach("m", whole.tokens, policy=FULL) as session:
        assert session.n_tokens == 200 and not session.derives
        session.set_policy(prefixd.Policy(k=5, estimator="none"))
        assert session.derives
    with pytest.raises(prefixd.FailedPrecondition, match="from 200 on are derived"):
        store.attach("m", prefix=derived.prefix, policy=FULL)
    with pytest.raises(prefixd.InvalidArgument, match="32 hex digits"):
        store.match("m", whole.tokens, lineage="mine")
    exact = whole.put(store)
    assert exact.stored_tokens == 60 and exact.lineage == "" and exact.prefix != derived.prefix
    assert store.match("m", whole.tokens, accept_approximate=True).prefix == exact.prefix
    covered = store.verify(exact.prefix)["covered"]
    assert covered == store.prefix(exact.prefix)["chain"] and len(covered) == 2
    assert store.verify_tenant("")["segments"] == 3


def spec_as_stored() -> prefixd.ModelSpec:
    plain = spec()
    return prefixd.ModelSpec(**{**plain.__dict__, "layers": tuple(plain.layers), "value_dim": DIM})


def test_a_refusal_for_memory_says_when_to_retry(tmp_path: Path) -> None:
    large = prefixd.ModelSpec(**{**spec().__dict__, "name": "large"})
    with prefixd.open(
        tmp_path, memory_bytes=128 << 20, host_tier_bytes=0, min_free_bytes=0, threads=1
    ) as store:
        store.register_model(large)
        puts = []
        with pytest.raises(prefixd.ResourceExhausted) as raised:
            for first in range(100):
                puts.append(store.begin_put("large", np.r_[first, np.arange(60_000)]))
        assert raised.value.retry_after_ms > 0
        assert len(puts) >= 2
        for put in puts:
            put.abort()
        with pytest.raises(prefixd.NotFound) as other:
            store.attach("nobody", [1])
        assert other.value.retry_after_ms == 0


def test_errors_have_codes_and_say_what_to_do(store: prefixd.Store) -> None:
    prompt = Prompt()
    prompt.put(store)
    with pytest.raises(prefixd.InvalidArgument, match="estimater: no such field"):
        store.attach("m", prompt.tokens, policy={"estimater": "moment"})
    with pytest.raises(prefixd.Infeasible) as raised:
        store.attach("m", prompt.tokens, policy=prefixd.Policy(budget=1e-4))
    assert raised.value.code == "infeasible"
    with pytest.raises(prefixd.NotFound, match="nobody"):
        store.attach("nobody", prompt.tokens)
    other = prefixd.ModelSpec(**{**spec().__dict__, "identity": {"weights": "others"}})
    with pytest.raises(prefixd.AlreadyExists):
        store.register_model(other)
    with pytest.raises(ValueError, match="one row of integers"):
        store.match("m", [0.5, 1])
    with pytest.raises(ValueError, match="between 0 and"):
        store.match("m", [-1])
    with store.attach("m", prompt.tokens, policy=FULL) as session:
        bad = prompt.q[0].copy()
        bad[1, 3] = np.nan
        with pytest.raises(prefixd.InvalidArgument, match="head 1 is NaN"):
            session.step(0, bad)
        with pytest.raises(prefixd.InvalidArgument):
            session.step(0, prompt.q[0, :2])
        with pytest.raises(prefixd.InvalidArgument):
            session.step(LAYERS, prompt.q[0])


def test_a_put_that_fails_leaves_nothing(store: prefixd.Store) -> None:
    prompt = Prompt(1)
    with pytest.raises(prefixd.InvalidArgument, match="is not f32"):
        with store.begin_put("m", prompt.tokens) as put:
            put.write(0, 0, prompt.k[0].astype(np.float64), prompt.v[0]).result()
    with pytest.raises(KeyError):  # the block's own exception must come out
        with store.begin_put("m", prompt.tokens) as put:
            put.write(0, 0, prompt.k[0], prompt.v[0])
            raise KeyError("the engine failed")
    with pytest.raises(prefixd.PrefixdError):  # rows of a layer are missing, which the end detects
        with store.begin_put("m", prompt.tokens) as put:
            put.write(0, 0, prompt.k[0], prompt.v[0])
    bad = prompt.k[1].copy()
    bad[5, 0, 0] = np.inf
    with pytest.raises(prefixd.InvalidArgument, match="layer 1, token 5"):
        with store.begin_put("m", prompt.tokens) as put:
            put.write(1, 0, bad, prompt.v[1])
            put.write(0, 0, prompt.k[0], prompt.v[0])
    assert store.match("m", prompt.tokens).n_tokens == 0 and store.list_prefixes().prefixes == []
    prompt.put(store)


def test_progress_can_cancel_and_its_exceptions_are_seen(store: prefixd.Store) -> None:
    Prompt().put(store)
    with pytest.raises(prefixd.Cancelled):
        store.verify(progress=lambda done, total, unit: False)

    def fails(done: int, total: int, unit: str) -> None:
        raise KeyError(unit)

    with pytest.raises(KeyError):
        store.verify(progress=fails)
    assert store.verify(progress=lambda *_: None)["segments"] == 1


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


def test_bf16_rows_are_bits_for_numpy_and_what_is_stored_outlives_the_process(
    tmp_path: Path,
) -> None:
    prompt = Prompt()
    bits = (
        (prompt.k.view(np.uint32) >> 16).astype(np.uint16),
        (prompt.v.view(np.uint32) >> 16).astype(np.uint16),
    )
    with prefixd.open(tmp_path, **SMALL) as store:
        store.register_model(spec("bf16"))
        with store.begin_put("m", prompt.tokens) as put:
            for layer in range(LAYERS):
                put.write(layer, 0, bits[0][layer], bits[1][layer])
        with pytest.raises(prefixd.FailedPrecondition):
            put.commit()
        with pytest.raises(prefixd.PrefixdError, match="(?i)lock|use"):
            prefixd.open(tmp_path, **SMALL)
    with pytest.raises(prefixd.FailedPrecondition, match="closed"):
        store.stats()
    with prefixd.open(tmp_path, **SMALL) as store:
        with store.attach("m", prompt.tokens, policy=FULL) as session:
            rows = session.read_range(0, 1, 0, 5)
            np.testing.assert_array_equal(rows.keys, bits[0][0, :5, 1])


def test_restore_brings_every_row_back(store: prefixd.Store) -> None:
    prompt = Prompt()
    prompt.put(store)
    seen: list[int] = []

    def progress(done: int, total: int, unit: str) -> None:
        assert unit == "bytes" and 0 < done <= total
        seen.append(total - done)

    with store.attach("m", prompt.tokens, policy=FULL) as session:
        n = session.n_tokens
        k, v = np.zeros_like(prompt.k[:, :n]), np.zeros_like(prompt.v[:, :n])
        for run in session.restore(buffer_bytes=1, progress=progress):
            k[run.layer, run.begin : run.end] = run.k
            v[run.layer, run.begin : run.end] = run.v
        np.testing.assert_array_equal(k, prompt.k[:, :n])
        np.testing.assert_array_equal(v, prompt.v[:, :n])
        assert seen[-1] == 0
        with session.restore(5, 9, layers=(1, 2), head_major=True) as restore:
            (run,) = restore
        np.testing.assert_array_equal(run.k, prompt.k[1, 5:9].swapaxes(0, 1))
        with pytest.raises(prefixd.Cancelled):
            list(session.restore(progress=lambda *_: False))
        restore = session.restore()
        restore.cancel()
        with pytest.raises(prefixd.Cancelled):
            list(restore)
        with pytest.raises(prefixd.InvalidArgument, match="tokens"):
            session.restore(0, n + 1)


def test_tenants_do_not_see_one_another(tmp_path: Path) -> None:
    prompt = Prompt()
    with prefixd.open(tmp_path, **SMALL) as store:
        store.register_model(spec())
        prompt.put(store, tenant="a")
        assert store.match("m", prompt.tokens, tenant="a").n_tokens == TOKENS
        assert store.match("m", prompt.tokens, tenant="b").n_tokens == 0
        with pytest.raises(prefixd.NotFound):
            store.attach("m", prompt.tokens, tenant="b")


def test_rows_can_be_stored_in_half_the_space(tmp_path: Path) -> None:
    prompt = Prompt()
    with prefixd.open(tmp_path, **SMALL) as store:
        store.register_model(spec())
        result = prompt.put(store, encoding="int8")
        assert result.extra["encoding"] == "int8"
        with store.attach("m", prompt.tokens, policy=FULL) as session:
            y, _ = session.step(0, prompt.q[0])
        np.testing.assert_allclose(y, prompt.reference(0, prompt.q[0])[0], atol=0.1)
        with pytest.raises(prefixd.InvalidArgument):
            store.begin_put("m", prompt.tokens, encoding="int3")


def test_two_puts_of_a_prompt_store_it_once(store: prefixd.Store) -> None:
    prompt = Prompt()
    first = store.begin_put("m", prompt.tokens)
    with pytest.raises(prefixd.Unavailable, match="another put of these tokens is under way"):
        store.begin_put("m", prompt.tokens, wait=0.02, alone=True)
    store.begin_put("m", prompt.tokens, wait=0.02).abort()
    first.abort()
    stored = prompt.put(store)
    with store.begin_put("m", prompt.tokens, wait=1.0, alone=True) as put:
        assert len(put.missing) == 0
    assert put.result().prefix == stored.prefix
    assert put.result().stored_tokens == 0


def test_options_of_a_store_are_checked(tmp_path: Path) -> None:
    with pytest.raises(prefixd.InvalidArgument, match="options.thread: no such field"):
        prefixd.open(tmp_path, thread=2)
    with pytest.raises(prefixd.InvalidArgument, match="options.threads must be from 0 to 1024 threads"):
        prefixd.open(tmp_path, threads=2000)
    with prefixd.open(tmp_path / "store", **SMALL, gathered_rows_bytes=1 << 20) as store:
        assert store.stats()["gathered_rows_capacity"] == 1 << 20
    with pytest.raises(prefixd.Unavailable):
        prefixd.connect(f"unix:{tmp_path}/nobody", reconnect=0.0)
