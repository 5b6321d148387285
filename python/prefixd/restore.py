"""Reads all rows of a stored prefix into an engine's own cache, the first layer first."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any

import numpy as np

from prefixd import _core, arrays
from prefixd.errors import Cancelled

if TYPE_CHECKING:
    from prefixd.session import Session
    from prefixd.store import Progress


@dataclass(frozen=True)
class Run:
    """Holds verified keys and values of tokens [begin, end) of one layer, of every KV head:
    [n][n_kv_heads][dim], or [n_kv_heads][n][dim] where the restore is head-major. They are in the
    model's dtype; bf16 as its bits in uint16."""

    layer: int
    begin: int
    end: int
    k: np.ndarray
    v: np.ndarray
    dtype: str

    def torch(self) -> tuple[Any, Any]:
        """Returns (k, v) as tensors over the same memory."""
        return arrays.as_torch(self.k, self.dtype), arrays.as_torch(self.v, self.dtype)


class Restore:
    """Session.restore makes it. Iterating yields runs, ordered by layer and then by token, while a
    thread reads the next ones. One thread may use it; any thread may call `cancel`."""

    def __init__(
        self,
        session: Session,
        *,
        begin: int,
        end: int,
        layers: tuple[int, int],
        head_major: bool,
        buffer_bytes: int,
        progress: Progress | None,
    ) -> None:
        geometry = session.info["geometry"]
        self._dtype = str(geometry["dtype"])
        self._shape_of = session.layer_shape
        self._head_major = head_major
        self._progress = progress
        self._done = 0
        n_tokens = (end or session.n_tokens) - begin
        shapes = map(session.layer_shape, range(layers[0], layers[1] or int(geometry["n_layers"])))
        elements = sum(own.n_kv_heads * (own.key_dim + own.value_dim) for own in shapes)
        self._total = n_tokens * elements * np.dtype(arrays.NUMPY_TYPES[self._dtype]).itemsize
        self._core = _core.Restore(
            session.core, begin, end, layers[0], layers[1], head_major, buffer_bytes
        )

    def __enter__(self) -> Restore:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.cancel()

    def cancel(self) -> None:
        """Makes iterating raise Cancelled from now on, even while it waits. Any thread may call
        it."""
        self._core.cancel()

    def fill_layer(
        self,
        layer: int,
        rows: _core.PagedRows,
        cache: Any,
        blocks: np.ndarray,
        *,
        row_heads: int = 0,
        first_head: int = 0,
    ) -> None:
        """Takes all runs of the next layer into an engine's paged cache, a contiguous array or tensor
        that `rows` describes, instead of iterating. blocks[i] (int64) is the block of tokens
        [i * block_tokens, (i + 1) * block_tokens). A rank of an engine takes its heads, from
        `first_head` on, of the `row_heads` that are stored."""
        self._core.fill_layer(layer, rows, cache, blocks, row_heads, first_head)

    def __iter__(self) -> Iterator[Run]:
        while (run := self._core.next()) is not None:
            layer, begin, end = run
            n, own = end - begin, self._shape_of(layer)
            shape = (own.n_kv_heads, n) if self._head_major else (n, own.n_kv_heads)
            k, v = (
                np.empty((*shape, dim), arrays.NUMPY_TYPES[self._dtype])
                for dim in (own.key_dim, own.value_dim)
            )
            # NumPy's halves and 16-bit integers have different type codes; the core takes the
            # integers.
            half = self._dtype == "f16"
            self._core.copy(k.view(np.uint16) if half else k, v.view(np.uint16) if half else v)
            self._done += k.nbytes + v.nbytes
            if self._progress and self._progress(self._done, self._total, "bytes") is False:
                self.cancel()
                raise Cancelled("the restore was cancelled")
            yield Run(layer, begin, end, k, v, self._dtype)
