"""Runs prefixd's own decoder over a store, in a process: documents go in, results come out as they are
measured."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from prefixd.evaluate.compare.documents import Document

ROOT = Path(__file__).resolve().parents[4]
RECORDED = 16  # queries of a document for errors by head


def default_program() -> Path:
    return Path(os.environ.get("PREFIXD_BUILD", ROOT / "build/release")) / "bin/prefixd-demo"


class Engine:
    """A process of `prefixd-demo compare`. Use it in a `with` block, which ends the process; what a
    document has stored until then serves the next one."""

    def __init__(self, program: Path, model: Path, store: Path, threads: int) -> None:
        if not program.is_file():
            raise SystemExit(f"{program} is not there; build it (make build) or name it with --program")
        self._process = subprocess.Popen(
            [program, "compare"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            # A signal to the group is for the Python program alone, which ends this process.
            start_new_session=True,
        )
        self._send({"model_dir": str(model.resolve()), "store_dir": str(store.resolve()), "threads": threads})
        self.begun = self._event()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate()

    def _send(self, line: Mapping[str, Any]) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(line) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            self._fail()

    def _event(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line.endswith("\n"):
            self._fail()
        event: dict[str, Any] = json.loads(line)
        return event

    def _fail(self) -> None:
        assert self._process.stderr is not None
        said = self._process.stderr.read().strip()
        raise SystemExit(said or f"prefixd-demo ended with status {self._process.wait()}")

    def compare(
        self, document: Document, readings: Sequence[Mapping[str, Any]], logits: bool = False
    ) -> Iterator[dict[str, Any]]:
        """Yields the events of one document; the last is "done"."""
        self._send({
            "id": "/".join(map(str, document.key)), "prompt": document.prompt,
            "passages": [p.request for p in document.passages], "readings": list(readings),
            "recorded": RECORDED if document.recorded else 0, "logits": logits,
        })
        while True:
            event = self._event()
            yield event
            if event["event"] == "done":
                return


def note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
