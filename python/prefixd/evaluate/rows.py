"""Joins measured rows: rows.jsonl has a line for each document, and lines of one document come
together here."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from prefixd.evaluate.methods import METHODS


class Rows:
    """Reads the complete lines of rows.jsonl and appends to it. A torn last one, of a run that was killed
    while it wrote, is cut off by the next one that is added; until then nothing is written, so that a
    report can be made while a run goes on. The last line with a key counts."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._rows: dict[tuple[object, ...], dict[str, Any]] = {}
        self._end: int | None = None  # where the first new line goes; None: at the end of the file
        if path.is_file():
            data = path.read_bytes()
            self._end = data.rfind(b"\n") + 1
            self._rows = {tuple(row["key"]): row for row in map(json.loads, data[: self._end].splitlines())}

    @property
    def rows(self) -> list[dict[str, Any]]:
        return list(self._rows.values())

    def find(self, *key: object) -> dict[str, Any] | None:
        return self._rows.get(key)

    def add(self, row: dict[str, Any]) -> None:
        self._rows[tuple(row["key"])] = row
        with self.path.open("ab") as file:
            if self._end is not None:
                file.truncate(self._end)
                self._end = None
            file.write(json.dumps(row).encode() + b"\n")


def without_outdated(row: Mapping[str, Any], maps: Sequence[str]) -> dict[str, Any]:
    """Returns a document's row without the cells that were measured with other feature maps than
    these."""
    if row.get("maps") == list(maps):
        return dict(row)

    def kept(cells: Mapping[str, Any]) -> dict[str, Any]:
        return {k: v for k, v in cells.items() if not METHODS[k.split("/")[0]].mapped}

    out = {k: v for k, v in row.items() if k not in ("scatter", "maps")}
    out["answers"] = [a | {"scores": kept(a["scores"])} for a in row["answers"]]
    if "nll" in row:
        found = row["diagnostics"]
        out["nll"] = kept(row["nll"])
        out["diagnostics"] = found | {k: kept(found[k]) for k in ("errors", "rho")}
    return out


def merged(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
    """Joins two rows of one document, which have cells of their own each."""
    out = {**old, **new}
    out["answers"] = [
        a | {"scores": a["scores"] | b["scores"]}
        for a, b in zip(old["answers"], new["answers"], strict=True)
    ]
    if "nll" in old and "nll" in new:
        out["nll"] = old["nll"] | new["nll"]
        a, b = old["diagnostics"], new["diagnostics"]
        out["diagnostics"] = a | {k: a[k] | b[k] for k in ("errors", "rho")}
    return out
