"""Starts a daemon in a directory, and waits for it as long as it gets on with opening its store."""

from __future__ import annotations

import fcntl
import os
import select
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from vllm.logger import init_logger

import prefixd
from prefixd.errors import FailedPrecondition

logger = init_logger("vllm.prefixd")

# A daemon that has to end gets so long until it is killed.
_ENDING_SECONDS = 5.0
# So often it is said that a daemon is waited for.
_SAYING_SECONDS = 10.0
_LAST_LINES, _LAST_BYTES = 5, 4096
# Of a store that another process has (storage/catalog/store_dir.cc).
_IN_USE = "is in use by process"
# Has the daemon end with the thread that started it. It runs in the child, as a program of its own: code of
# this process must not run there, where the locks of its other threads are held for ever.
_WITH_ITS_STARTER = """
import ctypes, os, signal, sys
libc = ctypes.CDLL(None)
libc.prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG
set_mempolicy = {"x86_64": 238, "aarch64": 237}.get(os.uname().machine)
if set_mempolicy:  # a worker of vLLM has bound its memory to a node
    libc.syscall(set_mempolicy, 0, None, 0)
os.sched_setaffinity(0, [int(cpu) for cpu in sys.argv[2].split(",")])
if os.getppid() == int(sys.argv[1]):
    os.execv(sys.argv[3], sys.argv[3:])
"""
# Of a service manager that watches the engine, and to which the daemon has nothing to say.
_NOT_INHERITED = ("NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID")


class StoreInUse(FailedPrecondition):
    """Another process has the store, and may be about to end."""


class Site:
    """A directory with a store, its daemon's socket, log and command line."""

    def __init__(self, directory: Path, arguments: tuple[str, ...]) -> None:
        self.directory = directory
        self.socket = directory / "prefixd.sock"
        self.log = directory / "prefixd.log"
        self._arguments = arguments

    def command(self) -> list[str]:
        return [program(), "--dir", str(self.directory), "--socket", str(self.socket), *self._arguments]

    def advice(self) -> str:
        """How a person starts the daemon."""
        return f"start it yourself ({shlex.join(self.command())})"

    def log_size(self) -> int:
        return self.log.stat().st_size if self.log.exists() else 0

    def last_lines(self, since: int = 0) -> list[str]:
        """Returns what the log ends with, of what was written behind its first `since` bytes."""
        if not self.log.exists():
            return []
        with self.log.open("rb") as log:
            log.seek(max(since, self.log_size() - _LAST_BYTES))
            return log.read().decode(errors="replace").splitlines()[-_LAST_LINES:]

    def ending(self, since: int = 0) -> str:
        """The same, as the end of a message."""
        lines = self.last_lines(since)
        if not lines:
            return f"its log, {self.log}, says nothing"
        return "\n  ".join([f"its log, {self.log}, ends with", *lines])


class Patience:
    """Waits for what a daemon or its starter does, until its log has said nothing new for `seconds`; says now and
    then what is waited for."""

    def __init__(self, site: Site, seconds: float) -> None:
        self.seconds = seconds
        self._site = site
        self._begun = self._moved = self._said = time.monotonic()
        self._size = site.log_size()

    def over(self, what: str) -> bool:
        now, size = time.monotonic(), self._site.log_size()
        if size != self._size:
            self._size, self._moved = size, now
        if now - self._said >= _SAYING_SECONDS:
            self._said = now
            (last,) = self._site.last_lines()[-1:] or ["nothing"]
            logger.info("prefixd: %s, for %.0f s now; its log says: %s", what, now - self._begun, last)
        return now - self._moved >= self.seconds


@contextmanager
def alone(site: Site, seconds: float) -> Iterator[None]:
    """Only one process at a time looks for a daemon in a directory and starts one."""
    with (site.directory / "vllm.lock").open("w") as lock:
        patience = Patience(site, seconds)
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if patience.over(f"another process starts the daemon in {site.directory}"):
                    raise FailedPrecondition(
                        f"another process has been starting a daemon in {site.directory} and gets no further: for "
                        f'{seconds:g} s ("start_seconds") nothing was heard of it. End that engine, or '
                        f"{site.advice()}; {site.ending()}"
                    ) from None
                time.sleep(0.1)
        yield


def launch(
    site: Site, seconds: float, started: Callable[[subprocess.Popen[bytes]], None]
) -> subprocess.Popen[bytes]:
    """Starts a daemon and waits until it is ready; it ends with this thread. `started` is given the process before.
    Raises FailedPrecondition where it does not become ready, StoreInUse where another process has its store."""
    read, write = os.pipe()
    command = [*site.command(), "--ready-fd", str(write)]
    before = site.log_size()
    try:
        with site.log.open("ab") as log:
            process = subprocess.Popen(
                [sys.executable, "-I", "-S", "-c", _WITH_ITS_STARTER, str(os.getpid()), _processors(), *command],
                pass_fds=[write],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={name: value for name, value in os.environ.items() if name not in _NOT_INHERITED},
                start_new_session=True,  # Ctrl-C at the terminal is the engine's, which then ends the daemon
            )
    except BaseException:
        os.close(read)
        raise
    finally:
        os.close(write)
    with os.fdopen(read, "rb") as ready:
        started(process)
        patience = Patience(site, seconds)
        while not select.select([ready], [], [], 0.2)[0]:
            if patience.over(f"the daemon in {site.directory} opens its store"):
                end(process)
                raise FailedPrecondition(
                    f"the daemon in {site.directory} was not ready, its log said nothing new for {seconds:g} s, and it "
                    'was ended. Where its disk is slow, give it longer ("start_seconds" in '
                    f"kv_connector_extra_config), or {site.advice()}; {site.ending(before)}"
                )
        if ready.read().startswith(b"prefixd ready"):
            return process
    how = said(process.wait())
    text = f"the daemon in {site.directory} did not start: it {how}; {site.ending(before)}"
    raise (StoreInUse if any(_IN_USE in line for line in site.last_lines(before)) else FailedPrecondition)(text)


def _processors() -> str:
    """Where a daemon may run: where this process's parent may. A worker of vLLM binds itself to a core, on which its
    own thread spins."""
    try:
        return ",".join(map(str, sorted(os.sched_getaffinity(os.getppid()))))
    except OSError:
        return ",".join(map(str, sorted(os.sched_getaffinity(0))))


def end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(_ENDING_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def said(status: int) -> str:
    """How a process ended."""
    if status >= 0:
        return f"ended with status {status}"
    name = signal.Signals(-status).name if -status in set(signal.Signals) else f"signal {-status}"
    return f"was ended by {name}" + (" (for want of memory?)" if -status == signal.SIGKILL else "")


def told_to_end(status: int) -> bool:
    """Whether somebody stopped the daemon, who will not want it to come back."""
    return status in (0, -signal.SIGTERM, -signal.SIGINT)


def program() -> str:
    """Returns the daemon's path: the wheel's, a build's beside these sources, or that on the PATH."""
    package = Path(prefixd.__file__).resolve().parent
    for path in (package / "bin/prefixd", package.parents[1] / "build/release/bin/prefixd"):
        if path.exists():
            return str(path)
    if found := shutil.which("prefixd"):
        return found
    raise FailedPrecondition("there is no prefixd to start: install the wheel or Debian's package, or name an address")
