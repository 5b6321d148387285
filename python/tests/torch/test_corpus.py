"""Tests the filter that keeps evaluation texts, and near copies of them, out of training."""

from __future__ import annotations

import gzip
from pathlib import Path

import numpy as np
import pytest

from prefixd.train.corpus import (
    GPL3,
    Corpus,
    NgramFilter,
    gather,
    ngram_hashes,
    read_text,
    word_spans,
)

KEPT = (
    b"The licenses for most software and other practical works are designed to take away your "
    b"freedom to share and change the works. By contrast, this text is only an example that was "
    b"written for a test and says nothing else of any importance to anybody at all.\n"
)


def other_lines(rng: np.random.Generator, count: int) -> bytes:
    words = ["alpha", "beta", "gamma", "delta", "eta", "theta", "iota", "kappa", "mu", "nu"]
    return b"".join(" ".join(rng.choice(words, 8)).encode() + b"\n" for _ in range(count))


def test_unrelated_text_passes_untouched() -> None:
    text = other_lines(np.random.default_rng(0), 60)
    assert NgramFilter([KEPT]).clean(text) == [text]


@pytest.mark.parametrize("change", ["same", "case", "layout", "one word in twelve"])
def test_near_copies_are_dropped(change: str) -> None:
    rng = np.random.default_rng(1)
    copy = KEPT
    if change == "case":
        copy = KEPT.upper()
    if change == "layout":
        copy = KEPT.replace(b" ", b"\n * ").replace(b",", b" ;; ")
    if change == "one word in twelve":
        words = KEPT.split()
        words[11::12] = [b"changed"] * len(words[11::12])
        copy = b" ".join(words) + b"\n"
    text = other_lines(rng, 60) + copy + other_lines(rng, 60)
    keep = NgramFilter([KEPT])
    pieces = keep.clean(text)
    joined = b"".join(pieces)
    assert keep.flagged(text) and not any(keep.flagged(p) for p in pieces)
    assert b"practical works" not in joined.lower() and len(joined) > len(text) // 2


def test_short_overlaps_stay() -> None:
    text = b"the licenses for most software and other things\n" * 8
    assert NgramFilter([KEPT]).clean(text) == [text]


def test_hashes_separate_orders_and_lengths() -> None:
    a = word_spans(b"one two three four five six seven eight")[0]
    assert len(ngram_hashes(a)) == 1 and len(ngram_hashes(a[:7])) == 0
    assert ngram_hashes(a)[0] != ngram_hashes(a[::-1].copy())[0]


@pytest.mark.skipif(not GPL3.is_file(), reason="this machine has no GPL-3 text")
def test_licence_header_and_older_licence_lose_their_shared_parts() -> None:
    header = (
        b"# This program is free software: you can redistribute it and/or modify\n"
        b"# it under the terms of the GNU General Public License as published by\n"
        b"# the Free Software Foundation, either version 3 of the License, or\n"
    )
    code = b"def function(argument):\n    return argument + 1\n" * 20
    keep = NgramFilter([GPL3.read_bytes()])
    assert b"redistribute" not in b"".join(keep.clean(code + header + code))
    old = GPL3.with_name("GPL-2")
    if old.is_file():
        pieces = keep.clean(old.read_bytes())
        assert sum(map(len, pieces)) < old.stat().st_size
        assert not any(keep.flagged(p) for p in pieces)


def test_reading_rejects_what_is_not_text(tmp_path: Path) -> None:
    good = tmp_path / "a.gz"
    good.write_bytes(gzip.compress(KEPT * 4))
    assert read_text(good) == KEPT * 4
    for name, data in {"b": b"\0" * 999, "c": bytes(range(128, 256)) * 9, "d": b"short",
                       "e.gz": b"not gzip" * 99}.items():
        (tmp_path / name).write_bytes(data)
        assert read_text(tmp_path / name) is None
    assert read_text(tmp_path / "missing") is None


def test_gathered_corpus_is_clear_and_survives_saving(tmp_path: Path, monkeypatch) -> None:
    rng = np.random.default_rng(2)
    root = tmp_path / "root"
    root.mkdir()
    kept = tmp_path / "kept.txt"
    kept.write_bytes(KEPT)
    for i in range(12):
        middle = KEPT if i % 3 == 0 else b""
        (root / f"{i}.txt").write_bytes(other_lines(rng, 300) + middle + other_lines(rng, 200))
    monkeypatch.setattr("prefixd.train.corpus.ROOTS", ((str(root), (".txt",), 1 << 20),))
    c = gather(1 << 20, (kept,), heldout_docs=2, log=lambda _: None)
    assert len(c.heldout) == 2
    assert not NgramFilter([KEPT, *c.heldout]).flagged(c.text.tobytes())
    c.save(tmp_path / "c.npz")
    d = Corpus.load(tmp_path / "c.npz")
    assert np.array_equal(c.text, d.text) and c.heldout == d.heldout
    assert len(d.window(rng, 500)) == 500
