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


def run_of(report: dict[str, Any], part: str) -> dict[str, Any]:
    """The run that measured the part: the report itself, or the one of those it keeps."""
    runs = [run for run in (report, *report.values()) if isinstance(run, dict) and isinstance(run.get(part), list)]
    if not runs:
        raise SystemExit(f"no {part} were measured: run scale_bench with --only {part}, too")
    if len(runs) > 1:
        raise SystemExit(f"{len(runs)} runs have {part}: keep the one that is to be drawn")
    return runs[0]


def versions(runs: dict[str, dict[str, Any]]) -> str:
    """Says of what the figures are: one commit, or one for each part."""
    commits = {part: str(run.get("run", {}).get("commit", "unknown")) for part, run in runs.items()}
    if len(set(commits.values())) == 1:
        return f"commit {next(iter(commits.values()))}"
    return "of different commits: " + ", ".join(f"{part} {commit}" for part, commit in commits.items())


def draw(report: dict[str, Any], path: Path) -> None:
    figure, axes = subplots(3, 2, 10, 12)
    runs = {part: run_of(report, part) for part in ("prefixes", "sessions", "lengths")}
    rows = runs["prefixes"]["prefixes"]
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
    if all("match_miss_open" in row for row in rows):  # earlier runs asked for stored prompts alone
        lines(
            at,
            x,
            [
                ("match, not stored, p99", [r["match_miss_open"]["p99_us"] / 1e3 for r in rows], COLOURS[4], "-"),
                ("the same, just started, p99",
                 [r["match_miss_just_started"]["p99_us"] / 1e3 for r in rows], COLOURS[5], "-"),
            ],
        )
    held(at, 1, "match p99: at most 1 ms")
    held(at, 20, "attach p99: at most 20 ms")
    finish(at, "Match and attach", "prefixes", "ms", below=True)
    at = axes[1]
    lines(
        at,
        x,
        [
            ("start", [row["start_s"]["median"] for row in rows], COLOURS[0], "-"),
            ("after kill -9", [row["recovery_s"]["median"] for row in rows], COLOURS[1], "--"),
            ("catalogue made anew from the files, before a start", [row["rebuild_s"] for row in rows], COLOURS[2], ":"),
        ],
    )
    held(at, 10, "recovery: at most 10 s")
    finish(at, "Until the daemon serves; prefixctl recover", "prefixes", "s", below=True)

    rows = runs["sessions"]["sessions"]
    x = [row["sessions"] for row in rows]
    at = axes[2]
    lines(at, x, pairs(rows, "one_steps", "one steps", COLOURS[0]) + pairs(rows, "all_step", "all step", COLOURS[1]))
    finish(at, "A step of one layer", "sessions", "ms")
    at = axes[3]
    lines(at, x, [("steps per second, all together", [row["steps_per_s"] for row in rows], COLOURS[0], "-")])
    some = [row for row in rows if row["memory_kib_each"] > 0]
    lines(
        at,
        [row["sessions"] for row in some],
        [("KiB of memory for each session", [row["memory_kib_each"] for row in some], COLOURS[2], "--")],
    )
    finish(at, "Throughput and memory", "sessions", "steps/s; KiB")

    rows = runs["lengths"]["lengths"]
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
    figure.supxlabel(versions(runs), color=GREY, fontsize=8)
    save(figure, path)


if __name__ == "__main__":
    draw_given(draw, __doc__)
