"""Tests the two sides of the connector, the scheduler's and the worker's, without an engine."""

from __future__ import annotations

from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import prefixd
from prefixd.salts import token_ids
from prefixd.vllm.messages import Load, Save, StepMessage, WorkerNote
from prefixd.vllm.scheduler import MAX_PUTS
from tests.vllm.parts import Put, SlowMatch, asking, gone, line, request, scheduler, step, worked, worker


def test_seconds_wait_for_what_they_belong_to() -> None:
    side = worker(line())
    side._counts.add(load_seconds=0.5)
    assert side.take_counts() is None
    side._counts.add(loads=1, load_seconds=0.25)
    counts = side.take_counts()
    assert counts is not None and counts.data == {"loads": 1, "load_seconds": 0.75}
    assert side.take_counts() is None
    side.close()


def test_the_scheduler_asks_and_does_not_wait() -> None:
    pending = SlowMatch()
    side = asking(pending)

    one = request("1")
    assert side.matched(one, 0) == (None, False)
    assert side.matched(one, 0) == (None, False)
    # A daemon that is away is no reason to wait.
    pending.answered = pending.broken = True
    lost = request("lost")
    assert [side.matched(lost, 0) for _ in range(2)] == [(0, False)] * 2
    pending.broken = False
    pending.answered = True
    assert side.matched(one, 0) == (256, False)
    assert side.matched(one, 128) == (128, False)
    assert side.matched(one, 256) == (0, False)
    assert side.matched(request("2", 257), 0) == (256, False)
    assert side.matched(request("3", 256), 0) == (128, False)  # one token is left to compute
    # Keys that follow from more than token ids are left alone.
    assert side.matched(request("4", lora_request=object()), 0) == (0, False)
    assert side.matched(request("5", mm_features=[1]), 0) == (0, False)
    assert side.matched(request("6", 127), 0) == (0, False)


# ---- loads that fail ----


@pytest.mark.parametrize(("again", "saved", "wrong"), [(300, ["a", "b"], []), (128, ["a"], [2])])
def test_what_shared_a_failed_load_is_stored_once_it_is_computed_again(
    again: int, saved: list[str], wrong: list[int]
) -> None:
    side = asking(SlowMatch(answered=True))
    tables = {"a": [1, 2, 3], "b": [1, 2, 4], "c": [5, 6, 7]}
    a, c = request("a"), request("c", prompt_token_ids=[3] * 300)
    b = request("b", prompt_token_ids=[1] * 256 + [2] * 44)
    for one, computed in ((a, 0), (b, 256), (c, 256)):
        external = side.matched(one, computed)[0]
        assert external is not None
        side.allocated(one, tables[one.request_id], external)
    first = side.message(step(tables, {"a": 256, "b": 256, "c": 256}, {}, {"a": 44, "b": 44, "c": 44}))
    assert [load.request for load in first.loads] == ["a"]
    assert [save.request for save in first.saves] == ["a", "b", "c"]
    assert first.wrong == []
    side.worked(worked({1, 2}))
    # b goes on over blocks that a has not computed again, and is not stored then.
    second = side.message(step(tables, {}, {"a": 0, "b": 256, "c": 300}, {"a": again, "b": 44, "c": 1}))
    assert [save.request for save in second.saves if save.tokens is not None] == saved
    assert [save.request for save in second.saves] == saved
    assert second.wrong == wrong
    if wrong:  # vLLM has b compute it itself
        side.worked(worked(set(wrong)))
        third = side.message(step(tables, {}, {"a": 128, "b": 128, "c": 301}, {"a": 100, "b": 172, "c": 1}))
        assert [save.request for save in third.saves if save.tokens is not None] == ["a", "b"]
        assert third.wrong == []


def test_wrong_blocks_are_reported_until_somebody_computes_them_again() -> None:
    """vLLM leaves them to the request that loaded them, which may end before, and its prefix cache gives them to
    others."""
    side = asking(SlowMatch(answered=True))
    tables = {"a": [1, 2, 3], "b": [1, 2, 4], "later": [1, 2, 5]}
    side.matched(request("a"), 0)
    side.allocated(request("a"), tables["a"], 256)
    side.allocated(request("b"), tables["b"], 0)  # an equal prompt, which a stores
    side.message(step(tables, {"a": 256, "b": 256}, {}, {"a": 44, "b": 44}))
    side.worked(worked({1, 2}))
    side.finished("a")
    for one in ("b", "later"):
        message = side.message(step(tables, {}, {one: 256}, {one: 44}))
        assert message.wrong == [1, 2] and message.saves == []
    message = side.message(step(tables, {}, {"b": 0}, {"b": 300}))
    assert message.wrong == []
    assert side.message(step(tables, {}, {"later": 256}, {"later": 44})).wrong == []


def test_blocks_of_who_was_preempted_are_not_theirs_any_more() -> None:
    side = asking(SlowMatch(answered=True))
    tables = {"a": [1, 2, 3], "b": [4, 1, 5], "c": [2, 3, 6]}
    side.matched(request("a"), 0)
    side.allocated(request("a"), tables["a"], 256)
    side.message(step(tables, {"a": 256}, {}, {"a": 44}))
    b = request("b", prompt_token_ids=[2] * 300)
    side.matched(b, 0)
    side.allocated(b, tables["b"], 256)
    side.message(step(tables, {"b": 256}, {}, {"b": 44}, preempted={"a"}))
    side.worked(worked({4, 1}))  # of b, which has one of a's blocks now
    # c has computed over what else were a's.
    message = side.message(step(tables, {"c": 256}, {}, {"c": 44}))
    assert message.wrong == []
    side.finished("a")


def test_a_match_for_which_there_is_no_room_is_asked_for_again() -> None:
    room = 0
    asked = 0

    def match_async(*given: Any, **named: Any) -> SlowMatch:
        nonlocal asked
        asked += 1
        if asked <= room:
            return SlowMatch(answered=True)
        raise prefixd.ResourceExhausted("256 matches are waiting")

    side = scheduler(line(match_async=match_async))
    one = request("1")
    assert [side.matched(one, 0) for _ in range(3)] == [(None, False)] * 3
    room = 4
    assert side.matched(one, 0) == (256, False)
    hurried = scheduler(line(match_async=match_async), match_seconds=0)
    assert hurried.matched(request("2"), 0) == (0, False)


def test_what_follows_an_attached_prefix_is_never_stored() -> None:
    """A session of streamed inputs is allocated blocks again, behind the markers of its prefix."""
    side = asking(SlowMatch(answered=True))
    one = request("1", 600)
    side.allocated(one, [-3, -4, 1, 2, 3], 0)
    assert side.message(step({"1": [-3, -4, 1, 2, 3]}, {}, {"1": 256}, {"1": 44})).saves == []
    side.allocated(request("2"), [1, 2, 3], 0)
    assert len(side.message(step({"2": [1, 2, 3]}, {"2": 0}, {}, {"2": 300})).saves) == 1


def test_a_worker_reports_what_it_is_told_to_be_wrong() -> None:
    side = worker(line())
    side.begin(StepMessage(wrong=[4, 7]))
    side.start_loads()
    assert side.take_invalid() == {4, 7}
    assert side.take_invalid() == set()
    side.close()


def test_what_is_computed_over_a_failed_load_is_not_stored() -> None:
    puts: dict[int, Put] = {}

    def begin_put(model: str, tokens: Any, **named: Any) -> Put:
        assert named["call_timeout"]
        return puts.setdefault(int(tokens[-1]), Put(tokens))

    side = worker(line(attach=gone, begin_put=begin_put))
    blocks = {"a": [1, 2, 3], "b": [1, 2, 4], "c": [5, 6, 7]}
    saves = [Save(name, 300, True, own, np.full(300, i), 256) for i, (name, own) in enumerate(blocks.items())]
    side.begin(StepMessage([Load("a", "p", 0, 256, False, blocks["a"])], saves))
    side.start_loads()
    side.before_layer("layer")
    side.after_layer("layer")
    side.settle()
    assert side.take_invalid() == {1, 2}
    side.close()
    assert [puts[i].ended for i in range(3)] == ["aborted", "aborted", "committed"]


# ---- bounds ----


@pytest.mark.parametrize(("loads", "park"), [(1, 0), (5, 0), (5, 200)])
def test_the_loads_of_a_step_share_their_buffers(loads: int, park: int) -> None:
    asked: list[int] = []

    def restore(begin: int, end: int, *, buffer_bytes: int) -> Any:
        asked.append(buffer_bytes)
        return SimpleNamespace(fill_layer=lambda *given, **named: None, cancel=lambda: None)

    def attach(model: str, **named: Any) -> Any:
        assert named["call_timeout"]
        return SimpleNamespace(restore=restore, detach=lambda: None)

    side = worker(line(attach=attach), load_mib=64, park_tokens=park)
    message = StepMessage([Load(f"{i}", "p", 0, 128, False, [i + 1]) for i in range(loads)])
    if park:
        message.loads += [Load("parked", "p", 0, 256, True, [90, 91])]
    side.begin(message)
    side.start_loads()
    while park and side.take_parked() != {"parked"}:
        pass
    side.settle()
    assert len(asked) == loads + bool(park)
    assert sum(asked) <= 64 << 20
    side.close()


def test_puts_stay_below_what_a_connection_may_have() -> None:
    side = scheduler(line(), load=False)
    names = [f"r{i}" for i in range(2 * MAX_PUTS)]
    tables = {name: [3 * i + 1, 3 * i + 2, 3 * i + 3] for i, name in enumerate(names)}
    for i, name in enumerate(names):
        side.allocated(request(name, prompt_token_ids=[i] * 300), tables[name], 0)
    first = side.message(step(tables, dict.fromkeys(names, 0), {}, dict.fromkeys(names, 300)))
    assert [save.request for save in first.saves] == names[:MAX_PUTS]
    side.worked(worked(note=WorkerNote(puts=MAX_PUTS - 2)))
    # The others wait, and are stored out of their blocks while their answers are generated.
    second = side.message(step(tables, {}, dict.fromkeys(names, 300), dict.fromkeys(names, 1)))
    assert [save.request for save in second.saves] == names[MAX_PUTS : MAX_PUTS + 2]
    assert all(save.last and save.end == save.computed == 300 for save in second.saves)
    side.finished(names[MAX_PUTS + 2])
    side.worked(worked(note=WorkerNote()))
    third = side.message(step(tables, {}, dict.fromkeys(names, 301), dict.fromkeys(names, 1)))
    assert [save.request for save in third.saves] == names[MAX_PUTS + 3 :]


def test_a_worker_says_how_many_puts_it_has() -> None:
    put = Put([1] * 300)
    put.commits = Future()
    side = worker(line(begin_put=lambda *given, **named: put))
    assert side.note() is None
    side.begin(StepMessage(saves=[Save("a", 128, False, [1, 2, 3], np.ones(300), 0)]))
    side.after_layer("layer")
    side.settle()
    assert side.note() == WorkerNote(puts=1)
    side.begin(StepMessage(saves=[Save("a", 300, True, [1, 2, 3])]))
    side.after_layer("layer")
    side.settle()
    assert side.note() == WorkerNote(puts=1)  # until its commit is over
    put.commits.set_exception(prefixd.Unavailable("the daemon did not answer in time"))
    side.begin(StepMessage())
    side.settle()
    assert side.note() == WorkerNote()
    assert side.note() is None
    side.close()


def test_one_of_equal_prompts_is_stored() -> None:
    side = scheduler(line(), load=False)

    def saved(*given: Any) -> list[str]:
        tables = {}
        for one in given:
            tables[one.request_id] = [1, 2, 3]
            side.allocated(one, [1, 2, 3], 0)
        message = side.message(step(tables, dict.fromkeys(tables, 0), {}, dict.fromkeys(tables, 300)))
        return [save.request for save in message.saves]

    assert saved(request("a"), request("b"), request("salted", cache_salt="s")) == ["a", "salted"]
    assert saved(request("c")) == []
    side.finished("b")
    assert saved(request("d")) == []
    side.finished("a")
    assert saved(request("e")) == ["e"]


# ---- salts ----


def test_salts_part_prompts_and_nothing_else() -> None:
    tokens = list(range(1000, 1300))
    plain, a, b = (token_ids(tokens, salt) for salt in (None, "a", "b"))
    assert plain.tolist() == token_ids(tokens, "").tolist() == tokens
    assert a.tolist() == token_ids(tokens, "a").tolist()
    for one, other in ((plain, a), (plain, b), (a, b)):
        assert not (one[:16] == other[:16]).any()
        assert (one[16:] == other[16:]).all()
    # Prompts of one salt share what they have in common.
    other = token_ids(tokens[:9] + [7] * 291, "a")
    assert (a == other).tolist() == [i < 9 for i in range(300)]
    assert len(token_ids([1, 2], "a")) == 2


def test_a_salt_is_no_model() -> None:
    asked: list[Any] = []
    side = scheduler(line(match_async=lambda model, tokens, **named: asked.append((model, tokens)) or SlowMatch()))
    for salt in (None, "a"):
        side.matched(request(f"of {salt}", cache_salt=salt), 0)
    assert {model for model, _ in asked} == {"m"}
    assert asked[0][1][0] != asked[1][1][0]
