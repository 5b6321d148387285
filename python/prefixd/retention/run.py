"""Measures policies on recorded texts: for each document and layer the error of the attention output under
an exact budget, with what left dropped, estimated, or retrieved and estimated."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from prefixd.evaluate.compare.journal import Journal
from prefixd.retention.attend import ESTIMATORS, Asked, entropy, error
from prefixd.retention.kvpop import Scorer
from prefixd.retention.policies import FORESEEN, WINDOW, make
from prefixd.retention.record import Recorded
from prefixd.retention.seen import Seen, kept
from prefixd.retention.target import Foreseen, future_attention

QUERIES = 64  # measured in each layer, and as many before them to choose estimators by
ANCHORS = 20  # the least that is retained: prefixd's sinks and tail
CHOICE = "choice"  # per KV head, the estimator of least error on the earlier queries


@dataclass(frozen=True)
class Cell:
    """`share` of the exact tokens is retained by the policy, the rest is retrieved for each query; 1: all are
    retained, as in the papers."""

    policy: str
    budget: float
    share: float

    @property
    def method(self) -> str:
        return f"{self.policy}/{self.budget:g}/{self.share:g}"

    def exact(self, tokens: int) -> int:
        return math.ceil(self.budget * tokens - 1e-9)

    def retained(self, tokens: int) -> int:
        return min(self.exact(tokens), max(ANCHORS, math.ceil(self.share * self.exact(tokens) - 1e-9)))


@dataclass(frozen=True)
class Plan:
    policies: Sequence[str]
    budgets: Sequence[float]
    shares: Sequence[float]
    layers: Sequence[int]
    prompt: int
    tokens: int

    def cells(self) -> Iterator[Cell]:
        for policy in self.policies:
            for budget in self.budgets:
                for share in self.shares:
                    yield Cell(policy, budget, share)


def asked_at(prompt: int, tokens: int) -> Tensor:
    """Returns the positions of queries: first those that choose estimators, spread over the first half of the
    own tokens, then those that are measured, spread over the second."""
    middle = (prompt + tokens) // 2
    parts = [(prompt, middle), (middle, tokens)]
    spread = [torch.arange(QUERIES) * (last - first) // QUERIES + first for first, last in parts]
    return torch.cat(spread)


def errors_by_estimator(asked: Asked, retained: Tensor, retrieved: int) -> Tensor:
    """Returns the error [estimator, H, G, n] of each query by each estimator of ESTIMATORS."""
    exact, cut = asked.retrieve(retained, retrieved) if retrieved else (retained, None)
    answers = asked.answers(exact, cut)
    return torch.stack([error(answers[name], asked.y) for name in ESTIMATORS])


def choice(errors: Tensor) -> Tensor:
    """Returns the number of the best estimator [H] for each KV head, by the errors [estimator, H, G, n] of
    some queries."""
    return errors.mean((2, 3)).argmin(0)


def errors_of(asked: Asked, retained: Tensor, retrieved: int, measured: Tensor) -> dict[str, list[float]]:
    """Returns each query head's mean error by estimator over the `measured` queries [n], and by the choice
    that the others make."""
    each = errors_by_estimator(asked, retained, retrieved)
    best = choice(each[..., ~measured])
    after = each[..., measured].mean(-1)  # [estimator, H, G]
    chosen = after.gather(0, best[None, :, None].expand(1, *after.shape[1:]))[0]
    named = dict(zip(ESTIMATORS, after, strict=True)) | {CHOICE: chosen}
    return {name: [round(x, 6) for x in e.flatten().tolist()] for name, e in named.items()}


class Layer:
    """Measures cells on one layer of one document; what a policy retains at a budget is found once."""

    def __init__(self, seen: Seen, scorer: Callable[[str], Scorer], measured: bool = True) -> None:
        """`measured`: False where nothing but the choice of estimators is asked for, which the first half of the
        own tokens makes."""
        self.seen, self._scorer = seen, scorer
        self.at = asked_at(seen.prompt, seen.tokens)[: 2 * QUERIES if measured else QUERIES]
        middle = (seen.prompt + seen.tokens) // 2
        self._ranked = seen if measured else seen.upto(middle)
        self.asked = Asked(self._ranked, self.at)
        self._measured = self.at >= middle
        self._leaves: dict[tuple[str, int], Tensor] = {}
        self._target: Tensor | None = None

    def scorer(self, name: str) -> Scorer:
        if name not in FORESEEN:
            return self._scorer(name)
        if self._target is None:
            self._target = future_attention(self.seen, WINDOW)
        return Foreseen(self._target, FORESEEN[name])

    def leaves(self, policy: str, budget: int) -> Tensor:
        if (policy, budget) not in self._leaves:
            one = make(policy, budget, self.scorer)
            one.advance(self._ranked)
            self._leaves[policy, budget] = one.leaves
        return self._leaves[policy, budget]

    def _retained(self, cell: Cell) -> tuple[Tensor, int]:
        """Returns what a cell retains [H, n, T], and how many more it retrieves."""
        exact, retained = cell.exact(self.seen.tokens), cell.retained(self.seen.tokens)
        mask = kept(self.leaves(cell.policy, retained), self.at)
        counts = mask.sum(-1)
        if bool((counts != retained).any()):
            raise AssertionError(f"{cell.method}: {int(counts.min())} to {int(counts.max())} tokens, not {retained}")
        return mask, exact - retained

    def measure(self, cell: Cell) -> dict[str, list[float]]:
        return errors_of(self.asked, *self._retained(cell), self._measured)

    def choose(self, cell: Cell) -> Tensor:
        """Returns the number of the estimator that each KV head [H] would take."""
        return choice(errors_by_estimator(self.asked, *self._retained(cell))[..., ~self._measured])


def missing(journal: Journal, document: str, layer: int, plan: Plan) -> list[Cell]:
    key = (document, layer, plan.prompt)
    return [c for c in plan.cells() if not journal.has(key, c.method)]


def measure(
    one: Recorded, layer: int, plan: Plan, cells: Sequence[Cell], scorer: Callable[[str], Scorer]
) -> list[dict[str, Any]]:
    """Returns a document's rows for a layer: one of its entropies, and one for each cell."""
    work = Layer(one.layer(layer, plan.prompt), scorer)
    key = [one.name, layer, plan.prompt]
    entropies = [round(x, 6) for x in entropy(work.asked).flatten().tolist()]
    rows: list[dict[str, Any]] = [{"key": key, "method": "entropy", "kind": one.kind, "entropy": entropies}]
    for cell in cells:
        rows.append({
            "key": key, "method": cell.method, "policy": cell.policy, "budget": cell.budget, "share": cell.share,
            "errors": work.measure(cell),
        })  # fmt: skip
    return rows
