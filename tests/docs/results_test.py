#!/usr/bin/env python3
"""Tests that docs/results.md follows from its figures, and that scripts/results.py refuses bad
input."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import json
import os
import sys
import tempfile
import unittest
from pathlib import Path

SOURCE = Path(os.environ.get("PREFIXD_SOURCE", Path(__file__).resolve().parents[2]))
spec = importlib.util.spec_from_file_location("results", SOURCE / "scripts/results.py")
results = importlib.util.module_from_spec(spec)
spec.loader.exec_module(results)

PROMISES = """
intro = "What is promised."
[[promise]]
title = "It is quick"
text = "On any machine."
[[promise.row]]
what = "a step"
run = "step"
get = { ratio = "/modes/mode=codes&k=1/ratio", floor = "/floor | 1e3" }
target = "10 times"
at_least = 10
today = "{ratio:.1f} times"
floor = "{floor:.0f} ms"
"""
RUN = {"command": "step_bench --dir /tmp/x --json /tmp/y.json", "commit": "0123abc", "date": "2026-01-01",
       "machine": "Some Processor, 2 cores"}


def step(ratio, run=RUN):
    return {"run": run, "floor": 0.005, "modes": [{"mode": "full", "k": 1, "ratio": 1},
                                                  {"mode": "codes", "k": 1, "ratio": ratio}]}


class Page(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.root = Path(folder.name)
        (self.root / "docs/results").mkdir(parents=True)
        self.promise(PROMISES)
        self.keep("step", step(12))

    def promise(self, text):
        (self.root / "docs/results/promises.toml").write_text(text)

    def keep(self, name, figures):
        (self.root / f"docs/results/{name}.json").write_text(json.dumps(figures))

    def call(self, *args):
        """Returns the exit code and the output."""
        said = io.StringIO()
        with contextlib.redirect_stderr(said):
            return results.main(["--root", str(self.root), *args]), said.getvalue()

    def page(self):
        return (self.root / "docs/results.md").read_text()

    def refused(self, why, *args):
        code, said = self.call(*args)
        self.assertEqual(code, 1)
        self.assertIn(why, said)

    def test_shows_figures_and_facts(self):
        self.assertEqual(self.call(), (0, ""))
        self.assertIn("| a step | 10 times | 12.0 times | 5 ms | `step_bench --dir /tmp/x --json /tmp/y.json` "
                      "| 0123abc | 2026-01-01 | Some, 2 cores |", self.page())
        self.assertIn("Every target below is reached.", self.page())

    def test_check_finds_a_stale_page(self):
        self.refused("stale", "--check")
        self.call()
        self.assertEqual(self.call("--check"), (0, ""))
        self.keep("step", step(13))
        self.refused("stale", "--check")
        self.assertIn("12.0 times", self.page())

    def test_what_is_unmet_says_why(self):
        self.keep("step", step(9))
        self.refused("does not say why")
        self.promise(PROMISES + 'why = "It waits."\n')
        self.assertEqual(self.call(), (0, ""))
        self.assertIn("- **a step** (10 times): 9.0 times. It waits.", self.page())
        self.assertIn("**9.0 times: not reached**", self.page())
        self.keep("step", step(11))
        self.refused("says why it is unmet, and is not")

    def test_facts_come_from_one_place(self):
        self.keep("step", step(12, {}))
        self.refused("lacks: commit, command, date, machine")
        stated = '[run.step]\ncommit = "4567def"\ncommand = "x"\ndate = "d"\nmachine = "m"\n'
        self.promise(PROMISES + stated)
        self.assertEqual(self.call(), (0, ""))
        self.assertIn("4567def", self.page())
        self.keep("step", step(12))
        self.refused("whose JSON says it itself")

    def test_a_run_that_nothing_shows(self):
        self.keep("other", {"run": RUN})
        self.refused("no promise uses the run other")

    def test_selectors(self):
        for pointer, why in (("/modes/mode=exact/ratio", "nothing there has mode=exact"),
                             ("/modes/9/ratio", "no '9' there"), ("/absent", "no 'absent' there"),
                             ("/modes", "is no number")):
            with self.assertRaisesRegex(results.Mistake, why):
                results.select(step(1), pointer)
        self.assertEqual(results.select(step(1), "/modes/#"), 2)
        self.assertEqual(results.select({"a": [{"n": "x/y", "v": 3}]}, "/a/n=x~1y/v | 2"), 6)

    def test_take(self):
        new = self.root / "new.json"
        for commit in ("unknown", "0123abc with changes"):
            new.write_text(json.dumps(step(15, RUN | {"commit": commit})))
            self.refused("no commit", "take", str(new), "step")
        new.write_text(json.dumps(step(15, {})))
        self.refused("does not say which run", "take", str(new), "step")
        new.write_text(json.dumps(step(15)))
        self.assertEqual(self.call("take", str(new), "step"), (0, ""))
        self.assertIn("15.0 times | 5 ms | `step_bench --dir DIR` |", self.page())

    def test_take_a_part(self):
        new = self.root / "new.json"
        new.write_text(json.dumps(step(15)))
        self.refused("has no parts", "take", str(new), "step/cold")
        self.keep("step", {"warm": step(12), "cold": step(13)})
        self.promise(PROMISES.replace('run = "step"', 'run = "step/cold"'))
        self.refused("no promise uses the run step/warm")
        self.keep("step", {"cold": step(13)})
        self.assertEqual(self.call("take", str(new), "step/cold"), (0, ""))
        self.assertIn("15.0 times", self.page())


class Repository(unittest.TestCase):
    def test_the_page_is_fresh(self):
        said = io.StringIO()
        with contextlib.redirect_stderr(said):
            self.assertEqual(results.main(["--root", str(SOURCE), "--check"]), 0, said.getvalue())


if __name__ == "__main__":
    sys.exit(unittest.main())
