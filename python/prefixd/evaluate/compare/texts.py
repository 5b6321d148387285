"""Finds real texts on the machine, in kinds that differ in how a model attends to them: prose, code,
manuals and logs. Debian's own packages have them; what was found is kept with a run, so that it does
not change when the machine does."""

from __future__ import annotations

import gzip
import json
import lzma
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

# Few texts come from one file, so that a kind is no single author's; long logs are few.
PER_FILE = {"logs": 2}
CHARACTERS = 48_000  # of a text: 8,000 tokens and more, also of dense logs
LEAST = 36_000


@dataclass(frozen=True)
class Text:
    kind: str
    number: int
    source: str  # file, and the character at which the text begins
    text: str


def read(path: Path) -> str:
    """Returns the text of a file, packed or not; empty where it is none."""
    try:
        data = path.read_bytes()
        if path.suffix == ".gz":
            data = gzip.decompress(data)
        elif path.suffix == ".xz":
            data = lzma.decompress(data)
        return data.decode("utf-8").replace("\r\n", "\n")
    except (OSError, EOFError, UnicodeDecodeError, lzma.LZMAError):
        return ""


def _below(root: str, pattern: str, least: int = 4096) -> Iterator[Path]:
    for path in sorted(Path(root).rglob(pattern)):
        if path.is_file() and not path.is_symlink() and path.stat().st_size >= least:
            yield path


def _first(paths: Iterable[str]) -> list[Path]:
    return [p for p in map(Path, paths) if p.is_file()]


def is_prose(text: str) -> bool:
    """Returns whether a text is mostly sentences: words in lines, and few lists, tables or code."""
    sample = text[:CHARACTERS]
    letters = sum(c.isalpha() or c in " ,.;'\n" for c in sample)
    stops = len(re.findall(r"[a-z][.!?]\s", sample))
    return letters > 0.93 * len(sample) and stops > len(sample) / 400


_MACRO = re.compile(r"^[.'](\w+)\s*(.*)$")
_ESCAPES = [(re.compile(p), r) for p, r in (
    (r'\\".*', ""), (r"\\f(\(..|\[[^]]*\]|.)", ""), (r"\\s[-+]?\d", ""), (r"\\\*?\[[^]]*\]", ""),
    (r"\\\((?:aq|cq|oq)", "'"), (r"\\\((?:lq|rq|dq)", '"'), (r"\\\*?\(..", ""), (r"\\[&|^%/,]", ""), (r"\\-", "-"),
    (r"\\e", r"\\"), (r"\\ ", " "), (r"\\c$", ""))]
_SHOWN = {"B", "I", "BR", "IR", "RB", "RI", "BI", "IB", "SB", "SM", "IP", "SS", "SH"}


def manual(source: str) -> str:
    """Returns the plain text of a manual page's source, near to what `man` shows."""
    lines = []
    skipped = False
    for raw in source.split("\n"):
        if skipped or raw.startswith((".ig", ".de")):
            skipped = raw.strip() != ".."
            continue
        line = raw
        if found := _MACRO.match(raw):
            name, rest = found[1], found[2]
            if name not in _SHOWN:
                if name in ("PP", "P", "LP", "TP"):
                    lines.append("")
                continue
            if name in ("SH", "SS", "IP"):
                lines.append("")
            parts = re.findall(r'"([^"]*)"|(\S+)', rest)
            words = [a or b for a, b in parts]
            if name == "IP":
                words = words[:1]
            line = ("" if len(name) == 2 and name[0] != "S" and name != "IP" else " ").join(words)
        for pattern, put in _ESCAPES:
            line = pattern.sub(put, line)
        if line.strip() and not raw.startswith(("'\\\"", '.\\"')):
            lines.append(line)
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).strip() + "\n"


def _prose() -> Iterator[tuple[Path, str]]:
    for path in _below("/usr/share/doc", "*", 9000):
        name = path.name.lower()
        if re.match(r"(readme|faq|news|howto|manual|guide|.*\.txt|.*\.md)", name) and "changelog" not in name:
            text = read(path)
            if is_prose(text):
                yield path, text


def _code() -> Iterator[tuple[Path, str]]:
    library = Path("/usr/lib").glob("python3.*")
    python = [p for folder in sorted(library) for p in _below(str(folder), "[a-z]*.py", LEAST)
              if "test" not in p.name and "/site-packages/" not in str(p)]
    for pair in zip(python, _below("/usr/include/c++", "*.h", LEAST), strict=False):
        yield from ((p, read(p)) for p in pair)


def _manuals() -> Iterator[tuple[Path, str]]:
    for section in (1, 8, 5, 7):
        for path in _below(f"/usr/share/man/man{section}", "*.gz", 9000):
            yield path, manual(read(path))


def _logs() -> Iterator[tuple[Path, str]]:
    named = ["/var/log/dpkg.log", "/var/log/alternatives.log", "/var/log/apt/term.log", "/var/log/apt/history.log"]
    for path in [*_first(named), *_below("/usr/share/doc", "*.log.gz"), *_below("/var/log", "*.log", LEAST),
                 *_below("/usr/share/doc", "changelog.Debian.gz", 12000)]:
        yield path, read(path)


KINDS: dict[str, Callable[[], Iterator[tuple[Path, str]]]] = {
    "prose": _prose, "code": _code, "manuals": _manuals, "logs": _logs}


def find(kind: str, count: int, seed: int) -> list[Text]:
    """Returns `count` texts of a kind, the same on the same machine; fewer where it has no more. A text that
    lies there several times, as packages of one source bring it, counts once."""
    rng = np.random.default_rng(seed)
    found: list[Text] = []
    seen: set[str] = set()
    for path, text in KINDS[kind]():
        if text in seen:
            continue
        seen.add(text)
        parts = min(PER_FILE.get(kind, 1), len(text) // LEAST)
        for part in range(parts):
            # A text begins at a line, somewhere in its share of the file.
            share = len(text) // parts
            begin = part * share + int(rng.integers(0, max(1, share - CHARACTERS)))
            begin = text.find("\n", begin) + 1 if begin else 0
            body = text[begin : begin + CHARACTERS]
            if len(body) >= LEAST:
                found.append(Text(kind, len(found), f"{path}:{begin}", body))
            if len(found) == count:
                return found
    return found


def kept(path: Path, kinds: Iterable[str], count: int, seed: int) -> dict[str, list[Text]]:
    """Returns texts of these kinds, from `path` as far as they are there; new ones are added to it."""
    texts: dict[str, list[Text]] = {}
    if path.is_file():
        for line in path.read_text(encoding="utf-8").splitlines():
            one = Text(**json.loads(line))
            texts.setdefault(one.kind, []).append(one)
    for kind in kinds:
        have = texts.setdefault(kind, [])
        if len(have) < count:
            have += find(kind, count, seed)[len(have) :]
    whole = "".join(json.dumps(asdict(t)) + "\n" for ts in texts.values() for t in ts)
    new = path.with_suffix(".new")
    new.write_text(whole, encoding="utf-8")
    new.replace(path)
    return {kind: texts[kind][:count] for kind in kinds}
