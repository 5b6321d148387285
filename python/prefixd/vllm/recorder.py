"""Stores one prompt out of the engine's blocks while it is computed."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
from vllm.logger import init_logger

from prefixd.errors import NotFound, PrefixdError
from prefixd.model import ModelSpec
from prefixd.put import Put, PutResult
from prefixd.store import Store
from prefixd.vllm.layout import LayerCache
from prefixd.vllm.messages import Save

logger = init_logger("vllm.prefixd")


class Recorder:
    """Is given every layer of every step until the prompt is complete. A failure ends the put, never the
    engine's step. Rows are read out of the blocks on a thread of the put; `settle` waits for it, because
    later steps may use the blocks for something else."""

    def __init__(
        self,
        store: Store,
        spec: ModelSpec,
        save: Save,
        block_tokens: int,
        heads: tuple[int, int],
        patience: float,
        starter: ThreadPoolExecutor,
    ) -> None:
        assert save.tokens is not None
        self._tokens = save.tokens
        self._computed = save.computed
        self._block = block_tokens
        self._heads = heads
        # The commit of a part waits for those of the other ranks.
        self._wait = patience if heads[1] < spec.n_kv_heads else 0.0
        self._begun: Future[Put | None] = starter.submit(self._begin, store, spec)
        self._writes: list[Future[None]] = []
        self._end = 0  # behind the last token of which rows are written
        self._committed: Future[PutResult] | None = None

    def _begin(self, store: Store, spec: ModelSpec) -> Put | None:
        """Returns nothing where the store has all that vLLM could load."""
        try:
            put = self._ask(store, spec)
        except NotFound:  # the first prompt of its salt, or the daemon has another store by now
            store.register_model(spec)
            put = self._ask(store, spec)
        if put.missing.start // self._block >= len(self._tokens) // self._block:
            put.abort()
            return None
        return put

    def _ask(self, store: Store, spec: ModelSpec) -> Put:
        return store.begin_put(
            spec.name, self._tokens, heads=self._heads, wait=self._wait, prefill_from=self._computed
        )

    def _put(self) -> Put | None:
        try:
            return self._begun.result()
        except PrefixdError as error:
            logger.warning("prefixd: a prompt is not stored: %s", error)
            self._drop()
            return None

    def _drop(self) -> None:
        self._begun = Future()
        self._begun.set_result(None)

    def write(self, layer: LayerCache, save: Save) -> None:
        """Hands over what this step has put into the blocks of one layer, and what was there before."""
        put = self._put()
        if put is None:
            return
        first = max(self._end, put.missing.start)
        if first >= save.end:
            return
        try:
            table = np.asarray(save.blocks, np.int64)
            self._writes.append(put.write_blocks(layer.index, first, save.end - first, layer.rows, layer.cache, table))
        except PrefixdError as error:
            self._failed(put, error)

    def settle(self, save: Save) -> None:
        """Waits until all rows of the step are read, and commits behind the last step."""
        put = self._put()
        if put is None:
            return
        try:
            for write in self._writes:
                write.result()
            self._writes.clear()
            self._end = max(self._end, save.end)
            if save.last:
                self._committed = put.commit()
                self._drop()
        except PrefixdError as error:
            self._failed(put, error)

    def _failed(self, put: Put, error: PrefixdError) -> None:
        logger.warning("prefixd: a prompt is not stored: %s", error)
        self._writes.clear()
        self._drop()
        put.abort()

    def abort(self) -> None:
        """Discards what is not committed."""
        put = self._put()
        if put is not None:
            self._drop()
            put.abort()

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
            logger.warning("prefixd: a prompt is not stored: %s", error)
            return None
