"""Tests the connector inside a real vLLM while something fails: requests are aborted, rows are damaged,
the daemon is killed or full. Answers stay equal, and nothing hangs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.vllm.conftest import PROMPTS, Daemon, Engine, claimable, eventually, keep, own_model
from tests.vllm.engines import BLOCK, same

Stock = dict[str, dict[str, Any]]
Stored = Callable[[list[int]], int]


def test_an_aborted_request_leaves_nothing(engine: Engine, stored: Stored, stock: Stock) -> None:
    prompt = PROMPTS["aborted"]
    engine.forget()
    name = engine.add(prompt)
    engine.core.step()  # the first part of the prompt
    engine.core.abort_request([name])
    other = engine.ask(PROMPTS["length 257"])
    same(other, stock["length 257"])
    assert stored(prompt) < BLOCK
    engine.forget()
    same(engine.ask(prompt), stock["aborted"])
    eventually(lambda: stored(prompt) == len(prompt))


@pytest.mark.parametrize("name", ["damaged", "damaged and parked"])
def test_damaged_rows_are_computed_again(
    engine: Engine, daemon: Daemon, stored: Stored, stock: Stock, name: str
) -> None:
    prompt = PROMPTS[name]
    keep(engine, stored, prompt)
    prefix = damage(daemon, prompt)
    assert stored(prompt) == len(prompt)  # nobody has read the rows yet
    got = engine.ask(prompt)
    same(got, stock[name])
    eventually(lambda: stored(prompt) == len(prompt))
    with daemon.store() as store:
        assert store.match(own_model(store), prompt).prefix != prefix  # stored again
    engine.forget()
    again = engine.ask(prompt)
    same(again, stock[name])
    assert again["cached"] == claimable(len(prompt))


def damage(daemon: Daemon, prompt: list[int]) -> str:
    """Flips bits of a stored prompt's rows; returns its prefix."""
    with daemon.store() as store:
        prefix = store.match(own_model(store), prompt).prefix
        store.wait_ready(prefix)  # so that nobody but the engine reads the rows
        segment = store.prefix(prefix)["chain"][-1]
    daemon.stop()
    (file,) = (daemon.folder / "store").rglob(f"{segment}.seg")
    with file.open("r+b") as rows:
        for at in range(1 << 14, file.stat().st_size // 2, 1 << 14):  # rows; token ids are at the end
            rows.seek(at)
            byte = rows.read(1)
            rows.seek(at)
            rows.write(bytes([byte[0] ^ 1]))
    daemon.start()
    return prefix


def test_who_shares_damaged_rows_computes_them_again(
    engine: Engine, daemon: Daemon, stored: Stored, stock: Stock
) -> None:
    """Both are admitted in one step, and vLLM gives the blocks that the first loads to the second."""
    names = ("damaged together", "beside the damaged")
    keep(engine, stored, PROMPTS[names[0]])
    damage(daemon, PROMPTS[names[0]])
    requests = {name: engine.add(PROMPTS[name]) for name in names}
    answers = engine.run()
    for name in names:
        same(answers[requests[name]], stock[name])
        eventually(lambda name=name: stored(PROMPTS[name]) == len(PROMPTS[name]))
    engine.forget()
    for name in names:
        again = engine.ask(PROMPTS[name])
        same(again, stock[name])  # out of rows that are right
        assert again["cached"] >= claimable(len(PROMPTS[name]))


def test_a_request_that_is_aborted_while_it_loads(engine: Engine, stored: Stored, stock: Stock) -> None:
    for name in ("killed while loading", "killed while parked"):
        prompt = PROMPTS[name]
        keep(engine, stored, prompt)
        for steps in range(3):
            aborted = engine.add(prompt)
            other = engine.add(PROMPTS["length 257"])
            for _ in range(steps):
                engine.core.step()
            engine.core.abort_request([aborted])
            same(engine.run()[other], stock["length 257"])
            engine.forget()
        back = engine.ask(prompt)
        same(back, stock[name])
        assert back["cached"] == claimable(len(prompt))


@pytest.mark.parametrize("name", ["killed while loading", "killed while parked"])
@pytest.mark.parametrize("when", ["asked", "attached"])
def test_a_daemon_that_is_killed_while_it_loads(
    engine: Engine, daemon: Daemon, stored: Stored, stock: Stock, name: str, when: str
) -> None:
    prompt = PROMPTS[name]
    if stored(prompt) < len(prompt):
        keep(engine, stored, prompt)
    engine.forget()
    killer = daemon.when_grows("sessions_total", daemon.kill) if when == "attached" else None
    request = engine.add(prompt)
    if killer is None:
        daemon.kill()  # the match may be answered, and the load is not
    same(engine.run()[request], stock[name])
    if killer is not None:
        killer()
    same(engine.ask(PROMPTS["length 129"]), stock["length 129"])  # without a daemon
    daemon.start()
    engine.forget()
    back = engine.ask(prompt)
    same(back, stock[name])
    assert back["cached"] == claimable(len(prompt))


def test_a_daemon_that_is_killed_while_it_stores(engine: Engine, daemon: Daemon, stored: Stored, stock: Stock) -> None:
    prompt = PROMPTS["killed while storing"]
    engine.forget()
    name = engine.add(prompt)
    engine.core.step()  # the first of three parts
    daemon.kill()
    same(engine.run()[name], stock["killed while storing"])
    daemon.start()
    assert stored(prompt) < BLOCK
    same(keep(engine, stored, prompt), stock["killed while storing"])


@pytest.mark.parametrize("bound", ["--quota-mib", "--tenant-quota-mib"])
def test_a_full_store_costs_nothing_but_time(
    engine: Engine, daemon: Daemon, stored: Stored, stock: Stock, bound: str
) -> None:
    prompt = PROMPTS["too large"]
    daemon.stop()
    daemon.start(bound, "1")
    engine.forget()
    for _ in range(2):
        got = engine.ask(prompt)
        same(got, stock["too large"])
        assert got["cached"] == 0
        engine.forget()
    assert stored(prompt) < BLOCK
    daemon.stop()
    daemon.start()
    same(engine.ask(prompt), stock["too large"])
    eventually(lambda: stored(prompt) == len(prompt))
    with daemon.store() as store:  # for the next bound
        store.remove(store.match(own_model(store), prompt).prefix)
