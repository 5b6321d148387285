"""Tests engines that come and go, with a daemon that the connector starts in a directory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.vllm import engines
from tests.vllm.conftest import ANSWER, PROMPTS, claimable


def test_a_restart_answers_from_what_is_stored(tmp_path: Path, stock: dict[str, dict[str, Any]]) -> None:
    names = ["length 129", "length 600"]
    prompts = [PROMPTS[name] for name in names]

    def run(**extra: Any) -> list[int]:
        config = engines.transfer(str(tmp_path / "kv"), daemon=engines.DAEMON, match_seconds=60, **extra)
        answers = engines.in_a_process(tmp_path / "model", prompts, ANSWER, kv_transfer_config=config)
        for name, answer in zip(names, answers, strict=True):
            engines.same(answer, stock[name])
        return [answer["cached"] for answer in answers]

    assert run() == [0, 0]
    assert run() == [claimable(129), claimable(600)]
    # Other weights under the same prompts: nothing of it is theirs.
    assert run(weights="others") == [0, 0]


def test_two_ranks_store_one_prefix_and_load_their_heads(tmp_path: Path, stock: dict[str, dict[str, Any]]) -> None:
    names = ["length 129", "length 600"]
    prompts = [PROMPTS[name] for name in names]

    def run(ranks: int) -> list[int]:
        config = engines.transfer(str(tmp_path / "kv"), daemon=engines.DAEMON, match_seconds=60)
        answers = engines.in_a_process(
            tmp_path / "model", prompts, ANSWER, kv_transfer_config=config, tensor_parallel_size=ranks
        )
        for name, answer in zip(names, answers, strict=True):
            engines.same(answer, stock[name])
        return [answer["cached"] for answer in answers]

    assert run(2) == [0, 0]
    assert run(2) == [claimable(129), claimable(600)]
    assert run(1) == [claimable(129), claimable(600)]  # a prefix knows no ranks
