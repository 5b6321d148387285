"""Turns what was measured into figures: means by document with intervals, ratios to Top-K on the same
documents, and what the project promises."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from prefixd.evaluate.compare.readings import DEFAULT, DEFAULT_TOPK, at_length, name
from prefixd.evaluate.stats import interval, ratio_interval

Row = Mapping[str, Any]
# Answers to questions that full attention mostly misses show nothing about reading.
FLOOR = 0.2
LONGEST = 7600


class Measured:
    """Looks rows up by document and method."""

    def __init__(self, rows: Sequence[Row]) -> None:
        self.rows: dict[str, dict[tuple[Any, ...], Row]] = defaultdict(dict)
        for row in rows:
            self.rows[row["method"]][tuple(row["key"])] = row
        self.lengths = sorted({r["key"][1] for r in rows})
        self.methods = [m for m in self.rows if m not in ("heads", "full")]

    def each(self, method: str, length: int, what: str, kind: str | None = None) -> dict[tuple[Any, ...], float]:
        """Returns a value of each document (of a kind): the mean of `what` over its forced tokens where
        it has such, else over what was written."""
        out = {}
        for key, row in self.rows.get(method, {}).items():
            if key[1] != length or not row.get("feasible", True) or (kind is not None and key[0] != kind):
                continue
            forced = [p for p in row["passages"] if "text" not in p] or row["passages"]
            values = [x for p in forced for x in p[what]]
            out[key] = float(np.mean(values))
        return out

    def scores(self, method: str, length: int) -> dict[str, dict[tuple[Any, ...], float]]:
        """Returns the mean score of each kind of question, by document."""
        out: dict[str, dict[tuple[Any, ...], float]] = defaultdict(dict)
        for key, row in self.rows.get(method, {}).items():
            if key[1] != length or not row.get("feasible", True):
                continue
            by_kind: dict[str, list[float]] = defaultdict(list)
            for p in row["passages"]:
                if p.get("score") is not None:
                    by_kind[p["kind"]].append(p["score"])
            for kind, values in by_kind.items():
                out[kind][key] = float(np.mean(values))
        return out


def _number(x: float) -> float | None:
    return float(x) if np.isfinite(x) else None


def mean(values: Sequence[float], clusters: Sequence[object] | None = None) -> dict[str, Any]:
    low, high = interval(values, clusters)
    return {"value": float(np.mean(values)), "low": _number(low), "high": _number(high), "n": len(values)}


def ratio(a: Mapping[Any, float], b: Mapping[Any, float]) -> dict[str, Any] | None:
    """Returns the ratio of the means of two methods on the documents that both have."""
    both = sorted(a.keys() & b.keys())
    if not both or not (below := sum(b[k] for k in both)):
        return None
    x, y = [a[k] for k in both], [b[k] for k in both]
    low, high = ratio_interval(x, y)
    return {"value": sum(x) / below, "low": _number(low), "high": _number(high), "n": len(both)}


def difference(
    a: Mapping[Any, float], b: Mapping[Any, float], document: Callable[[Any], object] | None = None
) -> dict[str, Any] | None:
    """Returns the mean difference of two methods on what both have. `document` tells the document of a key,
    where one has several."""
    both = sorted(a.keys() & b.keys())
    clusters = None if document is None else [document(k) for k in both]
    return mean([a[k] - b[k] for k in both], clusters) if both else None


def summarise(rows: Sequence[Row]) -> dict[str, Any]:
    m = Measured(rows)
    kinds = [*dict.fromkeys(r["key"][0] for r in rows)]
    out: dict[str, Any] = {"lengths": m.lengths, "kinds": kinds, "readings": [], "answers": [], "heads": []}
    out["documents"] = {str(n): {k: sum(key[:2] == (k, n) for key in m.rows["full"]) for k in kinds} for n in m.lengths}
    for length in m.lengths:
        for method in m.methods:
            for kind in (None, *kinds):
                kl = m.each(method, length, "kl", kind)
                if not kl:
                    continue
                base, _, budget = method.partition("@")
                plain = "topk-codes" if base.endswith("-codes") else "topk"
                entry = {"length": length, "method": method, "kind": kind or "",
                         "kl": mean([*kl.values()]), "same": mean([*m.each(method, length, "same", kind).values()]),
                         "nats": difference(m.each(method, length, "nll", kind), m.each("full", length, "nll", kind))}
                if budget and base != plain:
                    entry["kl_to_topk"] = ratio(kl, m.each(f"{plain}@{budget}", length, "kl", kind))
                out["readings"].append(entry)
        out["answers"] += _answers(m, length)
        out["heads"] += _heads(m, length)
    out["promises"] = promises(m, kinds)
    return out


def _answers(m: Measured, length: int) -> list[dict[str, Any]]:
    full = m.scores("full", length)
    able = {kind: scores for kind, scores in full.items() if np.mean([*scores.values()]) >= FLOOR}
    out = [{"length": length, "method": "full", "kind": kind, "able": kind in able, "score": mean([*s.values()])}
           for kind, s in full.items()]
    for method in m.methods:
        own = m.scores(method, length)
        for kind, scores in able.items():
            if own.get(kind):
                out.append({"length": length, "method": method, "kind": kind, "able": True,
                            "score": mean([*own[kind].values()]), "beyond_full": difference(own[kind], scores)})
    return out


def quartiles(values: np.ndarray) -> np.ndarray:
    """Returns each head's quartile, 0 to 3, by the rank of its entropy."""
    ranks = np.argsort(np.argsort(values, axis=None, kind="stable"), kind="stable")
    return ranks * 4 // values.size


def _heads(m: Measured, length: int) -> list[dict[str, Any]]:
    """Returns each method's errors of the attention output: by layer, by quartile of a document's
    heads, and the heads with the most."""
    known = {k: r for k, r in m.rows.get("heads", {}).items() if k[1] == length and r.get("entropy")}
    out = []
    for method in m.methods:
        found = {k: r for k, r in m.rows[method].items() if k in known and r.get("errors")}
        if not found:
            continue
        errors = np.array([r["errors"] for r in found.values()])
        shifts = np.array([r["shifts"] for r in found.values()])
        quarter = np.array([quartiles(np.array(known[k]["entropy"])) for k in found])
        layers = next(iter(known.values()))["layers"]
        by_head = errors.mean(0).reshape(layers, -1)
        worst = np.argsort(-by_head, axis=None)[:8]
        out.append({
            "length": length, "method": method, "n": len(found), "error": mean([*errors.mean(1)]),
            "by_quartile": [float(errors[quarter == q].mean()) for q in range(4)],
            "shift_by_quartile": [float(shifts[quarter == q].mean()) for q in range(4)],
            "by_layer": by_head.mean(1).tolist(),
            "worst": [[int(i // by_head.shape[1]), int(i % by_head.shape[1]), float(by_head.flat[i])] for i in worst],
        })
    return out


def promises(m: Measured, kinds: Sequence[str]) -> dict[str, Any]:
    """Returns what is promised at the longest length, with the default selector; null where it was not
    measured."""
    out: dict[str, Any] = {}
    length = max((n for n in m.lengths if n >= LONGEST), default=None)
    own, plain = (at_length(x, length or LONGEST) for x in (DEFAULT, DEFAULT_TOPK))
    worse: dict[str, Any] = {}
    for budget, most in ((0.02, 0.5), (0.05, 0.25)):
        key = f"kl_to_topk_{100 * budget:g}pct"
        if length is None:
            out[key] = None
            continue
        a, b = (m.each(name(x, budget), length, "kl") for x in (own, plain))
        found = ratio(a, b)
        out[key] = found and {**found, "at_most": most, "kept": found["high"] is not None and found["high"] <= most}
        for kind in kinds:
            part = ratio(*({k: v for k, v in x.items() if k[0] == kind} for x in (a, b)))
            if part is not None and part["value"] > 1:
                worse[f"{kind}, {100 * budget:g}%"] = part
    out["worse_kinds"] = None if length is None else worse
    same = m.each(name(own, 0.05), length, "same") if length else {}
    out["same_token_5pct"] = {**mean([*same.values()]), "at_least": 0.99} if same else None
    if out["same_token_5pct"]:
        out["same_token_5pct"]["kept"] = out["same_token_5pct"]["value"] >= 0.99
    out["answers_2pct_beyond_full"] = None
    if length:
        full, read = m.scores("full", length), m.scores(name(own, 0.02), length)
        able = [k for k, s in full.items() if np.mean([*s.values()]) >= FLOOR]
        a = {(kind, key): v for kind in able for key, v in read.get(kind, {}).items()}
        b = {(kind, key): v for kind in able for key, v in full[kind].items()}
        if (found := difference(a, b, lambda key: key[1])) is not None:
            kept = found["low"] is not None and found["low"] <= 0 <= found["high"] or found["value"] >= 0
            out["answers_2pct_beyond_full"] = {**found, "kept": bool(kept)}
    return out
