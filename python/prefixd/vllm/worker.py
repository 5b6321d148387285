"""The connector in a worker's process: rows into the paged cache before a layer attends, and out of it
behind the layer."""

from __future__ import annotations

import contextlib
import time
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from vllm.logger import init_logger

from prefixd.deadline import deadline
from prefixd.errors import InvalidArgument, PrefixdError
from prefixd.model import ModelSpec, Policy
from prefixd.restore import Restore
from prefixd.session import Session
from prefixd.vllm.layout import LayerCache, layer_caches
from prefixd.vllm.messages import Load, StepMessage, WorkerNote
from prefixd.vllm.options import Options
from prefixd.vllm.queries import Queries
from prefixd.vllm.reach import Line
from prefixd.vllm.recorder import Recorder, Recording
from prefixd.vllm.stats import Counts

logger = init_logger("vllm.prefixd")


class _Loading:
    """One request's load; its thread reads the next layers while this one attends."""

    def __init__(self, line: Line, spec: ModelSpec, load: Load, heads: tuple[int, int], buffer_bytes: int) -> None:
        self.load = load
        self._line = line
        self._all_heads, self._first_head = spec.n_kv_heads, heads[0]
        self.table = np.asarray(load.blocks, np.int64)
        with line.call() as store:
            self.session: Session = store.attach(
                spec.name,
                prefix=load.prefix,
                n_tokens=load.end,
                policy=Policy(mode="full"),
                call_timeout=line.seconds,
            )
        self.rows: Restore = self.session.restore(load.begin, load.end, buffer_bytes=buffer_bytes)

    def fill(self, layer: LayerCache) -> None:
        started = time.monotonic()
        try:
            self.rows.fill_layer(
                layer.index,
                layer.rows,
                layer.cache,
                self.table,
                row_heads=self._all_heads,
                first_head=self._first_head,
            )
        except PrefixdError as error:
            self._line.reach.failed(error, time.monotonic() - started)
            raise

    def close(self) -> None:
        self.rows.cancel()
        with contextlib.suppress(PrefixdError), deadline(self._line.seconds):  # a daemon that is away has ended it
            self.session.detach()


class WorkerSide:
    """`heads` are this rank's KV heads, the first and how many: the ranks of an engine store the parts of
    one prefix, and load their own. Puts have a line of their own, because calls wait there for a commit."""

    def __init__(
        self, loads: Line, puts: Line, spec: ModelSpec, options: Options, block_tokens: int, heads: tuple[int, int]
    ) -> None:
        self._heads = heads
        self._line = loads
        self._spec = spec
        self._block = block_tokens
        self._layers: dict[str, LayerCache] = {}
        self._recorders: dict[str, Recorder] = {}
        self._committing: list[Recorder] = []
        self._starter = ThreadPoolExecutor(1, thread_name_prefix="prefixd-begin")
        self._recording = Recording(puts, spec, block_tokens, heads, options.commit_seconds, self._starter)
        # Where loads are parked, one of them is read beside those of a step.
        self._buffer_bytes = (options.load_mib << 20) // (2 if options.park_tokens else 1)
        self._loading: list[_Loading] = []
        self._parked: list[tuple[Load, Future[None]]] = []
        self._loader = ThreadPoolExecutor(1, thread_name_prefix="prefixd-load")
        self._invalid: set[int] = set()
        self._message = StepMessage()
        self._counts = Counts()
        self._noted = WorkerNote()
        self._was_away = False
        self._stores = options.store
        self._queries = Queries(block_tokens)

    def register(self, caches: dict[str, torch.Tensor], layers: dict[str, Any]) -> None:
        """Learns the cache; `layers` are vLLM's attention layers by name, in order."""
        if len(caches) != len(self._spec.layers) or list(caches) != [name for name in layers if name in caches]:
            raise InvalidArgument(
                f"the engine's cache has {len(caches)} layers, and the model {len(self._spec.layers)}: layers that "
                "share a cache or have none were not tried with the connector"
            )
        for index, name in enumerate(caches):
            impl, own = layers[name].impl, self._spec.layers[index]
            softcap = float(getattr(impl, "logits_soft_cap", 0) or 0)
            if abs(float(impl.scale) - own.scale) > 1e-6 or abs(softcap - own.softcap) > 1e-6:
                raise InvalidArgument(
                    f"{name} scales scores by {impl.scale} with a softcap of {softcap}, and its configuration says "
                    f"{own.scale} and {own.softcap}: this family was not tried with the connector"
                )
        self._layers = layer_caches({name: i for i, name in enumerate(caches)}, caches, layers)

    @property
    def stores(self) -> bool:
        return self._stores

    @property
    def layers(self) -> dict[str, LayerCache]:
        return self._layers

    # ---- a step, in order ----

    def begin(self, message: StepMessage) -> None:
        self._message = message
        for save in message.saves:
            if save.tokens is not None:
                if old := self._recorders.pop(save.request, None):
                    old.abort()
                self._recorders[save.request] = Recorder(self._recording, save)
        of = self._recorders
        self._queries.begin([(of[save.request], save) for save in message.saves if save.request in of])

    def start_loads(self) -> None:
        self._invalid.update(self._message.wrong)
        at_once = sum(not load.parked for load in self._message.loads)
        for load in self._message.loads:
            if load.parked:
                self._parked.append((load, self._loader.submit(self._load_all, load)))
                continue
            try:
                self._loading.append(self._begin_loading(load, self._buffer_bytes // at_once))
            except PrefixdError as error:
                self._load_failed(load, error)

    def _begin_loading(self, load: Load, buffer_bytes: int) -> _Loading:
        return _Loading(self._line, self._spec, load, self._heads, buffer_bytes)

    def _load_all(self, load: Load) -> None:
        """Fills every layer while other requests compute; its blocks are nobody else's yet."""
        loading = self._begin_loading(load, self._buffer_bytes)
        try:
            for layer in self._layers.values():
                loading.fill(layer)
        finally:
            loading.close()

    def take_parked(self) -> set[str]:
        """Returns the requests whose loads have ended, well or not."""
        ended = [(load, job) for load, job in self._parked if job.done()]
        self._parked = [(load, job) for load, job in self._parked if not job.done()]
        for load, job in ended:
            error = job.exception()
            if error is None:
                self._counts.add(loads=1, loaded_tokens=load.end - load.begin)
            else:
                self._load_failed(load, error)
        return {load.request for load, _ in ended}

    def before_layer(self, name: str) -> None:
        for loading in list(self._loading):
            started = time.perf_counter()
            try:
                loading.fill(self._layers[name])
            except PrefixdError as error:
                self._loading.remove(loading)
                loading.close()
                self._load_failed(loading.load, error)
            self._counts.add(load_seconds=time.perf_counter() - started)

    def _load_failed(self, load: Load, error: BaseException) -> None:
        logger.warning(
            "prefixd: %d tokens of request %s are not there, and vLLM computes them or ends the request "
            "(kv_load_failure_policy): %s",
            load.end - load.begin,
            load.request,
            error,
        )
        self._counts.add(failed_loads=1)
        failed = set(load.blocks[load.begin // self._block : load.end // self._block])
        self._invalid |= failed
        # What is computed over them in this step is wrong as well, by whatever request: vLLM gives the blocks of a
        # load to others that are admitted with it.
        wrong = {load.request} | {save.request for save in self._message.saves if not failed.isdisjoint(save.blocks)}
        self.finished(wrong)

    def after_layer(self, name: str) -> None:
        started = time.perf_counter()
        for save in self._message.saves:
            if recorder := self._recorders.get(save.request):
                recorder.write(name, self._layers[name], save)
        self._counts.add(save_seconds=time.perf_counter() - started)

    def settle(self) -> None:
        started = time.perf_counter()
        for loading in self._loading:
            loading.close()
            self._counts.add(loads=1, loaded_tokens=loading.load.end - loading.load.begin)
        self._loading.clear()
        for save in self._message.saves:
            recorder = self._recorders.get(save.request)
            if recorder is None:
                continue
            recorder.settle(save)
            if save.last:
                self._committing.append(self._recorders.pop(save.request))
        for recorder in [one for one in self._committing if one.ended()]:
            self._committing.remove(recorder)
            if stored := recorder.result():
                self._counts.add(stored_prompts=1, stored_tokens=stored.stored_tokens)
        self._counts.add(save_seconds=time.perf_counter() - started)

    def finished(self, requests: set[str]) -> None:
        for request in requests:
            if recorder := self._recorders.pop(request, None):
                recorder.abort()

    def take_invalid(self) -> set[int]:
        taken, self._invalid = self._invalid, set()
        return taken

    def take_counts(self) -> Counts | None:
        """Returns what happened since the last call; the first rank counts for all. Seconds alone stay for a later
        call."""
        if self._counts.is_empty():
            return None
        taken, self._counts = self._counts, Counts()
        return None if self._heads[0] > 0 else taken

    def note(self) -> WorkerNote | None:
        """What the scheduler is told behind a step; None: what it was told last."""
        away, was_away = self._line.reach.away, self._was_away
        self._was_away = away
        note = WorkerNote(away and not was_away, len(self._recorders) + len(self._committing))
        told, self._noted = self._noted, note
        return None if note == told == WorkerNote() else note

    def close(self) -> None:
        self._queries.close()
        for recorder in self._recorders.values():
            recorder.abort()
        for recorder in self._committing:
            recorder.ended(wait=True)
        self._starter.shutdown()
        self._loader.shutdown(cancel_futures=True)
