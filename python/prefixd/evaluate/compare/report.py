"""Writes report.md and report.json of a run's rows."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from prefixd.evaluate.compare.journal import Journal
from prefixd.evaluate.compare.readings import METHODS
from prefixd.evaluate.compare.summary import summarise
from prefixd.evaluate.tables import markdown

Entry = Mapping[str, Any]
DASH = "–"


def write_report(out: Path) -> dict[str, Any]:
    results = summarise(Journal(out / "rows.jsonl").rows)
    (out / "report.json").write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    (out / "report.md").write_text(_page(results), encoding="utf-8")
    return results


def _said(x: Entry | None, form: str) -> str:
    if x is None:
        return DASH
    value = form.format(x["value"])
    return value if x["low"] is None else f"{value} [{form.format(x['low'])}, {form.format(x['high'])}]"


def _label(method: str) -> str:
    base, _, budget = method.partition("@")
    return METHODS[base].label + (f", {100 * float(budget):g}%" if budget else "")


def _sorted(methods: Sequence[str]) -> list[str]:
    order = [*METHODS]
    return sorted(methods, key=lambda m: (float(m.partition("@")[2] or 0), order.index(m.partition("@")[0])))


def _page(results: Entry) -> str:
    parts = ["# Reading less, compared with full attention\n\n"
             "KL(full || method) and nats beyond full attention are a token's, teacher-forced; intervals are 95% "
             "over documents, ratios on the same documents. Budgets are equal in total: what a summary "
             "costs is not retrieved.\n\n"]
    counts = [[n, *(str(c[k]) for k in results["kinds"])] for n, c in results["documents"].items()]
    parts.append("## Documents\n\n" + markdown(["tokens", *results["kinds"]], counts))
    for length in results["lengths"]:
        entries = [e for e in results["readings"] if e["length"] == length]
        if not entries:
            continue
        methods = _sorted([*dict.fromkeys(e["method"] for e in entries)])
        at = {(e["method"], e["kind"]): e for e in entries}
        body = [[_label(x), _said(e["kl"], "{:.4f}"), _said(e.get("kl_to_topk"), "{:.2f}"),
                 _said(e["same"], "{:.3f}"), _said(e["nats"], "{:+.4f}")]
                for x in methods if (e := at.get((x, "")))]
        parts.append(f"\n## {length} tokens\n\n" + markdown(
            ["read", "KL, nats", "KL, of Top-K's", "same next token", "nats beyond full"], body))
        parts.append("\nKL by kind of document:\n\n" + markdown(
            ["read", *results["kinds"]],
            [[_label(x), *(_kind(at.get((x, k))) for k in results["kinds"])] for x in methods]))
        parts.append(_answers(results, length))
        parts.append(_heads(results, length))
    parts.append("\n## Promised\n\n```json\n" + json.dumps(results["promises"], indent=1) + "\n```\n")
    return "".join(parts)


def _kind(entry: Entry | None) -> str:
    if entry is None:
        return DASH
    to_topk = entry.get("kl_to_topk")
    return f"{entry['kl']['value']:.4f}" + (f" (× {to_topk['value']:.2f})" if to_topk else "")


def _answers(results: Entry, length: int) -> str:
    entries = [e for e in results["answers"] if e["length"] == length]
    if not entries:
        return ""
    kinds = [*dict.fromkeys(e["kind"] for e in entries)]
    at = {(e["method"], e["kind"]): e for e in entries}
    methods = ["full", *_sorted([*dict.fromkeys(e["method"] for e in entries if e["method"] != "full")])]
    body = [["Full attention" if x == "full" else _label(x),
             *(_said(at[x, k]["score"], "{:.2f}") if (x, k) in at else DASH for k in kinds)] for x in methods]
    return ("\nShares of right answers, as RULER counts them; what full attention mostly misses is not asked "
            "further:\n\n" + markdown(["read", *kinds], body))


def _heads(results: Entry, length: int) -> str:
    entries = {e["method"]: e for e in results["heads"] if e["length"] == length}
    if not entries:
        return ""
    body = [[_label(x), f"{e['error']['value']:.3f}", " / ".join(f"{v:.3f}" for v in e["by_quartile"]),
             " / ".join(f"{v:+.3f}" for v in e["shift_by_quartile"]),
             ", ".join(f"{layer}.{head} {v:.2f}" for layer, head, v in e["worst"][:4])]
            for x in _sorted([*entries]) if (e := entries[x])]
    return ("\nRelative ℓ1 error of the attention output over the document; by quartile of heads, the lowest "
            "entropy first; log-sum-exp beyond full attention's, likewise; the heads (layer.head) with the "
            "largest error:\n\n" + markdown(["read", "error", "by quartile", "log-sum-exp", "worst heads"], body))
