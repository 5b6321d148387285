"""Measures the small model: needle recall by length, and bits per byte of held-out text."""

from __future__ import annotations

import argparse
import json
import math
import sys
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

from prefixd.planted import BOS, Line, fast_words, line_starts, needle, number
from prefixd.train.corpus import GPL3, Corpus
from prefixd.train.net import Net, load_hf


def needle_prompt(
    rng: np.random.Generator, document: bytes, length: int, needles: int
) -> tuple[np.ndarray, list[Line]]:
    """Returns BOS and a document's beginning with ``needles`` at line starts; about ``length`` ids.

    A shorter document is repeated. The prompt ends with a newline, ready for a question.
    """
    lines = [needle(w, number(rng)) for w in fast_words(rng, needles)]
    room = length - 2 - sum(len(x.text) + 2 for x in lines)
    if room < 16:
        raise ValueError(f"{needles} needles do not fit in {length} tokens")
    text = np.resize(np.frombuffer(document, np.uint8), room)
    places = np.sort(rng.choice(line_starts(text), size=needles, replace=True))
    parts, at = [], 0
    for p, line in zip(places, lines, strict=True):
        lead = "" if p == 0 or text[p - 1] == 10 else "\n"
        parts += [text[at:p].tobytes(), (lead + line.text + "\n").encode()]
        at = int(p)
    parts += [text[at:].tobytes(), b"\n"]
    raw = np.frombuffer(b"".join(parts), np.uint8).astype(np.int64)
    return np.concatenate([[BOS], raw]), lines


def _autocast(device: torch.device, bf16: bool) -> torch.autocast:
    return torch.autocast(device.type, torch.bfloat16, enabled=bf16)


@torch.no_grad()
def recall(
    net: Net,
    document: bytes,
    length: int,
    prompts: int,
    needles: int,
    seed: int = 0,
    *,
    one_by_one: bool = False,
    bf16: bool = True,
) -> tuple[int, int]:
    """Returns (answers wholly right, questions asked) on ``prompts`` prompts of ``length`` tokens.

    An answer is right when every byte of ``12345.]`` is the likeliest one after the true bytes
    before it, which is what greedy decoding gives. ``one_by_one`` asks each question on its own
    right after the document; otherwise they follow each other, answered.
    """
    device = next(net.parameters()).device
    right = asked = 0
    for p in range(prompts):
        rng = np.random.default_rng([seed, length, p])
        shift = int(rng.integers(0, max(1, len(document) - length)))
        ids, lines = needle_prompt(rng, document[shift:] + document[:shift], length, needles)
        order = [lines[int(i)] for i in rng.permutation(len(lines))]
        for asked_lines in [[x] for x in order] if one_by_one else [order]:
            seq, spans = [ids], []
            at = len(ids)
            for x in asked_lines:
                seq.append(np.frombuffer((x.text + "\n").encode(), np.uint8).astype(np.int64))
                spans.append((at + len(x.prompt), at + len(x.text)))
                at += len(seq[-1])
            full = torch.from_numpy(np.concatenate(seq)).to(device)
            with _autocast(device, bf16):
                hidden = net(full[None])[0]
                for a, b in spans:
                    guess = net.logits(hidden[a - 1 : b - 1]).argmax(-1)
                    right += int(torch.equal(guess, full[a:b]))
                    asked += 1
    return right, asked


@torch.no_grad()
def bits_per_byte(
    net: Net, documents: list[bytes], length: int, windows: int, *, bf16: bool = True
) -> float:
    """Returns the mean bits per byte over ``windows`` windows of ``length`` bytes taken evenly."""
    device = next(net.parameters()).device
    data = np.frombuffer(b"".join(documents), np.uint8)
    total, count = 0.0, 0
    for start in np.linspace(0, max(0, len(data) - length), windows).astype(int):
        ids = np.concatenate([[BOS], data[start : start + length].astype(np.int64)])
        full = torch.from_numpy(ids).to(device)
        with _autocast(device, bf16):
            logits = net.logits(net(full[None, :-1])[0])
        total += float(F.cross_entropy(logits, full[1:], reduction="sum"))
        count += len(full) - 1
    return total / count / math.log(2)


def main(argv: list[str] | None = None) -> int:
    """Prints the recall table and held-out bits per byte of a model as JSON."""
    a = argparse.ArgumentParser(prog="python -m prefixd.train.check", description=main.__doc__)
    a.add_argument("--model", type=Path, required=True, help="folder with config.json and weights")
    a.add_argument("--document", type=Path, default=GPL3, help="text to plant in (%(default)s)")
    a.add_argument("--corpus", type=Path, help="cached corpus, for its held-out texts")
    a.add_argument("--length", type=int, action="append", help="prompt length; may be repeated")
    a.add_argument("--prompts", type=int, default=8, help="prompts per length (%(default)s)")
    a.add_argument("--needles", type=int, default=8, help="most needles per prompt (%(default)s)")
    a.add_argument("--one-by-one", action="store_true", help="each question alone after the prompt")
    a.add_argument("--float32", action="store_true", help="compute in float32 instead of bf16")
    a.add_argument("--seed", type=int, default=1000)
    a.add_argument("--threads", type=int, default=0, help="CPU threads (0: torch's choice)")
    o = a.parse_args(argv)
    if o.threads:
        torch.set_num_threads(o.threads)
    net = load_hf(o.model).eval().requires_grad_(False)
    net.to("cuda" if torch.cuda.is_available() else "cpu")
    try:
        document = o.document.read_bytes()
    except OSError as e:
        raise SystemExit(f"cannot read {o.document}: {e}") from e
    bf16 = not o.float32
    for n in o.length or [256, 512, 1024, 2048, 4096, 8192]:
        if n + 512 > net.cfg.max_positions:
            a.error(f"--length {n}: the model has {net.cfg.max_positions} positions")
        count = max(2, min(o.needles, n // 100))
        right, asked = recall(
            net, document, n, o.prompts, count, o.seed, one_by_one=o.one_by_one, bf16=bf16
        )
        print(json.dumps({"length": n, "needles": count, "right": right, "asked": asked,
                          "recall": round(right / asked, 4)}), flush=True)
        nll = bits_per_byte(net, [document], n, 4, bf16=bf16)
        row = {"length": n, "document_bits_per_byte": round(nll, 4)}
        if o.corpus:
            held = Corpus.load(o.corpus).heldout
            windows = max(4, min(64, 131072 // n))
            row["heldout_bits_per_byte"] = round(bits_per_byte(net, held, n, windows, bf16=bf16), 4)
        print(json.dumps(row), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
