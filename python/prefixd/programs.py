"""Runs the console commands of the wheel. Each process becomes the program of its name, so that
signals and exit code are the program's own and no interpreter stays."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import NoReturn


def _become(name: str) -> NoReturn:
    program = Path(__file__).resolve().parent / "bin" / name
    # Python ignores these two signals, and the program would inherit that.
    for ignored in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(ignored, signal.SIG_DFL)
    try:
        os.execv(program, [name, *sys.argv[1:]])
    except OSError as error:
        sys.exit(f"{name}: {program} cannot be started ({error.strerror}); install the wheel again")


def prefixd() -> NoReturn:
    _become("prefixd")


def prefixctl() -> NoReturn:
    _become("prefixctl")
