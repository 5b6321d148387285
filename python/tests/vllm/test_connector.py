"""Tests the connector inside a real vLLM: equal answers whatever was stored, lost, damaged or under way."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.vllm.conftest import ANSWER, LENGTHS, PROMPTS, Daemon, Engine, claimable, eventually, own_model
from tests.vllm.engines import BLOCK, same

Stock = dict[str, dict[str, Any]]
Stored = Callable[[list[int]], int]


def keep(engine: Engine, stored: Stored, prompt: list[int]) -> dict[str, Any]:
    """Computes a prompt, waits until it is stored, and lets vLLM forget it."""
    engine.forget()
    answer = engine.ask(prompt)
    eventually(lambda: stored(prompt) == len(prompt))
    engine.forget()
    return answer


@pytest.mark.parametrize("n", LENGTHS)
def test_answers_are_equal_at_every_length(engine: Engine, stored: Stored, stock: Stock, n: int) -> None:
    prompt, want = PROMPTS[f"length {n}"], stock[f"length {n}"]
    engine.forget()
    cold = engine.ask(prompt)
    same(cold, want)
    assert cold["cached"] == 0
    if n >= BLOCK:
        eventually(lambda: stored(prompt) == n)
    engine.forget()
    warm = engine.ask(prompt)
    same(warm, want)
    assert warm["cached"] == claimable(n)


def test_branches_share_what_they_have_in_common(engine: Engine, stored: Stored, stock: Stock) -> None:
    keep(engine, stored, PROMPTS["first branch"])
    second = engine.ask(PROMPTS["second branch"])
    same(second, stock["second branch"])
    assert second["cached"] == 300 // BLOCK * BLOCK  # the branches part at token 300
    eventually(lambda: stored(PROMPTS["second branch"]) == len(PROMPTS["second branch"]))
    engine.forget()
    # Both at once, each from its own segments.
    names = [engine.add(PROMPTS[branch]) for branch in ("first branch", "second branch")]
    answers = engine.run()
    for name, branch in zip(names, ("first branch", "second branch"), strict=True):
        same(answers[name], stock[branch])
        assert answers[name]["cached"] >= 300 // BLOCK * BLOCK


def test_what_vllm_has_itself_is_not_loaded(engine: Engine, stored: Stored, stock: Stock) -> None:
    prompt = PROMPTS["length 600"]
    if stored(prompt) < len(prompt):
        keep(engine, stored, prompt)
    engine.forget()
    engine.ask(prompt[:300])  # vLLM has its first two blocks now
    both = engine.ask(prompt)
    same(both, stock["length 600"])
    assert both["cached"] == claimable(600)


def test_equal_prompts_at_once(engine: Engine, stored: Stored, stock: Stock) -> None:
    prompt = PROMPTS["twice at once"]
    engine.forget()
    names = [engine.add(prompt), engine.add(prompt)]
    answers = engine.run()
    for name in names:
        same(answers[name], stock["twice at once"])
    eventually(lambda: stored(prompt) == len(prompt))


def test_a_crowd_that_does_not_fit_is_preempted(engine: Engine, stored: Stored, stock: Stock) -> None:
    crowd = [f"crowd {i}" for i in range(4)]
    for name in crowd:
        keep(engine, stored, PROMPTS[name])
    before = engine.metric("vllm:num_preemptions")
    names = [engine.add(PROMPTS[name], 140) for name in crowd]
    answers = engine.run()
    assert engine.metric("vllm:num_preemptions") > before
    for name, prompt in zip(names, crowd, strict=True):
        head = {key: answers[name][key][:ANSWER] for key in ("tokens", "best")}
        same(head, stock[prompt])


# Prompts begin alike by chance: the first token, and a byte or two.
def test_salted_prompts_meet_their_own_salt_alone(engine: Engine, stored: Stored, stock: Stock) -> None:
    prompt = PROMPTS["salted"]

    def answer(salt: str | None) -> int:
        engine.forget()
        got = engine.ask(prompt, salt=salt)
        same(got, stock["salted"])
        return int(got["cached"])

    assert answer("a") == 0
    eventually(lambda: answer("a") == claimable(300))
    assert answer("b") == 0
    assert stored(prompt) < BLOCK
    assert answer(None) == 0


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


@pytest.mark.parametrize("name", ["killed while loading", "killed while parked"])
def test_a_daemon_that_is_killed_while_it_loads(
    engine: Engine, daemon: Daemon, stored: Stored, stock: Stock, name: str
) -> None:
    prompt = PROMPTS[name]
    keep(engine, stored, prompt)
    request = engine.add(prompt)
    daemon.kill()  # the match may be answered, and the load is not
    same(engine.run()[request], stock[name])
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
