"""Turns rows into figures: means with intervals of every cell, heads and quartiles, paired
comparisons."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from prefixd.evaluate.methods import ACCOUNTINGS, METHODS, SAME_K, Cell, cells, shown
from prefixd.evaluate.rows import without_outdated
from prefixd.evaluate.stats import interval, of_mean, wilson

Row = Mapping[str, Any]


def summarise(plan: Mapping[str, Any], rows: Sequence[Row]) -> dict[str, Any]:
    documents = [without_outdated(r, plan["maps"]) for r in rows if r["key"][0] == "document"]
    asked = cells(plan["methods"], plan["budgets"])
    lengths = sorted({r["key"][2] for r in documents})
    return {
        "plan": dict(plan),
        "lengths": lengths,
        "kinds": list(dict.fromkeys(a["kind"] for r in documents for a in r["answers"])),
        "documents": {str(n): sum(r["key"][2] == n for r in documents) for n in lengths},
        "probes": [
            {"task": r["key"][1], "length": r["key"][2], "score": r["score"], "asked": r["asked"],
             "able": r["able"]}
            for r in rows if r["key"][0] == "probe"
        ],
        "accuracy": _accuracy(documents, asked),
        "likelihood": _likelihood(documents, asked),
        "heads": [h for n in lengths for h in _heads(documents, n)],
        "errors": [e for n in lengths for e in _errors(documents, asked, n)],
        "paired": [p for n in lengths for p in _paired(documents, plan, n)],
        "scatter": [dict(r["scatter"], length=r["key"][2]) for r in documents if "scatter" in r],
    }


def _cell(cell: Cell) -> dict[str, Any]:
    return {"method": cell.method, "accounting": cell.accounting, "budget": cell.fraction}


def _mean(values: Sequence[float], clusters: Sequence[object]) -> dict[str, Any]:
    low, high = interval(values, clusters)
    return {"feasible": True, "mean": float(np.mean(values)), "low": _number(low),
            "high": _number(high), "n": len(values)}


def _number(x: float) -> float | None:
    """JSON has no NaN."""
    return None if np.isnan(x) else float(x)


_NOTHING = {"feasible": False, "mean": None, "low": None, "high": None, "n": 0}


def _accuracy(documents: Iterable[Row], asked: Sequence[Cell]) -> list[dict[str, Any]]:
    """Returns results per kind, length and cell; kind "" is the mean over kinds (all kinds weigh
    the same)."""
    scores: dict[tuple[str, int, str], list[tuple[float, object]]] = defaultdict(list)
    exact: dict[str, bool] = {}
    seen: set[tuple[str, int]] = set()
    for r in documents:
        length, name = r["key"][2], (r["key"][1], r["key"][3])
        for a in r["answers"]:
            seen.add((a["kind"], length))
            exact[a["kind"]] = a["exact"]
            for key, score in a["scores"].items():
                if score is not None:
                    scores[a["kind"], length, key].append((score, name))
    out = []
    for length in sorted({n for _, n in seen}):
        kinds = [k for k, n in seen if n == length]
        for cell in asked:
            parts = []
            for kind in sorted(kinds):
                found = scores.get((kind, length, cell.key))
                at = {"kind": kind, "length": length, **_cell(cell)}
                if not found:
                    out.append(at | _NOTHING)
                    continue
                values = [v for v, _ in found]
                entry = _mean(values, [c for _, c in found])
                if exact[kind]:  # right or wrong needs Wilson's interval
                    entry["low"], entry["high"] = wilson(sum(values), len(values))
                elif entry["low"] is not None:
                    entry["low"], entry["high"] = max(0, entry["low"]), min(1, entry["high"])
                parts.append(entry)
                out.append(at | entry)
            at = {"kind": "", "length": length, **_cell(cell)}
            if len(parts) < len(kinds):
                out.append(at | _NOTHING)
                continue
            known = [(e["mean"], e["low"], e["high"]) for e in parts if e["low"] is not None]
            low, high = of_mean(known) if len(known) == len(parts) else (np.nan, np.nan)
            out.append(at | {"feasible": True, "mean": float(np.mean([e["mean"] for e in parts])),
                             "low": _number(low), "high": _number(high),
                             "n": sum(e["n"] for e in parts)})
    return out


def _likelihood(documents: Iterable[Row], asked: Sequence[Cell]) -> list[dict[str, Any]]:
    """Returns nats per token of continuations; `excess`: beyond full attention on the same
    tokens."""
    found: dict[tuple[int, str], list[tuple[float, float, int]]] = defaultdict(list)
    lengths = set()
    for r in documents:
        if "nll" not in r:
            continue
        lengths.add(r["key"][2])
        full = r["nll"]["full/same-k/0"]
        for key, value in r["nll"].items():
            if value is not None:
                found[r["key"][2], key].append((value, value - full, r["key"][3]))
    out = []
    for length in sorted(lengths):
        for cell in asked:
            values = found.get((length, cell.key))
            at = {"length": length, **_cell(cell)}
            if not values:
                out.append(at | _NOTHING | {"excess": None})
                continue
            excess = _mean([e for _, e, _ in values], [d for _, _, d in values])
            out.append(at | _mean([v for v, _, _ in values], [d for _, _, d in values]) | {
                "excess": excess["mean"], "excess_low": excess["low"],
                "excess_high": excess["high"]})
    return out


def _diagnosed(documents: Iterable[Row], length: int) -> list[Row]:
    return [r for r in documents if r["key"][2] == length and "diagnostics" in r]


def _heads(documents: Iterable[Row], length: int) -> list[dict[str, Any]]:
    """Returns means over documents per head."""
    own = _diagnosed(documents, length)
    if not own:
        return []
    measured = [r["diagnostics"] for r in own]
    entropies = np.mean([m["entropy"] for m in measured], 0)
    mass = np.mean([m["mass"] for m in measured], 0) if len(
        {tuple(m["grid"]) for m in measured}) == 1 else np.array(measured[0]["mass"])
    quarter = quartiles(entropies)
    keys = {name: {k for m in measured for k, v in m[name].items() if v is not None}
            for name in ("errors", "rho")}
    means = {
        name: {k: np.mean([m[name][k] for m in measured if m[name].get(k) is not None], 0)
               for k in sorted(keys[name])}
        for name in ("errors", "rho")
    }
    return [
        {"length": length, "layer": layer, "head": h, "entropy": float(entropies[i, h]),
         "quartile": int(quarter[i, h]), "grid": measured[0]["grid"], "mass": mass[i, h].tolist(),
         **{name: {k: float(v[i, h]) for k, v in means[name].items()} for name in means}}
        for i, layer in enumerate(measured[0]["layers"]) for h in range(entropies.shape[1])
    ]


def quartiles(values: np.ndarray) -> np.ndarray:
    """Returns the quartile 0 to 3 by rank, in the same shape."""
    ranks = np.argsort(np.argsort(values, axis=None, kind="stable"), kind="stable")
    return (ranks * 4 // values.size).reshape(values.shape)


def _errors(documents: Iterable[Row], asked: Sequence[Cell], length: int) -> list[dict[str, Any]]:
    """Returns the mean relative l1 error over heads, and by quartile of heads."""
    own = _diagnosed(documents, length)
    if not own:
        return []
    quarter = quartiles(np.mean([r["diagnostics"]["entropy"] for r in own], 0))
    out = []
    for cell in asked:
        if METHODS[cell.method].baseline:
            continue
        values = [np.array(e) for r in own if (e := r["diagnostics"]["errors"].get(cell.key)) is not None]
        at = {"length": length, **_cell(cell)}
        if not values:
            out.append(at | _NOTHING | {"by_quartile": None})
            continue
        each = [float(v.mean()) for v in values]
        out.append(at | _mean(each, list(range(len(each)))) | {
            "by_quartile": [float(np.mean([v[quarter == i].mean() for v in values]))
                            for i in range(4)]})
    return out


def _paired(documents: Sequence[Row], plan: Mapping[str, Any], length: int) -> list[dict[str, Any]]:
    """Compares each completing method with Top-K at the same budget and accounting, on the same
    questions, tokens and queries; whole documents are drawn. Above 0 the method is better than
    Top-K."""
    out = []
    own = [r for r in documents if r["key"][2] == length]
    for method in plan["methods"]:
        if not METHODS[method].charged:
            continue
        for accounting in ACCOUNTINGS:
            for fraction in plan["budgets"]:
                cell = shown(method, accounting, fraction).key
                plain = Cell("topk", SAME_K, fraction).key
                gains: dict[str, list[tuple[float, object]]] = {
                    "accuracy": [], "likelihood": [], "error": []}
                for r in own:
                    name = tuple(r["key"])
                    for a in r["answers"]:
                        x, y = a["scores"].get(cell), a["scores"].get(plain)
                        if x is not None and y is not None:
                            gains["accuracy"].append((x - y, name))
                    if "nll" in r and r["nll"].get(cell) is not None and plain in r["nll"]:
                        gains["likelihood"].append((r["nll"][plain] - r["nll"][cell], name))
                        errors = r["diagnostics"]["errors"]
                        better = np.mean(errors[plain]) - np.mean(errors[cell])
                        gains["error"].append((float(better), name))
                at = {"length": length, "method": method, "accounting": accounting,
                      "budget": fraction}
                for what, found in gains.items():
                    if found:
                        out.append(at | {"what": what} | _mean(
                            [g for g, _ in found], [c for _, c in found]))
    return out
