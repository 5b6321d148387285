"""Tests requests that generate more than the engine's cache holds: all own tokens but a window leave their
blocks for the request's session."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.vllm.attached_engine import PROMPTS, Attached, attaching, equal, head
from tests.vllm.attached_prompts import LONG_ANSWER, LONGER, PREFIXES
from tests.vllm.conftest import Daemon
from tests.vllm.engines import BLOCK

WINDOW = 200  # no whole blocks
POOL = 13  # what the longest prefix needs to be computed once
USABLE = POOL - 1


@pytest.fixture(scope="module")
def attached(stock: Any, daemon: Daemon, model: Path) -> Iterator[Attached]:
    del stock
    prefixes = {name: PREFIXES[name] for name in ("b", "c")}
    with attaching(daemon, model, POOL, prefixes, own_window=WINDOW) as engine:
        yield engine


def sessions(daemon: Daemon) -> int:
    with daemon.store() as store:
        return int(store.stats()["sessions"])


def test_an_answer_may_be_longer_than_the_cache(attached: Attached, daemon: Daemon, stock: dict[str, Any]) -> None:
    """The question alone has more tokens than the window; they leave with the first step."""
    before, usage = dict(attached.counts), []
    request = attached.begin("b3", LONGER["b3"])
    answers = attached.run(lambda: usage.append(attached.metric("vllm:kv_cache_usage_perc")))
    equal(answers[request], stock["b3"], LONGER["b3"])
    own = len(PROMPTS["b3"]) - len(PREFIXES["b"]) // BLOCK * BLOCK + LONGER["b3"] - 1
    assert own > USABLE * BLOCK
    blocks = [round(share * USABLE) for share in usage]
    assert max(blocks[LONGER["b3"] // 4 :]) <= math.ceil(WINDOW / BLOCK) + 1
    attached.settle()
    assert attached.counts["handed_tokens"] - before.get("handed_tokens", 0) == own - WINDOW
    assert attached.metric("vllm:kv_cache_usage_perc") == 0
    assert sessions(daemon) == 0


def test_several_at_once_beside_others(attached: Attached, stock: dict[str, Any]) -> None:
    names = ["c0", "b2", "ordinary", "c0"]
    tokens = [LONGER["c0"], LONG_ANSWER, LONG_ANSWER, LONGER["c0"]]
    requests = [attached.begin(name, n) for name, n in zip(names, tokens, strict=True)]
    answers = attached.run()
    for name, n, request in zip(names, tokens, requests, strict=True):
        equal(answers[request], stock[name], n)


def test_the_preempted_begin_again(attached: Attached, stock: dict[str, Any]) -> None:
    """What was handed over is computed again."""
    before = attached.metric("vllm:num_preemptions")
    names = ["c0", "c3", "b4", "c2", "b2", "c4", "b0", "b3"]
    requests = [attached.begin(name, LONG_ANSWER) for name in names]
    answers = attached.run()
    assert attached.metric("vllm:num_preemptions") > before
    for name, request in zip(names, requests, strict=True):
        equal(answers[request], stock[name], LONG_ANSWER)
    assert attached.metric("vllm:kv_cache_usage_perc") == 0


def test_under_a_budget(attached: Attached, stock: dict[str, Any]) -> None:
    got = attached.one("c0", LONGER["c0"], budget=0.05)
    assert got["end"] == "length"
    assert len(got["tokens"]) == LONGER["c0"]
    assert all(math.isfinite(p) for step in got["best"] for p in step.values())
    equal({**got, **head(got, 1)}, stock["c0"], 1)


def test_a_daemon_that_is_killed_takes_what_it_has_with_it(
    attached: Attached, daemon: Daemon, stock: dict[str, Any]
) -> None:
    requests = [attached.begin("c0", LONGER["c0"]), attached.begin("ordinary", LONG_ANSWER)]
    steps = 0

    def kill() -> None:
        nonlocal steps
        steps += 1
        if steps == WINDOW + 50:
            daemon.kill()

    answers = attached.run(kill)
    assert [answers[request]["end"] for request in requests] == ["error", "length"]
    daemon.start()
    equal(attached.one("c0", LONG_ANSWER), stock["c0"], LONG_ANSWER)
