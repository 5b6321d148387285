"""Knows whether the daemon answers, so that an engine waits for one that is silent once, and not for each
prompt; and bounds each call to it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from vllm.logger import init_logger

from prefixd.deadline import deadline
from prefixd.errors import DeadlineExceeded, PrefixdError, Unavailable
from prefixd.store import Store

logger = init_logger("vllm.prefixd")

# Between two probes of a silent daemon. A daemon that falls silent again within a minute is left alone
# twice as long each time: it answers probes, and not what is asked of it.
_PAUSE, _LONGEST_PAUSE, _AGAIN = 1.0, 60.0, 60.0


class Reach:
    """One of each process of an engine. A call that took long and got no answer makes the daemon
    unreachable: nobody asks it then, until a probe, on a thread in the background, has been answered. One
    that refuses at once costs nothing, and is asked again each time."""

    def __init__(self, probe: Callable[[], None], seconds: float) -> None:
        """`probe` raises PrefixdError where the daemon does not answer; half of `seconds` is long."""
        self._probe = probe
        self._long = seconds / 2
        self._lock = threading.Lock()
        self._away = False
        self._closed = threading.Event()
        self._pause = _PAUSE
        self._back = float("-inf")  # when it answered again

    @property
    def away(self) -> bool:
        return self._away

    @contextmanager
    def call(self, seconds: float, blame: bool = True) -> Iterator[None]:
        """What is asked in the block is answered within `seconds`, or fails; it fails at once while the
        daemon is unreachable. Not `blame`: whatever comes of it, the daemon is none the worse for it."""
        if self._away:
            raise Unavailable("the daemon did not answer of late, and is not asked until it does")
        begun = time.monotonic()
        try:
            with deadline(seconds):
                yield
        except PrefixdError as error:
            if blame:
                self.failed(error, time.monotonic() - begun)
            raise

    def failed(self, error: PrefixdError, seconds: float) -> None:
        """Notes that a call failed for which an engine waited so long."""
        if isinstance(error, (Unavailable, DeadlineExceeded)) and seconds >= self._long:
            self.lose(str(error))

    def lose(self, why: str) -> None:
        with self._lock:
            if self._away or self._closed.is_set():
                return
            self._away = True
            soon = time.monotonic() - self._back < _AGAIN
            self._pause = min(2 * self._pause, _LONGEST_PAUSE) if soon else _PAUSE
            logger.warning(
                "prefixd: the daemon does not answer (%s): prompts are neither found nor stored until it does", why
            )
            threading.Thread(target=self._watch, name="prefixd-probe").start()

    def _watch(self) -> None:
        while not self._wait(self._pause):
            try:
                self._probe()
            except PrefixdError:
                continue
            with self._lock:
                self._away, self._back = False, time.monotonic()
            logger.info("prefixd: the daemon answers again")
            return

    def _wait(self, seconds: float) -> bool:
        """Returns whether the probe is to end, and else after so long. A process that ends without `close`
        waits for its threads."""
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0 and threading.main_thread().is_alive():
            if self._closed.wait(min(left, 0.5)):
                return True
        return not threading.main_thread().is_alive()

    def close(self) -> None:
        with self._lock:
            self._closed.set()


class Line:
    """A connection to the daemon, opened when it is first needed. Calls take turns on it."""

    def __init__(self, connect: Callable[[], Store], reach: Reach, seconds: float) -> None:
        self.reach = reach
        self.seconds = seconds  # of a call
        self._connect = connect
        self._lock = threading.Lock()
        self._store: Store | None = None

    @contextmanager
    def call(self, blame: bool = True) -> Iterator[Store]:
        """Provides the store for what is asked in the block, all of it within the seconds of a call."""
        with self.reach.call(self.seconds, blame):
            yield self._opened()

    def _opened(self) -> Store:
        with self._lock:
            if self._store is None:
                self._store = self._connect()
            return self._store

    def close(self) -> None:
        with self._lock:
            if self._store is not None:
                self._store.close()
                self._store = None
