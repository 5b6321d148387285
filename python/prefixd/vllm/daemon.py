"""Finds the daemon that an engine uses. vLLM is several processes and a store has one owner, so a
directory is opened by a daemon, which the first process of the engine starts and ends with itself."""

from __future__ import annotations

import ctypes
import fcntl
import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

from vllm.logger import init_logger

import prefixd
from prefixd.errors import DeadlineExceeded, FailedPrecondition, ResourceExhausted, Unavailable
from prefixd.model import ModelSpec
from prefixd.store import Store, connect
from prefixd.vllm.options import Options
from prefixd.vllm.reach import Line, Reach

logger = init_logger("vllm.prefixd")

_PR_SET_PDEATHSIG = 1
# How long the daemon may take to answer a new connection, at most.
_CONNECTING_SECONDS = 5.0
# How long a daemon may take to stop.
_STOPPING_SECONDS = 20.0


class Daemon:
    """Connects as the options say, by lines. A directory without a daemon gets one, which `close` ends; it
    also ends when this process does in any other way."""

    def __init__(self, options: Options) -> None:
        self._options = options
        self._process: subprocess.Popen[bytes] | None = None
        self._lines: list[Line] = []
        self.reach = Reach(self._probe, options.call_seconds)
        self.address = options.prefixd
        if options.directory is not None:
            directory = Path(options.directory).resolve()
            directory.mkdir(parents=True, exist_ok=True)
            self.address = f"unix:{directory / 'prefixd.sock'}"
            with (directory / "vllm.lock").open("w") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                self._ensure(directory)

    def line(self, *, rows: bool) -> Line:
        """Returns a connection of its own; `rows`: keys and values go over it."""
        line = Line(lambda: self._connect(shared_memory=rows), self.reach, self._options.call_seconds)
        self._lines.append(line)
        return line

    def greet(self, line: Line, spec: ModelSpec) -> None:
        """Registers the engine's model. An engine starts whether the daemon answers or not, and whether it has
        room or not: it is of use without. What else is wrong is said now."""
        try:
            with line.call() as store:
                store.register_model(spec)
        except (DeadlineExceeded, Unavailable) as error:
            logger.error(
                "prefixd: %s does not answer (%s): the engine starts without, and prompts are neither found nor "
                "stored until it does",
                self.address,
                error,
            )
        except ResourceExhausted as error:
            logger.error("prefixd: prompts of model %s are not stored: %s", spec.name, error)

    def _probe(self) -> None:
        self._connect(shared_memory=False).close()

    def _ensure(self, directory: Path) -> None:
        """Finds a daemon or starts one; that of an engine that has just ended may still hold the store."""
        end = time.monotonic() + _STOPPING_SECONDS
        while not self._answers():
            try:
                return self._start(directory)
            except FailedPrecondition:
                if time.monotonic() > end:
                    raise
                time.sleep(0.5)

    def _connect(self, seconds: float = _CONNECTING_SECONDS, *, shared_memory: bool) -> Store:
        return connect(
            self.address,
            tenant=self._options.tenant,
            token=self._options.token,
            connect_timeout=min(seconds, self._options.call_seconds),
            shared_memory=shared_memory,
            call_timeout=self._options.call_seconds,
            # Enough to find a daemon that was started again. An engine does not wait for one that went
            # away: it computes.
            reconnect=0.2,
        )

    def _answers(self) -> bool:
        try:
            self._connect(1.0, shared_memory=False).close()
        except (DeadlineExceeded, Unavailable):
            return False
        return True

    def _start(self, directory: Path) -> None:
        libc = ctypes.CDLL(None)
        read, write = os.pipe()

        def with_this_process() -> None:
            libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)

        command = [program(), "--dir", str(directory), "--socket", self.address.removeprefix("unix:")]
        command += ["--ready-fd", str(write), *self._options.daemon]
        with (directory / "prefixd.log").open("ab") as log:
            self._process = subprocess.Popen(
                command,
                pass_fds=[write],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,  # Ctrl-C at the terminal is the engine's, which then ends the daemon
                preexec_fn=with_this_process,
            )
        os.close(write)
        with os.fdopen(read) as ready:
            if not ready.read().startswith("prefixd ready"):
                self._process.wait()
                raise FailedPrecondition(f"the daemon for {directory} did not start; {directory}/prefixd.log says why")

    def close(self) -> None:
        self.reach.close()
        for line in self._lines:
            line.close()
        if self._process is not None:
            self._process.terminate()  # and not waited for: vLLM kills processes that are slow to end
            self._process = None


def program() -> str:
    """Returns the daemon's path: the wheel's, a build's beside these sources, or that on the PATH."""
    package = Path(prefixd.__file__).resolve().parent
    for path in (package / "bin/prefixd", package.parents[1] / "build/release/bin/prefixd"):
        if path.exists():
            return str(path)
    if found := shutil.which("prefixd"):
        return found
    raise FailedPrecondition("there is no prefixd to start: install the wheel or Debian's package, or name an address")
