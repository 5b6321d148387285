"""Draws the paper's figures 1, 2 and 4 to 8 for this model, and the likelihood by budget, as
PNG."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("agg")
import matplotlib.pyplot as plt  # noqa: E402
import numpy as np  # noqa: E402
from matplotlib.axes import Axes  # noqa: E402
from matplotlib.figure import Figure  # noqa: E402
from matplotlib.ticker import MaxNLocator  # noqa: E402

from prefixd.evaluate.methods import BUDGET, METHODS, SAME_K, Cell, shown  # noqa: E402
from prefixd.evaluate.tables import percent  # noqa: E402

Entry = Mapping[str, Any]
Drawn = tuple[str, str, str]  # file name, title, what it shows
COLOURS = {
    "sink-tail": "#9e9e9e", "topk": "#d95f02", "phi": "#7570b3", "phi-bf16": "#b5b1dd",
    "moment": "#1b9e77", "moment-r8": "#66c2a5", "centroid": "#e6ab02", "auto": "#1f78b4",
    "cis": "#a6cee3", "quest": "#e7298a", "snapkv": "#a6761d", "streaming": "#666666",
}
MARKS = {"phi": "s", "moment": "^", "centroid": "D", "auto": "o", "moment-r8": "v",
         "phi-bf16": "P", "cis": "X"}


def _save(figure: Figure, path: Path) -> None:
    figure.savefig(path, dpi=150, bbox_inches="tight")
    plt.close(figure)


def _panels(count: int, width: float = 3.5, height: float = 3.2, **kwargs: Any
            ) -> tuple[Figure, list[Axes]]:
    figure, axes = plt.subplots(
        1, count, figsize=(width * count, height), squeeze=False, layout="constrained", **kwargs)
    for panel in axes[0]:
        panel.grid(alpha=0.25, linewidth=0.6)
        panel.spines[["top", "right"]].set_visible(False)
    return figure, list(axes[0])


def _completing(results: Entry) -> list[str]:
    wanted = ("phi", "moment", "centroid", "auto")
    return [m for m in wanted if m in results["plan"]["methods"]]


def _middle(results: Entry) -> float:
    """Returns the budget that single-budget figures show."""
    budgets = results["plan"]["budgets"]
    return 0.02 if 0.02 in budgets else sorted(budgets)[len(budgets) // 2]


def draw(results: Entry, directory: Path) -> list[Drawn]:
    """Returns the figures that the rows allow."""
    directory.mkdir(exist_ok=True)
    made: list[Drawn] = []
    if results["scatter"]:
        made.append(_kernel(results["scatter"][-1], directory))
    heads = results["heads"]
    if heads:
        longest = max(h["length"] for h in heads)
        own = [h for h in heads if h["length"] == longest]
        made.append(_gain(results, own, longest, directory))
        made.append(_entropy(results, own, longest, directory))
        made.append(_mass(own, longest, directory))
        made.append(_by_quartile(results, own, longest, directory))
        for number, method in (("7", "phi"), ("8", "auto")):
            if method in results["plan"]["methods"]:
                made.append(_fixed_k(results, own, longest, number, method, directory))
    if results["likelihood"]:
        made.append(_likelihood(results, directory))
    return made


def _kernel(scatter: Entry, directory: Path) -> Drawn:
    """Figure 1 shows what each variant uses for exp(s) of a pair."""
    s, z = np.array(scatter["scores"]), np.array(scatter["surrogate"])
    part = np.array(scatter["part"])
    e = np.log10(np.e)
    x, learned = s * e, z * e
    low = float(min(x.min(), np.quantile(learned, 0.01))) - 0.5
    high = float(max(x.max(), np.quantile(learned, 0.99))) + 0.5
    floor = low - 0.08 * (high - low)
    panels = (
        ("(a) all exact", x),
        ("(b) sink + tail + Top-K", np.where(part > 0, x, floor)),
        ("(c) sink + tail + φ", np.where(part == 2, x, learned)),
        ("(d) sink + tail + Top-K + φ", np.where(part > 0, x, learned)),
    )
    figure, axes = _panels(4, 3.0, 3.2, sharey=True)
    for panel, (title, y) in zip(axes, panels, strict=True):
        for kind, colour, label in ((0, "#1f78b4", "the rest"), (1, "#d95f02", "retrieved"),
                                    (2, "#1b9e77", "anchors")):
            at = part == kind
            panel.scatter(x[at], y[at], s=5, c=colour, alpha=0.45, linewidths=0, label=label)
        panel.plot([low, high], [low, high], color="#444444", linewidth=0.8, zorder=0)
        panel.set_title(title, fontsize=10)
        panel.set_xlabel("log₁₀ exp(s), teacher")
        panel.set_xlim(low, high)
        panel.set_ylim(floor - 0.04 * (high - low), high)
    axes[1].text(high, floor + 0.02 * (high - low), "not read: 0 ", ha="right", va="bottom",
                 fontsize=8, color="#1f78b4")
    axes[0].set_ylabel("log₁₀ of the kernel that is used")
    axes[0].legend(fontsize=8, loc="upper left", markerscale=2.5)
    name = "figure-1-kernel.png"
    _save(figure, directory / name)
    return (name, "Figure 1. Kernel by variant",
            f"Sampled query-key pairs of layer {scatter['layer']}, query head {scatter['head']} (the "
            f"most diffuse one), {scatter['length']} tokens, K = {scatter['k']}, maps {scatter['maps']}. "
            "On the diagonal the value used is exact.")


def _gain(results: Entry, heads: Sequence[Entry], length: int, directory: Path) -> Drawn:
    """Figure 2 shows the budget-matched gain by entropy."""
    fraction = _middle(results)
    plain = Cell("topk", SAME_K, fraction).key
    methods = [m for m in _completing(results)
               if any(shown(m, BUDGET, fraction).key in h["errors"] for h in heads)]
    figure, axes = _panels(max(1, len(methods)), 3.1, 3.1, sharey=True)
    for panel, method in zip(axes, methods, strict=False):
        key = shown(method, BUDGET, fraction).key
        x = [h["entropy"] for h in heads]
        y = [h["errors"][plain] - h["errors"][key] for h in heads]
        panel.axhline(0, color="#444444", linewidth=0.8)
        panel.scatter(x, y, s=28, color=COLOURS[method], alpha=0.85, linewidths=0)
        better, worse = sum(v > 0.001 for v in y), sum(v < -0.001 for v in y)
        panel.set_title(f"{METHODS[method].label}\nbetter in {better}, worse in {worse} of {len(y)}",
                        fontsize=10)
        panel.set_xlabel("H_mid")
    axes[0].set_ylabel("gain: ℓ1 error of Top-K minus its own")
    name = "figure-2-gain.png"
    _save(figure, directory / name)
    return (name, "Figure 2. Gain over Top-K by entropy, budget-matched",
            f"One point per layer and query head; {length} tokens, {percent(fraction)}, the summary "
            "charged to every step (L_gen = 1). Better or worse: by more than 0.001. Methods that the "
            "budget cannot pay for are left out.")


def _entropy(results: Entry, heads: Sequence[Entry], length: int, directory: Path) -> Drawn:
    """Figure 4 shows the entropy of heads, and entropy against completion share."""
    layers = sorted({h["layer"] for h in heads})
    columns = 1 + max(h["head"] for h in heads)
    grid = np.full((len(layers), columns), np.nan)
    for h in heads:
        grid[layers.index(h["layer"]), h["head"]] = 100 * h["entropy"]
    figure, axes = plt.subplots(1, 2, figsize=(8.6, 3.4), layout="constrained")
    image = axes[0].imshow(grid, aspect="auto", cmap="viridis", vmin=0, vmax=100)
    axes[0].set_yticks(range(len(layers)), [str(x) for x in layers])
    axes[0].xaxis.set_major_locator(MaxNLocator(integer=True))
    if grid.size <= 128:
        for i, j in np.ndindex(*grid.shape):
            axes[0].text(j, i, f"{grid[i, j]:.0f}", ha="center", va="center", fontsize=8,
                         color="black" if grid[i, j] > 60 else "white")
    axes[0].set_xlabel("query head")
    axes[0].set_ylabel("layer")
    axes[0].set_title("(a) H_mid, %", fontsize=10)
    figure.colorbar(image, ax=axes[0])
    fraction = min(results["plan"]["budgets"])
    method = "phi" if "phi" in results["plan"]["methods"] else "moment"
    key = Cell(method, SAME_K, fraction).key
    panel = axes[1]
    panel.grid(alpha=0.25, linewidth=0.6)
    panel.spines[["top", "right"]].set_visible(False)
    known = [h for h in heads if key in h["rho"]]
    points = panel.scatter([h["entropy"] for h in known], [h["rho"][key] for h in known], s=30,
                           c=[h["layer"] for h in known], cmap="plasma", linewidths=0)
    bar = figure.colorbar(points, ax=panel)
    bar.set_label("layer")
    bar.ax.yaxis.set_major_locator(MaxNLocator(integer=True))
    panel.set_xlabel("H_mid")
    panel.set_ylabel("completion share ρ_Z")
    panel.set_title(f"(b) {METHODS[method].label}, K of {percent(fraction)}", fontsize=10)
    name = "figure-4-entropy.png"
    _save(figure, directory / name)
    return (name, "Figure 4. Entropy of the middle, and what completion contributes",
            f"{length} tokens, means over documents and decode queries.")


def _mass(heads: Sequence[Entry], length: int, directory: Path) -> Drawn:
    """Figure 5 shows mass curves of heads from the sharpest to the most diffuse."""
    ordered = sorted(heads, key=lambda h: h["entropy"])
    picked = [ordered[int(i)] for i in np.unique(np.linspace(0, len(ordered) - 1, 6).astype(int))]
    figure, (panel,) = _panels(1, 5.4, 3.6)
    colours = plt.get_cmap("viridis")(np.linspace(0, 0.92, len(picked)))
    for h, colour in zip(picked, colours, strict=True):
        panel.plot(h["grid"], h["mass"], color=colour, linewidth=1.8,
                   label=f"layer {h['layer']}, head {h['head']}: H_mid {h['entropy']:.2f}")
    panel.set_xscale("log")
    panel.set_ylim(0, 1.02)
    panel.set_xlabel("K")
    panel.set_ylabel("share of the middle's mass in its Top-K")
    panel.legend(fontsize=8, loc="lower right")
    name = "figure-5-mass.png"
    _save(figure, directory / name)
    return (name, "Figure 5. Mass curves of the middle",
            f"{length} tokens; six heads from the lowest to the highest entropy.")


def _by_quartile(results: Entry, heads: Sequence[Entry], length: int, directory: Path) -> Drawn:
    """Figure 6 shows budget-matched errors by quartile of heads."""
    methods = ["topk", *_completing(results)]
    figure, axes = _panels(4, 3.0, 3.2)
    for quartile, panel in enumerate(axes):
        own = [h for h in heads if h["quartile"] == quartile]
        for method in methods:
            x, y = [], []
            for f in results["plan"]["budgets"]:
                key = shown(method, BUDGET, f).key
                if own and all(key in h["errors"] for h in own):
                    x.append(100 * f)
                    y.append(float(np.mean([h["errors"][key] for h in own])))
            panel.plot(x, y, marker=MARKS.get(method, "o"), markersize=4.5,
                       linestyle="--" if method == "auto" else "-",
                       color=COLOURS[method], label=METHODS[method].label)
        mean = np.mean([h["entropy"] for h in own]) if own else float("nan")
        panel.set_title(f"({'abcd'[quartile]}) quartile {quartile}: H_mid {mean:.2f}", fontsize=10)
        panel.set_ylim(0, max(panel.get_ylim()[1], 0.02))  # sharp heads: not a scale of noise
        panel.set_xlabel("budget, % of the prompt")
        panel.set_xticks([100 * f for f in results["plan"]["budgets"]])
    axes[0].set_ylabel("relative ℓ1 error")
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, fontsize=8.5, ncols=len(methods), loc="outside lower center",
                  frameon=False)
    name = "figure-6-quartiles.png"
    _save(figure, directory / name)
    return (name, "Figure 6. Errors by budget and quartile of heads, budget-matched",
            f"{length} tokens, L_gen = 1. Scales differ. Points are missing where the budget cannot "
            "pay for the summary.")


def _fixed_k(
    results: Entry, heads: Sequence[Entry], length: int, number: str, method: str, directory: Path
) -> Drawn:
    """Figures 7 and 8 show the same K, without the summary's cost."""
    fraction = _middle(results)
    plain, own = Cell("topk", SAME_K, fraction).key, Cell(method, SAME_K, fraction).key
    known = [h for h in heads if plain in h["errors"] and own in h["errors"]]
    x = [h["entropy"] for h in known]
    base = np.array([h["errors"][plain] for h in known])
    with_it = np.array([h["errors"][own] for h in known])
    figure, axes = _panels(3, 3.2, 3.2)
    label = METHODS[method].label
    worse = int((base - with_it < -0.001).sum())
    for panel, y, title, colour in (
        (axes[0], base, "(a) Top-K: error", COLOURS["topk"]),
        (axes[1], with_it, f"(b) {label}: error", COLOURS[method]),
        (axes[2], base - with_it, f"(c) gain (worse by 0.001 in {worse} of {len(known)})", "#333333"),
    ):
        panel.scatter(x, y, s=28, color=colour, alpha=0.85, linewidths=0)
        panel.set_title(title, fontsize=10)
        panel.set_xlabel("H_mid")
    top = float(max(base.max(initial=0), with_it.max(initial=0))) * 1.06 + 1e-6
    axes[0].set_ylim(-0.02 * top, top)
    axes[1].set_ylim(-0.02 * top, top)
    axes[2].axhline(0, color="#444444", linewidth=0.8)
    axes[0].set_ylabel("relative ℓ1 error")
    name = f"figure-{number}-fixed-k-{method}.png"
    _save(figure, directory / name)
    return (name, f"Figure {number}. Fixed K: {label} against Top-K",
            f"{length} tokens, K of {percent(fraction)}, the summary's cost left out; one point per "
            "layer and query head.")


def _likelihood(results: Entry, directory: Path) -> Drawn:
    methods = [m for m in ("topk", *_completing(results), "quest", "streaming")
               if m in results["plan"]["methods"]]
    lengths = results["lengths"]
    figure, axes = _panels(len(lengths), 3.7, 3.3, sharey=True)
    entries = {(e["length"], Cell(e["method"], e["accounting"], e["budget"]).key): e
               for e in results["likelihood"]}
    for panel, n in zip(axes, lengths, strict=True):
        panel.axhline(0, color="#444444", linewidth=0.8)
        for i, method in enumerate(methods):
            known = [(f, e) for f in results["plan"]["budgets"]
                     if (e := entries.get((n, shown(method, BUDGET, f).key))) and e["feasible"]]
            x = [100 * f + 0.05 * (i - len(methods) / 2) for f, _ in known]
            y = [e["excess"] for _, e in known]
            bars = None
            if all(e["excess_low"] is not None for _, e in known):
                bars = [[e["excess"] - e["excess_low"] for _, e in known],
                        [e["excess_high"] - e["excess"] for _, e in known]]
            panel.errorbar(x, y, bars, marker=MARKS.get(method, "o"), markersize=4, linewidth=1.2,
                           elinewidth=0.7, color=COLOURS[method], label=METHODS[method].label,
                           linestyle="--" if method == "auto" else "-")
        panel.set_title(f"{n} tokens", fontsize=10)
        panel.set_xlabel("budget, % of the prompt")
        panel.set_xticks([100 * f for f in results["plan"]["budgets"]])
    axes[0].set_yscale("symlog", linthresh=0.01)
    axes[0].set_ylabel("nats per token beyond full attention")
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, fontsize=8.5, ncols=len(methods), loc="outside lower center",
                  frameon=False)
    name = "likelihood.png"
    _save(figure, directory / name)
    return (name, "Likelihood of a continuation by budget",
            "Budget-matched, L_gen = 1, with 95% intervals over documents; the scale is linear "
            "within ±0.01. 0 is full attention.")
