#!/usr/bin/env python3
"""Draws memory and time of a long generation, from the JSON of generate_bench.

    python3 bench/pictures/generation.py generation.json generation.svg"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from picture import COLOURS, draw_given, finish, save, subplots


def draw(report: dict[str, Any], path: Path) -> None:
    figure, (memory, times) = subplots(1, 2, 10, 4.6)
    rows, peers = report["rows"], report["framework"]
    tokens = [r["tokens"] / 1e3 for r in rows]
    more = [p["tokens"] / 1e3 for p in peers]
    memory.plot(tokens, [r["process_mib"] for r in rows], color=COLOURS[0], label="the process, PyTorch included")
    memory.plot(tokens, [r["daemon_mib"] for r in rows], color=COLOURS[3], label="the daemon")
    memory.plot(tokens, [r["own_tokens_mib"] for r in rows], color=COLOURS[2], label="of it, rows of own tokens")
    memory.plot(more, [p["cache_mib"] for p in peers], color=COLOURS[1], linestyle="--",
                label="a cache of the framework's own would be")
    memory.set_ylim(bottom=0)
    finish(memory, f"{report['tokens']:,} tokens behind {report['prompt']:,}", "thousand tokens", "MiB", below=True)
    times.plot(tokens, [r["token_ms"]["p99"] for r in rows], color=COLOURS[0], alpha=0.35, label="p99")
    times.plot(tokens, [r["token_ms"]["median"] for r in rows], color=COLOURS[0], label="through prefixd, median")
    times.plot(more, [p["token_ms"] for p in peers], color=COLOURS[1], linestyle="--",
               label="the framework's own cache, growing")
    times.set_ylim(bottom=0)
    finish(times, "Time of a token", "thousand tokens", "ms", below=True)
    save(figure, path)


if __name__ == "__main__":
    draw_given(draw, __doc__)
