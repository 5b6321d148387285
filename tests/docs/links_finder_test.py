#!/usr/bin/env python3
"""Tests that links_test.py fails where it should."""

from __future__ import annotations

import tempfile
import unittest
from pathlib import Path

import links_test

DOCS = "docs"  # written in parts, because links_test.py reads this file, too

PAGE = """# One page

## What `it` does, and why
## Twice
## Twice

[a](other.md) [b](other.md#there) [c](#what-it-does-and-why) [d](#twice-1) ![p](p.png) [web](https://x.y/z#q)
[![image](p.png)](other.md) `[not](a-link.md)` `room/here.h`, `elsewhere/never.h`, `file.h`

```
[nothing](in-code.md)
```
"""


class Links(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.root = Path(folder.name)
        for name, text in ((f"{DOCS}/page.md", PAGE), (f"{DOCS}/other.md", "# There\n"), (f"{DOCS}/p.png", ""),
                           ("room/here.h", f"// {DOCS}/page.md has more.\n"), ("build/x.md", "[a](gone.md)")):
            path = self.root / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)

    def found(self):
        return list(links_test.findings(self.root))

    def test_all_is_there(self):
        self.assertEqual(self.found(), [])

    def test_what_is_missing(self):
        for text, why in (("[x](gone.md)", f"{DOCS}/page.md:14: gone.md: there is no such file"),
                          ("[x](other.md#gone)", f"{DOCS}/page.md:14: other.md#gone: there is no such heading"),
                          ("[x](#twice-2)", f"{DOCS}/page.md:14: #twice-2: there is no such heading"),
                          ("[x](../../..)", f"{DOCS}/page.md:14: ../../..: there is no such file"),
                          ("[![x](gone.png)](other.md)", f"{DOCS}/page.md:14: gone.png: there is no such file"),
                          ("`room/gone.h`", f"{DOCS}/page.md:14: `room/gone.h`: there is no such file")):
            with self.subTest(text):
                (self.root / f"{DOCS}/page.md").write_text(PAGE + "\n" + text + "\n")
                self.assertEqual(self.found(), [why])

    def test_a_source_that_names_a_page(self):
        (self.root / "room/here.h").write_text(f"// One.\n// See {DOCS}/gone.md.\n")
        self.assertEqual(self.found(), [f"room/here.h:2: {DOCS}/gone.md: there is no such page"])

    def test_decision_notes(self):
        notes = self.root / "docs/decisions"
        notes.mkdir()
        (notes / "001-short.md").write_text("# 001. Short\n")
        (notes / "README.md").write_text("# Decisions\n")
        self.assertEqual(self.found(), [f"{DOCS}/decisions/001-short.md:1: the index of decisions does not list it"])
        (notes / "README.md").write_text("- [001](001-short.md) Short\n")
        self.assertEqual(self.found(), [])
        (notes / "001-short.md").write_text("long\n" * 26)
        self.assertEqual(self.found(), [f"{DOCS}/decisions/001-short.md:26: a decision note has 25 lines at most"])

    def test_a_link_in_code_is_none(self):
        (self.root / f"{DOCS}/page.md").write_text("```\n[x](gone.md)\n```\n[y](gone.md)\n")
        self.assertEqual(self.found(), [f"{DOCS}/page.md:4: gone.md: there is no such file"])


if __name__ == "__main__":
    unittest.main()
