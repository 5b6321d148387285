"""Tests the connector inside a real vLLM: equal answers whatever was stored."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.vllm.conftest import ANSWER, CROWD, LENGTHS, PROMPTS, Engine, claimable, eventually, keep
from tests.vllm.engines import BLOCK, same

Stock = dict[str, dict[str, Any]]
Stored = Callable[[list[int]], int]


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


def test_eight_prefixes_in_a_batch(engine: Engine, stored: Stored, stock: Stock) -> None:
    crowd = [f"one of eight {i}" for i in range(8)]
    for name in crowd:
        keep(engine, stored, PROMPTS[name])
    names = [engine.add(PROMPTS[name]) for name in crowd]
    answers = engine.run()
    for name, prompt in zip(names, crowd, strict=True):
        same(answers[name], stock[prompt])
        assert answers[name]["cached"] == BLOCK


def test_a_crowd_that_does_not_fit_is_preempted(engine: Engine, stored: Stored, stock: Stock) -> None:
    crowd = [f"crowd {i}" for i in range(CROWD)]
    for name in crowd:
        keep(engine, stored, PROMPTS[name])
    before = engine.metric("vllm:num_preemptions")
    names = [engine.add(PROMPTS[name], 140) for name in crowd]
    answers = engine.run()
    assert engine.metric("vllm:num_preemptions") > before
    for name, prompt in zip(names, crowd, strict=True):
        head = {key: answers[name][key][:ANSWER] for key in ("tokens", "best")}
        same(head, stock[prompt])


@pytest.mark.parametrize("no", [False, "false"])
def test_a_prompt_that_is_not_to_be_stored_is_not(engine: Engine, stored: Stored, no: object) -> None:
    prompt, other = ([first, *PROMPTS["salted"]] for first in ((7, 9) if no else (8, 10)))
    engine.ask(prompt, own={"store": no})
    engine.ask(other)
    eventually(lambda: stored(other) == len(other))  # puts come one after the other
    assert stored(prompt) < BLOCK
    engine.forget()
    engine.ask(prompt, own={"store": True})
    eventually(lambda: stored(prompt) == len(prompt))


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
