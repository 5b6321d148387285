"""What the benchmarks in Python say about a run and its samples, in the words of bench/support."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def spread(samples: list[float]) -> dict[str, float]:
    ordered = sorted(samples)

    def at(p: float) -> float:
        return ordered[round(p * (len(ordered) - 1))]

    return {"median": at(0.5), "p25": at(0.25), "p75": at(0.75)}


def ratios(a: list[float], b: list[float]) -> dict[str, float]:
    return spread([x / y for x, y in zip(a, b, strict=True)])


def run_facts(build: Path, program: str) -> dict[str, str]:
    said = subprocess.run([build / "bin/prefixd", "--version"], capture_output=True, text=True, check=True).stdout
    commit = subprocess.run(["git", "-C", ROOT, "rev-parse", "--short", "HEAD"],
                            capture_output=True, text=True, check=True).stdout.strip()
    changed = subprocess.run(["git", "-C", ROOT, "status", "--porcelain", "--untracked-files=no"],
                             capture_output=True, text=True, check=True).stdout.strip()
    names = [line.split(":", 1)[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines()
             if line.startswith("model name")]
    return {
        "program": program, "command": " ".join([program, *sys.argv[1:]]),
        "commit": commit + (", with changes" if changed else ""), "daemon": said.split("\n")[0],
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "machine": f"{names[0] if names else 'unknown processor'}, {os.cpu_count()} cores",
    }
