"""Finds the daemon that an engine uses. vLLM is several processes and a store has one owner, so a
directory is opened by a daemon, which the first process of the engine starts, starts again when it dies, and ends
with itself."""

from __future__ import annotations

from vllm.logger import init_logger

from prefixd.errors import DeadlineExceeded, ResourceExhausted, Unavailable
from prefixd.model import ModelSpec
from prefixd.store import Store, connect
from prefixd.vllm.launch import Site
from prefixd.vllm.options import Options
from prefixd.vllm.reach import Line, Reach
from prefixd.vllm.supervisor import Supervisor

logger = init_logger("vllm.prefixd")

# How long the daemon may take to answer a new connection, at most.
_CONNECTING_SECONDS = 5.0


class Daemon:
    """Connects as the options say, by lines. A directory without a daemon gets one, which `close` ends; it
    also ends when this process does in any other way."""

    def __init__(self, options: Options) -> None:
        self._options = options
        self._supervisor: Supervisor | None = None
        self._lines: list[Line] = []
        self.reach = Reach(self._probe, min(options.call_seconds, _CONNECTING_SECONDS))
        self.address = options.prefixd
        if options.directory is not None:
            options.directory.mkdir(parents=True, exist_ok=True)
            # Codes and summaries are of no use to an engine that loads rows, until another one attaches.
            asked = options.attach or any(a.startswith("--defer-ingest") for a in options.daemon)
            usual = () if asked else ("--defer-ingest=true",)
            site = Site(options.directory.resolve(), (*usual, *options.daemon))
            self.address = f"unix:{site.socket}"
            self._supervisor = Supervisor(site, options.start_seconds, self._answers, self.reach.lose)
            self._supervisor.start()

    def line(self, *, rows: bool) -> Line:
        """Returns a connection of its own; `rows`: keys and values go over it."""
        line = Line(lambda: self._connect(shared_memory=rows), self.reach, self._options.call_seconds)
        self._lines.append(line)
        return line

    def greet(self, line: Line, spec: ModelSpec) -> None:
        """Registers the engine's model, where it stores: who only loads needs no right to write. An engine
        starts whether the daemon answers or not, and whether it has room or not: it is of use without. What else
        is wrong is said now."""
        try:
            with line.call() as store:
                if self._options.store:
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

    def close(self) -> None:
        self.reach.close()
        for line in self._lines:
            line.close()
        if self._supervisor is not None:
            self._supervisor.close()
