"""Tests requests whose stored prefix is attached: a real vLLM, a pool of few blocks, equal answers where
everything is read, and failures of single requests."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.vllm import engines
from tests.vllm.attached_engine import ANSWER, PROMPTS, Attached, attaching, equal, head, stored_of
from tests.vllm.attached_prompts import LONG_ANSWER, PREFIXES, QUESTIONS
from tests.vllm.conftest import Daemon
from tests.vllm.engines import BLOCK

LAYERS, KV_HEADS = 4, 2
POOL = 26  # one prefix fills it
LONG = ["a2", "b2", "c2"] * 4  # answered until the pool is too small for all


@pytest.fixture(scope="module")
def attached(stock: Any, daemon: Daemon, model: Path) -> Iterator[Attached]:
    del stock
    with attaching(daemon, model, POOL, {**PREFIXES, "short": PROMPTS["short"][: 3 * BLOCK]}) as engine:
        yield engine


@pytest.mark.parametrize("question", range(len(QUESTIONS)))
@pytest.mark.parametrize("prefix", PREFIXES)
def test_answers_are_equal_where_everything_is_read(
    attached: Attached, daemon: Daemon, stock: dict[str, Any], prefix: str, question: int
) -> None:
    name = f"{prefix}{question}"
    got = attached.one(name)
    equal(got, stock[name])
    assert got["cached"] == len(PREFIXES[prefix]) // BLOCK * BLOCK
    assert stored_of(daemon, PROMPTS[name]) < len(PREFIXES[prefix]) + BLOCK  # nothing behind it is kept


def test_a_crowd_runs_at_once(attached: Attached, stock: dict[str, Any]) -> None:
    """Each of the longest prefixes alone fills the pool."""
    attached.most = 0
    names = [f"a{q}" for q in (0, 2, 4, 5)] * 2 + [f"{p}{q}" for p in "bc" for q in (0, 4)] + ["ordinary", "short"]
    tokens = 3 * ANSWER  # the first ones go on until the last has begun
    requests = [attached.begin(name, tokens) for name in names]
    usage = []
    answers = attached.run(lambda: usage.append(attached.metric("vllm:kv_cache_usage_perc")))
    for name, request in zip(names, requests, strict=True):
        equal(answers[request], stock[name], tokens)
    assert attached.most == len(names)
    assert max(usage) < 1
    assert attached.metric("vllm:kv_cache_usage_perc") == 0


def test_the_preempted_are_attached_again(attached: Attached, stock: dict[str, Any]) -> None:
    before = attached.metric("vllm:num_preemptions")
    requests = [attached.begin(name, LONG_ANSWER) for name in LONG]
    requests += [attached.begin(name, LONG_ANSWER) for name in ("a3", "b3", "c3")]
    answers = attached.run()
    assert attached.metric("vllm:num_preemptions") > before
    for name, request in zip([*LONG, "a3", "b3", "c3"], requests, strict=True):
        equal(answers[request], stock[name], LONG_ANSWER)


def test_the_aborted_leave_the_others(attached: Attached, stock: dict[str, Any]) -> None:
    names = ["a0", "a1", "b0", "c3"]
    requests = [attached.begin(name) for name in names]
    attached.core.step()
    attached.core.abort_request([requests[0], requests[3]])
    answers = attached.run()
    assert set(answers) == {requests[1], requests[2]}
    equal(answers[requests[1]], stock["a1"])
    equal(answers[requests[2]], stock["b0"])
    assert attached.metric("vllm:kv_cache_usage_perc") == 0


@pytest.mark.parametrize("budget", [0.01, 0.02, 0.05])
def test_steps_stay_within_their_budget(attached: Attached, stock: dict[str, Any], budget: float) -> None:
    attached.settle()
    before = dict(attached.counts)
    got = attached.one("a0", LONG_ANSWER, budget=budget, estimator="none")
    assert got["end"] == "length"
    assert len(got["tokens"]) == LONG_ANSWER
    assert all(math.isfinite(p) for step in got["best"] for p in step.values())
    # The question attends exactly, so the first token is vLLM's own.
    equal({**got, **head(got, 1)}, stock["a0"], 1)

    attached.settle()
    read, steps = (attached.counts[n] - before.get(n, 0) for n in ("attached_read", "attached_steps"))
    assert steps == (LONG_ANSWER - 1) * LAYERS * KV_HEADS
    tokens = len(PREFIXES["a"]) // BLOCK * BLOCK
    assert 20 <= read / steps <= math.ceil(budget * tokens)


def test_approximate_blocks_serve_nobody_else(attached: Attached, stock: dict[str, Any]) -> None:
    attached.forget()
    attached.one("b3", LONG_ANSWER, k=16, estimator="none")  # 400 tokens and an answer behind the prefix
    loaded = attached.one("b3", attach=False)
    equal(loaded, stock["b3"])
    assert loaded["cached"] == len(PREFIXES["b"]) // BLOCK * BLOCK  # what was loaded, and no more
    attached.forget()


def test_what_vllm_has_itself_is_not_pinned(attached: Attached, stock: dict[str, Any]) -> None:
    attached.forget()
    PROMPTS["part"] = PREFIXES["b"][: 6 * BLOCK + 9]
    attached.one("part", 1, attach=False)  # vLLM has six blocks of it now
    got = attached.one("b0")
    equal(got, stock["b0"])
    assert got["cached"] == len(PREFIXES["b"]) // BLOCK * BLOCK
    attached.forget()


def test_policies_that_cannot_be_are_refused(attached: Attached) -> None:
    from vllm.exceptions import VLLMValidationError

    for policy, what in (
        ({"budgets": 0.1}, "no 'budgets'"),
        ({"mode": "everything"}, "mode"),
        ({"budget": "all"}, "budget"),
        ({"attach": 1}, "true or false"),
    ):
        with pytest.raises(VLLMValidationError, match=what):
            attached.begin("a0", **policy)
    assert not attached.core.has_unfinished_requests()


def test_what_only_the_store_can_refuse_fails_alone(attached: Attached, stock: dict[str, Any]) -> None:
    bad, good = attached.begin("a0", budget=0.0001), attached.begin("a1")
    answers = attached.run()
    assert answers[bad]["end"] == "error"
    equal(answers[good], stock["a1"])


def test_a_prompt_larger_than_the_cache_does_not_wait_for_ever(attached: Attached, stock: dict[str, Any]) -> None:
    PROMPTS["huge"] = engines.text(40000, POOL * BLOCK + 5)
    sampling = engines.sampling(ANSWER)
    sampling.prompt_logprobs = 1  # vLLM computes every token, and takes what the connector finds for nothing
    sampling.skip_reading_prefix_cache = True
    attached.core.add_request("all of it", {"prompt_token_ids": PROMPTS["huge"]}, sampling)
    huge, good = attached.begin("huge"), attached.begin("c0")
    answers = attached.run()
    assert answers["all of it"]["end"] == answers[huge]["end"] == "error"
    equal(answers[good], stock["c0"])


def test_a_daemon_that_is_killed_while_it_steps(attached: Attached, daemon: Daemon, stock: dict[str, Any]) -> None:
    requests = [attached.begin("a0", LONG_ANSWER), attached.begin("ordinary", LONG_ANSWER)]
    requests.append(attached.begin("b4", LONG_ANSWER, budget=0.05, estimator="none"))
    steps = 0

    def kill() -> None:
        nonlocal steps
        steps += 1
        if steps == 10:
            daemon.kill()

    answers = attached.run(kill)
    assert [answers[request]["end"] for request in requests] == ["error", "length", "error"]
    equal(answers[requests[1]], stock["ordinary"], LONG_ANSWER)
    daemon.start()
    equal(attached.one("a0"), stock["a0"])
    assert attached.metric("vllm:kv_cache_usage_perc") == 0
