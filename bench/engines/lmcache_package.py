"""Installs LMCache into a folder of its own, for the benchmarks that measure it."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LMCACHE = ROOT / "build/lmcache"
LMCACHE_LIST = ROOT / "python/requirements-lmcache.txt"


def install_lmcache(python: str | Path) -> Path:
    """Installs it once (some 60 MB) with the pip of `python`; returns the folder for PYTHONPATH."""
    if not (LMCACHE / "list").exists() or (LMCACHE / "list").read_text() != LMCACHE_LIST.read_text():
        shutil.rmtree(LMCACHE, ignore_errors=True)
        subprocess.run([python, "-m", "pip", "install", "-q", "--disable-pip-version-check", "--no-deps",
                        "--target", LMCACHE, "-r", LMCACHE_LIST], check=True)
        (LMCACHE / "list").write_text(LMCACHE_LIST.read_text())
    return LMCACHE
