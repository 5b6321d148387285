"""Lists what is compared: methods, read budgets and their accounting, as policies of real
sessions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import prefixd

N_SINK, N_TAIL = 4, 16


@dataclass(frozen=True)
class Method:
    """`estimator` stands for what is not read (None: not a retrieval method). `baseline` is a name
    in baselines.py instead. `charged`: the summary costs tokens, so that the accountings differ.
    `mapped`: the tokens read depend on the feature maps."""

    name: str
    label: str
    estimator: str | None = None
    baseline: str = ""
    mode: str = "retrieve"
    charged: bool = False
    cis: bool = False
    mapped: bool = False


METHODS = {
    m.name: m
    for m in (
        Method("full", "Full attention", mode="full"),
        Method("sink-tail", "Sink + tail", mode="anchors"),
        Method("topk", "Top-K", "none"),
        Method("phi", "Top-K + φ", "phi", charged=True, mapped=True),
        Method("phi-bf16", "Top-K + φ (bf16 cache)", "phi/bf16", charged=True, mapped=True),
        Method("moment", "Top-K + moment", "moment", charged=True),
        Method("moment-r8", "Top-K + moment, rank 8", "moment/r8", charged=True),
        Method("centroid", "Top-K + centroid", "centroid", charged=True),
        Method("auto", "Per-head choice", "auto", charged=True, mapped=True),
        Method("cis", "Per-head choice + CIS", "auto", charged=True, mapped=True, cis=True),
        Method("quest", "Quest", baseline="quest"),
        Method("snapkv", "SnapKV", baseline="snapkv"),
        Method("streaming", "StreamingLLM", baseline="streaming"),
    )
}
# Blocks of steps share the set that one of them retrieved, where queries are alike
# (docs/selection.md).
CIS = {"block": 16, "similarity": 0.8, "dilation": 1}
# Fixed choices of `auto` are made among these, so the store builds them.
ESTIMATORS = ("none", "moment", "moment/r8", "centroid", "phi", "phi/bf16")

SAME_K, BUDGET, AMORTIZED = "same-k", "budget", "amortized"
ACCOUNTINGS = {
    SAME_K: "same K (the summary is not charged)",
    BUDGET: "budget-matched, the summary charged to every step (L_gen = 1)",
    AMORTIZED: "budget-matched, the summary shared by L_gen = {l_gen} generated tokens",
}


@dataclass(frozen=True)
class Cell:
    """A cell is one column of a table for one method. Fraction 0: the budget does not matter."""

    method: str
    accounting: str
    fraction: float

    @property
    def key(self) -> str:
        return f"{self.method}/{self.accounting}/{self.fraction:g}"


def budget_tokens(fraction: float, n: int) -> int:
    """Returns n(f) [13]."""
    return math.ceil(fraction * n - 1e-9)


def k_topk(fraction: float, n: int) -> int:
    """Returns [14], the tokens that every method retrieves under SAME_K."""
    return max(0, budget_tokens(fraction, n) - N_SINK - N_TAIL)


def cells(methods: Sequence[str], fractions: Sequence[float]) -> list[Cell]:
    """Returns each cell of every method once: as SAME_K where the accountings do not differ."""
    out = []
    for name in methods:
        method = METHODS[name]
        if method.mode != "retrieve":
            out.append(Cell(name, SAME_K, 0.0))
            continue
        for accounting in ACCOUNTINGS if method.charged else (SAME_K,):
            out += [Cell(name, accounting, f) for f in fractions]
    return out


def shown(cell_method: str, accounting: str, fraction: float) -> Cell:
    """Returns the cell that stands in the table of `accounting`."""
    method = METHODS[cell_method]
    if method.mode != "retrieve":
        return Cell(cell_method, SAME_K, 0.0)
    return Cell(cell_method, accounting if method.charged else SAME_K, fraction)


def policy(cell: Cell, n: int, l_gen: int, selector: str) -> prefixd.Policy:
    """Returns how a session over n tokens reads in this cell (not for baselines)."""
    method = METHODS[cell.method]
    if method.mode != "retrieve":
        return prefixd.Policy(mode=method.mode)
    assert method.estimator is not None
    sharing = CIS if method.cis else None
    if cell.accounting == SAME_K:
        k = k_topk(cell.fraction, n)
        return prefixd.Policy(k=k, estimator=method.estimator, selector=selector, sharing=sharing)
    return prefixd.Policy(
        budget=cell.fraction,
        estimator=method.estimator,
        l_gen=l_gen if cell.accounting == AMORTIZED else 1,
        selector=selector,
        sharing=sharing,
    )
