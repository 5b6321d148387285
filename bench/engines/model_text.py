#!/usr/bin/env python3
"""Writes the token ids of a text as a JSON list, for model_bench and splice_bench.

By default the text is the licences that every Debian machine has, one after the other."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "demo" / "story"))

LICENCES = ("GPL-3", "LGPL-2.1", "Apache-2.0")


def token_ids(model: Path, file: Path | None) -> list[int]:
    """Returns the ids of a whole text, in the model's own tokens."""
    from text import read_document, text_of

    files = [file] if file else [Path("/usr/share/common-licenses") / name for name in LICENCES]
    text = "\n".join(read_document(f) for f in files)
    head, ids = text_of(model).document(text)
    return head + ids


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="checkpoint with its tokenizer")
    parser.add_argument("--file", type=Path, help="a UTF-8 text, instead of the licences")
    args = parser.parse_args()
    from text import Stop

    try:
        print(json.dumps(token_ids(args.model, args.file)))
    except Stop as stop:
        print(f"model_text: {stop}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
