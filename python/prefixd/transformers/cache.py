"""Implements a Cache whose first tokens are stored in prefixd and whose later ones are in memory.

Columns and positions. A batch is left-padded: row b's token at position p lies in column pads[b] + p. The
stored part ends at one column for all rows, `columns`; row b's session is cut to columns - pads[b] tokens.
Layers with full attention keep only what comes after it; layers with a sliding window hold the last
window - 1 columns, read back from the store, and are the model's own."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import Any

import torch
from transformers.cache_utils import Cache, DynamicLayer, DynamicSlidingWindowLayer

from prefixd import arrays
from prefixd.errors import FailedPrecondition, InvalidArgument, PrefixdError
from prefixd.estimate import ReuseEstimate
from prefixd.model import ModelSpec
from prefixd.put import PutResult
from prefixd.session import Session, step_batch
from prefixd.transformers.attention import mark
from prefixd.transformers.recorder import Recorder
from prefixd.transformers.rows import Rows

QueryObserver = Callable[[int, torch.Tensor], None]
# A question attends in runs of so many tokens, each with a call's bound of its own: a long one over a
# long prefix takes long, and that says nothing of the daemon.
_RUN = 256


class _Layer:
    """Checks and records rows as they come, for both kinds of layer."""

    observer: QueryObserver | None = None

    def bind(self, index: int, spec: ModelSpec, rows: Rows, recorder: Recorder | None) -> None:
        self.index = index
        self.spec = spec
        self.rows = rows
        self.recorder = recorder

    def take(self, keys: torch.Tensor, values: torch.Tensor, first_column: int) -> None:
        if first_column + keys.shape[2] != self.rows.announced:
            raise InvalidArgument(
                "a PrefixCache is for the model that was spliced: a part of it, called by itself, is not checked for "
                "tokens and positions"
            )
        name = arrays.dtype_name(keys.dtype)
        if name != self.spec.dtype:
            raise InvalidArgument(
                f"layer {self.index} computes keys in {keys.dtype}, but this model's prefixes are stored in "
                f"{self.spec.dtype}; run it in the dtype it was described in"
            )
        if len(keys) != len(self.rows):
            if len(keys) % len(self.rows):
                raise InvalidArgument(
                    f"the cache was made for {len(self.rows)} prompts, the model was given {len(keys)}"
                )
            # With beams and several answers per prompt, generate repeats each row.
            times = len(keys) // len(self.rows)
            self.rows.select([i for i in range(len(self.rows)) for _ in range(times)])
        if self.recorder is not None:
            self.recorder.write(self.index, first_column, keys, values)


class PrefixLayer(_Layer, DynamicLayer):
    """Attends fully: the stored part through the session, later tokens in memory, but for those that
    were handed over to the session, too."""

    handed = 0  # tokens of each row that its session has
    leaving: tuple[torch.Tensor, torch.Tensor] | None = None  # that it is to have with the next step

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        n = key_states.shape[2]
        if n > 1 and self.handed > 0:
            raise FailedPrecondition(
                "tokens were handed over (own_window): the model goes on one token at a time"
            )
        self.take(key_states, value_states, self.get_seq_length())
        leaves = self._leaves(n)
        keys, values = super().update(key_states, value_states, *args, **kwargs)
        if leaves > 0:
            self.leaving = keys[:, :, :leaves], values[:, :, :leaves]
            self.keys, self.values = keys, values = keys[:, :, leaves:], values[:, :, leaves:]
            self.handed += leaves
        return mark(keys, self), values

    def _kept(self) -> int:
        return int(super().get_seq_length())

    def _leaves(self, n: int) -> int:
        """Returns how many tokens leave memory when n more come."""
        window = self.rows.own_window
        if window is None or n > 1 or self.get_seq_length() < self.rows.prompt:
            return 0
        return max(0, self._kept() + n - window)

    def get_seq_length(self) -> int:
        return self.rows.columns + self.handed + self._kept()

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        leaves = self._leaves(query_length)
        return self._kept() + query_length - leaves, self.rows.columns + self.handed + leaves

    def crop(self, tokens_to_remove: int) -> None:
        """Gets 0 or less from PrefixCache.crop."""
        if tokens_to_remove == 0:
            return
        self.check_crop(tokens_to_remove)
        super().crop(tokens_to_remove)

    def check_crop(self, tokens_to_remove: int) -> None:
        """Refuses what crop would."""
        if self.handed > 0:
            raise FailedPrecondition("tokens were handed over (own_window): they cannot be cropped")
        if -tokens_to_remove > self._kept():
            raise FailedPrecondition(
                "a stored prefix cannot be cropped; attach again with n_tokens"
            )

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        if self.is_initialized:
            super().reorder_cache(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        if self.is_initialized:
            super().batch_repeat_interleave(repeats)

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        if self.is_initialized:
            super().batch_select_indices(indices)

    # ---- LayerSplice ----

    def observe(self, query: torch.Tensor) -> None:
        if self.observer is not None:
            self.observer(self.index, query)
        if self.recorder is not None:
            self.recorder.write_queries(self.index, self.get_seq_length() - query.shape[2], query)

    def prefix_state(self, query: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | None:
        spliced = {b: s for b, s in enumerate(self.rows.sessions) if s is not None}
        if not spliced:
            return None
        active, sessions = list(spliced), list(spliced.values())
        batch, heads, n, _ = query.shape
        if n == 1 and len(active) == batch and self.get_seq_length() > self.rows.prompt:
            return self._decode(sessions, query)
        y = torch.zeros((batch, heads, n, self.spec.shape(self.index).value_dim))
        lse = torch.full((batch, heads, n), -torch.inf)
        source = (
            query.detach().to("cpu", torch.float32).transpose(1, 2).contiguous()
        )  # [B, n, Hq, dh]
        # The question's tokens attend to the prefix exactly, generated ones under the read budget.
        exact = max(0, min(n, self.rows.prompt - (self.get_seq_length() - n)))
        for b, session in zip(active, sessions, strict=True):
            # No session has own tokens before the prompt's end, so that runs attend as one block would.
            for begin in range(0, exact, _RUN):
                end = min(exact, begin + _RUN)
                part, norm = _tensors(session.attend_exact(self.index, source[b, begin:end]))
                y[b, :, begin:end], lse[b, :, begin:end] = part.transpose(0, 1), norm.T
        if exact < n and not self.rows.derived:
            self.rows.derived = any(session.derives for session in sessions)
        for i in range(exact, n):
            part, norm = _tensors(step_batch(sessions, self.index, source[active, i]))
            y[active, :, i], lse[active, :, i] = part, norm
        return y.to(query.device), lse.to(query.device)

    def _decode(
        self, sessions: list[Session], query: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Steps one generated token of every row: the frequent case, of as few operations as may be."""
        if not self.rows.derived:
            self.rows.derived = any(session.derives for session in sessions)
        source = query.detach()[:, :, 0]
        if self.leaving is None:
            y, lse = _tensors(step_batch(sessions, self.index, source))
        else:
            k, v = (
                rows.detach().to("cpu").transpose(1, 2).contiguous() for rows in self.leaving
            )  # [B, tokens, Hkv, dim]
            self.leaving = None
            # The first time, the question's leave at once.
            for session, own_k, own_v in zip(sessions, k, v, strict=True):
                if len(own_k) > 1:
                    session.append(self.index, own_k[:-1], own_v[:-1])
            last = (rows[:, -1].contiguous() for rows in (k, v))
            y, lse = _tensors(step_batch(sessions, self.index, source, k=next(last), v=next(last)))
        return y.unsqueeze(2), lse.unsqueeze(2)


def _tensors(state: tuple[Any, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """Declares states of tensors to be tensors, for the type checker."""
    return state


class WindowLayer(_Layer, DynamicSlidingWindowLayer):
    """Fills the model's own sliding window from the store."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self.take(key_states, value_states, self.get_seq_length())
        if self.keys is not None and self.is_initialized and len(self.keys) != len(key_states):
            self.batch_repeat_interleave(len(key_states) // len(self.keys))
        keys, values = super().update(key_states, value_states, *args, **kwargs)
        return keys, values

    def restore(self, device: torch.device) -> None:
        """Reads the last window - 1 columns of the stored part."""
        end = self.rows.columns
        begin = max(0, end - (self.sliding_window - 1))
        own = self.spec.shape(self.index)
        shape = (len(self.rows), own.n_kv_heads, end - begin)
        dtype = arrays.torch_dtype(self.spec.dtype)
        keys = torch.zeros((*shape, own.key_dim), dtype=dtype)
        values = torch.zeros((*shape, own.value_dim), dtype=dtype)
        for b, (session, pad) in enumerate(zip(self.rows.sessions, self.rows.pads, strict=True)):
            if session is None:
                continue
            first = max(begin, pad)  # the mask hides earlier columns, which are padding
            for head in range(own.n_kv_heads):
                rows = session.read_range(self.index, head, first - pad, end - pad)
                keys[b, head, first - begin :], values[b, head, first - begin :] = rows.torch()
        keys, values = keys.to(device), values.to(device)
        self.lazy_initialization(keys, values)
        self.keys, self.values = keys, values
        self.cumulative_length = end


class PrefixCache(Cache):
    """Splice.cache makes it; pass it to the model as past_key_values. It serves one prompt and what
    is generated after it. It ends with its `with` block, which waits until the recorded rows are
    durable."""

    def __init__(
        self,
        spec: ModelSpec,
        rows: Rows,
        recorder: Recorder | None,
        device: torch.device,
        lineage: str = "",
    ) -> None:
        layers: list[Any] = []  # Cache does not accept a list of another kind
        for index, layer in enumerate(spec.layers):
            made: PrefixLayer | WindowLayer
            if layer.sliding_window:
                made = WindowLayer(layer.sliding_window)
            else:
                made = PrefixLayer()  # type: ignore[no-untyped-call]  # transformers' constructor
            made.bind(index, spec, rows, recorder)
            if isinstance(made, WindowLayer) and rows.columns > 0:
                made.restore(device)
            layers.append(made)
        super().__init__(layers=layers)
        self.spec = spec
        self.rows = rows
        self.recorder = recorder
        self._lineage = lineage
        self.prompt_ids = torch.empty((len(rows), 0), dtype=torch.long)
        self.adapters: str | None = None  # of the model that it is for (identity.adapters)
        self.estimates: list[ReuseEstimate] = []  # by row, of the stored part that was matched

    def announce(self, ids: torch.Tensor) -> None:
        """Takes the tokens [B, n] that the model is about to run, at positions and with a mask that were checked."""
        first = self.get_seq_length()
        self.rows.announced = first + ids.shape[1]
        if self.recorder is not None:
            self.recorder.note_tokens(first, ids)

    def __enter__(self) -> PrefixCache:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close(abort=kind is not None)

    @property
    def attached(self) -> list[int]:
        """Returns each row's tokens that are attended in the store and need no prefill."""
        return [s.n_tokens if s is not None else 0 for s in self.rows.sessions]

    @property
    def sessions(self) -> list[Session | None]:
        return list(self.rows.sessions)

    @property
    def derived(self) -> bool:
        """Returns whether the tokens after the prompt are derived: a step below mode "full" went
        before them, or the stored part has derived tokens."""
        return self.rows.derived

    @property
    def lineage(self) -> str:
        """Names the derived rows of this conversation: with it, `Splice.cache` attaches the next
        turn to them."""
        return self._lineage if self.recorder is None else self.recorder.lineage

    def observe_queries(self, observer: QueryObserver | None) -> None:
        """Registers `observer(layer, q [B, Hq, n, dh])`, which sees the queries of every layer with
        full attention, after RoPE, as they attend."""
        for layer in self.layers:
            assert isinstance(layer, _Layer)
            layer.observer = observer

    def reports(self) -> list[dict[str, Any] | None]:
        """Returns what each row's session read so far."""
        return [s.report() if s is not None else None for s in self.rows.sessions]

    def stored(self) -> list[PutResult | None]:
        """Waits until the prompts' new tokens are durable; None for rows that were stored
        already. Raises what made storing fail, which the model's own passes go on without."""
        if self.recorder is None:
            raise FailedPrecondition("this cache was made with store=False")
        return self.recorder.results()

    def persist(self) -> list[PutResult | None]:
        """Stores what has been generated since, as a continuation of the prompt: the next turn of
        the conversation attaches to all of it, by this cache's `lineage` where it is derived. Waits
        until it is durable. The last token generated is not part of it, because the model has not
        run it."""
        if self.recorder is None:
            raise FailedPrecondition("this cache was made with store=False")
        return self.recorder.persist_conversation(self.rows.derived)

    def close(self, abort: bool = False) -> None:
        """Detaches whatever fails, and then says the first failure; nothing with `abort`, whose reason is another."""
        try:
            if self.recorder is not None:
                self.recorder.close(abort)
        finally:
            failed = self._detach()
        if failed is not None and not abort:
            raise failed

    def _detach(self) -> PrefixdError | None:
        """Returns the first failure."""
        failed = None
        for session in {id(s): s for s in self.rows.sessions if s is not None}.values():
            try:
                if session.final_report is None:
                    session.detach()
            except PrefixdError as error:
                failed = failed or error
        return failed

    # ---- what generate does to a batch ----

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        self._forget_recording(moved=True)
        self.rows.select(beam_idx.tolist())
        super().reorder_cache(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._forget_recording()
        self.rows.select([i for i in range(len(self.rows)) for _ in range(repeats)])
        super().batch_repeat_interleave(repeats)

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        self._forget_recording(moved=True)
        self.rows.select(torch.arange(len(self.rows))[indices.cpu()].tolist())
        super().batch_select_indices(indices)

    def crop(self, tokens_to_remove: int) -> None:
        """Removes the last -n tokens. A positive n is the length that stays, as for transformers' own caches, whose
        layers would take it for a length of what they have in memory."""
        if tokens_to_remove > 0:
            tokens_to_remove = min(0, tokens_to_remove - self.get_seq_length())
        if tokens_to_remove:  # a refusal leaves all layers as they are
            for layer in self.layers:
                if isinstance(layer, PrefixLayer):
                    layer.check_crop(tokens_to_remove)
        super().crop(tokens_to_remove)
        if self.recorder is not None and tokens_to_remove:
            self.recorder.crop(-tokens_to_remove)  # once no layer has refused

    def _forget_recording(self, moved: bool = False) -> None:
        # Rows of a prompt are recorded before generate moves beams about. Beams cannot be continued
        # as a conversation, so their rows are not recorded.
        if self.recorder is not None:
            self.recorder.end_conversation(
                "beams were reordered or rows selected: this is no conversation to continue"
            )
            if moved:
                self.recorder.end_prompts()
