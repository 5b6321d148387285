#!/usr/bin/env python3
"""Draws the steps of each tenant over time, from the JSON of `make soak`.

    python3 bench/pictures/soak_tenants.py build/release/soak.json soak.svg"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from picture import COLOURS, draw_given, finish, save, subplots


def draw(report: dict[str, Any], path: Path) -> None:
    figure, axes = subplots(1, 2, 10, 4.2)
    flooding = report["flooding"]
    for at, member in zip(axes, ("p50_us", "p99_us"), strict=True):
        others = 0
        for one in report["tenants"]:
            points = [p for p in report["over_time"] if p["tenant"] == one["tenant"] and p["steps"] > 0]
            if not points:
                continue
            flood = one["tenant"] == flooding
            name = "floods" if flood else "each of the others" if others == 0 else None
            others += not flood
            at.plot(
                [p["at_s"] / 60 for p in points],
                [p[member] / 1e3 for p in points],
                color=COLOURS[1] if flood else COLOURS[0],
                linewidth=2 if flood else 1,
                alpha=1 if flood else 0.6,
                linestyle="--" if flood else "-",
                label=name,
                zorder=3 if flood else 2,
            )
        at.set_yscale("log")
        finish(at, f"Steps of {len(report['tenants'])} tenants, {member[:3]}", "minutes", "ms")
    save(figure, path)


if __name__ == "__main__":
    draw_given(draw, __doc__)
