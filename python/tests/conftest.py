"""Provides fixtures for all tests; needs only NumPy and the built module."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import prefixd
from tests.prompts import SMALL, spec

ROOT = Path(__file__).resolve().parents[2]


def pytest_report_header() -> str | None:
    if importlib.util.find_spec("torch"):
        return None
    return "PyTorch is not here (requirements-torch.txt): tests/torch is left out"


def run_python(*arguments: str, stdin: str = "") -> str:
    """Returns what a new Python prints, with the package on its path; it must exit with 0."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "python"), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        input=stdin,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def start_daemon(directory: Path, *arguments: str) -> tuple[subprocess.Popen[bytes], str]:
    """Starts a real daemon over the store in `directory`, which listens at `directory`/s; returns it, and the line
    that says it is ready."""
    build = Path(os.environ.get("PREFIXD_BUILD", ROOT / "build/release"))
    read, write = os.pipe()
    command = [
        str(build / "bin/prefixd"),
        "--dir",
        str(directory / "daemon"),
        "--socket",
        str(directory / "s"),
    ]
    command += ["--min-free-mib", "0", "--threads", "2", "--host-tier-mib", "64"]
    command += ["--ready-fd", str(write), *arguments]
    process = subprocess.Popen(
        command, pass_fds=[write], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    os.close(write)
    with os.fdopen(read) as ready:
        line = ready.read()
    assert line.startswith("prefixd ready")
    return process, line


@contextmanager
def running_daemon(directory: Path, *arguments: str) -> Iterator[str]:
    """Runs a real daemon with an empty store in `directory`; provides the line that says it is ready."""
    process, line = start_daemon(directory, *arguments)
    yield line
    process.terminate()
    assert process.wait(120) == 0


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[str]:
    """Provides the address of a real daemon with an empty store."""
    with running_daemon(tmp_path):
        yield f"unix:{tmp_path / 's'}"


@pytest.fixture(params=["embedded", "daemon"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[prefixd.Store]:
    """Provides a store with the model of `tests.prompts`."""
    if request.param == "embedded":
        with prefixd.open(tmp_path / "store", **SMALL) as opened:
            opened.register_model(spec())
            yield opened
        return
    address: str = request.getfixturevalue("daemon")
    with prefixd.connect(address) as connected:
        connected.register_model(spec())
        yield connected
