"""Runs a model with a policy inside: every layer attends to what the policy left it, and what the model
predicts is compared with what it predicts with everything, token by token, all tokens forced; then it is
asked, or goes on by itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache, PreTrainedModel
from transformers.masking_utils import sdpa_mask

from prefixd.retention.asked import Continuation
from prefixd.retention.attend import ESTIMATORS, Asked
from prefixd.retention.policy import Policy
from prefixd.retention.run import Cell, Layer
from prefixd.retention.seen import Seen, kept
from prefixd.transformers.attention import attention
from prefixd.transformers.capture import captured
from prefixd.transformers.identity import attention_layers

NAME = "prefixd-retention"
_ATTRIBUTE = "_prefixd_retention"
BLOCK = 128  # own tokens of a forward pass


class Attending:
    """One layer's attention under a policy; `estimators` [Hkv] are numbers of ESTIMATORS."""

    def __init__(self, policy: Policy, retrieved: int, estimators: Tensor, prompt: int, scale: float) -> None:
        self._policy, self._retrieved, self._estimators = policy, retrieved, estimators
        self._prompt, self._scale = prompt, scale
        self._queries: list[Tensor] = []

    def __call__(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor | None:
        """Returns the output [1, n, Hq, dv]; None for queries of the prompt, which attend to everything."""
        self._queries.append(query[0])
        k, v = key[0], value[0]
        if k.shape[1] <= self._prompt:
            return None
        q = torch.cat(self._queries, 1)
        self._queries = [q]
        seen = Seen(q.unflatten(0, (k.shape[0], -1)), k, v, self._prompt, self._scale)
        self._policy.advance(seen)
        asked = Asked(seen, torch.arange(seen.tokens - query.shape[2], seen.tokens))
        exact, cut = kept(self._policy.leaves, asked.at), None
        if self._retrieved:
            exact, cut = asked.retrieve(exact, self._retrieved)
        answers = asked.answers(exact, cut)
        y = torch.stack([answers[ESTIMATORS[int(e)]][head] for head, e in enumerate(self._estimators)])
        return y.flatten(0, 1).transpose(0, 1)[None].contiguous()


def _attention(
    module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any
) -> tuple[Tensor, None]:
    own: Tensor | None = getattr(module, _ATTRIBUTE)(query, key, value)
    return attention(module, query, key, value, *args, **kwargs) if own is None else (own, None)


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

    def __init__(self, model: PreTrainedModel) -> None:
        self._model, self._cache = model, DynamicCache()
        self._next = -1  # the likeliest token

    def _read(self, ids: Sequence[int], wanted: Tensor | int = 1) -> Tensor:
        """Returns the log-probabilities [n, vocabulary] behind the tokens at `wanted`, or behind the last ones."""
        got = self._model(
            input_ids=torch.tensor([list(ids)]), past_key_values=self._cache, use_cache=True, logits_to_keep=wanted
        )
        logits: Tensor = got.logits[0].float()
        self._next = int(logits[-1].argmax())
        return logits.log_softmax(-1)

    def predictions(self, ids: list[int], prompt: int, progress: Callable[[int], None]) -> Tensor:
        """Returns the log-probabilities [n, vocabulary] behind each token of the second half of the own tokens but
        the last."""
        out = []
        middle = (prompt + len(ids)) // 2
        edges = [0, *range(prompt, len(ids), BLOCK), len(ids)]
        for first, last in zip(edges, edges[1:], strict=False):
            progress(first)
            wanted = torch.arange(min(max(0, middle - first), last - first), last - first)
            got = self._read(ids[first:last], wanted if len(wanted) else 1)
            if len(wanted):
                out.append(got)
        return torch.cat(out)[:-1]

    def answers(self, then: Continuation) -> list[list[int]]:
        out = []
        for question in then.questions:
            if question:
                self._read(question)
            own: list[int] = []
            while len(own) < then.tokens and self._next not in then.stop:
                own.append(self._next)
                self._read(own[-1:])
            out.append(own)
        return out


class Document:
    """Compares cells with full attention on one text, and on what is asked behind it: `answers` are what the model
    writes with everything read."""

    @torch.no_grad()
    def __init__(
        self, model: PreTrainedModel, ids: list[int], prompt: int, then: Continuation, progress: Callable[[int], None]
    ) -> None:
        self._model, self._ids, self._prompt, self.progress = model, ids, prompt, progress
        self._then = then
        self._shapes = attention_layers(model, model.config.get_text_config(decoder=True))[0]
        queries: list[list[Tensor]] = [[] for _ in self._shapes]
        rows: dict[int, tuple[Tensor, Tensor]] = {}

        def sink(index: int, q: Tensor, k: Tensor, v: Tensor) -> None:
            queries[index].append(q[0])
            rows[index] = (k[0], v[0])

        reading = _Reading(model)
        with captured(model, sink):
            self._full = reading.predictions(ids, prompt, progress)
        self.answers = reading.answers(then)
        self._seen = [
            Seen(torch.cat(q, 1).unflatten(0, (rows[i][0].shape[0], -1)), *rows[i], prompt, self._shapes[i].scale)
            for i, q in enumerate(queries)
        ]

    @torch.no_grad()
    def measure(self, cell: Cell, policy: Callable[[int], Policy]) -> tuple[dict[str, float], list[list[int]]]:
        """Returns the mean divergence KL(full || cell) in nats, the share of equal likeliest tokens, and the nats of
        the text beyond full attention's; and what the model answers. With all retained, what left is dropped; else
        the rest is estimated by what each head chose on the trace of full attention. `policy`: of so many tokens."""
        tokens = len(self._ids)
        retained = cell.retained(tokens)
        retrieved = cell.exact(tokens) - retained
        layers = []
        for seen, shape in zip(self._seen, self._shapes, strict=True):
            estimators = torch.zeros(seen.heads, dtype=torch.int64)
            if retrieved:
                estimators = Layer(seen, _no_scorer).choose(cell)
            layers.append(Attending(policy(retained), retrieved, estimators, self._prompt, shape.scale))
        reading = _Reading(self._model)
        with attending(self._model, layers):
            own = reading.predictions(self._ids, self._prompt, self.progress)
            self.progress(tokens)
            answers = reading.answers(self._then)
        full, next_tokens = self._full, torch.tensor(self._ids[len(self._ids) - len(own) :])[:, None]
        return {
            "kl": float((full.exp() * (full - own)).sum(-1).mean()),
            "same": float((full.argmax(-1) == own.argmax(-1)).float().mean()),
            "nats": float((full - own).gather(1, next_tokens).mean()),
        }, answers


def _no_scorer(name: str) -> Any:
    raise AssertionError(f"{name}: policies with scorers are not run inside a model")
