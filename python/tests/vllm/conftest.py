"""Provides one engine with the connector, its daemon, and what vLLM answers without either."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import prefixd
from tests.vllm import attached_prompts, engines
from tests.vllm.engines import BLOCK, DAEMON, ROOT

ANSWER = 8
PARK = 384  # longer loads are parked: both ways are met below
# Around one, two and sixteen blocks, and longer than a step.
LENGTHS = (127, 128, 129, 255, 256, 257, 600, 2047, 2048, 2049, 2050)
CROWD = 4
PROMPTS = {f"length {n}": engines.text(100 * n, n) for n in LENGTHS}
_HALF = engines.text(4000, 300)
PROMPTS |= {
    "first branch": _HALF + engines.text(9000, 150)[1:],
    "second branch": _HALF + engines.text(11000, 250)[1:],
    "damaged": engines.text(12000, 300),
    "damaged together": engines.text(16600, 300),
    "beside the damaged": engines.text(16600, 256) + engines.text(17400, 100)[1:],
    "damaged and parked": engines.text(13000, 500),
    "killed while loading": engines.text(13600, 380),
    "killed while parked": engines.text(14000, 450),
    "killed while storing": engines.text(15000, 550),
    "aborted": engines.text(16000, 550),
    "salted": engines.text(17000, 300),
    "twice at once": engines.text(18000, 400),
    "too large": engines.text(18500, 450),
    **{f"crowd {i}": engines.text(19000 + 600 * i, 500) for i in range(CROWD)},
    **{f"one of eight {i}": engines.text(30000 + 600 * i, 200) for i in range(8)},
    "damaged twice": engines.text(36000, 1200),
    "silent load": engines.text(45000, 1100),
    "silent parked": engines.text(47000, 1700),
    "silent put": engines.text(49000, 700),
    **{f"silent {i}": engines.text(51000 + 600 * i, 300) for i in range(6)},
}


class Daemon:
    """A daemon that tests may kill, silence, and start again on the same store."""

    def __init__(self, folder: Path, *more: str, start: bool = True) -> None:
        self.folder, self.address = folder, f"unix:{folder / 'socket'}"
        self._more = more
        self.process: subprocess.Popen[bytes] | None = None
        if start:
            self.start()

    def start(self, *more: str) -> None:
        program = Path(os.environ.get("PREFIXD_BUILD", ROOT / "build/release")) / "bin/prefixd"
        read, write = os.pipe()
        command = [str(program), "--dir", str(self.folder / "store"), "--socket", str(self.folder / "socket"), *DAEMON]
        command.append("--warm-up=false")  # rows that a test damages are the engine's to find
        with (self.folder / "log").open("ab") as log:
            self.process = subprocess.Popen(
                [*command, *self._more, *more, "--ready-fd", str(write)], pass_fds=[write], stdout=log, stderr=log
            )
        os.close(write)
        with os.fdopen(read) as ready:
            assert ready.read().startswith("prefixd ready"), (self.folder / "log").read_text()

    def ensure(self) -> None:
        assert self.process is not None
        if self.process.poll() is not None:
            self.start()

    def kill(self) -> None:
        assert self.process is not None
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()

    def silence(self) -> None:
        """Its connections stay, and nobody answers."""
        assert self.process is not None
        self.process.send_signal(signal.SIGSTOP)

    def wake(self) -> None:
        assert self.process is not None
        self.process.send_signal(signal.SIGCONT)

    def when_grows(self, counter: str | Callable[[Any], int], act: Callable[[], None]) -> Callable[[], None]:
        """Acts as soon as this statistic has grown, from a thread; the result waits for it."""
        count = counter if callable(counter) else lambda stats: stats[counter]
        ended: list[BaseException | None] = []

        def watch() -> None:
            try:
                with self.store() as store:
                    before, end = count(store.stats()), time.monotonic() + 120
                    watching.set()
                    while count(store.stats()) <= before:
                        assert time.monotonic() < end, "the moment did not come"
                act()
                ended.append(None)
            except BaseException as error:
                ended.append(error)
                raise

        watching = threading.Event()
        thread = threading.Thread(target=watch)
        thread.start()
        assert watching.wait(60)

        def wait() -> None:
            thread.join()
            assert ended == [None]

        return wait

    def stop(self) -> None:
        assert self.process is not None
        self.process.terminate()
        self.process.wait(120)

    def store(self) -> prefixd.Store:
        return prefixd.connect(self.address)


class Engine:
    """An engine whose requests tests drive step by step."""

    def __init__(self, llm: Any) -> None:
        self.llm, self.core = llm, llm.llm_engine
        self._next = 0
        self.counts: Counter[str] = Counter()  # what the connector counted
        record = self.core.logger_manager.record

        def counting(*arguments: Any, **given: Any) -> None:
            stats = given.get("scheduler_stats")
            if stats is not None and stats.kv_connector_stats:
                self.counts.update(stats.kv_connector_stats)
            record(*arguments, **given)

        self.core.logger_manager.record = counting

    def add(
        self, prompt: list[int], tokens: int = ANSWER, salt: str | None = None, own: dict[str, Any] | None = None
    ) -> str:
        """`own`: the request's kv_transfer_params["prefixd"]."""
        self._next += 1
        name = f"r{self._next}"
        given: dict[str, Any] = {"prompt_token_ids": prompt}
        if salt is not None:
            given["cache_salt"] = salt
        sampling = engines.sampling(tokens)
        if own is not None:
            sampling.extra_args = {"kv_transfer_params": {"prefixd": own}}
        self.core.add_request(name, given, sampling)
        return name

    def run(self, after_step: Callable[[], None] = lambda: None) -> dict[str, dict[str, Any]]:
        """Steps until nothing is left to do; returns the answers by request."""
        answers = {}
        while self.core.has_unfinished_requests():
            for output in self.core.step():
                if output.finished:
                    answers[output.request_id] = engines.answer(output)
            after_step()
        return answers

    def ask(
        self, prompt: list[int], tokens: int = ANSWER, salt: str | None = None, own: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        name = self.add(prompt, tokens, salt, own)
        return self.run()[name]

    def forget(self) -> None:
        """Empties vLLM's own prefix cache."""
        assert self.llm.reset_prefix_cache()

    def metric(self, name: str) -> float:
        return sum(m.value for m in self.llm.get_metrics() if m.name == name)


def eventually(what: Callable[[], Any], seconds: float = 120) -> Any:
    """Waits until `what` answers something true, and returns it."""
    end = time.monotonic() + seconds
    while not (found := what()):
        assert time.monotonic() < end, "this did not happen"
        time.sleep(0.02)
    return found


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return engines.tiny(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def stock(model: Path) -> dict[str, dict[str, Any]]:
    """What vLLM answers by itself, with room for everything."""
    prompts = PROMPTS | attached_prompts.PROMPTS
    tokens = [ANSWER] * len(PROMPTS)
    tokens += [attached_prompts.LONGER.get(name, attached_prompts.LONG_ANSWER) for name in attached_prompts.PROMPTS]
    answers = engines.in_a_process(
        model, list(prompts.values()), tokens, max_model_len=4096, num_gpu_blocks_override=64
    )
    return dict(zip(prompts, answers, strict=True))


@pytest.fixture(scope="session")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    own = Daemon(tmp_path_factory.mktemp("kv"))
    yield own
    own.stop()


@pytest.fixture(scope="session")
def engine(stock: Any, daemon: Daemon, model: Path) -> Iterator[Engine]:
    """The engine of most tests; `stock` comes first, so that two are never in memory."""
    del stock
    llm = engines.engine(
        model,
        kv_transfer_config=engines.transfer(daemon.address, match_seconds=60, park_tokens=PARK),
    )
    yield Engine(llm)
    llm.llm_engine.engine_core.shutdown()


@pytest.fixture(autouse=True)
def running(request: pytest.FixtureRequest) -> Iterator[None]:
    """A test that fails without a daemon leaves one to the next."""
    yield
    if "daemon" in request.fixturenames:
        request.getfixturevalue("daemon").ensure()


@pytest.fixture
def stored(daemon: Daemon, engine: Engine) -> Callable[[list[int]], int]:
    """Asks the daemon how many tokens of a prompt it has, for the engine's model."""

    def tokens(prompt: list[int]) -> int:
        with daemon.store() as store:
            return store.match(own_model(store), prompt).n_tokens

    return tokens


def keep(engine: Engine, stored: Callable[[list[int]], int], prompt: list[int]) -> dict[str, Any]:
    """Computes a prompt, waits until it is stored, and lets vLLM forget it."""
    engine.forget()
    answer = engine.ask(prompt)
    eventually(lambda: stored(prompt) == len(prompt))
    engine.forget()
    return answer


def own_model(store: prefixd.Store) -> str:
    """The name under which the engine's prompts are stored."""
    (model,) = store.list_models().models
    return model.name


def claimable(n: int) -> int:
    """Whole blocks of a prompt, with at least one token left to compute."""
    return (n - 1) // BLOCK * BLOCK
