"""Writes the small model's prompts for its feature maps as files: text with planted needles and,
behind the prefix, questions and text. ``python -m prefixd.train.prompts --out DIR --length
8192``."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import numpy as np

from prefixd.train.check import needle_prompt
from prefixd.train.corpus import Corpus, gather


def prompt_text(rng: np.random.Generator, corpus: Corpus, length: int, extra: int) -> bytes:
    """Returns ``length`` - 1 bytes with needles (BOS precedes them), then ``extra`` of questions
    and text."""
    text = corpus.window(rng, length + extra).tobytes()
    count = int(rng.integers(2, max(3, min(24, length // 100) + 1)))
    ids, lines = needle_prompt(rng, text[:length], length, count)
    used = length - 2 - sum(len(x.text) + 2 for x in lines)
    order = rng.permutation(len(lines))[: int(rng.integers(1, 5))]
    asked = "".join(lines[int(i)].text + "\n" for i in order).encode()
    tail = asked + text[used:] if rng.random() < 0.5 else text[used : used + extra // 2] + asked
    full = (tail + text)[: length + extra - len(ids)]
    return ids[1:].astype(np.uint8).tobytes() + full


def main(argv: list[str] | None = None) -> int:
    a = argparse.ArgumentParser(prog="python -m prefixd.train.prompts", description=__doc__)
    a.add_argument("--out", type=Path, required=True, help="folder for the files and the corpus")
    a.add_argument("--length", type=int, action="append", help="prefix length; may be repeated")
    a.add_argument("--prompts", type=int, default=24, help="files per length (%(default)s)")
    a.add_argument("--queries", type=int, default=256, help="bytes behind the prefix (%(default)s)")
    a.add_argument("--corpus", type=Path, help="cached corpus (default: OUT/corpus.npz)")
    a.add_argument("--seed", type=int, default=7)
    o = a.parse_args(argv)
    o.out.mkdir(parents=True, exist_ok=True)
    cache = o.corpus or o.out / "corpus.npz"
    corpus = Corpus.load(cache) if cache.is_file() else gather()
    if not cache.is_file():
        corpus.save(cache)
    for n in o.length or [8192]:
        folder = o.out / str(n)
        folder.mkdir(exist_ok=True)
        for p in range(o.prompts):
            rng = np.random.default_rng([o.seed, n, p])
            (folder / f"{p:03d}.txt").write_bytes(prompt_text(rng, corpus, n, o.queries))
        print(f"{o.prompts} prompts in {folder}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
