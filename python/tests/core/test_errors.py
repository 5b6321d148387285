"""Tests what is refused, cancelled or fails, and that it says what to do."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import prefixd
from tests.prompts import FULL, LAYERS, SMALL, Prompt, spec


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
    # A put that is left open would be waited for: its owner's variable and its exception still hold it.
    store.begin_put("m", prompt.tokens, wait=5, alone=True).abort()
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
    # Whatever else it returns: functions are called for what they do, and return what they do.
    for value in (None, True, 1, 0, "", [], object()):
        assert store.verify(progress=lambda *_, value=value: value)["segments"] == 1


def test_options_of_a_store_are_checked(tmp_path: Path) -> None:
    with pytest.raises(prefixd.InvalidArgument, match="options.thread: no such field"):
        prefixd.open(tmp_path, thread=2)
    with pytest.raises(prefixd.InvalidArgument, match="options.threads must be from 0 to 1024 threads"):
        prefixd.open(tmp_path, threads=2000)
    with prefixd.open(tmp_path / "store", **SMALL, gathered_rows_bytes=1 << 20) as store:
        assert store.stats()["gathered_rows_capacity"] == 1 << 20
    with pytest.raises(prefixd.Unavailable):
        prefixd.connect(f"unix:{tmp_path}/nobody", reconnect=0.0)
