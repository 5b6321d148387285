"""Tests calls to a daemon that is silent: its connections stay, and nobody answers."""

from __future__ import annotations

import os
import signal
import socket
import struct
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

import prefixd
from prefixd.deadline import deadline
from tests.prompts import FULL, Prompt, spec


@contextmanager
def silenced(address: str) -> Iterator[None]:
    with socket.socket(socket.AF_UNIX) as own:
        own.connect(address.removeprefix("unix:"))
        peer = own.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
    process = struct.unpack("3i", peer)[0]
    os.kill(process, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(process, signal.SIGCONT)


@pytest.fixture
def connected(daemon: str) -> Iterator[prefixd.Store]:
    with prefixd.connect(daemon, reconnect=0, connect_timeout=1) as store:
        store.register_model(spec())
        yield store


def begun_put(store: prefixd.Store, prompt: Prompt) -> prefixd.put.Put:
    put = store.begin_put("m", prompt.tokens, call_timeout=0.2)
    for layer in range(len(prompt.k)):
        put.write(layer, 0, prompt.k[layer], prompt.v[layer]).result()
    return put


def test_a_commit_that_nobody_answers_ends(connected: prefixd.Store, daemon: str) -> None:
    rows = Prompt(seed=2)
    put, other = begun_put(connected, Prompt(seed=1)), begun_put(connected, rows)
    with silenced(daemon):
        begun = time.monotonic()
        committed = put.commit(timeout=0.5)
        time.sleep(0.2)  # it has the connection
        for call in (
            lambda: connected.begin_put("m", Prompt(seed=3).tokens, call_timeout=0.2),
            lambda: connected.attach("m", Prompt(seed=3).tokens, policy=FULL, call_timeout=0.2),
            lambda: other.write(0, 0, rows.k[0], rows.v[0]).result(),
        ):
            with pytest.raises(prefixd.DeadlineExceeded):
                call()
        assert time.monotonic() - begun < 4  # each of them ended by its own deadline
        with pytest.raises(prefixd.Unavailable, match="did not answer in time"):
            committed.result(timeout=30)
        assert time.monotonic() - begun < 12
        with pytest.raises(prefixd.PrefixdError):
            other.commit(timeout=0.5).result(timeout=30)  # the connection has gone with it
    with prefixd.connect(daemon) as again:
        again.model("m")


def test_a_thread_has_one_deadline_for_all_its_calls(connected: prefixd.Store, daemon: str) -> None:
    with deadline(60):
        connected.model("m")
        with deadline(None):
            connected.model("m")
        with deadline(0.001), pytest.raises(prefixd.DeadlineExceeded):
            while True:
                connected.model("m")
        connected.model("m")
    with silenced(daemon), deadline(0.2):
        begun = time.monotonic()
        with pytest.raises(prefixd.PrefixdError):
            connected.model("m")
        with pytest.raises(prefixd.PrefixdError):
            connected.model("m")
        assert time.monotonic() - begun < 9
