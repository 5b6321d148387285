"""Tests sessions whose daemon went away or does not answer, and stores in a child that fork() made."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

import prefixd
from tests.conftest import start_daemon
from tests.prompts import FULL, Prompt, spec


class Daemon:
    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self.address = f"unix:{directory / 's'}"
        self.start()

    def start(self) -> None:
        self.process, _ = start_daemon(self._directory)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(60)


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Daemon]:
    daemon = Daemon(tmp_path)
    yield daemon
    daemon.process.send_signal(signal.SIGCONT)
    daemon.kill()


def test_a_session_says_nothing_old_and_hides_no_error(served: Daemon) -> None:
    prompt = Prompt()
    with prefixd.connect(served.address, reconnect=0) as store:
        store.register_model(spec())
        prompt.put(store)
        asked, unasked = (store.attach("m", prompt.tokens, policy=FULL) for _ in range(2))
        for session in (asked, unasked):
            session.step(0, prompt.q[0])
        steps = asked.report()["total"]["steps"]
        assert steps > 0
        served.kill()
        for session in (asked, unasked):
            with pytest.raises(prefixd.Unavailable):
                session.report()
            for number in ("own_tokens", "own_moved", "own_retained"):
                with pytest.raises(prefixd.Unavailable):
                    getattr(session, number)
        # What ended the block is what its caller sees.
        with pytest.raises(prefixd.Unavailable), asked:
            asked.step(0, prompt.q[0])
        assert asked.final_report is not None and asked.final_report["total"]["steps"] == steps
        with pytest.raises(ZeroDivisionError), unasked:
            raise ZeroDivisionError
        assert unasked.report()["total"]["steps"] == 0  # what detach returned


def test_a_block_ends_in_order_though_the_daemon_restarted(served: Daemon) -> None:
    prompt = Prompt()
    with prefixd.connect(served.address) as store:
        store.register_model(spec())
        prompt.put(store)
        with store.attach("m", prompt.tokens, policy=FULL) as session:
            session.step(0, prompt.q[0])
            served.kill()
            served.start()
        with store.attach("m", prompt.tokens, policy=FULL) as session:
            served.kill()
            served.start()
            assert session.report()["info"]["n_tokens"] == len(prompt.tokens)  # it attached again


@pytest.mark.parametrize("what", ["session", "restore"])
def test_an_end_that_waits_holds_up_no_other_thread(what: str, served: Daemon) -> None:
    prompt = Prompt()
    store = prefixd.connect(served.address, call_timeout=2)
    store.register_model(spec())
    prompt.put(store)
    session = store.attach("m", prompt.tokens, policy=FULL)
    os.kill(served.process.pid, signal.SIGSTOP)
    held = [session.restore() if what == "restore" else session]
    if what == "session":
        del session
    else:
        time.sleep(0.3)  # its thread reads by then
    ended = threading.Event()

    def end() -> None:
        held.clear()  # the last reference
        ended.set()

    ending = threading.Thread(target=end)
    ending.start()
    longest, last, until = 0.0, time.monotonic(), time.monotonic() + 1
    while time.monotonic() < until:
        time.sleep(0.005)
        now = time.monotonic()
        longest, last = max(longest, now - last), now
    assert not ended.is_set(), "it did not wait, so that this shows nothing"
    assert longest < 0.9
    os.kill(served.process.pid, signal.SIGCONT)
    ending.join(60)
    assert ended.is_set()


def refusals(calls: dict[str, Callable[[], object]], answers: multiprocessing.SimpleQueue) -> None:
    """Runs in the child."""
    for name, call in calls.items():
        try:
            answers.put((name, "went through", str(call())))
        except Exception as error:
            answers.put((name, type(error).__name__, str(error)))


def refused_in_a_child(calls: dict[str, Callable[[], object]]) -> list[tuple[str, str, str]]:
    """What a forked child's calls end with: name, error, message."""
    forking = multiprocessing.get_context("fork")
    answers = forking.SimpleQueue()
    child = forking.Process(target=refusals, args=(calls, answers))
    child.start()
    got = [answers.get() for _ in calls]
    child.join(60)
    assert child.exitcode == 0, "the child hangs where it ends"
    return got


def test_a_child_is_refused_and_its_parent_goes_on(store: prefixd.Store) -> None:
    prompt, other = Prompt(), Prompt(seed=3)
    prompt.put(store)
    session = store.attach("m", prompt.tokens, policy=FULL)
    put = store.begin_put("m", other.tokens)
    store.match_async("m", prompt.tokens, deadline=60).result()  # its thread is not in the child
    want, _ = session.step(0, prompt.q[0])

    def leave() -> None:
        with session:
            pass

    calls: dict[str, Callable[[], object]] = {
        "step": lambda: session.step(0, prompt.q[0]),
        "report": session.report,
        "restore": lambda: next(iter(session.restore())),
        "match": lambda: store.match("m", prompt.tokens),
        "attach": lambda: store.attach("m", prompt.tokens),
        "begin_put": lambda: store.begin_put("m", prompt.tokens),
        "stats": store.stats,
        "missing": lambda: put.core.write(0, 0, other.k[0], other.v[0]),
        "with": leave,
    }
    for name, kind, message in refused_in_a_child(calls):
        assert kind == "FailedPrecondition" and "before fork()" in message, (name, kind, message)

    y, _ = session.step(0, prompt.q[0])
    np.testing.assert_array_equal(y, want)
    with put:
        for layer in range(2):
            put.write(layer, 0, other.k[layer], other.v[layer])
    assert put.result().stored_tokens == len(other.tokens)
    session.detach()


def test_a_put_is_refused_in_a_child_and_hangs_nobody(store: prefixd.Store) -> None:
    prompt = Prompt()
    put = store.begin_put("m", prompt.tokens)
    put.write(0, 0, prompt.k[0], prompt.v[0]).result()  # by a thread that is not in the child

    def leave() -> None:
        with put:
            raise ZeroDivisionError("the block's own, before fork()")

    calls: dict[str, Callable[[], object]] = {
        "write": lambda: put.write(1, 0, prompt.k[1], prompt.v[1]).result(timeout=20),
        "queries": lambda: put.write_queries(0, 0, prompt.q).result(timeout=20),
        "commit": lambda: put.commit().result(timeout=20),
        "abort": put.abort,
        "with": leave,
    }
    for name, kind, message in refused_in_a_child(calls):
        wanted = "ZeroDivisionError" if name == "with" else "FailedPrecondition"
        assert kind == wanted and "before fork()" in message, (name, kind, message)
    with put:
        put.write(1, 0, prompt.k[1], prompt.v[1])
    assert put.result().stored_tokens == len(prompt.tokens)


def test_a_window_of_the_splice_is_refused_elsewhere(store: prefixd.Store) -> None:
    prompt = Prompt()
    prompt.put(store)
    window = prefixd.Policy(mode="full", own_window=64)
    with pytest.raises(prefixd.InvalidArgument, match="own_window"):
        store.attach("m", prompt.tokens, policy=window)
    with store.attach("m", prompt.tokens, policy=FULL) as session:
        with pytest.raises(prefixd.InvalidArgument, match="own_window"):
            session.set_policy(window)
        session.step(0, prompt.q[0])
