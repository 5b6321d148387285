"""Keeps what was measured, a line of JSON for each document and way of reading, as it comes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

Key = tuple[str, int, int]


class Journal:
    """Reads the complete lines of a file and appends to it. A torn last line, of a run that was killed
    while it wrote, is cut off by the next one that is added; until then nothing is written, so that a
    report can be made while a run goes on. Of lines with one key and method the last counts."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._rows: dict[tuple[Key, str], dict[str, Any]] = {}
        self._end: int | None = None  # where the first new line goes; None: at the end of the file
        if path.is_file():
            data = path.read_bytes()
            self._end = data.rfind(b"\n") + 1
            for line in data[: self._end].splitlines():
                self._take(json.loads(line))

    def _take(self, row: dict[str, Any]) -> None:
        self._rows[tuple(row["key"]), row["method"]] = row

    def add(self, row: dict[str, Any]) -> None:
        with self.path.open("ab") as file:
            if self._end is not None:
                file.truncate(self._end)
                self._end = None
            file.write(json.dumps(row, separators=(",", ":")).encode() + b"\n")
        self._take(row)

    def has(self, key: Key, method: str) -> bool:
        return (key, method) in self._rows

    @property
    def rows(self) -> list[dict[str, Any]]:
        return list(self._rows.values())
