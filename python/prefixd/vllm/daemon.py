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

import prefixd
from prefixd.errors import FailedPrecondition, Unavailable
from prefixd.store import Store, connect
from prefixd.vllm.options import Options

_PR_SET_PDEATHSIG = 1
# How long a daemon may take to stop.
_STOPPING_SECONDS = 20.0


class Daemon:
    """Connects as the options say. A directory without a daemon gets one, which `close` ends; it also
    ends when this process does in any other way."""

    def __init__(self, options: Options) -> None:
        self._options = options
        self._process: subprocess.Popen[bytes] | None = None
        self.address = options.prefixd
        if options.directory is not None:
            directory = Path(options.directory).resolve()
            directory.mkdir(parents=True, exist_ok=True)
            self.address = f"unix:{directory / 'prefixd.sock'}"
            with (directory / "vllm.lock").open("w") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                self._ensure(directory)
        self.store = self._connect()

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

    def _connect(self, seconds: float = 5.0) -> Store:
        return connect(
            self.address,
            tenant=self._options.tenant,
            token=self._options.token,
            connect_timeout=seconds,
            call_timeout=self._options.call_seconds,
            # Enough to find a daemon that was started again. An engine does not wait for one that went
            # away: it computes.
            reconnect=0.2,
        )

    def _answers(self) -> bool:
        try:
            self._connect(1.0).close()
        except Unavailable:
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
        self.store.close()
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
