"""Attends over attached prefixes in a worker's process: the requests' sessions, and one call a layer for
all of them."""

from __future__ import annotations

import time
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from vllm.logger import init_logger

from prefixd import _core, errors
from prefixd.deadline import deadline
from prefixd.errors import FailedPrecondition, InvalidArgument, PrefixdError
from prefixd.model import ModelSpec
from prefixd.session import Session
from prefixd.vllm.layout import LayerCache
from prefixd.vllm.messages import Attachment
from prefixd.vllm.reach import Line
from prefixd.vllm.stats import Counts

if TYPE_CHECKING:
    from prefixd.vllm.attached.backend import AttachedRows

logger = init_logger("vllm.prefixd")


@dataclass
class _Held:
    """A request's session, until the request ends."""

    attachment: Attachment
    session: Future[Session]
    handed: int = 0  # own tokens that the session has
    failed: bool = False


@dataclass
class Batch:
    """The attached rows of one step, made when the first layer attends."""

    core: _core.AttachedBatch
    held: list[_Held] = field(default_factory=list)


class Attending:
    """One of each worker. Own tokens of a request that generates, all but the last `own_window` (0: none), go
    to its session, which keeps `own_memory_tokens` of them in memory. A request whose prefix cannot be read is
    computed with its own tokens alone until the step ends, and vLLM fails it then; the others of the batch are not
    concerned."""

    current: Attending | None = None  # what the attention layers of this process call

    def __init__(
        self, line: Line, spec: ModelSpec, heads: tuple[int, int], own_window: int, own_memory_tokens: int
    ) -> None:
        self._line = line
        self._own_window = own_window
        self._own_memory_tokens = own_memory_tokens if own_window else 0
        self._spec = spec
        self._heads = heads
        self._layers: dict[str, LayerCache] = {}
        self._held: dict[str, _Held] = {}
        self._by_marker: dict[int, _Held] = {}
        self._starter = ThreadPoolExecutor(4, thread_name_prefix="prefixd-attach")
        self._failed: set[int] = set()
        self._counts = Counts()
        self._reports: list[Future[dict[str, Any]]] = []
        Attending.current = self

    def register(self, layers: Mapping[str, LayerCache], attention: Mapping[str, Any]) -> None:
        from prefixd.vllm.attached.backend import AttachedImpl

        for name in layers:
            impl = attention[name].impl
            if not isinstance(impl, AttachedImpl):
                raise FailedPrecondition(
                    f"{name} attends with {type(impl).__name__}: vLLM has not loaded prefixd's plugin, or has another "
                    "attention backend"
                )
            if impl.alibi_slopes is not None or impl.sinks is not None:
                raise InvalidArgument("attention with ALiBi or sinks has no attached prefixes")
        self._layers = dict(layers)

    # ---- a step, in order ----

    def begin(self, attachments: list[Attachment]) -> None:
        for one in attachments:
            held = self._held.pop(one.request, None)
            # One that is computed again begins without the tokens that were handed over.
            if held is None or held.handed > 0 or not held.attachment.same(one):
                self._drop(held)
                held = _Held(one, self._starter.submit(self._attach, one))
                self._counts.add(attached_requests=1, attached_tokens=one.tokens)
            held.attachment = one
            self._held[one.request] = self._by_marker[one.marker] = held

    def _attach(self, one: Attachment) -> Session:
        if one.refused:
            raise InvalidArgument(one.refused)
        with self._line.call() as store:
            session: Session = store.attach(
                self._spec.name,
                prefix=one.prefix,
                n_tokens=one.tokens,
                policy=one.policy,
                own_memory_tokens=self._own_memory_tokens,
                call_timeout=self._line.seconds,
            )
        return session

    def attend(self, name: str, impl: Any, query: torch.Tensor, rows: AttachedRows, output: torch.Tensor) -> None:
        """Attends the attached rows of one layer, of `query` and `output` [tokens][heads][dim]."""
        batch = rows.batch
        if batch is None:
            batch = rows.batch = self._batch(rows)
        layer = self._layers[name]
        plain = output.dtype == torch.float32 and output.is_contiguous()
        # The extension's stub knows NumPy alone.
        cache: Any = layer.cache
        q: Any = query.float().contiguous()
        y: Any = output if plain else torch.empty(output.shape, dtype=torch.float32)
        started = time.monotonic()
        failed = batch.core.attend(
            layer.index,
            layer.rows,
            cache,
            self._spec.dtype,
            float(impl.scale),
            float(impl.logits_soft_cap or 0.0),
            self._heads,
            torch.get_num_threads(),
            q,
            y,
        )
        if not plain:
            for one in rows.rows:
                output[one.first : one.end] = y[one.first : one.end].to(output.dtype)
        for sequence, code, message in failed:
            self._line.reach.failed(errors.make(code, message), time.monotonic() - started)
            self._fail(batch.held[sequence], f"{code}: {message}")

    def _batch(self, rows: AttachedRows) -> Batch:
        batch = Batch(_core.AttachedBatch())
        for one in rows.rows:
            held = self._by_marker[one.marker]
            session = None
            try:
                session = held.session.result().core
            except PrefixdError as error:
                self._fail(held, str(error))
            queries = one.end - one.first
            own = one.length - held.attachment.tokens
            had = held.handed
            if self._own_window and held.attachment.hands_over(one.length, queries):
                held.handed = max(own - self._own_window, had)
                self._counts.add(handed_tokens=held.handed - had)
            if had and held.handed == had:  # the session's part and the blocks' would not fit together
                self._fail(held, "it went on without its newest token alone, behind tokens that were handed over")
                had = held.handed = 0
            batch.core.add(
                None if held.failed else session,
                one.first,
                queries,
                own,
                np.asarray(one.blocks, np.int64),
                not held.attachment.generates(one.length, queries),
                had,
                held.handed,
            )
            batch.held.append(held)
        return batch

    def _fail(self, held: _Held, reason: str) -> None:
        if not held.failed:
            held.failed = True
            logger.error("prefixd: request %s fails: %s", held.attachment.request, reason)
            self._counts.add(failed_attached=1)
        self._failed.add(held.attachment.marker)

    def take_failed(self) -> set[int]:
        """Returns the markers of requests that vLLM shall fail."""
        taken, self._failed = self._failed, set()
        return taken

    def finished(self, requests: set[str]) -> None:
        for request in requests:
            self._drop(self._held.pop(request, None))

    def _drop(self, held: _Held | None) -> None:
        if held is None:
            return
        if self._by_marker.get(held.attachment.marker) is held:
            del self._by_marker[held.attachment.marker]
        self._reports.append(self._starter.submit(_detach, held.session, self._line.seconds))

    def take_counts(self) -> Counts:
        """Returns what happened since the last call. What steps read is counted when a request ends."""
        ended = [report for report in self._reports if report.done()]
        self._reports = [report for report in self._reports if report not in ended]
        for report in ended:
            self._counts.add(attached_ended=1)
            if total := report.result():
                read = total["anchor_tokens"] + total["retrieved_tokens"] + total["feature_tokens"]
                self._counts.add(attached_steps=total["steps"])
                self._counts.add(attached_read=read + total["charged_summary_tokens"])
        taken, self._counts = self._counts, Counts()
        return taken

    def close(self) -> None:
        for request in list(self._held):
            self._drop(self._held.pop(request))
        self._starter.shutdown()
        if Attending.current is self:
            Attending.current = None


def _detach(session: Future[Session], seconds: float) -> dict[str, Any]:
    try:
        with deadline(seconds):
            total: dict[str, Any] = session.result().detach()["total"]
    except PrefixdError:  # it was never attached, or the daemon has gone
        return {}
    return total
