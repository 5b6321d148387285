#!/usr/bin/env python3
"""Draws what scale_bench measured: prefixes, sessions, lengths.

    python3 bench/pictures/scale.py docs/results/scale.json docs/images/scale.svg

Takes what the benchmark wrote, or the runs of it that scripts/results.py keeps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from picture import COLOURS, GREY, draw_given, finish, save, subplots

Lines = list[tuple[str, list[float], str, str]]  # name, values, colour, style


def lines(axes: Any, x: list[float], drawn: Lines) -> None:
    for name, y, colour, style in drawn:
        axes.plot(x, y, style, color=colour, linewidth=2, marker="o", markersize=4, label=name)
    axes.set_xscale("log")
    axes.set_yscale("log")


def held(axes: Any, y: float, name: str) -> None:
    axes.axhline(y, color=GREY, linewidth=1, linestyle=(0, (1, 2)))
    axes.annotate(name, (0.02, y), xycoords=("axes fraction", "data"), color=GREY, fontsize=8, va="bottom")


def pairs(rows: list[dict[str, Any]], member: str, name: str, colour: str, scale: float = 1e-3) -> Lines:
    return [
        (f"{name}, p50", [row[member]["p50_us"] * scale for row in rows], colour, "--"),
        (f"{name}, p99", [row[member]["p99_us"] * scale for row in rows], colour, "-"),
    ]


def rows_of(report: dict[str, Any], part: str) -> list[dict[str, Any]]:
    for run in (report, *report.values()):
        if isinstance(run, dict) and isinstance(run.get(part), list):
            return list(run[part])
    raise SystemExit(f"no {part} were measured: run scale_bench with --only {part}, too")


def draw(report: dict[str, Any], path: Path) -> None:
    figure, axes = subplots(3, 2, 10, 11)
    rows = rows_of(report, "prefixes")
    x = [row["prefixes"] for row in rows]
    at = axes[0]
    lines(at, x, pairs(rows, "match_open", "match", COLOURS[0]) + pairs(rows, "attach_open", "attach", COLOURS[2]))
    lines(
        at,
        x,
        [
            ("match, just started, p99", [r["match_just_started"]["p99_us"] / 1e3 for r in rows], COLOURS[1], "-"),
            ("attach, just started, p99", [r["attach_just_started"]["p99_us"] / 1e3 for r in rows], COLOURS[3], "-"),
        ],
    )
    held(at, 1, "match p99: at most 1 ms")
    held(at, 20, "attach p99: at most 20 ms")
    finish(at, "Match and attach", "prefixes", "ms")
    at = axes[1]
    lines(
        at,
        x,
        [
            ("start", [row["start_s"]["median"] for row in rows], COLOURS[0], "-"),
            ("after kill -9", [row["recovery_s"]["median"] for row in rows], COLOURS[1], "--"),
            ("catalogue made anew from the files", [row["rebuild_s"] for row in rows], COLOURS[2], ":"),
        ],
    )
    held(at, 10, "recovery: at most 10 s")
    finish(at, "Until the daemon serves", "prefixes", "s")

    rows = rows_of(report, "sessions")
    x = [row["sessions"] for row in rows]
    at = axes[2]
    lines(at, x, pairs(rows, "one_steps", "one steps", COLOURS[0]) + pairs(rows, "all_step", "all step", COLOURS[1]))
    finish(at, "A step of one layer", "sessions", "ms")
    at = axes[3]
    lines(at, x, [("steps per second, all together", [row["steps_per_s"] for row in rows], COLOURS[0], "-")])
    lines(at, x, [("KiB of memory for each session", [row["memory_kib_each"] for row in rows], COLOURS[2], "--")])
    finish(at, "Throughput and memory", "sessions", "steps/s; KiB")

    rows = rows_of(report, "lengths")
    x = [row["tokens"] for row in rows]
    at = axes[4]
    lines(
        at,
        x,
        pairs(rows, "match", "match", COLOURS[0])
        + pairs(rows, "attach", "attach", COLOURS[2])
        + pairs(rows, "step", "step", COLOURS[1]),
    )
    finish(at, "One prompt", "tokens", "ms")
    at = axes[5]
    lines(
        at,
        x,
        [
            ("memory beside the host tier", [row["memory_mib"] for row in rows], COLOURS[0], "-"),
            ("on the disk", [row["disk_mib"] for row in rows], COLOURS[2], "--"),
        ],
    )
    finish(at, "What one prompt takes", "tokens", "MiB")
    save(figure, path)


if __name__ == "__main__":
    draw_given(draw, __doc__)
