#!/usr/bin/env python3
"""Checks that the targets of links in pages and in comments of sources exist.

    links_test.py [--source DIR]

It checks relative links of every page and their anchors, pages that sources name
("docs/format.md"), and files that pages name between backticks (`storage/segment_file.h`). Each
decision note must be in its index, and short.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from pathlib import Path

SKIPPED = {".git", "build", "demo-report", "node_modules", "shared"}
SOURCES = {".h", ".cc", ".cu", ".cuh", ".py", ".sh", ".txt", ".cmake", ".toml"}
LINK = re.compile(r"\]\(([^)\s]+)(?:\s+\"[^\"]*\")?\)")
NAMED_PAGE = re.compile(r"(?<![\w/.-])docs/[\w/-]+\.md\b")
NAMED_FILE = re.compile(r"`((?:[\w.-]+/)+[\w.-]+\.(?:h|cc|cu|cuh|py|sh|toml|md|txt))`")
NOTE_LINES = 25


def files(root: Path):
    for folder, folders, names in os.walk(root):
        folders[:] = sorted(f for f in folders if f not in SKIPPED and not f.startswith(".venv"))
        for name in sorted(names):
            yield Path(folder) / name


def outside_code(text: str) -> str:
    """Returns the page with blocks of code left empty, so that lines keep their numbers."""
    inside, out = False, []
    for line in text.split("\n"):
        fence = line.lstrip().startswith("```")
        out.append("" if inside or fence else line)
        inside ^= fence
    return "\n".join(out)


def anchor(heading: str) -> str:
    """Returns the anchor that GitHub gives a heading."""
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).replace("`", "").replace("*", "")
    return re.sub(r"[^\w\- ]", "", text.strip().lower()).replace(" ", "-")


def anchors(page: Path) -> set[str]:
    seen: dict[str, int] = {}
    out = set()
    for heading in re.findall(r"^#{1,6}\s+(.*?)\s*#*$", outside_code(page.read_text()), re.M):
        name = anchor(heading)
        count = seen.get(name, 0)
        seen[name] = count + 1
        out.add(f"{name}-{count}" if count else name)
    return out


def broken_links(root: Path, page: Path):
    text = outside_code(page.read_text())
    for match in LINK.finditer(re.sub(r"`[^`\n]*`", lambda m: "x" * len(m[0]), text)):
        target, _, name = match[1].partition("#")
        if re.match(r"[a-z]+:", match[1]):
            continue
        at = page if not target else (page.parent / target)
        line = text.count("\n", 0, match.start()) + 1
        if not at.exists() or not at.resolve().is_relative_to(root.resolve()):
            yield line, f"{match[1]}: there is no such file"
        elif name and at.suffix == ".md" and name not in anchors(at):
            yield line, f"{match[1]}: there is no such heading"


def named_but_missing(root: Path, page: Path):
    rooms = {entry.name for entry in root.iterdir() if entry.is_dir()}
    text = outside_code(page.read_text())
    for match in NAMED_FILE.finditer(text):
        room = match[1].split("/")[0]
        # Folders of the reader's own and build outputs are not checked.
        if room in rooms - SKIPPED and not (root / match[1]).exists():
            yield text.count("\n", 0, match.start()) + 1, f"`{match[1]}`: there is no such file"


def unknown_pages(root: Path, source: Path):
    text = source.read_text(errors="replace")
    for match in NAMED_PAGE.finditer(text):
        if not (root / match[0]).exists():
            yield text.count("\n", 0, match.start()) + 1, f"{match[0]}: there is no such page"


def decisions(root: Path):
    index = root / "docs/decisions/README.md"
    listed = index.read_text() if index.exists() else ""
    for note in sorted(index.parent.glob("[0-9]*.md")):
        if f"]({note.name})" not in listed:
            yield f"{note.relative_to(root)}:1: the index of decisions does not list it"
        if (lines := note.read_text().count("\n")) > NOTE_LINES:
            yield f"{note.relative_to(root)}:{lines}: a decision note has {NOTE_LINES} lines at most"


def findings(root: Path):
    yield from decisions(root)
    for file in files(root):
        if file.suffix == ".md":
            found = [*broken_links(root, file)]
            if file.name != "CHANGELOG.md":  # the changelog names files of older versions
                found += named_but_missing(root, file)
        elif file.suffix in SOURCES:
            found = [*unknown_pages(root, file)]
        else:
            continue
        for line, text in found:
            yield f"{file.relative_to(root)}:{line}: {text}"


def main(argv=None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", type=Path, default=Path(__file__).resolve().parents[2])
    root = parser.parse_args(argv).source
    found = list(findings(root))
    print("\n".join(found) or "every link leads somewhere")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
