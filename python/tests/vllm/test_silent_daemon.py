"""Tests an engine whose daemon is away from the start, falls silent, or has room for one model: it waits once
and not for each prompt, answers stay equal, and the daemon is found again. And what a failed load leaves to a
request that shares its blocks, where many steps are between."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.vllm import engines
from tests.vllm.conftest import PROMPTS, Daemon, Engine, claimable, eventually, keep, own_model
from tests.vllm.engines import same
from tests.vllm.test_failures import damage

Stock = dict[str, dict[str, Any]]
CALL = 2.0  # seconds; a silent daemon costs a connection 5 more
ONE_WAIT = CALL + 5
PROMPT = 1.5  # what a short prompt takes on a busy machine


@pytest.fixture(scope="module")
def silent(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    own = Daemon(tmp_path_factory.mktemp("silent"), "--max-models", "1", start=False)
    yield own
    own.wake()
    own.stop()


@pytest.fixture(scope="module")
def own_engine(stock: Stock, silent: Daemon, model: Path) -> Iterator[Engine]:
    """Starts while there is no daemon. Its steps are short, so that a prompt takes many."""
    transfer = engines.transfer(
        silent.address, match_seconds=CALL, call_seconds=CALL, commit_seconds=CALL, park_tokens=1400
    )
    llm = engines.engine(model, kv_transfer_config=transfer, max_num_batched_tokens=64, max_num_seqs=8)
    engine = Engine(llm)
    name = "silent 5"
    same(engine.ask(PROMPTS[name]), stock[name])
    silent.start()
    yield engine
    llm.llm_engine.engine_core.shutdown()


@pytest.fixture
def stored(silent: Daemon, own_engine: Engine) -> Iterator[Callable[[list[int]], int]]:
    """How many tokens the daemon has of a prompt. Afterwards the engine finds it again, whatever became of it."""

    def tokens(prompt: list[int]) -> int:
        with silent.store() as store:
            if not store.list_models().models:
                return 0
            return store.match(own_model(store), prompt).n_tokens

    yield tokens
    silent.wake()
    silent.ensure()
    PROMPTS["once more"] = engines.text(60000, 150)
    found_again(own_engine, PROMPTS["once more"])


def found_again(engine: Engine, prompt: list[int]) -> None:
    """Asks until the prompt is stored, and comes back."""

    def loaded() -> bool:
        engine.forget()
        return bool(engine.ask(prompt)["cached"] == claimable(len(prompt)))

    eventually(loaded)


def test_an_engine_that_started_without_a_daemon_finds_it(
    own_engine: Engine, stored: Callable[[list[int]], int], stock: Stock
) -> None:
    prompt = PROMPTS["silent 5"]
    found_again(own_engine, prompt)
    own_engine.forget()
    again = own_engine.ask(prompt)
    same(again, stock["silent 5"])
    assert again["cached"] == claimable(len(prompt))


def test_a_salt_needs_no_model_of_its_own(
    own_engine: Engine, silent: Daemon, stored: Callable[[list[int]], int], stock: Stock
) -> None:
    name = "silent 4"

    def answer(salt: str) -> int:
        own_engine.forget()
        got = own_engine.ask(PROMPTS[name], salt=salt)
        same(got, stock[name])
        return int(got["cached"])

    for salt in ("a", "b", "c"):  # the daemon has room for one model
        assert answer(salt) == 0
        eventually(lambda salt=salt: answer(salt) == claimable(len(PROMPTS[name])))
    with silent.store() as store:
        assert store.stats()["models"] == 1


def test_a_silent_daemon_is_waited_for_once(
    own_engine: Engine, silent: Daemon, stored: Callable[[list[int]], int], stock: Stock
) -> None:
    names = [f"silent {i}" for i in range(4)]
    for name in names[:2]:
        keep(own_engine, stored, PROMPTS[name])
    silent.silence()
    begun = time.monotonic()
    same(own_engine.ask(PROMPTS[names[0]]), stock[names[0]])
    assert time.monotonic() - begun < ONE_WAIT + PROMPT
    begun = time.monotonic()
    for name in 2 * names:
        own_engine.forget()
        same(own_engine.ask(PROMPTS[name]), stock[name])
    assert time.monotonic() - begun < 8 * PROMPT  # a wait for each would be 16 s
    assert own_engine.counts["unreachable_prompts"] >= 8
    silent.wake()
    found_again(own_engine, PROMPTS[names[3]])
    own_engine.forget()
    assert own_engine.ask(PROMPTS[names[0]])["cached"] == claimable(300)


@pytest.mark.parametrize("name", ["silent load", "silent parked"])
def test_a_daemon_that_falls_silent_while_it_loads(
    own_engine: Engine, silent: Daemon, stored: Callable[[list[int]], int], stock: Stock, name: str
) -> None:
    keep(own_engine, stored, PROMPTS[name])
    silenced = silent.when_grows("sessions_total", silent.silence)
    begun = time.monotonic()
    same(own_engine.ask(PROMPTS[name]), stock[name])
    silenced()
    assert time.monotonic() - begun < 2 * ONE_WAIT + 30 * PROMPT


def test_a_daemon_that_falls_silent_while_it_stores(
    own_engine: Engine, silent: Daemon, stored: Callable[[list[int]], int], stock: Stock
) -> None:
    silenced = silent.when_grows(lambda stats: sum(one["reserved_bytes"] for one in stats["tenants"]), silent.silence)
    begun = time.monotonic()
    own_engine.forget()
    same(own_engine.ask(PROMPTS["silent put"]), stock["silent put"])
    silenced()
    assert time.monotonic() - begun < 2 * ONE_WAIT + 12 * PROMPT


def test_who_shares_damaged_rows_of_a_request_that_ends(
    own_engine: Engine, silent: Daemon, stored: Callable[[list[int]], int], stock: Stock
) -> None:
    """Two equal prompts of one step: the second gets the blocks that the first loads, and vLLM leaves it to the
    first to compute them again."""
    name = "damaged twice"
    prompt = PROMPTS[name]
    keep(own_engine, stored, prompt)
    damage(silent, prompt)
    found_again(own_engine, engines.text(61000, 150))
    own_engine.forget()
    before = own_engine.counts["failed_loads"]
    first, second = own_engine.add(prompt), own_engine.add(prompt)
    while own_engine.counts["failed_loads"] == before:
        own_engine.core.step()
    own_engine.core.abort_request([first])
    same(own_engine.run()[second], stock[name])
    same(own_engine.ask(prompt), stock[name])  # out of vLLM's own cache
    found_again(own_engine, prompt)
    own_engine.forget()
    loaded = own_engine.ask(prompt)
    same(loaded, stock[name])
    assert loaded["cached"] == claimable(len(prompt))
