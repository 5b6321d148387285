"""Which peers there are, and which Python each runs in."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "bench/engines"))

from lmcache_package import install_lmcache  # noqa: E402


def lmcache_path() -> dict[str, str]:
    python = ROOT / ".venv/bin/python"
    return {"PYTHONPATH": str(install_lmcache(python)), "LMCACHE_TRACK_USAGE": "false"}


@dataclass(frozen=True)
class Entry:
    module: str
    cls: str
    python: Path = Path(sys.executable)
    environment: Callable[[], dict[str, str]] = field(default=dict)  # raises what says why it cannot run


PEERS = {
    "prefixd": Entry("prefixd_peer", "Daemon"),
    "prefixd-embedded": Entry("prefixd_peer", "Embedded"),
    "prefixd-defaults": Entry("prefixd_peer", "Defaults"),
    "safetensors": Entry("safetensors_peer", "Plain"),
    "safetensors-synced": Entry("safetensors_peer", "Synced"),
    "rocksdb": Entry("rocksdb_peer", "RocksDb"),
    "lmcache": Entry("lmcache_peer", "LmCache", ROOT / ".venv/bin/python", lmcache_path),
    "mooncake": Entry("mooncake_peer", "Mooncake"),
    "llama.cpp": Entry("llama_peer", "LlamaCpp"),
}


def environment_of(entry: Entry) -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": str(os.cpu_count() or 1), **entry.environment()}
