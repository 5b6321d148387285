#!/usr/bin/env python3
"""Fails on an #include that docs/architecture.md does not draw.

The arrows are the last column of the page's table of rooms: what a room's files may include, their
own room aside. Inside a room, sub-folders must form no circle. Every #include of the project's own
is read, .cu and .cuh files too.
"""

import argparse
import pathlib
import re
import subprocess
import sys

INCLUDE = re.compile(r'^\s*#\s*include\s+"([^"]+)"', re.M)
ROW = re.compile(r"^\| `([\w/]+)/` \|.*\|([^|]*)\|\s*$", re.M)
SUFFIXES = {".h", ".cc", ".c", ".cu", ".cuh"}


def drawn_arrows(page: str) -> dict[str, set[str]]:
    """Room -> rooms (or single headers) that it may include."""
    arrows = {}
    for match in ROW.finditer(page):
        arrows[match.group(1)] = {a.rstrip("/") for a in re.findall(r"`([^`]+)`", match.group(2))}
    return arrows


def room_of(path: str, rooms: set[str]) -> str:
    """The longest room that the path lies in: index/codes before index."""
    parts = path.split("/")
    for n in range(len(parts) - 1, 0, -1):
        if "/".join(parts[:n]) in rooms:
            return "/".join(parts[:n])
    return ""


def includes(source: pathlib.Path) -> dict[str, list[str]]:
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=source, check=True, capture_output=True, text=True).stdout.split("\0")
    found = {}
    for name in listed:
        path = source / name
        if path.suffix in SUFFIXES and path.is_file():
            found[name] = INCLUDE.findall(path.read_text())
    return found


def wrong_arrows(found: dict[str, list[str]], arrows: dict[str, set[str]]) -> list[str]:
    rooms = set(arrows)
    wrong = []
    for name, headers in found.items():
        here = room_of(name, rooms)
        if not here:
            wrong.append(f"{name} lies in no room of the table")
            continue
        for header in headers:
            path = f"include/{header}" if header.startswith("prefixd/") else header
            there = room_of(path, rooms)
            if not there:
                if path not in GENERATED:
                    wrong.append(f"{name}: {header} lies in no room of the table")
            elif there != here and there not in arrows[here] and path not in arrows[here]:
                wrong.append(f"{name}: {header} ({here} -> {there} is not drawn)")
    return wrong


# Written by the build.
GENERATED = {"commit.h"}


def circles(found: dict[str, list[str]], rooms: set[str]) -> list[str]:
    """Sub-folders of one room that include one another, directly or by way of others."""
    graph: dict[str, dict[str, str]] = {}
    for name, headers in found.items():
        folder = name.rsplit("/", 1)[0]
        for header in headers:
            other = header.rsplit("/", 1)[0]
            if other == folder or room_of(name, rooms) != room_of(header, rooms):
                continue
            if room_of(name, rooms) and not name.startswith(("tests/", "bench/")):
                graph.setdefault(folder, {}).setdefault(other, f"{name} includes {header}")
    wrong, done = [], set()

    def visit(folder: str, path: list[str]) -> None:
        if folder in path:
            circle = path[path.index(folder):]
            steps = [graph[a][b] for a, b in zip(circle, circle[1:] + [folder], strict=True)]
            wrong.append("a circle of folders: " + "; ".join(steps))
            return
        if folder in done:
            return
        for other in graph.get(folder, {}):
            visit(other, path + [folder])
        done.add(folder)

    for folder in list(graph):
        visit(folder, [])
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("source", type=pathlib.Path, help="the source tree")
    source = parser.parse_args().source
    arrows = drawn_arrows((source / "docs/architecture.md").read_text())
    if len(arrows) < 10:
        print("docs/architecture.md has no table of rooms that this test can read")
        return 1
    found = includes(source)
    wrong = wrong_arrows(found, arrows) + circles(found, set(arrows))
    # A test that cannot fail proves nothing: an arrow upward must be seen.
    planted = {"base/planted.cc": ["daemon/server.h"], "gpu/step/planted.cu": ["storage/io/file.h"]}
    if len(wrong_arrows(planted, arrows)) != len(planted):
        wrong.append("an arrow upward was not seen")
    looped = {"storage/io/a.h": ["storage/read/b.h"], "storage/read/b.h": ["storage/io/a.h"]}
    if not circles(looped, set(arrows)):
        wrong.append("a circle was not seen")
    for line in wrong:
        print(line)
    print(f"{len(found)} files, {sum(map(len, found.values()))} includes, {len(wrong)} wrong")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
