"""The benchmark of long generations, at small size."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from tests.conftest import ROOT

BUILD = Path(os.environ.get("PREFIXD_BUILD", ROOT / "build/release"))


def test_a_generation_is_watched(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    done = subprocess.run(
        [sys.executable, ROOT / "bench/engines/generate_bench.py", "--build", BUILD, "--json", out, "--threads", "1",
         "--prompt", "600", "--tokens", "400", "--every", "100", "--window", "64", "--k", "16", "--peer-steps", "2"],
        capture_output=True, text=True, timeout=200, check=True)  # fmt: skip
    report = json.loads(out.read_text())
    rows = report["rows"]
    assert [r["tokens"] for r in rows] == [100, 200, 300, 400] and "400" in done.stdout
    # Beside the window all are the session's: keys and values of 4 layers of 2 heads of 64 float32.
    handed_over = rows[-1]["tokens"] - 64
    assert 0.8 < rows[-1]["own_tokens_mib"] * (1 << 20) / (handed_over * 4 * 2 * 2 * 64 * 4) < 1.6
    assert report["framework"][-1]["cache_mib"] > report["framework"][0]["cache_mib"]
    assert report["ratios"]["cache_would_grow_mib"] > 0 and report["kinds"]["own_tokens"] > 0
