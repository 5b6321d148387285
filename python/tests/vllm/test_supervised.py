"""Tests an engine whose own daemon, in a directory, is killed: prompts are computed meanwhile, and the daemon comes
back with what it had, without a new start of the engine."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import prefixd
from tests.vllm import engines
from tests.vllm.conftest import ANSWER, PROMPTS, Engine, claimable, eventually, own_model
from tests.vllm.engines import DAEMON, same

Stock = dict[str, dict[str, Any]]


class Directory:
    """The engine's directory, and the daemon that it has there."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def pid(self) -> int:
        return int((self.folder / "lock").read_text())

    def kill(self) -> None:
        os.kill(self.pid(), signal.SIGKILL)

    def stored(self, prompt: list[int]) -> int:
        try:
            with prefixd.connect(f"unix:{self.folder / 'prefixd.sock'}", reconnect=0) as store:
                return store.match(own_model(store), prompt).n_tokens
        except prefixd.Unavailable:
            return 0


@pytest.fixture(scope="module")
def answers(model: Path) -> Stock:
    """What vLLM answers by itself."""
    prompts = {name: PROMPTS[name] for name in ("length 600", "killed while storing")}
    given = engines.in_a_process(model, list(prompts.values()), ANSWER, num_gpu_blocks_override=64)
    return dict(zip(prompts, given, strict=True))


@contextmanager
def supervised(model: Path, folder: Path) -> Iterator[tuple[Any, Directory]]:
    transfer = engines.transfer(str(folder), daemon=DAEMON, match_seconds=60, call_seconds=20)
    llm = engines.engine(model, kv_transfer_config=transfer, max_model_len=17 * engines.BLOCK)
    yield llm, Directory(folder)
    llm.llm_engine.engine_core.shutdown()


def test_the_daemon_of_an_engine_comes_back(tmp_path: Path, model: Path, answers: Stock) -> None:
    name = "length 600"
    prompt = PROMPTS[name]
    with supervised(model, tmp_path / "kv") as (llm, own):
        engine = Engine(llm)

        def ask() -> int:
            engine.forget()
            got = engine.ask(prompt)
            same(got, answers[name])
            return int(got["cached"])

        assert ask() == 0
        eventually(lambda: own.stored(prompt) == len(prompt))
        for _ in range(2):
            assert ask() == claimable(len(prompt))
            before = own.pid()
            own.kill()
            ask()  # computed, or already found again
            eventually(lambda: ask() == claimable(len(prompt)))
            assert own.pid() != before
        # In the middle of a prompt: nothing of it is stored, and it is once it comes again.
        engine.forget()
        request = engine.add(PROMPTS["killed while storing"])
        engine.core.step()
        own.kill()
        same(engine.run()[request], answers["killed while storing"])

        def stored() -> bool:
            engine.forget()
            same(engine.ask(PROMPTS["killed while storing"]), answers["killed while storing"])
            return own.stored(PROMPTS["killed while storing"]) == len(PROMPTS["killed while storing"])

        eventually(stored)
