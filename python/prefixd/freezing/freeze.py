"""Runs a Hugging Face model's prefill with early tokens frozen in the upper layers, in both forms."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel

STATES, ROWS = "states", "rows"
FORMS = (STATES, ROWS)


@dataclass(frozen=True)
class Schedule:
    """Which positions of a prompt are frozen at which layer: [sinks, end(layer))."""

    layers: int
    tokens: int
    psi: float = 0.5
    gamma: float = 1.0
    sinks: int = 16

    @property
    def first(self) -> int:
        """Returns the layer at which freezing begins; it freezes nothing yet."""
        return 3 * self.layers // 4

    def end(self, layer: int) -> int:
        """Returns E of eq. 16."""
        if layer < self.first:
            return 0
        depth = (layer - self.first) / (self.layers - self.first)
        return math.floor((1 - float(self.psi ** (self.gamma * depth))) * self.tokens)

    def frozen(self, layer: int) -> slice:
        return slice(self.sinks, max(self.sinks, self.end(layer)))

    @property
    def saved(self) -> float:
        """Returns the share of all layers' tokens that are frozen: of rows that need not be stored (ROWS), of
        tokens that need not be computed (both)."""
        frozen: int = sum(s.stop - s.start for s in map(self.frozen, range(self.layers)))
        return frozen / (self.layers * self.tokens)


class SharedRows(DynamicCache):
    """The form of appendix D: at each layer the frozen tokens' keys and values are those of the layer before."""

    def __init__(self, schedule: Schedule) -> None:
        super().__init__()
        self._schedule = schedule
        self._before: tuple[Tensor, Tensor] | None = None  # of the layer before, in a prefill

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        if self.get_seq_length(layer_idx) == 0:
            frozen = self._schedule.frozen(layer_idx)
            if self._before is not None and frozen.start < frozen.stop:
                key_states, value_states = key_states.clone(), value_states.clone()
                key_states[:, :, frozen] = self._before[0][:, :, frozen]
                value_states[:, :, frozen] = self._before[1][:, :, frozen]
            self._before = (key_states, value_states)
        out: tuple[Tensor, Tensor] = super().update(key_states, value_states, layer_idx, *args, **kwargs)
        return out


def _kept_state(frozen: slice, module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> Tensor:
    out = output.clone()
    out[:, frozen] = args[0][:, frozen]
    return out


@contextmanager
def _frozen_states(model: PreTrainedModel, schedule: Schedule) -> Iterator[None]:
    """The form of section IV-C: a frozen token leaves a layer with the state with which it came."""
    with ExitStack() as hooks:
        for i, layer in enumerate(model.get_decoder().layers):
            frozen = schedule.frozen(i)
            if frozen.start < frozen.stop:
                handle = layer.register_forward_hook(functools.partial(_kept_state, frozen))
                hooks.callback(handle.remove)
        yield


def prefill(model: PreTrainedModel, ids: Tensor, schedule: Schedule | None, form: str) -> DynamicCache:
    """Returns the keys and values of a prompt `ids` [1, schedule.tokens]; without a schedule nothing is frozen."""
    cache = DynamicCache()
    with ExitStack() as stack:
        if schedule is not None and form == ROWS:
            cache = SharedRows(schedule)
        elif schedule is not None:
            stack.enter_context(_frozen_states(model, schedule))
        model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
    return cache


def follow(model: PreTrainedModel, cache: DynamicCache, ids: Tensor) -> Tensor:
    """Returns the log-probabilities [n - 1, vocabulary] behind `ids` [1, n] but the last, over a prefill's rows;
    the cache grows by them."""
    logits: Tensor = model(input_ids=ids[:, :-1], past_key_values=cache, use_cache=True).logits
    return logits[0].float().log_softmax(-1)
