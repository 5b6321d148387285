"""Tells what a model predicts, writes and answers with a policy inside it, beside full attention."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from prefixd.evaluate.stats import interval, ratio_interval
from prefixd.retention.report import heading

# What a row may have: its title, and the digits that are shown.
COLUMNS = {
    "kl": ("KL, nats", 4), "kl_of_dropped": ("KL, of dropped", 4),
    "kl_of_window": ("KL, of the window's", 3), "same": ("same next token", 3),
    "nats": ("nats beyond full", 4), "alike": ("of 64 written, alike", 3), "answers": ("answers", 3),
}  # fmt: skip


def _with_ends(mean: float, ends: tuple[float, float]) -> list[float | None]:
    """Returns a mean and the ends of its interval; None for those of a single value."""
    return [mean, *(e if math.isfinite(e) else None for e in ends)]


def _divergences(*methods: Sequence[Mapping[str, Any]]) -> list[list[float]]:
    """Returns for methods with rows of the same texts what intervals of their divergences are over: texts, or where
    there are fewer than three, spans of them."""
    if len(methods[0]) < 3 and all("spans" in row for rows in methods for row in rows):
        return [[kl for row in rows for kl in row["spans"]] for rows in methods]
    return [[row["kl"] for row in rows] for rows in methods]


def inside_summary(rows: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Returns each method's means over the texts that have it, with 95% intervals: one with facts has answers, any
    other a free text. `kl_of_dropped` is over the same policy and budget with what left dropped, `kl_of_window` over
    sinks and a window with the same budget and shares, both paired by text, or by span where there are fewer than
    three texts. `rows` are what was measured."""
    rows = list(rows)
    found: dict[str, dict[str, Mapping[str, Any]]] = {}
    for row in rows:
        found.setdefault(row["method"], {})[row["key"][0]] = row
    methods = []
    for method, by_text in found.items():
        of = [by_text[text] for text in sorted(by_text)]
        one: dict[str, Any] = {"method": method, "texts": sorted(by_text)}
        for what in COLUMNS:
            if each := [float(row[what]) for row in of if what in row]:
                of_what = _divergences(of)[0] if what == "kl" else each
                one[what] = _with_ends(float(np.mean(each)), interval(of_what))
        policy, *rest = method.split("/")
        for what, other in (("kl_of_dropped", "/".join([policy, rest[0], "1"]) if rest else method),
                            ("kl_of_window", "/".join(["window", *rest]))):  # fmt: skip
            both = sorted(by_text.keys() & found.get(other, {}).keys())
            if other != method and both:
                above, below = _divergences(*([found[m][text] for text in both] for m in (method, other)))
                one[what] = _with_ends(sum(above) / sum(below), ratio_interval(above, below))
        methods.append(one)
    return {"methods": methods, "worst": _worst(methods), "rows": rows}


def _worst(methods: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Returns for each fate of what left the largest divergence over dropped's and the least share of right answers of
    all policies and budgets; of what is dropped, the largest share of right answers."""
    fates: dict[str, list[dict[str, Any]]] = {"dropped": [], "estimated": [], "retrieved": []}
    for one in methods:
        if one["method"] != "full":
            *_, end = one["method"].split("/")
            fates["dropped" if end == "1" else "estimated" if end == "estimated" else "retrieved"].append(one)
    out: dict[str, dict[str, float]] = {}
    for fate, of in fates.items():
        ratios = [one["kl_of_dropped"][0] for one in of if "kl_of_dropped" in one]
        answers = [one["answers"][0] for one in of if "answers" in one]
        out[fate] = {"kl_of_dropped": max(ratios)} if ratios else {}
        if answers:
            out[fate]["answers"] = max(answers) if fate == "dropped" else min(answers)
    return out


def _shown(e: list[float | None] | None, digits: int) -> str:
    if e is None:
        return "–"
    return f"{e[0]:.{digits}f}" + ("" if e[1] is None else f" [{e[1]:.{digits}f}, {e[2]:.{digits}f}]")


def inside_table(body: Mapping[str, Any]) -> str:
    lines = heading("policy / budget / share retained", "texts", *(title for title, _ in COLUMNS.values()))
    for one in body["methods"]:
        shown = [_shown(one.get(what), digits) for what, (_, digits) in COLUMNS.items()]
        lines.append(f"| {one['method']} | {len(one['texts'])} | " + " | ".join(shown) + " |")
    return "\n".join(lines) + "\n"
