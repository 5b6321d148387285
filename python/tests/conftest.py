"""Shared by the tests: one thread, small shapes, a corpus made up on the spot."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from prefixd.train.corpus import Corpus
from prefixd.train.net import NetConfig

ROOT = Path(__file__).resolve().parents[2]
SMALL = NetConfig(
    hidden=32, layers=2, q_heads=4, kv_heads=2, head_dim=8, ffn=48, max_positions=2048
)


def run_python(*arguments: str, stdin: str = "") -> str:
    """What a Python of its own prints, with the package in reach; it must end well."""
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


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def corpus() -> Corpus:
    """Repetitive prose, so that a few steps of training already help."""
    rng = np.random.default_rng(0)
    vocabulary = "a store keeps keys and values on disk for any decoder that asks".split()
    lines = [" ".join(rng.choice(vocabulary, 9)) + ".\n" for _ in range(4000)]
    text = np.frombuffer("".join(lines).encode(), np.uint8).copy()
    return Corpus(text, np.zeros(1, np.int64), [text[:40000].tobytes()])


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[str]:
    """The address of a real daemon with an empty store."""
    build = Path(os.environ.get("PREFIXD_BUILD", ROOT / "build/release"))
    socket = tmp_path / "s"
    read, write = os.pipe()
    command = [
        str(build / "bin/prefixd"),
        "--dir",
        str(tmp_path / "daemon"),
        "--socket",
        str(socket),
    ]
    command += ["--min-free-mib", "0", "--threads", "2", "--host-tier-mib", "64"]
    command += ["--ready-fd", str(write)]
    process = subprocess.Popen(
        command, pass_fds=[write], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    os.close(write)
    with os.fdopen(read) as ready:
        assert ready.read().startswith("prefixd ready")
    yield f"unix:{socket}"
    process.terminate()
    assert process.wait(30) == 0
