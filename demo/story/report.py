#!/usr/bin/env python3
"""Turns the demo's report.json into one self-contained page with plots.

    python3 demo/story/report.py demo-report/report.json demo-report/index.html

Every number on the page comes from report.json; nothing is fetched.
"""

from __future__ import annotations

import argparse
import io
import json
import sys
from pathlib import Path

import jinja2
import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt  # noqa: E402
import numpy as np  # noqa: E402

METHODS = {
    "full": ("full attention", "#444444"),
    "sink_tail": ("sink + tail", "#b0b0b0"),
    "topk": ("Top-K", "#d95f02"),
    "topk_phi": ("Top-K + φ", "#7570b3"),
    "topk_moment": ("Top-K + moment", "#1b9e77"),
    "topk_auto": ("per-head choice", "#1f78b4"),
}
# The answers' columns that are no method of the table; a budget is called so.
ANSWERS = {"alone": "without the document", "own": "full attention, without prefixd",
           "full": "everything read", "sink_tail": "first and last tokens alone"}
BUDGETED = ["sink_tail", "topk", "topk_phi", "topk_moment", "topk_auto"]
COMPARED = ["topk", "topk_phi", "topk_moment", "topk_auto"]


def svg(figure: plt.Figure) -> str:
    out = io.StringIO()
    figure.tight_layout()
    figure.savefig(out, format="svg", bbox_inches="tight")
    plt.close(figure)
    text = out.getvalue()
    return text[text.index("<svg") :]


def series(rows: list[dict], method: str, key: str) -> tuple[list[float], list[float]]:
    points = [(100 * r["budget"], r[key]) for r in rows
              if r["method"] == method and r["budget"] and r.get(key) is not None]
    points.sort()
    return [p[0] for p in points], [p[1] for p in points]


def line_plot(rows: list[dict], key: str, label: str, methods: list[str], log: bool = False) -> str:
    figure, axes = plt.subplots(figsize=(5.2, 3.4))
    budgets = sorted({100 * r["budget"] for r in rows if r["budget"]})
    axes.set_xticks(budgets)
    for method in methods:
        x, y = series(rows, method, key)
        if x:
            name, colour = METHODS[method]
            # The choice often is the moment estimator everywhere: its line is dashed, so that both
            # are visible.
            style = "o--" if method == "topk_auto" else "o-"
            axes.plot(x, y, style, label=name, color=colour, markersize=4)
    full = [r for r in rows if r["method"] == "full"]
    if full and full[0].get(key) and key != "rel_l1":
        axes.axhline(full[0][key], color=METHODS["full"][1], linestyle="--", label="full attention")
    if log:
        axes.set_yscale("log")
    axes.set_xlabel("budget, % of the prompt per step")
    axes.set_ylabel(label)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    return svg(figure)


def quartile_plot(rows: list[dict], budget: float) -> str:
    figure, axes = plt.subplots(figsize=(5.2, 3.4))
    shown = [r for m in ["sink_tail", *COMPARED] for r in rows
             if r["method"] == m and r["budget"] == budget and r.get("rel_l1_by_quartile")]
    width = 0.8 / max(1, len(shown))
    for i, row in enumerate(shown):
        name, colour = METHODS[row["method"]]
        axes.bar(np.arange(4) + i * width, row["rel_l1_by_quartile"], width, label=name, color=colour)
    axes.set_xticks(np.arange(4) + width * (len(shown) - 1) / 2,
                    ["lowest", "second", "third", "highest"])
    axes.set_xlabel("quartile of attention heads by entropy $H_{mid}$")
    axes.set_ylabel(f"relative ℓ1 error at {100 * budget:g}%")
    axes.set_yscale("log")
    axes.set_ylim(1e-3, 4)  # sharp heads lie far below
    axes.grid(alpha=0.3, axis="y")
    axes.legend(fontsize=7, ncol=3, loc="upper center")
    return svg(figure)


def interpolate(k: np.ndarray, t: np.ndarray, at: np.ndarray) -> np.ndarray:
    """Returns a piecewise linear function, extrapolated from the nearest segment, clamped at 0
    ([RC])."""
    if len(k) < 2:
        return np.maximum(np.full_like(at, t[0]), 0)
    i = np.clip(np.searchsorted(k, at) - 1, 0, len(k) - 2)
    slope = (t[i + 1] - t[i]) / (k[i + 1] - k[i])
    return np.maximum(t[i] + slope * (at - k[i]), 0)


def break_even_plot(sweep: dict) -> str:
    """Returns speedup(ξ, γ; c = 1) of completion at k_φ over Top-K at γ k_φ, for φ and for
    moment."""
    k = np.array(sweep["k"], dtype=float)
    t_load = np.array(sweep["load_ms"])
    t_cmp = np.array(sweep["compute_ms"])
    k_phi = float(sweep["k_phi"])
    xi = np.logspace(0, 2, 80)
    gamma = np.linspace(1, 10, 80)
    grid_xi, grid_gamma = np.meshgrid(xi, gamma)
    selection = (interpolate(k, t_cmp, grid_gamma * k_phi)
                 + grid_xi * interpolate(k, t_load, grid_gamma * k_phi))
    methods = [m for m in ("topk_phi", "topk_moment") if m in sweep["completion"]]
    figure, all_axes = plt.subplots(1, len(methods), figsize=(4.4 * len(methods), 3.6),
                                    squeeze=False)
    for axes, method in zip(all_axes[0], methods, strict=True):
        point = sweep["completion"][method]
        completed = point["compute_ms"] + grid_xi * point["load_ms"]
        speedup = selection / np.maximum(completed, 1e-9)
        mesh = axes.pcolormesh(xi, gamma, np.log2(speedup), cmap="RdBu", vmin=-3, vmax=3,
                               shading="auto", rasterized=True)
        if speedup.min() < 1 < speedup.max():
            contour = axes.contour(xi, gamma, speedup, levels=[1.0], colors="black")
            axes.clabel(contour, fmt="break-even", fontsize=8)
        axes.set_xscale("log")
        axes.set_xlabel("ξ: reads this many times slower than here")
        axes.set_ylabel("γ: Top-K reads γ × as many tokens")
        axes.set_title(METHODS[method][0], fontsize=10)
        figure.colorbar(mesh, ax=axes, label="log2 speedup of completion")
    return svg(figure)


def number(value: float | None, digits: int = 3) -> str:
    if value is None:
        return "–"
    if value == 0:
        return "0"
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.{digits}g}"


def per_cent(value: float | None) -> str:
    return "–" if value is None else f"{100 * value:.3g}%"


def answer_columns(report: dict) -> list[dict]:
    """Returns what the table of answers shows side by side, with each column's answers by question."""
    columns = []
    for column in report["answered"]:
        method, budget = column["method"], column["budget"]
        name = ANSWERS.get(method) or (f"budget {100 * budget:g}%" if budget else METHODS[method][0])
        cells = [q.get(method) if method in ("alone", "own") else next(
                     (a for a in q["answers"] if (a["method"], a["budget"]) == (method, budget)), None)
                 for q in report["questions"]]
        columns.append({**column, "name": name, "cells": cells})
    return columns


def render(report: dict) -> str:
    rows = report["rows"]
    budgets = sorted({r["budget"] for r in rows if r["budget"]})
    sink_nll = next((r["nll"] for r in rows if r["method"] == "sink_tail"), None)
    middle = 0.02 if 0.02 in budgets else budgets[len(budgets) // 2]
    plots = [
        ("Output error by budget",
         "Mean over all heads and held-out steps of ‖ŷ − y‖₁ / ‖y‖₁, against exact attention over "
         "the whole stored prompt.",
         line_plot(rows, "rel_l1", "relative ℓ1 output error", BUDGETED, log=True)),
        ("Error by entropy quartile",
         "Diffuse heads (right) are where reading only the best tokens loses most.",
         quartile_plot(rows, middle)),
        ("Held-out continuation",
         f"Nats per token of {report['continuation_tokens']} tokens, teacher-forced. Sink + tail lies at "
         f"{number(sink_nll, 4)}.",
         line_plot(rows, "nll", "negative log-likelihood", COMPARED)),
        ("Time per token",
         "One token through the whole model and its attention, rows in host memory.",
         line_plot(rows, "ms_per_token", "ms per token", BUDGETED)),
        ("Break-even map of this run",
         "Completion at 1% against Top-K at γ%, reads slowed down by ξ, from times measured in this "
         "run (selection left out, as in the paper).", break_even_plot(report["break_even"])),
    ]
    if report["facts"]:
        plots.insert(2, ("Planted facts answered", "Exact five-digit answers.",
                         line_plot(rows, "accuracy", "answer accuracy", BUDGETED)))
    here = Path(__file__).resolve().parent
    environment = jinja2.Environment(loader=jinja2.FileSystemLoader(here), autoescape=True,
                                     trim_blocks=True, lstrip_blocks=True)
    environment.filters.update(number=number, per_cent=per_cent)
    return environment.get_template("report.html.j2").render(
        report=report, plots=plots, names={k: v[0] for k, v in METHODS.items()},
        columns=answer_columns(report))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("report", type=Path, help="report.json written by prefixd-demo")
    parser.add_argument("page", type=Path, help="HTML file to write")
    arguments = parser.parse_args()
    try:
        report = json.loads(arguments.report.read_text(encoding="utf-8"))
        arguments.page.write_text(render(report), encoding="utf-8")
    except (OSError, json.JSONDecodeError, KeyError) as error:
        print(f"report: cannot make a page from {arguments.report}: {error!r}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
