"""Makes of measured rows what was asked: each policy's error with what left dropped, estimated, or retrieved
and estimated; against sinks and a window; by quartile of heads; and whether retrieval ever loses."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from prefixd.evaluate.stats import interval, ratio_interval
from prefixd.retention.attend import ESTIMATORS
from prefixd.retention.run import CHOICE

Floats = NDArray[np.float64]
Estimate = tuple[float, float, float]  # value, and the ends of its 95% interval
DROP, ESTIMATED = "drop", "estimate"
QUARTILES = 4


def offload(share: float) -> str:
    return f"offload@{share:g}"


@dataclass
class Measured:
    """errors[policy, budget, arm][document, layer]: of each query head."""

    errors: dict[tuple[str, float, str], dict[tuple[str, int], Floats]] = field(default_factory=dict)
    entropy: dict[tuple[str, int], Floats] = field(default_factory=dict)
    kinds: dict[str, str] = field(default_factory=dict)

    @staticmethod
    def of(rows: Iterable[Mapping[str, Any]]) -> Measured:
        out = Measured()
        for row in rows:
            place = (row["key"][0], row["key"][1])
            if row["method"] == "entropy":
                out.entropy[place], out.kinds[place[0]] = np.array(row["entropy"]), row["kind"]
                continue
            share, errors = row["share"], row["errors"]
            arms = {offload(share): CHOICE} | {f"{offload(share)}/{e}": e for e in ESTIMATORS}
            if share == 1:
                arms = {DROP: "none", ESTIMATED: CHOICE} | {f"estimate/{e}": e for e in ESTIMATORS[1:]}
            for arm, name in arms.items():
                out.errors.setdefault((row["policy"], row["budget"], arm), {})[place] = np.array(errors[name])
        return out

    @property
    def documents(self) -> list[str]:
        return sorted(self.kinds)

    @property
    def layers(self) -> list[int]:
        return sorted({layer for _, layer in self.entropy})

    def quartile_of(self) -> dict[int, NDArray[np.int64]]:
        """Returns each head's quartile by its entropy over all documents, 0 the sharpest, by layer."""
        means = {i: np.mean([e for (_, at), e in self.entropy.items() if at == i], 0) for i in self.layers}
        every = np.concatenate(list(means.values()))
        rank = np.argsort(np.argsort(every, kind="stable"), kind="stable") * QUARTILES // len(every)
        return dict(zip(means, np.split(rank, len(means)), strict=True)) if means else {}


class Tables:
    """Means over documents, of the heads of a quartile or of all."""

    def __init__(self, measured: Measured) -> None:
        self.m = measured
        self._quartile = measured.quartile_of()
        self._whole = {(d, i) for d in measured.documents for i in measured.layers}

    @property
    def cells(self) -> list[tuple[str, float, str]]:
        """Returns what was measured everywhere."""
        return [key for key, places in self.m.errors.items() if self._whole <= set(places)]

    def by_document(self, cell: tuple[str, float, str], quartile: int | None = None) -> list[float]:
        places, out = self.m.errors[cell], []
        for document in self.m.documents:
            heads = [places[document, i][self._heads(i, quartile)] for i in self.m.layers]
            out.append(float(np.concatenate(heads).mean()))
        return out

    def _heads(self, layer: int, quartile: int | None) -> NDArray[np.bool_]:
        of = self._quartile[layer]
        return np.ones(len(of), bool) if quartile is None else of == quartile

    def mean(self, cell: tuple[str, float, str], quartile: int | None = None) -> Estimate:
        each = self.by_document(cell, quartile)
        return float(np.mean(each)), *interval(each)

    def ratio(
        self, above: tuple[str, float, str], below: tuple[str, float, str], quartile: int | None = None
    ) -> Estimate:
        """Returns the ratio of mean errors, paired by document."""
        a, b = self.by_document(above, quartile), self.by_document(below, quartile)
        return sum(a) / sum(b), *ratio_interval(a, b)


def summary(tables: Tables) -> dict[str, Any]:
    """Returns everything that the report shows, for --json."""
    there = set(tables.cells)
    cells = []
    for cell in sorted(there):
        policy, budget, arm = cell
        row: dict[str, Any] = {
            "policy": policy, "budget": budget, "arm": arm, "error": tables.mean(cell),
            "quartiles": [tables.mean(cell, q) for q in range(QUARTILES)],
        }
        if (base := ("window", budget, arm)) in there:
            row["of_window"] = tables.ratio(cell, base)
        if arm.startswith("offload") and (dropped := (policy, budget, DROP)) in there:
            row["of_drop"] = [tables.ratio(cell, dropped, q) for q in range(QUARTILES)]
        cells.append(row)
    return {"documents": tables.m.kinds, "layers": tables.m.layers, "cells": cells}


def _shown(e: Sequence[float], digits: int) -> str:
    return f"{e[0]:.{digits}f} [{e[1]:.{digits}f}, {e[2]:.{digits}f}]"


def heading(*names: str) -> list[str]:
    return ["", "| " + " | ".join(names) + " |", "|---" * len(names) + "|"]


def markdown(body: Mapping[str, Any]) -> str:
    """Returns the report's tables."""
    found = {(c["policy"], c["budget"], c["arm"]): c for c in body["cells"]}
    budgets = sorted({b for _, b, _ in found})
    policies = list(dict.fromkeys(p for p, _, _ in found))
    arms = sorted({a for _, _, a in found if "/" not in a}, key=lambda a: (a != DROP, a != ESTIMATED, a))
    lines = [
        f"{len(body['documents'])} documents, layers {', '.join(map(str, body['layers']))}; mean l1 error of the "
        "attention output over heads, 95% intervals over documents."
    ]
    for budget in budgets:
        lines += ["", f"## {budget:.0%} exact", *heading("policy", *arms)]
        for policy in policies:
            row = [found.get((policy, budget, arm)) for arm in arms]
            if any(row):
                shown = [_shown(c["error"], 4) if c else "–" for c in row]
                lines.append(f"| {policy} | " + " | ".join(shown) + " |")
        lines += ["", "Errors over those of sinks + window in the same arm:", *heading("policy", *arms)]
        for policy in policies:
            row = [found.get((policy, budget, arm)) for arm in arms]
            if policy != "window" and any(row):
                shown = [_shown(c["of_window"], 3) if c and "of_window" in c else "–" for c in row]
                lines.append(f"| {policy} | " + " | ".join(shown) + " |")
        lines += ["", "Retrieved and estimated, over dropped, by quartile of heads (the sharpest first):"]
        lines += heading("policy", "arm", *map(str, range(1, QUARTILES + 1)))
        for policy in policies:
            for arm in arms:
                if (c := found.get((policy, budget, arm))) and "of_drop" in c:
                    shown = [_shown(e, 3) for e in c["of_drop"]]
                    lines.append(f"| {policy} | {arm} | " + " | ".join(shown) + " |")
    return "\n".join(lines) + "\n"
