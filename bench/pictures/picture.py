"""How the pictures of docs/ look: readable on light pages and on dark ones, the same bytes for the
same figures. Needs Matplotlib (python3-matplotlib)."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

GREY = "#7d8590"
COLOURS = ("#1f7ae0", "#d1495b", "#bf8700", "#2a9d5c", "#8250df", "#0e8a9c")


def subplots(rows: int, columns: int, width: float, height: float) -> tuple[Any, Any]:
    """A figure and a flat list of its axes, in inches."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams |= {"svg.fonttype": "none", "svg.hashsalt": "prefixd", "font.family": "sans-serif"}
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(rows, columns, figsize=(width, height), squeeze=False)
    return figure, list(axes.flat)


def finish(axes: Any, title: str, x: str, y: str, legend: bool = True, below: bool = False) -> None:
    """`below`: the legend stands below the axes, where it hides none of many lines."""
    axes.set_title(title, color=GREY, fontsize=11)
    axes.set_xlabel(x, color=GREY)
    axes.set_ylabel(y, color=GREY)
    axes.tick_params(colors=GREY, which="both")
    axes.grid(color=GREY, alpha=0.25)
    for side in axes.spines.values():
        side.set_color(GREY)
    if legend:
        place = {"loc": "upper center", "bbox_to_anchor": (0.5, -0.16), "ncol": 2} if below else {}
        axes.legend(frameon=False, labelcolor=GREY, fontsize=8 if below else 9, handlelength=3, **place)


def save(figure: Any, path: Path) -> None:
    figure.tight_layout()
    figure.savefig(path, transparent=True, metadata={"Date": None} if path.suffix == ".svg" else None)


def draw_given(draw: Callable[[dict[str, Any], Path], None], usage: str | None) -> None:
    """Draws the figures of the file that is the program's first argument into the second."""
    if len(sys.argv) != 3:
        raise SystemExit(usage)
    draw(json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2]))
