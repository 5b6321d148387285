"""Collects text that every Debian machine has, without the documents kept for evaluation.

A training text may share no run of eight words with an evaluation document: the lines around any
such run are dropped, so near copies (licence headers, other versions of a licence) go with it.
"""

from __future__ import annotations

import gzip
import hashlib
import re
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

GPL3 = Path("/usr/share/common-licenses/GPL-3")
# (folder, name endings, most bytes to take)
ROOTS: tuple[tuple[str, tuple[str, ...], int], ...] = (
    ("/usr/share/doc",
     (".txt", ".md", ".rst", ".html", ".gz", "README", "NEWS", "copyright"), 12 << 20),
    ("/usr/lib/python3.11", (".py", ".txt"), 10 << 20),
    ("/usr/share/perl", (".pm", ".pod", ".pl"), 8 << 20),
    ("/usr/share/man/man1", (".gz",), 4 << 20),
    ("/usr/share/man/man8", (".gz",), 2 << 20),
    ("/usr/include", (".h", ".hpp", ".tcc"), 6 << 20),
    ("/usr/share/cmake-3.25", (".cmake", ".rst"), 2 << 20),
    ("/usr/share/common-licenses", ("",), 1 << 20),
)
NGRAM = 8
_WORD = re.compile(rb"[a-z0-9]+")
_PRIME = np.uint64(0x9E3779B97F4A7C15)


def word_spans(data: bytes) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns hash, start and end of every word, case folded."""
    hashes, starts, ends = [], [], []
    for m in _WORD.finditer(data.lower()):
        hashes.append(zlib.crc32(m.group()))
        starts.append(m.start())
        ends.append(m.end())
    return (
        np.array(hashes, dtype=np.uint64),
        np.array(starts, dtype=np.int64),
        np.array(ends, dtype=np.int64),
    )


def ngram_hashes(words: np.ndarray, n: int = NGRAM) -> np.ndarray:
    """Returns a 64-bit hash of each run of ``n`` words (empty when there are fewer)."""
    count = len(words) - n + 1
    if count <= 0:
        return np.zeros(0, dtype=np.uint64)
    out = np.zeros(count, dtype=np.uint64)
    with np.errstate(over="ignore"):
        for j in range(n):
            out = (out + words[j : j + count] + np.uint64(1)) * _PRIME
            out ^= out >> np.uint64(29)
    return out


class NgramFilter:
    """Removes from a text the lines that share a run of ``n`` words with a kept-out document."""

    def __init__(self, kept_out: Iterable[bytes], n: int = NGRAM) -> None:
        self.n = n
        parts = [ngram_hashes(word_spans(d)[0], n) for d in kept_out]
        self.banned = np.unique(np.concatenate(parts)) if parts else np.zeros(0, np.uint64)

    def flagged(self, data: bytes) -> list[tuple[int, int]]:
        """Returns byte ranges, merged and in order, covered by shared runs of words."""
        words, starts, ends = word_spans(data)
        hashes = ngram_hashes(words, self.n)
        if not len(hashes) or not len(self.banned):
            return []
        at = np.minimum(np.searchsorted(self.banned, hashes), len(self.banned) - 1)
        ranges: list[tuple[int, int]] = []
        for i in np.flatnonzero(self.banned[at] == hashes):
            lo, hi = int(starts[i]), int(ends[i + self.n - 1])
            if ranges and lo <= ranges[-1][1]:
                ranges[-1] = (ranges[-1][0], hi)
            else:
                ranges.append((lo, hi))
        return ranges

    def clean(self, data: bytes, margin: int = 200, least: int = 256) -> list[bytes]:
        """Returns the pieces of ``data``, cut at line ends, that stay clear of every flagged
        range."""
        pieces, at = [], 0
        for lo, hi in [*self.flagged(data), (len(data) + margin, len(data) + margin)]:
            end = len(data) if lo >= len(data) else data.rfind(b"\n", 0, max(lo - margin, 0)) + 1
            if end - at >= least:
                pieces.append(data[at:end])
            nxt = data.find(b"\n", min(hi + margin, len(data)))
            at = max(at, len(data) if nxt < 0 else nxt + 1)
        return pieces


def read_text(path: Path, most: int = 1 << 20) -> bytes | None:
    """Returns the file's bytes when they are text (gzip is opened), else None."""
    try:
        if path.is_symlink() or not path.is_file() or path.stat().st_size > 4 * most:
            return None
        raw = path.read_bytes()
        if path.suffix == ".gz":
            raw = gzip.decompress(raw)
    except (OSError, EOFError, zlib.error):
        return None
    raw = raw[:most]
    if len(raw) < 512 or b"\0" in raw:
        return None
    high = sum(np.frombuffer(raw, np.uint8) > 127)
    return raw if high * 50 < len(raw) else None


def text_files(root: str, endings: tuple[str, ...]) -> Iterator[Path]:
    base = Path(root)
    if base.is_dir():
        for path in sorted(base.rglob("*")):
            if path.name.endswith(endings) and "/site-packages/" not in str(path):
                yield path


@dataclass
class Corpus:
    """Holds training text as one array, and the documents kept for evaluation."""

    text: np.ndarray
    starts: np.ndarray
    heldout: list[bytes]

    def window(self, rng: np.random.Generator, size: int) -> np.ndarray:
        """Returns ``size`` consecutive bytes from a random place."""
        at = int(rng.integers(0, max(1, len(self.text) - size)))
        got = self.text[at : at + size]
        return got if len(got) == size else np.resize(got, size)

    def save(self, path: Path) -> None:
        sizes = np.array([len(d) for d in self.heldout], np.int64)
        joined = np.frombuffer(b"".join(self.heldout), np.uint8)
        tmp = path.with_name(path.name + ".part")
        with tmp.open("wb") as f:
            np.savez(f, text=self.text, starts=self.starts, sizes=sizes, heldout=joined)
        tmp.replace(path)

    @staticmethod
    def load(path: Path) -> Corpus:
        z = np.load(path)
        ends = np.cumsum(z["sizes"])
        held = [bytes(z["heldout"][e - s : e]) for s, e in zip(z["sizes"], ends, strict=True)]
        return Corpus(z["text"], z["starts"], held)


def _rank(path: Path) -> bytes:
    return hashlib.sha256(str(path).encode()).digest()


def gather(
    most: int = 40 << 20, kept_out: tuple[Path, ...] = (GPL3,), heldout_docs: int = 24,
    log: Callable[[str], None] = print,
) -> Corpus:
    """Collects the corpus: up to ``most`` bytes, clear of GPL-3 and of the held-out documents."""
    files: list[bytes] = []
    seen: set[bytes] = set()
    candidates: list[tuple[bytes, bytes]] = []
    for root, endings, cap in ROOTS:
        taken = 0
        for path in sorted(text_files(root, endings), key=_rank):
            if taken >= cap or path.resolve() in {p.resolve() for p in kept_out}:
                continue
            data = read_text(path)
            digest = hashlib.sha256(data or b"").digest()
            if data is None or digest in seen:
                continue
            seen.add(digest)
            taken += len(data)
            if 16384 <= len(data) <= 200_000 and root != "/usr/share/common-licenses":
                candidates.append((_rank(path), data))
            files.append(data)
    if not files:
        raise SystemExit("no training text found under /usr/share and /usr/include")
    candidates.sort()
    heldout = [d for _, d in candidates[:heldout_docs]]
    held_ids = {id(d) for d in heldout}
    documents = [p.read_bytes() for p in kept_out if p.is_file()]
    keep = NgramFilter([*documents, *heldout])
    pieces: list[bytes] = []
    before = 0
    for data in files:
        if id(data) not in held_ids:
            before += len(data)
            pieces += keep.clean(data)
    order = sorted(range(len(pieces)), key=lambda i: zlib.crc32(pieces[i][:64]))
    pieces = [pieces[i] for i in order]
    text = np.frombuffer(b"".join(pieces), np.uint8)[:most].copy()
    starts = np.cumsum([0] + [len(p) for p in pieces[:-1]]).astype(np.int64)
    log(f"corpus: {before >> 10} KiB read, {len(text) >> 10} KiB kept, {len(heldout)} held out")
    return Corpus(text, starts[starts < len(text)], heldout)
