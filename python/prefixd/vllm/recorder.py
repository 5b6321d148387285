"""Stores one prompt out of the engine's blocks while it is computed."""

from __future__ import annotations

import contextlib
import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np
import torch
from vllm.logger import init_logger

from prefixd.errors import NotFound, PrefixdError, Unavailable
from prefixd.model import ModelSpec
from prefixd.put import Put, PutResult
from prefixd.vllm.layout import LayerCache
from prefixd.vllm.messages import Save
from prefixd.vllm.queries import sample
from prefixd.vllm.reach import Line

logger = init_logger("vllm.prefixd")


@dataclass(frozen=True)
class Recording:
    """What all puts of a worker have in common. `starter` begins and aborts them, so that a step waits for a
    daemon only where it needs the put."""

    line: Line
    spec: ModelSpec
    block_tokens: int
    heads: tuple[int, int]  # of this rank: the first, and how many
    commit_seconds: float
    starter: ThreadPoolExecutor
    # Under way. Calls take turns on the line: what waits behind a slow disk says nothing of the daemon.
    commits: set[Future[PutResult]] = field(default_factory=set)


class Recorder:
    """Is given every layer of every step until the prompt is complete. A failure ends the put, never the
    engine's step. Rows are read out of the blocks on a thread of the put; `settle` waits for it, because
    later steps may use the blocks for something else."""

    def __init__(self, how: Recording, save: Save) -> None:
        assert save.tokens is not None
        self._how = how
        self._tokens = save.tokens
        self._computed = save.computed
        self.sampled = sample(len(save.tokens), save.computed)  # tokens whose queries are wanted
        self._queries: dict[str, tuple[list[int], np.ndarray]] = {}  # by layer, of this step
        self._begun: Future[Put | None] = how.starter.submit(self._begin)
        self._writes: list[Future[None]] = []
        self._end = 0  # behind the last token of which rows are written
        self._committed: Future[PutResult] | None = None
        self._commit_seconds = 0.0  # that it took

    def _begin(self) -> Put | None:
        """Returns nothing where the store has all that vLLM could load."""
        try:
            put = self._ask()
        except NotFound:  # the model made room for another one, or the daemon has another store by now
            with self._how.line.call() as store:
                store.register_model(self._how.spec)
            put = self._ask()
        block = self._how.block_tokens
        if put.missing.start // block >= len(self._tokens) // block:
            put.abort()
            return None
        return put

    def _ask(self) -> Put:
        how = self._how
        with how.line.call(blame=not how.commits) as store:
            return store.begin_put(
                how.spec.name,
                self._tokens,
                heads=how.heads,
                # The commit of a part waits for those of the other ranks.
                wait=how.line.seconds if how.heads[1] < how.spec.n_kv_heads else 0.0,
                prefill_from=self._computed,
                call_timeout=how.line.seconds,
            )

    def _put(self) -> Put | None:
        if self._begun is not _NOTHING and self._how.line.reach.away:
            self._say(Unavailable("the daemon does not answer"))
            self.abort()
        try:
            return self._begun.result()
        except PrefixdError as error:
            self._say(error)
            self._drop()
            return None

    def _drop(self) -> None:
        self._begun = _NOTHING

    def _say(self, error: PrefixdError) -> None:
        logger.warning("prefixd: a prompt is not stored: %s", error)

    def take_queries(self, layer: str, tokens: list[int], q: torch.Tensor) -> None:
        """Keeps queries of some of the prompt's tokens until the layer is written."""
        self._queries[layer] = (tokens, q.numpy())

    def write(self, name: str, layer: LayerCache, save: Save) -> None:
        """Hands over what this step has put into the blocks of one layer, and what was there before."""
        queries = self._queries.pop(name, None)
        put = self._put()
        if put is None:
            return
        waited = time.monotonic()
        first = max(self._end, put.missing.start)
        if first >= save.end:
            return
        try:
            table = np.asarray(save.blocks, np.int64)
            self._writes.append(put.write_blocks(layer.index, first, save.end - first, layer.rows, layer.cache, table))
            if queries is not None:
                tokens, q = queries
                stored = sum(token < put.missing.start for token in tokens)
                put.write_queries(layer.index, tokens[stored:], q[stored:])
        except PrefixdError as error:
            self._failed(error, time.monotonic() - waited)

    def settle(self, save: Save) -> None:
        """Waits until all rows of the step are read, and commits behind the last step."""
        put = self._put()
        if put is None:
            return
        waited = time.monotonic()
        try:
            for write in self._writes:
                write.result()
            self._writes.clear()
            self._end = max(self._end, save.end)
            if save.last:
                begun, commits = time.monotonic(), self._how.commits
                self._committed = put.commit(self._how.commit_seconds)
                commits.add(self._committed)
                self._committed.add_done_callback(commits.discard)
                self._committed.add_done_callback(lambda _: self._took(time.monotonic() - begun))
                self._drop()
        except PrefixdError as error:
            self._failed(error, time.monotonic() - waited)

    def _failed(self, error: PrefixdError, waited: float) -> None:
        self._say(error)
        if not self._how.commits:
            self._how.line.reach.failed(error, waited)
        self.abort()

    def abort(self) -> None:
        """Discards what is not committed. Nobody waits for it: rows that are read meanwhile are discarded."""
        begun = self._begun
        self._writes.clear()
        self._drop()
        self._how.starter.submit(_abort, begun)

    def ended(self, wait: bool = False) -> bool:
        """Whether the commit is over, if there is one."""
        if wait and self._committed is not None:
            self._committed.exception()
        return self._committed is None or self._committed.done()

    def result(self) -> PutResult | None:
        """What the commit stored; None where it stored nothing. Says why it failed."""
        if self._committed is None:
            return None
        try:
            return self._committed.result()
        except PrefixdError as error:
            self._say(error)
            self._how.line.reach.failed(error, self._commit_seconds)
            return None

    def _took(self, seconds: float) -> None:
        self._commit_seconds = seconds


_NOTHING: Future[Put | None] = Future()  # of who does not store, or stores no more
_NOTHING.set_result(None)


def _abort(begun: Future[Put | None]) -> None:
    with contextlib.suppress(PrefixdError):
        if put := begun.result():
            put.abort()
