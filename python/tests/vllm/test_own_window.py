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
MEMORY = 256  # the least
POOL = 13  # what the longest prefix needs to be computed once
USABLE = POOL - 1


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    """One that has no longer prefixes, of which less would be handed over."""
    own = Daemon(tmp_path_factory.mktemp("kv"))
    yield own
    own.stop()


@pytest.fixture(scope="module")
def attached(stock: Any, daemon: Daemon, model: Path) -> Iterator[Attached]:
    del stock
    prefixes = {name: PREFIXES[name] for name in ("b", "c")}
    with attaching(daemon, model, POOL, prefixes, own_window=WINDOW, own_memory_tokens=MEMORY) as engine:
        yield engine


def statistic(daemon: Daemon, name: str) -> int:
    with daemon.store() as store:
        return int(store.stats()[name])


def own_tokens(name: str, answer: int) -> int:
    """Tokens that a request computes behind its prefix."""
    return len(PROMPTS[name]) - len(PREFIXES[name[0]]) // BLOCK * BLOCK + answer - 1


def test_an_answer_may_be_longer_than_the_cache(attached: Attached, daemon: Daemon, stock: dict[str, Any]) -> None:
    """The question alone has more tokens than the window; they leave with the first step. More than the daemon keeps
    in memory goes to its disk."""
    before, usage = dict(attached.counts), []
    request = attached.begin("b3", LONGER["b3"])
    answers = attached.run(lambda: usage.append(attached.metric("vllm:kv_cache_usage_perc")))
    equal(answers[request], stock["b3"], LONGER["b3"])
    own = own_tokens("b3", LONGER["b3"])
    assert own > USABLE * BLOCK
    blocks = [round(share * USABLE) for share in usage]
    assert max(blocks[LONGER["b3"] // 4 :]) <= math.ceil(WINDOW / BLOCK) + 1
    attached.settle()
    assert attached.counts["handed_tokens"] - before.get("handed_tokens", 0) == own - WINDOW
    assert attached.metric("vllm:kv_cache_usage_perc") == 0
    assert statistic(daemon, "sessions") == 0
    assert statistic(daemon, "own_moved_tokens") >= own - WINDOW - MEMORY - BLOCK


def test_several_at_once_beside_others(attached: Attached, stock: dict[str, Any]) -> None:
    names = ["c0", "b2", "ordinary"]  # the last one runs on in blocks that the first one gave back
    tokens = [LONGER["c0"], LONG_ANSWER, LONGER["ordinary"]]
    attached.most = 0
    requests = [attached.begin(name, n) for name, n in zip(names, tokens, strict=True)]
    answers = attached.run()
    for name, n, request in zip(names, tokens, requests, strict=True):
        equal(answers[request], stock[name], n)
    assert attached.most == len(names)


def test_the_preempted_begin_again(attached: Attached, stock: dict[str, Any]) -> None:
    """What was handed over is computed again."""
    before = attached.metric("vllm:num_preemptions")
    attached.settle()
    handed = attached.counts["handed_tokens"]
    requests = [attached.begin("c0", LONGER["c0"]) for _ in range(5)]
    answers = attached.run()
    assert attached.metric("vllm:num_preemptions") > before
    for request in requests:
        equal(answers[request], stock["c0"], LONGER["c0"])
    attached.settle()
    once = len(requests) * (own_tokens("c0", LONGER["c0"]) - WINDOW)
    assert attached.counts["handed_tokens"] - handed > once
    assert attached.metric("vllm:kv_cache_usage_perc") == 0


def test_under_a_budget(attached: Attached, stock: dict[str, Any]) -> None:
    attached.settle()
    handed = attached.counts["handed_tokens"]
    got = attached.one("c0", LONGER["c0"], budget=0.05)
    assert got["end"] == "length"
    assert len(got["tokens"]) == LONGER["c0"]
    assert all(math.isfinite(p) for step in got["best"] for p in step.values())
    equal({**got, **head(got, 1)}, stock["c0"], 1)
    attached.settle()
    assert attached.counts["handed_tokens"] - handed == own_tokens("c0", LONGER["c0"]) - WINDOW


def test_a_daemon_that_starts_again_has_lost_what_it_was_given(
    attached: Attached, daemon: Daemon, stock: dict[str, Any]
) -> None:
    """Without it the answer would be another, so the request fails."""
    requests = [attached.begin("c0", LONGER["c0"]), attached.begin("ordinary", LONGER["ordinary"])]
    steps = 0

    def restart() -> None:
        nonlocal steps
        steps += 1
        if steps == WINDOW + 50:
            daemon.kill()
            daemon.start()

    answers = attached.run(restart)
    assert [answers[request]["end"] for request in requests] == ["error", "length"]
    equal(answers[requests[1]], stock["ordinary"], LONGER["ordinary"])
    equal(attached.one("c0", LONG_ANSWER), stock["c0"], LONG_ANSWER)
