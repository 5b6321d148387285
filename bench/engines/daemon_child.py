"""The real daemon as a child of a benchmark in Python."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path


class Daemon:
    """Its store goes with it. close() ends it; SIGTERM ends the benchmark as sys.exit does, so that it comes
    to that."""

    def __init__(self, build: Path, tier_mib: int, *options: str) -> None:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
        self._dir = tempfile.TemporaryDirectory(prefix="prefixd-bench-")
        read, write = os.pipe()
        root = Path(self._dir.name)
        with open(root / "log", "wb") as log:
            self._process = subprocess.Popen(
                [build / "bin/prefixd", "--dir", root / "store", "--socket", root / "s", "--min-free-mib", "0",
                 "--host-tier-mib", str(tier_mib), "--threads", "2", "--ready-fd", str(write), *options],
                pass_fds=[write], stdout=log, stderr=log, start_new_session=True,
            )
        os.close(write)
        served = os.read(read, 1)
        os.close(read)
        if not served:
            raise SystemExit(f"the daemon did not start: {(root / 'log').read_text()}")
        self.pid = self._process.pid
        self.address = f"unix:{root / 's'}"

    def close(self) -> None:
        self._process.terminate()
        self._process.wait()
        self._dir.cleanup()
