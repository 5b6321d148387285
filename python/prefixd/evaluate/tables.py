"""Writes the figures as Markdown tables, in the layout of the paper's."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from prefixd.evaluate.methods import (
    ACCOUNTINGS,
    AMORTIZED,
    BUDGET,
    METHODS,
    SAME_K,
    Cell,
    shown,
)

Entry = Mapping[str, Any]
Table = tuple[str, str, str]  # title, what it says, Markdown
DASH = "–"
RIVALS = ("quest", "snapkv", "streaming")


def spread(entry: Entry, form: str) -> str:
    """Returns the interval, where there is one."""
    if entry["low"] is None:
        return ""
    return f" [{form.format(entry['low'])}, {form.format(entry['high'])}]"


def markdown(head: Sequence[str], body: Sequence[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    return "\n".join(lines + ["| " + " | ".join(row) + " |" for row in body]) + "\n"


def percent(fraction: float) -> str:
    return f"{100 * fraction:g}%"


def _index(entries: Sequence[Entry]) -> dict[tuple[str, int, str], Entry]:
    return {
        (e.get("kind", ""), e["length"], Cell(e["method"], e["accounting"], e["budget"]).key): e
        for e in entries
    }


def _by_budget(
    results: Entry, entries: Sequence[Entry], methods: Sequence[str], accounting: str,
    text: Callable[[Entry], str], *, best: Callable[[Entry], float] | None = None, kind: str = "",
) -> str:
    """Writes methods as rows and budgets of every length as columns; best in bold, infeasible
    "–"."""
    index = _index(entries)
    lengths, budgets = results["lengths"], results["plan"]["budgets"]
    columns = [(n, f) for n in lengths for f in budgets]
    top: dict[tuple[int, float], float] = {}
    if best is not None:
        for n, f in columns:
            rated = [
                best(e) for m in methods if METHODS[m].mode == "retrieve"
                and (e := index.get((kind, n, shown(m, accounting, f).key))) and e["feasible"]
            ]
            top[n, f] = max(rated, default=float("inf"))
    body = []
    for m in methods:
        row = [METHODS[m].label]
        for n, f in columns:
            e = index.get((kind, n, shown(m, accounting, f).key))
            cell = text(e) if e and e["feasible"] else DASH
            bold = (cell != DASH and best is not None and e is not None
                    and METHODS[m].mode == "retrieve"
                    and best(e) >= top[n, f] - 1e-12)
            row.append(f"**{cell}**" if bold else cell)
        body.append(row)
    return markdown(["method", *(f"{n}: {percent(f)}" for n, f in columns)], body)


def all_tables(results: Entry) -> list[Table]:
    plan = results["plan"]
    ours = [m for m in plan["methods"] if not METHODS[m].baseline]
    baselines = [m for m in plan["methods"] if m in ("full", "topk", "auto", "phi") or m in RIVALS]
    named = {a: ACCOUNTINGS[a].format(l_gen=plan["l_gen"]) for a in ACCOUNTINGS}
    tables: list[Table] = []
    if results["accuracy"]:
        tables.append(_table_1(results, ours))
        for accounting, number in ((BUDGET, "2"), (AMORTIZED, "2b")):
            tables.append((
                f"Table {number}. Answers by budget, {accounting}",
                f"Share of right answers, mean over the kinds of questions; {named[accounting]}. "
                "Columns: document tokens and the fraction read per step. Best in bold; "
                f'"{DASH}": the budget cannot pay for anchors and summary.',
                _by_budget(results, results["accuracy"], ours, accounting,
                           lambda e: f"{e['mean']:.3f}", best=lambda e: e["mean"]),
            ))
        tables.append(_table_3(results, ours))
        if any(m in RIVALS for m in baselines):
            tables.append((
                "Table 4. Baselines that select or evict otherwise",
                "Share of right answers. Quest, SnapKV and StreamingLLM read the same number of tokens "
                "per query head (Quest's page bounds, and its two dense first layers, are not charged "
                f"to it); ours are {named[BUDGET]}.",
                _by_budget(results, results["accuracy"], baselines, BUDGET,
                           lambda e: f"{e['mean']:.3f}", best=lambda e: e["mean"]),
            ))
    if results["likelihood"]:
        with_rivals = [m for m in plan["methods"] if m not in ("full", "snapkv")]
        full = {e["length"]: e for e in results["likelihood"] if e["method"] == "full"}
        said = ", ".join(f"{e['mean']:.4f} at {n}" for n, e in full.items())
        for accounting, number in ((SAME_K, "5"), (BUDGET, "5b")):
            tables.append((
                f"Table {number}. Likelihood of a continuation, {accounting}",
                f"Nats per token beyond full attention (which has {said}); {named[accounting]}. Every "
                "token of the continuation reads the document by the method. Nearest to full in bold.",
                _by_budget(results, results["likelihood"], with_rivals, accounting,
                           lambda e: f"{e['excess']:+.4f}", best=lambda e: -abs(e["excess"])),
            ))
    if results["errors"]:
        methods = [m for m in ours if m != "full"]
        for accounting, number in ((SAME_K, "6"), (BUDGET, "6b")):
            tables.append((
                f"Table {number}. Error of the attention output, {accounting}",
                f"Relative ℓ1 error, mean over heads, queries and documents; {named[accounting]}.",
                _by_budget(results, results["errors"], methods, accounting,
                           lambda e: f"{e['mean']:.4f}", best=lambda e: -e["mean"]),
            ))
        tables.append(_quartiles(results, methods))
    if results["paired"]:
        tables += _paired(results, named)
    return tables


def _table_1(results: Entry, methods: Sequence[str]) -> Table:
    fraction = min(results["plan"]["budgets"])
    index = _index(results["accuracy"])
    body = []
    for m in methods:
        row = [METHODS[m].label]
        for n in results["lengths"]:
            e = index.get(("", n, shown(m, SAME_K, fraction).key))
            row.append(f"{e['mean']:.3f}{spread(e, '{:.2f}')}"
                       if e and e["feasible"] else DASH)
        body.append(row)
    return (
        "Table 1. Answers at one point of reading, same K",
        f"Share of right answers, mean over the kinds of questions, with {percent(fraction)} of the "
        "document read exactly per step; the summary is not charged. 95% intervals.",
        markdown(["method", *map(str, results["lengths"])], body),
    )


def _table_3(results: Entry, methods: Sequence[str]) -> Table:
    fraction = min(results["plan"]["budgets"])
    index = _index(results["accuracy"])
    columns = [(k, n) for k in results["kinds"] for n in results["lengths"]]
    body = []
    for m in methods:
        row = [METHODS[m].label]
        for kind, n in columns:
            e = index.get((kind, n, shown(m, SAME_K, fraction).key))
            row.append(f"{e['mean']:.2f}{spread(e, '{:.2f}')}"
                       if e and e["feasible"] else DASH)
        body.append(row)
    return (
        "Table 3. Answers by kind of question, same K",
        f"At {percent(fraction)}; Wilson's 95% intervals for exact answers, over documents for "
        "shares of expected strings.",
        markdown(["method", *(f"{k}, {n}" for k, n in columns)], body),
    )


def _quartiles(results: Entry, methods: Sequence[str]) -> Table:
    fractions = results["plan"]["budgets"]
    fraction = 0.02 if 0.02 in fractions else min(fractions)
    index = _index(results["errors"])
    body = []
    for m in methods:
        row = [METHODS[m].label]
        for n in results["lengths"]:
            e = index.get(("", n, shown(m, SAME_K, fraction).key))
            row.append(" / ".join(f"{x:.3f}" for x in e["by_quartile"])
                       if e and e["feasible"] else DASH)
        body.append(row)
    edges = []
    for n in results["lengths"]:
        heads = [h for h in results["heads"] if h["length"] == n]
        means = [[h["entropy"] for h in heads if h["quartile"] == q] for q in range(4)]
        edges.append(" / ".join(f"{sum(x) / len(x):.2f}" if x else DASH for x in means))
    body.insert(0, ["(mean H_mid of the quartile)", *edges])
    return (
        "Table 7. Error by quartile of heads, same K",
        f"Relative ℓ1 error at {percent(fraction)}, heads sorted by the normalized entropy of their "
        "attention over the middle, lowest first.",
        markdown(["method", *map(str, results["lengths"])], body),
    )


def _paired(results: Entry, named: Mapping[str, str]) -> list[Table]:
    plan, tables = results["plan"], []
    index = {(p["what"], p["length"], p["method"], p["accounting"], p["budget"]): p
             for p in results["paired"]}
    if "auto" not in plan["methods"]:
        return []
    body = []
    for n in results["lengths"]:
        for f in plan["budgets"]:
            row = [str(n), percent(f)]
            for accounting in (SAME_K, BUDGET):
                for what, form in (("accuracy", "{:+.3f}"), ("likelihood", "{:+.4f}"),
                                   ("error", "{:+.4f}")):
                    p = index.get((what, n, "auto", accounting, f))
                    row.append(DASH if p is None else
                               form.format(p["mean"]) + spread(p, form))
            body.append(row)
    head = ["length", "budget"] + [f"{what}, {a}" for a in (SAME_K, BUDGET)
                                   for what in ("answers", "nats per token", "ℓ1 error")]
    tables.append((
        "Table 8. Per-head choice against Top-K, paired",
        "On the same questions, tokens and queries; above 0 the choice is the better one. 95% "
        f"intervals over documents. {SAME_K}: {named[SAME_K]}; {BUDGET}: {named[BUDGET]}.",
        markdown(head, body),
    ))
    return tables
