"""Bounds calls over a connection that have no timeout of their own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from prefixd import _core


@contextmanager
def deadline(seconds: float | None) -> Iterator[None]:
    """The calls of this thread over a connection end within so many seconds, all of them together, also
    those that wait for the connection behind others: DeadlineExceeded. None: no bound."""
    if seconds is None:
        yield
        return
    bound = _core.Deadline(max(1, round(seconds * 1000)))
    bound.enter()
    try:
        yield
    finally:
        bound.leave()
