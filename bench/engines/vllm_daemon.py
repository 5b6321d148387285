"""A prefixd of its own beside vLLM engines that each run in a process of their own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from vllm_engine import ENVIRONMENT

ROOT = Path(__file__).resolve().parents[2]


def transfer(address: str, **options: Any) -> dict[str, Any]:
    """Returns vLLM's kv_transfer_config for a connector that fails rather than computes again."""
    return {
        "kv_connector": "PrefixdConnector",
        "kv_connector_module_path": "prefixd.vllm",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "fail",
        "kv_connector_extra_config": {
            "prefixd": address,
            "call_seconds": 300,
            "match_seconds": 120,
            "compute_when_faster": False,  # loading is what is measured, whether or not it pays
            **options,
        },
    }


class Daemon:
    """A daemon on `folder`/store, with a socket and a log beside it. stop() ends it."""

    def __init__(self, folder: Path, options: list[str]) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.address = f"unix:{folder / 'socket'}"
        read, write = os.pipe()
        command = [str(ROOT / "build/release/bin/prefixd"), "--dir", str(folder / "store")]
        command += ["--socket", str(folder / "socket"), "--min-free-mib", "0", "--ready-fd", str(write), *options]
        with (folder / "log").open("wb") as log:
            self.process = subprocess.Popen(command, pass_fds=[write], stdout=log, stderr=log)
        os.close(write)
        with os.fdopen(read) as ready:
            if not ready.read().startswith("prefixd ready"):
                raise SystemExit((folder / "log").read_text())

    def stop(self) -> None:
        self.process.terminate()
        self.process.wait(300)


def in_a_process(program: Path, work: dict[str, Any]) -> dict[str, Any]:
    """Runs `program --engine` with the work on its input; returns the object that it prints as a line,
    which begins with {"chats"."""
    done = subprocess.run(
        [sys.executable, program, "--engine"], input=json.dumps(work), capture_output=True, text=True,
        env={**ENVIRONMENT, **os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "python"), str(program.parent)])},
    )
    said = [line for line in done.stdout.splitlines() if line.startswith('{"chats"')]  # vLLM prints, too
    if done.returncode != 0 or not said:
        raise SystemExit(done.stderr[-6000:] + done.stdout[-2000:])
    answer: dict[str, Any] = json.loads(said[-1])
    return answer
