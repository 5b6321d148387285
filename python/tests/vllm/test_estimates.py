"""Tests that a stored prompt is computed where the engine is faster than the store."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.vllm import engines
from tests.vllm.conftest import PROMPTS, Daemon, Engine, claimable, eventually, own_model
from tests.vllm.engines import same

NAME, N = "length 600", 600


@pytest.fixture
def own_daemon(tmp_path: Path) -> Iterator[Daemon]:
    """No other test has measured what its disk takes."""
    daemon = Daemon(tmp_path)
    yield daemon
    daemon.stop()


def test_a_stored_prompt_is_computed_where_that_is_faster(
    stock: dict[str, dict[str, Any]], own_daemon: Daemon, model: Path
) -> None:
    prompt, want = PROMPTS[NAME], stock[NAME]
    options = {"match_seconds": 60, "compute_when_faster": True, "prefill_tokens_per_second": 1e15}
    llm = engines.engine(model, kv_transfer_config=engines.transfer(own_daemon.address, **options))
    engine = Engine(llm)
    try:
        same(engine.ask(prompt), want)
        with own_daemon.store() as store:
            eventually(lambda: store.match(own_model(store), prompt).n_tokens == N)
            # The connector's put streamed the prefill: its rate is known, besides the one that is given.
            learnt = store.match(own_model(store), prompt).estimate
            assert learnt.recompute.source == "learnt"
            assert learnt.prefill_tokens_per_second > 0
            # How long restoring takes nobody knows yet: what is stored is loaded, which shows it.
            for _ in range(2):
                estimate = store.match(own_model(store), prompt).estimate
                if estimate.restore.known:
                    break
                engine.forget()
                loaded = engine.ask(prompt)
                same(loaded, want)
                assert loaded["cached"] == claimable(N)
            assert store.match(own_model(store), prompt).estimate.restore.source == "measured"
            before = store.stats()["advised_recompute"]
            for _ in range(2):
                engine.forget()
                computed = engine.ask(prompt)
                same(computed, want)
                assert computed["cached"] == 0
            assert store.stats()["advised_recompute"] == before + 2
        assert engine.counts["computed_instead"] == 2
        assert engine.counts["computed_instead_tokens"] == 2 * claimable(N)
        assert engine.counts["failed_loads"] == 0
    finally:
        llm.llm_engine.engine_core.shutdown()
