"""Tests the example with a real model: the second engine answers from what the first one stored."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.vllm.engines import BLOCK, ENVIRONMENT, ROOT

MODEL = ROOT / "build/models/smollm2"


@pytest.mark.skipif(not MODEL.exists(), reason="make model-smollm2 fetches the weights")
def test_a_long_question_is_answered_from_the_store(tmp_path: Path) -> None:
    def run() -> tuple[int, int, str]:
        done = subprocess.run(
            [sys.executable, str(ROOT / "examples/python/vllm_restart.py"), str(MODEL), str(tmp_path / "kv")],
            capture_output=True,
            text=True,
            env={**os.environ, **ENVIRONMENT},
            timeout=1800,
        )
        assert done.returncode == 0, done.stderr[-8000:]
        said = re.sub(r"^\(.*pid=\d+\).*$", "", done.stdout, flags=re.MULTILINE)  # vLLM's log goes on behind the answer
        found = re.search(r"(\d+) tokens, (\d+) of them were stored.*\n([\s\S]*)", said)
        assert found, done.stdout
        return int(found[1]), int(found[2]), found[3].strip()

    tokens, cached, text = run()
    assert tokens > 2000 and cached == 0 and text
    assert run() == (tokens, (tokens - 1) // BLOCK * BLOCK, text)
