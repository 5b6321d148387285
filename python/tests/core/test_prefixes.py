"""Tests which stored prefixes serve whom: matches, tenants, derived rows, puts of one prompt."""

from __future__ import annotations

import contextlib
from pathlib import Path

import numpy as np
import pytest

import prefixd
from tests.prompts import FULL, SMALL, TOKENS, Prompt, spec


def test_matches_that_nobody_waits_for(store: prefixd.Store) -> None:
    prompt = Prompt()
    prompt.put(store)
    pending = store.match_async("m", prompt.tokens, deadline=60)
    found = store.match("m", prompt.tokens)
    assert pending.result().prefix == found.prefix and pending.result().n_tokens == found.n_tokens == TOKENS
    assert pending.ready()
    # Without patience there is an answer or none, but no waiting; a little later there is one.
    hurried = store.match_async("m", prompt.tokens, deadline=0)
    assert hurried.ready()
    with contextlib.suppress(prefixd.DeadlineExceeded):
        assert hurried.result().prefix == found.prefix
    with pytest.raises(prefixd.NotFound, match="no model named 'x'"):
        store.match_async("x", prompt.tokens, deadline=60).result()


def test_estimates_say_what_is_fastest(store: prefixd.Store) -> None:
    prompt = Prompt()
    prompt.put(store)
    unknown = store.match("m", prompt.tokens).estimate
    assert unknown.tokens == TOKENS and unknown.memory_bytes + unknown.disk_bytes > 0
    assert not unknown.recompute.known and unknown.advice == "unknown"
    for _ in range(2):  # from the disk, and from memory
        with store.attach("m", prompt.tokens, policy=FULL) as session:
            for _run in session.restore():
                pass
    fast, slow = prefixd.EngineSpeed(1e15, cached_tokens=100), prefixd.EngineSpeed(1e-9)
    estimate = store.match_async("m", prompt.tokens, deadline=60, engine=fast).result().estimate
    assert estimate.tokens == TOKENS - 100 and estimate.restore.source == "measured"
    assert estimate.recompute == prefixd.TimeEstimate((TOKENS - 100) / 1e15, "given")
    assert estimate.advice == "recompute"
    assert store.match("m", prompt.tokens, engine=slow).estimate.advice == "restore"
    assert store.explain("m", prompt.tokens, engine=fast)["match"]["estimate"]["advice"] == "recompute"
    with store.attach("m", prompt.tokens, policy=FULL, engine=slow) as session:
        assert session.estimate.advice == "restore"
    with pytest.raises(prefixd.InvalidArgument, match="prefill_tokens_per_second"):
        store.match("m", prompt.tokens, engine=prefixd.EngineSpeed(-1.0))


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


def test_compressed_prefixes_serve_who_asks(store: prefixd.Store) -> None:
    prompt = Prompt(tokens=200)
    prefix = prompt.put(store).prefix
    store.wait_ready(prefix)
    assert not store.compress(prefix, policy="window", dry_run=True)["compressed"]
    report = store.compress(prefix, policy="window", keep=0.5)
    assert report["compressed"] and report["refused"] == "" and report["bytes_after"] > 0
    assert store.prefix(prefix)["summary"]["kept_tokens"] == report["kept_tokens"]
    assert store.match("m", prompt.tokens).n_tokens == 0
    match = store.match("m", prompt.tokens, accept_compressed=True)
    assert match.prefix == prefix and match.compressed
    some = prefixd.Policy(k=5, estimator="moment")
    with store.attach("m", prompt.tokens, policy=some, accept_compressed=True) as session:
        assert session.n_tokens == 200
    with pytest.raises(prefixd.FailedPrecondition, match="is compressed"):
        store.attach("m", prefix=prefix, policy=FULL)
    assert prompt.put(store).prefix != prefix


def test_tenants_do_not_see_one_another(tmp_path: Path) -> None:
    prompt = Prompt()
    with prefixd.open(tmp_path, **SMALL) as store:
        store.register_model(spec())
        prompt.put(store, tenant="a")
        assert store.match("m", prompt.tokens, tenant="a").n_tokens == TOKENS
        assert store.match("m", prompt.tokens, tenant="b").n_tokens == 0
        with pytest.raises(prefixd.NotFound):
            store.attach("m", prompt.tokens, tenant="b")


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
