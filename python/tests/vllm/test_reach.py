"""Tests that an engine waits for a silent daemon once, and finds it again."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import prefixd
from prefixd.vllm import reach
from prefixd.vllm.daemon import Daemon
from prefixd.vllm.messages import Save, StepMessage, WorkerNote
from prefixd.vllm.options import Options
from prefixd.vllm.reach import Line, Reach
from tests.prompts import spec
from tests.vllm.parts import Put, SlowMatch, line, request, scheduler, step, worked, worker


class Clock:
    """A probe whose answer tests give, and calls that seem to take long."""

    def __init__(self) -> None:
        self.answers = False
        self.probes = 0

    def __call__(self) -> None:
        self.probes += 1
        if not self.answers:
            raise prefixd.Unavailable("the daemon did not answer in time")


@pytest.fixture
def probe(monkeypatch: pytest.MonkeyPatch) -> Clock:
    monkeypatch.setattr(reach, "_PAUSE", 0.02)
    return Clock()


@pytest.fixture
def own(probe: Clock) -> Iterator[Reach]:
    made = Reach(probe, 10)
    yield made
    made.close()


def until(what: Callable[[], Any]) -> None:
    end = time.monotonic() + 30
    while not what():
        assert time.monotonic() < end
        time.sleep(0.005)


def silent() -> prefixd.PrefixdError:
    return prefixd.DeadlineExceeded("the call did not end by its deadline")


def test_a_silent_daemon_is_not_asked_until_it_answers(own: Reach, probe: Clock) -> None:
    own.failed(silent(), 9)
    assert own.away
    with pytest.raises(prefixd.Unavailable, match="not asked until it does"), own.call(10):
        raise AssertionError("it was asked")
    until(lambda: probe.probes > 2)
    assert own.away
    probe.answers = True
    until(lambda: not own.away)
    with own.call(10):
        pass


@pytest.mark.parametrize(
    ("error", "seconds"),
    [(prefixd.Unavailable("refused"), 0.1), (silent(), 1), (prefixd.ResourceExhausted("full"), 20)],
)
def test_what_costs_nothing_and_what_is_an_answer_changes_nothing(
    own: Reach, error: prefixd.PrefixdError, seconds: float
) -> None:
    own.failed(error, seconds)
    assert not own.away


def test_who_answers_probes_alone_is_left_alone_for_longer(own: Reach, probe: Clock) -> None:
    probe.answers = True
    pauses = []
    for _ in range(4):
        own.lose("a call got no answer")
        pauses.append(own._pause)
        until(lambda: not own.away)
    assert pauses == [0.02, 0.04, 0.08, 0.16]


def test_a_call_that_takes_too_long_is_noted() -> None:
    to = line(seconds=0.02)

    def call() -> None:
        with to.call():
            time.sleep(0.02)
            raise silent()

    with pytest.raises(prefixd.DeadlineExceeded):
        call()
    assert to.reach.away
    to.reach.close()


def test_further_prompts_pay_nothing_in_the_scheduler(probe: Clock) -> None:
    slow = SlowMatch()
    to = line(probe, match_async=lambda *given, **named: slow)
    side = scheduler(to)
    waiting, other = request("waiting"), request("other", prompt_token_ids=[2] * 300)
    assert side.matched(waiting, 0) == side.matched(other, 0) == (None, False)
    side._asked["waiting"].since -= 20
    slow.answered = slow.broken = True
    assert side.matched(waiting, 0) == (0, False)
    slow.answered = False
    assert side.matched(other, 0) == (0, False)  # and nobody waits for what was asked before
    tables = {"waiting": [1, 2, 3], "other": [4, 5, 6]}
    for one in (waiting, other):
        side.allocated(one, tables[one.request_id], 0)
    message = side.message(step(tables, {"waiting": 0, "other": 0}, {}, {"waiting": 300, "other": 300}))
    assert message.saves == []
    counts = side.take_counts()
    assert counts is not None and counts.data == {"unreachable_prompts": 2}
    probe.answers = True
    until(lambda: not to.reach.away)
    # Who runs yet is stored.
    message = side.message(step(tables, {}, {"waiting": 300, "other": 300}, {"waiting": 1, "other": 1}))
    assert [save.request for save in message.saves] == ["waiting", "other"]
    assert side.matched(request("new"), 0) == (None, False)
    to.reach.close()


def test_what_a_worker_missed_the_scheduler_knows(probe: Clock) -> None:
    to = line(probe)
    side = worker(to)
    to.reach.lose("a load got no answer")
    note = side.note()
    assert note == WorkerNote(lost=True)
    assert side.note() == WorkerNote()  # it says so once
    assert side.note() is None
    of_scheduler = line(probe)
    scheduler(of_scheduler).worked(worked(note=note))
    assert of_scheduler.reach.away
    assert WorkerNote(puts=3).aggregate(WorkerNote(lost=True, puts=1)) == WorkerNote(True, 3)
    to.reach.close()
    of_scheduler.reach.close()
    side.begin(StepMessage())
    side.close()


def test_a_put_under_way_is_given_up_with_the_daemon(probe: Clock) -> None:
    """Else a step would wait for its rows as long as it has waited for a load."""
    put = Put([1] * 300)
    to = line(probe, begin_put=lambda *given, **named: put)
    side = worker(to)
    save = Save("a", 128, False, [1, 2, 3], np.ones(300), 0)
    side.begin(StepMessage(saves=[save]))
    side.after_layer("layer")
    to.reach.lose("a load got no answer")
    side.after_layer("layer")
    side.settle()
    side.close()
    assert put.ended == "aborted"
    to.reach.close()


def refusing(error: prefixd.PrefixdError) -> Callable[..., None]:
    def refuse(*given: Any) -> None:
        raise error

    return refuse


@pytest.mark.parametrize("error", [prefixd.Unavailable("no"), silent(), prefixd.ResourceExhausted("256 models")])
def test_an_engine_starts_whatever_the_store_has_to_say(error: prefixd.PrefixdError) -> None:
    daemon = Daemon(Options("unix:/nowhere/s"))
    daemon.greet(line(register_model=refusing(error)), spec("f32", "m"))
    daemon.greet(daemon.line(rows=True), spec("f32", "m"))  # there is none
    daemon.close()


def test_who_only_loads_needs_no_right_to_write() -> None:
    daemon = Daemon(Options("unix:/nowhere/s", store=False))
    daemon.greet(line(register_model=refusing(prefixd.FailedPrecondition("no right"))), spec("f32", "m"))
    daemon.close()


def test_what_waits_behind_a_commit_says_nothing_of_the_daemon(probe: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    slow: Future[Any] = Future()

    def begin_put(model: str, tokens: Any, **named: Any) -> Put:
        if int(tokens[0]) == 0:
            put = Put(tokens)
            put.commits = slow
            return put
        raise silent()

    now = 0.0
    monkeypatch.setattr(reach, "time", SimpleNamespace(monotonic=lambda: now, sleep=time.sleep))
    to = line(probe, begin_put=begin_put)
    side = worker(to)
    for i in range(2):
        now += 10 * i
        side.begin(StepMessage(saves=[Save(str(i), 300, True, [1, 2, 3], np.full(300, i), 0)]))
        side.before_layer("layer")
        side.after_layer("layer")
        side.settle()
    assert not to.reach.away
    slow.set_result(None)
    side.close()
    to.reach.close()


def test_what_is_wrong_with_an_engine_is_said_at_its_start() -> None:
    daemon = Daemon(Options("unix:/nowhere/s"))
    with pytest.raises(prefixd.AlreadyExists):
        daemon.greet(line(register_model=refusing(prefixd.AlreadyExists("m"))), spec("f32", "m"))
    daemon.close()


def test_a_line_is_opened_when_it_is_needed() -> None:
    store: Any = SimpleNamespace(close=lambda: closed.append(store))
    opened: list[Any] = []
    closed: list[Any] = []

    def connect() -> Any:
        opened.append(store)
        if len(opened) == 1:
            raise prefixd.Unavailable("no daemon there")
        return store

    to = Line(connect, Reach(lambda: None, 10), 10)
    assert not opened
    with pytest.raises(prefixd.Unavailable), to.call():
        pass
    for _ in range(2):
        with to.call() as found:
            assert found is store
    assert len(opened) == 2
    to.close()
    assert closed == [store]
