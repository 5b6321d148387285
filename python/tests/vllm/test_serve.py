"""Tests vLLM's API server with the connector and a daemon: chats go on over restarts of either."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.vllm.conftest import Daemon, eventually
from tests.vllm.engines import BLOCK, ENVIRONMENT, ROOT

MODEL = ROOT / "build/models/smollm2"
EXAMPLES = ROOT / "examples/python"
ATTACHED = 2048  # tokens, by default: shorter prefixes are loaded


def free_port() -> int:
    with socket.socket() as own:
        own.bind(("127.0.0.1", 0))
        return int(own.getsockname()[1])


@contextmanager
def serving(daemon: Daemon, port: int, log: Path, *options: str) -> Iterator[None]:
    """The example's server, without a prefix cache of its own: what is cached comes from the daemon."""
    command = [EXAMPLES / "vllm_serve.sh", *options, MODEL, daemon.address, "--port", str(port)]
    with log.open("ab") as out:
        server = subprocess.Popen(
            [*command, "--host", "127.0.0.1", "--no-enable-prefix-caching"],
            stdout=out,
            stderr=out,
            env={**os.environ, **ENVIRONMENT},
            start_new_session=True,
        )

    def ready() -> bool:
        assert server.poll() is None, log.read_text()[-8000:]
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=2) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False

    try:
        eventually(ready, 600)
        yield
    finally:
        server.send_signal(signal.SIGINT)
        try:
            server.wait(120)
        except subprocess.TimeoutExpired:
            os.killpg(server.pid, signal.SIGKILL)
            raise


@pytest.mark.skipif(not MODEL.exists(), reason="make model-smollm2 fetches the weights")
def test_chats_survive_restarts_of_server_and_daemon(tmp_path: Path) -> None:
    port = free_port()

    def asked(*more: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, EXAMPLES / "vllm_ask.py", "--url", f"http://127.0.0.1:{port}/v1", "--characters", "3000",
             "--tokens", "12", *more],
            capture_output=True,
            text=True,
            timeout=900,
        )  # fmt: skip

    def ask(*more: str) -> tuple[int, int, str]:
        done = asked(*more)
        assert done.returncode == 0, done.stderr[-4000:] + (tmp_path / "server").read_text()[-8000:]
        found = re.search(r"(\d+) tokens, (\d+) of them were cached.*\n([\s\S]*)", done.stdout)
        assert found, done.stdout
        return int(found[1]), int(found[2]), found[3].strip()

    daemon = Daemon(tmp_path)
    try:
        with serving(daemon, port, tmp_path / "server"):
            tokens, cached, text = ask()
            assert tokens > 4 * BLOCK and cached == 0 and text
            whole = (tokens - 1) // BLOCK * BLOCK
            eventually(lambda: ask()[1] == whole)
            # Another question of the same text.
            assert whole - BLOCK <= ask("--question", "May I sell copies?")[1] <= whole
            assert ask("--salt", "somebody")[1] == 0  # and nobody else's prompts
            daemon.kill()
            assert ask() == (tokens, 0, text)  # computed
            daemon.start()
            assert ask() == (tokens, whole, text)  # at once: the next request finds the daemon
        daemon.stop()
        daemon.start()
        with serving(daemon, port, tmp_path / "server"):
            assert ask() == (tokens, whole, text)
            # A text that is long enough to be attached, by the next server.
            long = ("--characters", "11000")
            tokens, cached, text = ask(*long)
            assert tokens > ATTACHED + BLOCK and cached < ATTACHED
            whole = (tokens - 1) // BLOCK * BLOCK
            eventually(lambda: ask(*long)[1] == whole)
        log = tmp_path / "attaching"
        with serving(daemon, port, log, "--attach"):
            everything = ("--policy", '{"mode": "full"}')
            assert ask(*long, *everything) == (tokens, whole, text)
            assert ask(*long)[:2] == (tokens, whole)  # by the server's policy
            assert ask(*long, "--policy", '{"budget": 0.1}')[:2] == (tokens, whole)
            wrong = asked(*long, "--policy", '{"budgets": 0.1}')
            assert wrong.returncode != 0 and "budgets" in wrong.stderr
            assert ask(*long, *everything) == (tokens, whole, text)  # the server serves on
        assert "attached_requests" in log.read_text()
    finally:
        daemon.stop()
