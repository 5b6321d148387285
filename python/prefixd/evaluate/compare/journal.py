"""Keeps what was measured, a line of JSON for each document and way of reading, as it comes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

Key = tuple[str, int, int]


class Journal:
    """Reads the complete lines of a file and appends to it. A torn last line, of a run that was
    killed while it wrote, is dropped. Of lines with one key and method the last counts."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._rows: dict[tuple[Key, str], dict[str, Any]] = {}
        if path.is_file():
            text = path.read_text(encoding="utf-8")
            whole = text[: text.rfind("\n") + 1]
            if whole != text:
                path.write_text(whole, encoding="utf-8")
            for line in whole.splitlines():
                self._take(json.loads(line))

    def _take(self, row: dict[str, Any]) -> None:
        self._rows[tuple(row["key"]), row["method"]] = row

    def add(self, row: dict[str, Any]) -> None:
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row, separators=(",", ":")) + "\n")
        self._take(row)

    def has(self, key: Key, method: str) -> bool:
        return (key, method) in self._rows

    @property
    def rows(self) -> list[dict[str, Any]]:
        return list(self._rows.values())
