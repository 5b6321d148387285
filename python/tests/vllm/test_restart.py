"""Tests engines that come and go, with a daemon that the connector starts in a directory, and with two
ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.vllm import engines
from tests.vllm.conftest import ANSWER, PROMPTS, claimable


def test_a_restart_answers_from_what_is_stored(
    tmp_path: Path, model: Path, stock: dict[str, dict[str, Any]]
) -> None:
    names = ["length 129", "length 600"]
    whole = [claimable(129), claimable(600)]

    def run(ranks: int, stored: int, **extra: Any) -> list[int]:
        config = engines.transfer(str(tmp_path / "kv"), daemon=engines.DAEMON, match_seconds=60, **extra)
        answers = engines.in_a_process(
            model, [PROMPTS[name] for name in names], ANSWER, (tmp_path / "kv", stored),
            kv_transfer_config=config, tensor_parallel_size=ranks,
        )  # fmt: skip
        for name, answer in zip(names, answers, strict=True):
            engines.same(answer, stock[name])
        return [answer["cached"] for answer in answers]

    assert run(1, stored=2) == [0, 0]
    assert run(2, stored=2) == whole  # a prefix knows no ranks: each loads its heads
    # Other weights under the same prompts: nothing of it is theirs. Two ranks store one prefix.
    assert run(2, stored=4, weights="others") == [0, 0]
    assert run(1, stored=4, weights="others") == whole
