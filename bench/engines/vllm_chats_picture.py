#!/usr/bin/env python3
"""Draws chats at once against the engine's cache, from what vllm_concurrency.py measured.

    bench/engines/vllm_chats_picture.py docs/results/vllm_concurrency.json docs/images/vllm-chats.svg

Needs Matplotlib (python3-matplotlib). The picture is readable on light pages and on dark ones."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "pictures"))
from picture import GREY, draw_given, finish, save, subplots  # noqa: E402

ARMS = {
    "attached": ("attached: stays in prefixd", "o", "-", "#1f7ae0"),
    "loaded": ("loaded into the engine's blocks", "s", "--", "#bf8700"),
    "alone": ("vLLM alone", "D", ":", "#d1495b"),
}


def draw(report: dict[str, Any], path: Path) -> None:
    figure, [axes] = subplots(1, 1, 7.2, 4.0)
    for arm, (title, mark, line, colour) in ARMS.items():
        points = sorted((one["cache_bytes"] / 2**30, one["at_once"]) for one in report["arms"] if one["arm"] == arm)
        axes.plot(*zip(*points, strict=True), marker=mark, color=colour, linewidth=2, linestyle=line, label=title)
        if arm == "loaded":  # lies on vLLM alone
            continue
        for x, y in points:
            axes.annotate(str(y), (x, y), textcoords="offset points", xytext=(0, 8), ha="center", color=colour)
    title = f"{report['chats']} chats, each over its own stored prompt of {report['prompt_tokens']:,} tokens"
    finish(axes, title, "engine's cache, GiB", "chats that run at once", legend=False)
    axes.set_xlim(left=0)
    axes.set_ylim(0, report["chats"] * 1.15)
    axes.legend(frameon=False, labelcolor=GREY, loc="center right", bbox_to_anchor=(0.98, 0.5))
    save(figure, path)


if __name__ == "__main__":
    draw_given(draw, __doc__)
