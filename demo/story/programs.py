"""Starts the daemon and prefixd-demo, and ends them with the demo, however that ends."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from text import Stop


class Interrupted(BaseException):
    """SIGINT or SIGTERM came; the value is the exit status."""


def end_on_signals() -> None:
    def end(number: int, frame: object) -> None:
        # Ending must not be interrupted in turn.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        raise Interrupted(128 + number)

    signal.signal(signal.SIGINT, end)
    signal.signal(signal.SIGTERM, end)


@contextlib.contextmanager
def held() -> Iterator[None]:
    """Holds signals back until the end of the block: a process that was started is known by then."""
    came: list[int] = []
    before = {n: signal.signal(n, lambda number, frame: came.append(number)) for n in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if came:
        signal.raise_signal(came[0])


class Progress:
    """One line on standard error: redrawn on a terminal, now and then a plain line elsewhere."""

    def __init__(self) -> None:
        self._terminal = sys.stderr.isatty()
        self._last = time.monotonic()
        self._drawn = False

    def show(self, event: dict[str, Any]) -> None:
        now = time.monotonic()
        if not self._terminal and now - self._last < 10:
            return
        self._last = now
        part = 100 * event["done"] // max(1, event["total"])
        line = f"   {event['what']}: {part}% ({event['done']} of {event['total']} {event['unit']})"
        if self._terminal:
            sys.stdout.flush()
            print(f"\r\033[K{line}", end="", file=sys.stderr, flush=True)
            self._drawn = True
        else:
            print(line, file=sys.stderr, flush=True)

    def clear(self) -> None:
        if self._drawn:
            print("\r\033[K", end="", file=sys.stderr, flush=True)
            self._drawn = False


class Programs:
    """The programs of one build, and one socket."""

    def __init__(self, build: Path, socket: Path | None = None) -> None:
        self.daemon, self.demo = build / "bin/prefixd", build / "bin/prefixd-demo"
        self.socket = socket
        for program in (self.daemon, self.demo):
            if not program.is_file():
                raise Stop(f"{program} is missing; run 'make build' first")

    def version(self) -> str:
        said = subprocess.run([self.demo, "--version"], capture_output=True, text=True, check=False).stdout
        return said.split()[1] if len(said.split()) > 1 else "unknown"

    def run(self, command: list[str], request: dict[str, Any] | None = None) -> Iterator[dict[str, Any]]:
        """Yields what `prefixd-demo COMMAND` emits; progress is shown and not yielded."""
        where = [] if self.socket is None else ["--socket", str(self.socket)]
        process: subprocess.Popen[str] | None = None
        progress = Progress()
        try:
            with held():
                process = subprocess.Popen(
                    [self.demo, command[0], *(where if request is not None else []), *command[1:]],
                    stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                )
            assert process.stdin and process.stdout and process.stderr
            try:
                process.stdin.write(json.dumps(request or {}))
                process.stdin.close()
            except BrokenPipeError:
                pass  # it ended already, and says why
            for line in process.stdout:
                event = json.loads(line)
                if event["event"] == "progress":
                    progress.show(event)
                    continue
                progress.clear()
                yield event
            said = process.stderr.read().strip()
            if process.wait() != 0:
                raise Stop(said.removeprefix("prefixd-demo: ") or f"prefixd-demo ended with {process.returncode}")
        finally:
            progress.clear()
            if process is not None:
                if process.poll() is None:
                    process.terminate()
                process.wait()
                for stream in (process.stdout, process.stderr):
                    if stream is not None:
                        stream.close()


class Daemon:
    """A running daemon; leaving the context stops it."""

    def __init__(self, programs: Programs, store: Path, log: Path, *flags: str) -> None:
        self._programs, self._store, self._log, self._flags = programs, store, log, flags
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Daemon:
        socket = self._programs.socket
        assert socket is not None
        socket.unlink(missing_ok=True)
        try:
            with self._log.open("a") as log, held():
                self._process = process = subprocess.Popen(
                    [self._programs.daemon, "--dir", self._store, "--socket", socket, *self._flags],
                    stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                )
            for _ in range(1200):
                if socket.exists():
                    return self
                if process.poll() is not None:
                    break
                time.sleep(0.05)
            last = self._log.read_text(errors="replace").strip().splitlines()[-1:]
            raise Stop(f"the daemon did not start; its log is {self._log}: {' '.join(last)}")
        except BaseException:
            self.__exit__()
            raise

    def __exit__(self, *_: object) -> None:
        if self._process is None:
            return
        if self._process.poll() is None:
            self._process.terminate()
        if (status := self._process.wait()) != 0:
            print(f"demo: the daemon ended with status {status}", file=sys.stderr)
