"""Starts the daemon of a directory, and starts it again when it ends by itself."""

from __future__ import annotations

import subprocess
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future

from vllm.logger import init_logger

from prefixd.errors import FailedPrecondition, PrefixdError
from prefixd.vllm.launch import Site, StoreInUse, alone, launch, said, told_to_end

logger = init_logger("vllm.prefixd")

# A daemon that has ended so often in so many seconds is left alone.
_ENDS, _WITHIN = 5, 600.0
# Before it is started again; twice as long each time.
_PAUSE, _LONGEST_PAUSE = 0.5, 30.0
# Between two looks whether another process has let go of the store, as above.
_LOCKED_PAUSE, _LONGEST_LOCKED_PAUSE = 0.25, 4.0


class Supervisor:
    """One of each process that finds no daemon in its directory. All starts are a thread's that lives as long as this
    process does, because a daemon ends with the thread that started it."""

    def __init__(
        self, site: Site, seconds: float, answers: Callable[[], bool], lost: Callable[[str], None]
    ) -> None:
        """`seconds`: how long a start may take without a sign of progress; `answers`: whether there is a daemon;
        `lost` hears that there is none any more."""
        self._site = site
        self._seconds = seconds
        self._answers = answers
        self._lost = lost
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._process: subprocess.Popen[bytes] | None = None
        self._ends: list[float] = []

    def start(self) -> None:
        """Returns when there is a daemon: another's, or one of its own, which it starts again from then on."""
        first: Future[None] = Future()
        threading.Thread(target=self._run, args=(first,), name="prefixd-supervisor", daemon=True).start()
        first.result()

    def close(self) -> None:
        """Ends the daemon, if it is this one's, and does not wait for it: vLLM kills processes that are slow to end."""
        with self._lock:
            self._closed.set()
            if self._process is not None:
                self._process.terminate()

    def _run(self, first: Future[None]) -> None:
        try:
            process = self._find_or_launch()
        except BaseException as error:
            first.set_exception(error)
            return
        first.set_result(None)
        while process is not None:
            status = process.wait()
            if self._closed.is_set():
                return
            self._lost(f"the one in {self._site.directory} {said(status)}")
            if told_to_end(status):
                logger.warning(
                    "prefixd: the daemon in %s was stopped and is not started again: %s, or start the engine anew",
                    self._site.directory,
                    self._site.advice(),
                )
                return
            process = self._again(f"it {said(status)}")

    def _again(self, why: str) -> subprocess.Popen[bytes] | None:
        """Returns the next process; none where there is nothing to watch any more."""
        while True:
            now = time.monotonic()
            self._ends = [*(at for at in self._ends if now - at < _WITHIN), now]
            if len(self._ends) > _ENDS:
                logger.error(
                    "prefixd: the daemon in %s has failed %d times within %g minutes and is not started again: prompts "
                    "are neither found nor stored until you %s, or start the engine anew; last, %s; %s",
                    self._site.directory,
                    len(self._ends),
                    _WITHIN / 60,
                    self._site.advice(),
                    why,
                    self._site.ending(),
                )
                return None
            pause = min(_PAUSE * 2 ** (len(self._ends) - 1), _LONGEST_PAUSE)
            logger.warning(
                "prefixd: the daemon in %s is started again in %g s: %s; %s",
                self._site.directory,
                pause,
                why,
                self._site.ending(),
            )
            if self._closed.wait(pause):
                return None
            try:
                process = self._find_or_launch()
            except (PrefixdError, OSError) as error:
                if self._closed.is_set():
                    return None
                why = str(error)
                continue
            whose = "runs again" if process is not None else "is another engine's now, which starts it again"
            logger.info("prefixd: the daemon in %s %s", self._site.directory, whose)
            return process

    def _find_or_launch(self) -> subprocess.Popen[bytes] | None:
        """Returns a daemon that it has started, or nothing where there is one; that of an engine that has just ended,
        or one that is being killed, may still hold the store."""
        with alone(self._site, self._seconds):
            patience, pause = time.monotonic() + self._seconds, _LOCKED_PAUSE
            while not self._answers():
                try:
                    return launch(self._site, self._seconds, self._started)
                except StoreInUse as error:
                    if time.monotonic() > patience:
                        raise FailedPrecondition(
                            f"a process that does not answer at {self._site.socket} has had the store for "
                            f'{self._seconds:g} s ("start_seconds"): end it, or name the address of the daemon '
                            f"that it is; {self._site.ending()}"
                        ) from error
                    if pause == _LOCKED_PAUSE:
                        logger.info("prefixd: waiting for the store in %s: %s", self._site.directory, error)
                    if self._closed.wait(pause):
                        raise
                    pause = min(2 * pause, _LONGEST_LOCKED_PAUSE)
        return None

    def _started(self, process: subprocess.Popen[bytes]) -> None:
        with self._lock:
            self._process = process
            if self._closed.is_set():
                process.terminate()
