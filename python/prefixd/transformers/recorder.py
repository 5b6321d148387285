"""Stores the rows that a PrefixCache sees: the prompt's new tokens while they are prefilled, on the
puts' own threads, and generated ones when the conversation is to be continued. A put that fails ends, and the model
goes on: who asks for what was stored is told."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from concurrent.futures import Future

import torch

from prefixd.errors import FailedPrecondition, PrefixdError
from prefixd.put import Put, PutResult

# Begins to store these tokens; the flag says whether their rows are derived, the text names the
# derived rows that they may continue, the last flag says whether the rows come while they are prefilled.
BeginPut = Callable[[Sequence[int], bool, str, bool], Put]


class Recorder:
    def __init__(
        self,
        n_layers: int,
        prompts: torch.Tensor,  # [B, T] on the host
        pads: Sequence[int],
        begin_put: BeginPut,
        pad_token: int | None,
        derived: bool,
        lineage: str,
    ) -> None:
        self._n_layers = n_layers
        self._prompts = prompts
        self._pads = list(pads)
        self._columns = prompts.shape[1]
        self._begin_put = begin_put
        self._pad_token = pad_token
        self._derived = derived  # the prompt's rows are
        self.lineage = lineage  # of derived rows that are stored here
        self._puts: list[Put | None] = []
        self._commits: list[Future[PutResult] | None] = [None] * len(pads)
        self._failures: list[PrefixdError | None] = [None] * len(pads)
        self._done: list[set[int]] = [set() for _ in pads]
        # Why what comes after the prompt is not recorded; None: it is.
        self._no_conversation: str | None = None
        self._moved = False  # the model's rows are no longer those of the prompts, in their order
        # Rows of the tokens after the prompt, per layer: chunks [B, Hkv, n, d] on the host, in
        # order.
        self._later: list[list[tuple[torch.Tensor, torch.Tensor]]] = [[] for _ in range(n_layers)]
        self._later_ids: list[torch.Tensor] = []
        begun: dict[tuple[int, ...], Put | None] = {}  # several rows may have the same prompt
        try:
            for row, pad in zip(prompts, pads, strict=True):
                tokens = tuple(row[pad:].tolist())
                if tokens in begun:
                    self._puts.append(None)
                    continue
                put: Put | None = begin_put(tokens, derived, lineage, len(pads) == 1)
                assert put is not None
                if len(put.missing) == 0:
                    put.abort()
                    put = None
                begun[tokens] = put
                self._puts.append(put)
        except BaseException:
            self.close(abort=True)
            raise

    def first_missing(self) -> list[int]:
        """Returns each row's first column that its put needs; the row's end where it is stored
        already."""
        firsts: list[int] = []
        begun: dict[tuple[int, ...], int] = {}
        for row, pad, put in zip(self._prompts, self._pads, self._puts, strict=True):
            tokens = tuple(row[pad:].tolist())
            first = self._columns if put is None else pad + put.missing.start
            firsts.append(begun.setdefault(tokens, first))
        return firsts

    # ---- as the model runs ----

    def note_tokens(self, first_column: int, ids: torch.Tensor) -> None:
        """Takes the tokens [B, n] that the model runs; `write` receives their rows."""
        later = ids[:, max(0, self._columns - first_column) :]
        if self._no_conversation is None and later.shape[1]:
            self._later_ids.append(later.to("cpu"))

    def write(
        self, layer: int, first_column: int, keys: torch.Tensor, values: torch.Tensor
    ) -> None:
        if self._moved:
            return
        n = keys.shape[2]
        of_prompt = max(0, min(n, self._columns - first_column))
        times = len(keys) // len(self._puts)
        for b, put in enumerate(self._puts):
            if put is None or self._commits[b] is not None:
                continue
            pad = self._pads[b]
            begin = max(first_column, pad + put.missing.start)
            end = min(first_column + of_prompt, pad + put.missing.stop)
            if begin < end:
                part = slice(begin - first_column, end - first_column)
                try:
                    put.write(layer, begin - pad, *_rows(keys, values, b * times, part))
                except PrefixdError as error:
                    self._fail(b, error)
                    continue
            if first_column + n >= self._columns:
                self._done[b].add(layer)
        if self._no_conversation is None and of_prompt < n:
            self._later[layer].append(
                (keys[:, :, of_prompt:].to("cpu"), values[:, :, of_prompt:].to("cpu"))
            )

    def write_queries(self, layer: int, first_column: int, query: torch.Tensor) -> None:
        """Keeps queries of the last quarter of a prompt, on which estimators are chosen."""
        if self._moved:
            return
        times = len(query) // len(self._puts)
        for b, put in enumerate(self._puts):
            if put is None or self._commits[b] is not None:
                continue
            pad = self._pads[b]
            quarter = pad + (self._columns - pad) * 3 // 4
            begin = max(first_column, quarter, pad + put.missing.start)
            end = min(first_column + query.shape[2], self._columns)
            if begin < end:
                part = query[b * times, :, begin - first_column : end - first_column]
                try:
                    put.write_queries(layer, begin - pad, part.transpose(0, 1))
                except PrefixdError as error:
                    self._fail(b, error)

    def commit_finished(self) -> None:
        """Commits prompts whose layers are all complete, after a forward pass. Does not wait."""
        for b, put in enumerate(self._puts):
            if (
                put is not None
                and self._commits[b] is None
                and len(self._done[b]) == self._n_layers
            ):
                try:
                    self._commits[b] = put.commit()
                except PrefixdError as error:
                    self._fail(b, error)

    def _fail(self, b: int, error: PrefixdError) -> None:
        """Drops a put inside the model's forward pass, which is no place to raise its error."""
        put, self._puts[b] = self._puts[b], None
        self._failures[b] = error
        if put is not None:
            _abort(put)

    def crop(self, tokens: int) -> None:
        """Drops the last tokens, which were not accepted."""
        if self._no_conversation is not None:
            return
        self._later = [_cut(chunks, tokens) for chunks in self._later]
        ids = torch.cat(self._later_ids, dim=1) if self._later_ids else None
        if ids is not None:
            self._later_ids = [ids[:, : max(0, ids.shape[1] - tokens)]]

    def end_conversation(self, why: str) -> None:
        """Records no more of what comes after the prompt, and drops what was."""
        self._no_conversation = why
        self._later = [[] for _ in range(self._n_layers)]
        self._later_ids = []

    def end_prompts(self) -> None:
        """Records no more of the prompts: rows were moved, and those of one must not be stored as another's. A prompt
        that was not prefilled to its end is not stored."""
        self._moved = True

    # ---- afterwards ----

    def results(self) -> list[PutResult | None]:
        results = []
        for put, commit, failure in zip(self._puts, self._commits, self._failures, strict=True):
            if failure is not None:
                raise failure
            if put is not None and commit is None:
                raise FailedPrecondition(
                    "the prompt was not prefilled to its end, so it is not stored"
                )
            result = commit.result() if commit is not None else None
            self._note_lineage(result)
            results.append(result)
        return results

    def _note_lineage(self, result: PutResult | None) -> None:
        # A put that continues the derived rows of others has their lineage.
        if result is not None and result.lineage:
            self.lineage = result.lineage

    def persist_conversation(self, derived: bool) -> list[PutResult | None]:
        self.results()
        if self._no_conversation is not None:
            raise FailedPrecondition(self._no_conversation)
        if not self._later_ids:
            return [None] * len(self._puts)
        ids = torch.cat(self._later_ids, dim=1)
        layers = [
            tuple(torch.cat(part, dim=2) for part in zip(*c, strict=True)) for c in self._later
        ]
        times = len(ids) // len(self._puts)
        results: list[PutResult | None] = []
        for row in range(len(ids)):
            prompt = self._prompts[row // times, self._pads[row // times] :].tolist()
            answer = self._answer(ids[row].tolist())
            with self._begin_put(prompt + answer, derived or self._derived, self.lineage, False) as put:
                first = max(put.missing.start, len(prompt))
                if put.missing.start < len(prompt) and len(put.missing):
                    raise FailedPrecondition(
                        "the prompt itself is not stored any more (it was removed or evicted); "
                        "prefill it again"
                    )
                part = slice(first - len(prompt), len(answer))
                for layer, (keys, values) in enumerate(layers):
                    if first < len(prompt) + len(answer):
                        put.write(layer, first, *_rows(keys, values, row, part))
            results.append(put.result())
            self._note_lineage(results[-1])
        return results

    def _answer(self, tokens: list[int]) -> list[int]:
        """Returns rows without the tokens that generate appends to rows that ended before others
        did."""
        end = len(tokens)
        while end > 0 and self._pad_token is not None and tokens[end - 1] == self._pad_token:
            end -= 1
        return tokens[: min(len(tokens), end + 1)] if end < len(tokens) else tokens

    def close(self, abort: bool) -> None:
        """Waits for commits that are under way; aborts puts whose prompt was not finished. Raises what has failed,
        if not `abort`."""
        failed: BaseException | None = next((one for one in self._failures if one is not None), None)
        for put, commit in zip(self._puts, self._commits, strict=False):
            if commit is not None:
                failed = failed or commit.exception()
                if put is not None and commit.exception() is not None:
                    _abort(put)  # it may have failed before the store heard of a commit
            elif put is not None:
                _abort(put)
        self._puts = [None] * len(self._puts)
        if failed is not None and not abort:
            raise failed


def _abort(put: Put) -> None:
    with contextlib.suppress(PrefixdError):  # a daemon that is away has ended it
        put.abort()


def _rows(
    keys: torch.Tensor, values: torch.Tensor, row: int, part: slice
) -> tuple[torch.Tensor, torch.Tensor]:
    """Copies [B, Hkv, n, d] to [n, Hkv, d] on the host, which no other tensor shares."""
    k, v = (t[row, :, part].detach().transpose(0, 1) for t in (keys, values))
    return (
        k.to("cpu", copy=True).contiguous(),
        v.to("cpu", copy=True).contiguous(),
    )


def _cut(
    chunks: list[tuple[torch.Tensor, torch.Tensor]], tokens: int
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    if not chunks:
        return chunks
    keys, values = (torch.cat(part, dim=2) for part in zip(*chunks, strict=True))
    left = max(0, keys.shape[2] - tokens)
    return [(keys[:, :, :left], values[:, :, :left])]
