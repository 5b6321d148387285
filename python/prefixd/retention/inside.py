"""Runs a model with a policy inside: every layer attends to what the policy left it, and what the model
predicts is compared with what it predicts with everything, token by token, all tokens forced; then it is
asked, or goes on by itself."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache, PreTrainedModel
from transformers.masking_utils import sdpa_mask

from prefixd.retention.asked import Continuation
from prefixd.retention.attending import Attending
from prefixd.retention.kvpop import Scorer
from prefixd.retention.policies import make
from prefixd.retention.run import Cell, Layer
from prefixd.retention.seen import Seen
from prefixd.transformers.capture import captured
from prefixd.transformers.identity import attention_layers

NAME = "prefixd-retention"
_ATTRIBUTE = "_prefixd_retention"
BLOCK = 128  # own tokens of a forward pass
SPANS = 10  # parts of a text whose divergences are kept beside the mean


def method(cell: Cell, estimated: bool) -> str:
    """Returns what a cell is called in a journal: what is dropped has no share that is retrieved."""
    return f"{cell.method}/estimated" if estimated and cell.share == 1 else cell.method


def _attention(
    module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any
) -> tuple[Tensor, None]:
    return getattr(module, _ATTRIBUTE)(query, key, value), None


@contextmanager
def attending(model: PreTrainedModel, layers: list[Attending]) -> Iterator[None]:
    """Lets every layer of the model attend by `layers` inside the block."""
    config = model.config.get_text_config(decoder=True)
    modules = attention_layers(model, config)[1]
    before = config._attn_implementation
    AttentionInterface.register(NAME, _attention)
    AttentionMaskInterface.register(NAME, sdpa_mask)
    try:
        for module, layer in zip(modules, layers, strict=True):
            setattr(module, _ATTRIBUTE, layer)
        model.set_attn_implementation(NAME)
        yield
    finally:
        model.set_attn_implementation(before)
        for module in modules:
            delattr(module, _ATTRIBUTE)


class _Reading:
    """A model and what it has read."""

    def __init__(self, model: PreTrainedModel, cache: DynamicCache) -> None:
        self._model, self._cache = model, cache
        self._next = -1  # the likeliest token

    def read(self, ids: Sequence[int], wanted: Tensor | int = 1) -> Tensor:
        """Returns the log-probabilities [n, vocabulary] behind the tokens at `wanted`, or behind the last ones."""
        got = self._model(
            input_ids=torch.tensor([list(ids)]), past_key_values=self._cache, use_cache=True, logits_to_keep=wanted
        )
        logits: Tensor = got.logits[0].float()
        self._next = int(logits[-1].argmax())
        return logits.log_softmax(-1)

    def predictions(self, ids: list[int], progress: Callable[[int], None]) -> Tensor:
        """Returns the log-probabilities [n, vocabulary] behind each token of the second half of those that were not
        yet read but the last."""
        out = []
        read = self._cache.get_seq_length()
        middle = (read + len(ids)) // 2
        edges = [*range(read, len(ids), BLOCK), len(ids)]
        for first, last in zip(edges, edges[1:], strict=False):
            progress(first)
            wanted = torch.arange(min(max(0, middle - first), last - first), last - first)
            got = self.read(ids[first:last], wanted if len(wanted) else 1)
            if len(wanted):
                out.append(got)
        return torch.cat(out)[:-1]

    def answers(self, then: Continuation) -> list[list[int]]:
        out = []
        for question in then.questions:
            if question:
                self.read(question)
            own: list[int] = []
            while len(own) < then.tokens and self._next not in then.stop:
                own.append(self._next)
                self.read(own[-1:])
            out.append(own)
        return out


class Document:
    """Compares cells with full attention on one text, and on what is asked behind it: `answers` are what the model
    writes with everything read."""

    @torch.no_grad()
    def __init__(
        self, model: PreTrainedModel, ids: list[int], prompt: int, then: Continuation,
        progress: Callable[[int], None], scorer: Callable[[int, str], Scorer],
    ) -> None:  # fmt: skip
        self._model, self._ids, self.progress, self._then = model, ids, progress, then
        shapes = attention_layers(model, model.config.get_text_config(decoder=True))[0]
        queries: list[list[Tensor]] = [[] for _ in shapes]
        rows: dict[int, tuple[Tensor, Tensor]] = {}

        def sink(index: int, q: Tensor, k: Tensor, v: Tensor) -> None:
            queries[index].append(q[0])
            rows[index] = (k[0], v[0])

        cache = DynamicCache()
        reading = _Reading(model, cache)
        with captured(model, sink):
            progress(0)
            reading.read(ids[:prompt])
            self._read = copy.deepcopy(cache)  # queries of the prompt attend to everything, whatever a policy says
            self._full = reading.predictions(ids, progress)
        self.answers = reading.answers(then)
        self._layers = []
        for i, shape in enumerate(shapes):
            k, v = rows[i]
            seen = Seen(torch.cat(queries[i], 1).unflatten(0, (k.shape[0], -1)), k, v, prompt, shape.scale)
            self._layers.append(Layer(seen, functools.partial(scorer, i), measured=False))

    @torch.no_grad()
    def measure(self, cell: Cell, estimated: bool) -> tuple[dict[str, Any], list[list[int]]]:
        """Returns the mean divergence KL(full || cell) in nats, and that of each of SPANS equal parts of the tokens
        that were compared; the share of equal likeliest tokens, and the nats of the text beyond full attention's; and
        what the model answers. What left is dropped, or `estimated` by what each head chose on the trace of full
        attention."""
        tokens = len(self._ids)
        retained = cell.retained(tokens)
        retrieved = cell.exact(tokens) - retained
        layers = []
        for layer in self._layers:
            estimators = layer.choose(cell) if estimated else torch.zeros(layer.seen.heads, dtype=torch.int64)
            policy = make(cell.policy, retained, layer.scorer)
            layers.append(Attending(policy, retrieved, estimators, layer.seen.upto(layer.seen.prompt)))
        reading = _Reading(self._model, copy.deepcopy(self._read))
        with attending(self._model, layers):
            own = reading.predictions(self._ids, self.progress)
            self.progress(tokens)
            answers = reading.answers(self._then)
        full, next_tokens = self._full, torch.tensor(self._ids[len(self._ids) - len(own) :])[:, None]
        each = (full.exp() * (full - own)).sum(-1)
        return {
            "kl": float(each.mean()),
            "spans": [round(float(span.mean()), 7) for span in each.tensor_split(SPANS)],
            "same": float((full.argmax(-1) == own.argmax(-1)).float().mean()),
            "nats": float((full - own).gather(1, next_tokens).mean()),
        }, answers
