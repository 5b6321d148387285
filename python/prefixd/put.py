"""Stores a prompt while it is prefilled."""

from __future__ import annotations

import contextlib
import json
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, fields
from types import TracebackType
from typing import TYPE_CHECKING, Any

from prefixd import _core, arrays
from prefixd.deadline import deadline
from prefixd.errors import FailedPrecondition, InvalidArgument, PrefixdError

if TYPE_CHECKING:
    import numpy as np

    from prefixd.arrays import Array

# This many writes may wait for the disk before `write` itself waits, so that a fast prefill cannot
# fill the memory with rows.
MAX_WAITING = 8


@dataclass(frozen=True)
class PutResult:
    """`prefix` is the id of the stored prompt."""

    prefix: str
    n_tokens: int  # all tokens of the prompt
    stored_tokens: int  # newly stored by this put
    bytes: int  # written to disk for rows
    seconds: float  # from the beginning until durable
    exact_tokens: int  # tokens of the prompt before the first derived one
    lineage: str  # names the derived rows, for who continues them; "" where all are exact
    extra: Mapping[str, Any] = field(default_factory=dict)  # further values that this store reports

    @classmethod
    def from_wire(cls, result: Mapping[str, Any]) -> PutResult:
        known = {f.name for f in fields(cls)} - {"extra"}
        return cls(
            **{key: result[key] for key in known},
            extra={key: value for key, value in result.items() if key not in known},
        )


class Put:
    """Store.begin_put makes it. A thread of its own writes the rows, so that a put overlaps with
    the prefill: `write` returns a future, and its arguments must stay unchanged until that is done.
    The first failure fails everything after it, `commit` at the latest.

        with store.begin_put("llama", tokens) as put:
            for layer, (k, v) in enumerate(cache):
                put.write(layer, 0, k, v)
        put.result().prefix            # committed when the block was left without an exception
    """

    def __init__(
        self,
        core: _core.Put,
        progress: Callable[[int, int], None] | None = None,
        call_timeout: float | None = None,
    ) -> None:
        self.core = core
        self._call_timeout = call_timeout
        begin, end = core.missing
        self.missing = range(begin, end)  # tokens that are not stored yet; others are skipped
        self._progress = progress
        self._process = os.getpid()
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="prefixd-put")
        self._room = threading.BoundedSemaphore(MAX_WAITING)
        self._failed: BaseException | None = None
        self._written = self._submitted = 0
        self._result: Future[PutResult] | None = None

    def _check_process(self) -> None:
        # The thread that writes is not in a child of fork(): what is given to it there waits for ever.
        if os.getpid() != self._process:
            raise FailedPrecondition(
                "this put was begun before fork(), by another process; connect or open again in this one and begin "
                "another put"
            )

    def _submit(self, call: Callable[[], Any], timeout: float | None) -> Future[Any]:
        self._check_process()
        if self._failed is not None:
            raise self._failed
        if self._result is not None:
            raise FailedPrecondition("this put was committed or aborted already; begin another")
        self._room.acquire()

        def run() -> Any:
            try:
                if self._failed is not None:
                    raise self._failed
                with deadline(timeout):
                    return call()
            except BaseException as error:
                self._failed = self._failed or error
                raise
            finally:
                self._room.release()

        return self._worker.submit(run)

    def write(self, layer: int, first: int, k: Array, v: Array) -> Future[None]:
        """Writes keys and values of tokens [first, first + n) of one layer, in any order and
        chunking: k [n][n_kv_heads][key_dim] after RoPE and QK-norm, v [n][n_kv_heads][value_dim],
        in the model's dtype (bf16 also as its bits in uint16)."""
        keys, values = arrays.as_input(k), arrays.as_input(v)
        self._submitted += len(keys)

        def call() -> None:
            self.core.write(layer, first, keys, values)
            self._written += len(keys)
            if self._progress is not None:
                self._progress(self._written, self._submitted)

        return self._submit(call, self._call_timeout)

    def write_blocks(
        self, layer: int, first: int, n: int, rows: _core.PagedRows, cache: Any, blocks: np.ndarray
    ) -> Future[None]:
        """Writes tokens [first, first + n) of one layer out of an engine's paged cache, a contiguous
        array or tensor that `rows` describes, without a tensor in between. blocks[i] (int64) is the
        block of the prompt's tokens [i * block_tokens, (i + 1) * block_tokens)."""
        self._submitted += n

        def call() -> None:
            self.core.write_blocks(layer, first, n, rows, cache, blocks)
            self._written += n
            if self._progress is not None:
                self._progress(self._written, self._submitted)

        return self._submit(call, self._call_timeout)

    def write_queries(self, layer: int, first: int | Sequence[int], q: Array) -> Future[None]:
        """Writes the prefill's own queries [n][n_q_heads][key_dim], of tokens [first, first + n), or of the
        tokens that `first` lists. This is optional: the store keeps a sample of them, by which it chooses
        estimators per head and tunes the search."""
        queries = arrays.as_float32(q)
        runs = [(first, queries)] if isinstance(first, int) else _runs(first, queries)

        def call() -> None:
            for begin, some in runs:
                self.core.write_queries(layer, begin, some)

        return self._submit(call, self._call_timeout)

    def commit(self, timeout: float | None = None) -> Future[PutResult]:
        """Makes the prompt durable and visible when the future is done; summaries and indexes
        follow in the background (Store.wait_ready). It takes as long as the disk does, unless there is a
        `timeout`: 5 seconds behind it the connection is given up, and every put on it fails with
        Unavailable. This one may have been stored."""
        self._result = self._submit(lambda: PutResult.from_wire(json.loads(self.core.commit())), timeout)
        self._worker.shutdown(wait=False)
        return self._result

    def abort(self) -> None:
        """Discards the put. Waits for the write that is under way."""
        self._check_process()
        self._failed = self._failed or FailedPrecondition("this put was aborted")
        self._worker.shutdown(wait=True)
        with deadline(self._call_timeout):
            self.core.abort()

    def result(self, timeout: float | None = None) -> PutResult:
        """Waits for `commit` and returns its result."""
        if self._result is None:
            raise FailedPrecondition("this put was not committed")
        if not self._result.done():
            self._check_process()
        return self._result.result(timeout)

    def __enter__(self) -> Put:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is not None:
            if os.getpid() == self._process:  # a child has nothing to abort
                self.abort()
        elif self._result is None and self._failed is not None:
            self.abort()
            raise self._failed
        else:
            try:
                if self._result is None:
                    self.commit()
                self.result()
            except BaseException:
                # A write that failed behind the block keeps the store from hearing of the commit.
                with contextlib.suppress(PrefixdError):
                    self.abort()
                raise


def _runs(tokens: Sequence[int], queries: np.ndarray) -> list[tuple[int, np.ndarray]]:
    """Cuts queries of ascending tokens into runs that follow one another."""
    if len(tokens) != len(queries):
        raise InvalidArgument(f"there are queries of {len(queries)} tokens, and {len(tokens)} tokens are named")
    edges = [0, *(i for i in range(1, len(tokens)) if tokens[i] != tokens[i - 1] + 1), len(tokens)]
    return [(tokens[a], queries[a:b]) for a, b in zip(edges, edges[1:], strict=False) if a < b]
