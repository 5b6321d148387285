#!/usr/bin/env python3
"""Tests that console_test.py fails where it should: python3 -m unittest console_matcher_test"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
import unittest
from pathlib import Path
from unittest import mock

import console_test
from console_test import Failure, compare, extract, line_matches, run_page


class Lines(unittest.TestCase):
    def test_literal(self):
        self.assertTrue(line_matches("stored 12 tokens", "stored 12 tokens"))
        self.assertFalse(line_matches("stored 12 tokens", "stored 13 tokens"))
        self.assertFalse(line_matches("stored 12", "stored 12 tokens"))
        self.assertFalse(line_matches("12 tokens", "stored 12 tokens"))

    def test_special_characters_stand_for_themselves(self):
        self.assertTrue(line_matches("a.c [x] (1+1)", "a.c [x] (1+1)"))
        self.assertFalse(line_matches("a.c", "abc"))

    def test_dots_stand_for_something(self):
        self.assertTrue(line_matches("after ... ms", "after 12.5 ms"))
        self.assertTrue(line_matches("...: page ... is bad", "x: y: page 3 is bad"))
        self.assertFalse(line_matches("after ... ms", "after 12.5 s"))
        self.assertFalse(line_matches("done...", "done"))
        self.assertTrue(line_matches("0....%", "0.5%"))
        self.assertFalse(line_matches("0....%", "05%"))

    def test_white_space_at_the_end_does_not_count(self):
        self.assertTrue(line_matches("a ", "a  "))
        self.assertFalse(line_matches(" a", "a"))


class Outputs(unittest.TestCase):
    def test_equal(self):
        self.assertIsNone(compare(["a", "b"], ["a", "b", ""]))
        self.assertIsNone(compare([], []))

    def test_any_lines(self):
        for printed in ["a", "z"], ["a", "1", "z"], ["a", "1", "2", "z", "z"]:
            self.assertIsNone(compare(["a", "...", "z"], printed))
        self.assertIsNone(compare(["..."], []))
        self.assertIsNone(compare(["...", "b", "...", "d", "..."], ["a", "b", "c", "b", "d"]))

    def test_changed(self):
        self.assertEqual(compare(["a", "b"], ["a", "c"]), [(" ", "a"), ("-", "b"), ("+", "c")])

    def test_missing(self):
        self.assertEqual(compare(["a", "b"], ["b"]), [("-", "a"), (" ", "b")])
        self.assertEqual(compare(["a"], []), [("-", "a")])

    def test_unexpected(self):
        self.assertEqual(compare([], ["a"]), [("+", "a")])
        self.assertEqual(compare(["a"], ["a", "b"]), [(" ", "a"), ("+", "b")])
        self.assertEqual(compare(["a", "b"], ["a", "", "b"]), [(" ", "a"), ("+", ""), (" ", "b")])

    def test_order_counts(self):
        self.assertIsNotNone(compare(["a", "b"], ["b", "a"]))
        self.assertIsNotNone(compare(["...", "b", "a", "..."], ["a", "b"]))

    def test_what_follows_any_lines_counts(self):
        self.assertEqual(compare(["a", "...", "z"], ["a", "1", "2"]),
                         [(" ", "a"), (" ", "..."), ("-", "z")])


class Pages(unittest.TestCase):
    def test_commands_and_outputs(self):
        page = textwrap.dedent("""\
            ```
            $ not run
            ```
            ```console
            $ first
            one

            two
            $ second {
            >   more
            > }
            > output
            ```
              ```console
              $ third
                indented
              ```
            """)
        got = [(e.line, e.command, e.expected) for e in extract(page)]
        self.assertEqual(got, [(5, "first", ["one", "", "two"]),
                               (9, "second {\n  more\n}\noutput", []),
                               (15, "third", ["  indented"])])

    def test_broken_pages(self):
        with self.assertRaisesRegex(Failure, "begins with a command"):
            extract("```console\noutput\n```\n")
        with self.assertRaisesRegex(Failure, "does not end"):
            extract("```console\n$ true\n")


class Sessions(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = Path(folder.name)
        self.source, self.build = self.folder / "source", self.folder / "out"
        self.source.mkdir()
        self.build.mkdir()
        (self.source / "data").write_text("of the source\n")
        (self.build / "program").write_text("#!/bin/sh\necho built\n")
        (self.build / "program").chmod(0o755)

    def page(self, *lines: str) -> Path:
        page = self.source / "page.md"
        page.write_text("\n".join(["```console", *lines, "```", ""]))
        return page

    def run_lines(self, *lines: str, timeout: float = 20) -> int:
        with contextlib.redirect_stdout(None):
            return run_page(self.page(*lines), self.source, self.build, timeout)

    def assert_fails(self, says: str, *lines: str, timeout: float = 20):
        with self.assertRaisesRegex(Failure, says):
            self.run_lines(*lines, timeout=timeout)

    def test_one_session_in_a_copy_of_the_checkout(self):
        self.assertEqual(self.run_lines("$ cat data; build/release/program", "of the source",
                                        "built", "$ x=1; mkdir new; cd new", "$ echo $x ${PWD##*/}",
                                        "1 new"), 3)
        self.assertFalse((self.source / "new").exists())

    def test_temporary_files_are_removed(self):
        made = self.folder / "made"
        self.run_lines(f"$ mktemp -d >{made}", f"$ test -d $(cat {made})")
        self.assertFalse(Path(made.read_text().strip()).exists())

    def test_both_outputs_in_order_and_no_newline_at_the_end(self):
        self.run_lines("$ echo a; echo b >&2; printf c", "a", "b", "c", "$ cat", "$ echo d", "d")

    def test_changed_output_fails(self):
        self.assert_fails(r"(?s)page.md:2: \$ echo 2.*  - 1\n  \+ 2", "$ echo 2", "1")

    def test_extra_line_fails(self):
        self.assert_fails(r"\+ b", "$ echo a; echo b", "a")

    def test_output_of_a_silent_command_fails(self):
        self.assert_fails(r"\+ a", "$ echo a", "$ true")

    def test_failing_command_fails(self):
        self.assert_fails("status 3", "$ sh -c 'exit 3'")
        self.assert_fails("status 1", "$ false", "$ true")

    def test_shown_failure_is_meant(self):
        self.run_lines("$ sh -c 'exit 3'", "$ echo $?", "3", "$ echo $?", "0")
        self.assert_fails(r"(?s)- 3\n  \+ 4", "$ sh -c 'exit 4'", "$ echo $?", "3")
        self.assert_fails(r"(?s)- 3\n  \+ 0", "$ true", "$ echo $?", "3")

    def test_syntax_error_fails(self):
        self.assert_fails("syntax error", "$ if")

    def test_end_of_the_shell_fails(self):
        self.assert_fails("the shell has ended", "$ exit 0", "$ true")

    def test_endless_command_fails(self):
        start = time.monotonic()
        self.assert_fails(r"(?s)no end in time.*begun", "$ echo begun; sleep 100", timeout=4)
        self.assertLess(time.monotonic() - start, 60)

    def test_page_without_commands_fails(self):
        page = self.source / "page.md"
        page.write_text("# Nothing\n")
        with self.assertRaisesRegex(Failure, "no console blocks"):
            run_page(page, self.source, self.build, 20)
        with self.assertRaisesRegex(Failure, "No such file"):
            run_page(self.source / "none.md", self.source, self.build, 20)

    def left_running(self, pid_file: Path) -> bool:
        stat = Path(f"/proc/{pid_file.read_text().strip()}/stat")
        try:
            return stat.read_text().rpartition(")")[2].split()[0] != "Z"
        except OSError:
            return False

    def test_background_process_is_stopped(self):
        pid = self.folder / "pid"
        begin = f"$ sleep 300 & echo $! >{pid}"
        self.run_lines(begin)
        self.assertFalse(self.left_running(pid))
        self.assert_fails("status 1", begin, "$ false")
        self.assertFalse(self.left_running(pid))

    def test_background_process_is_stopped_though_it_will_not(self):
        pid = self.folder / "pid"
        quick = ((signal.SIGTERM, 0.3), (signal.SIGKILL, 5.0))
        with mock.patch.object(console_test.Shell, "STOP", quick):
            self.run_lines(f"$ (trap '' TERM; echo $BASHPID >{pid}; while :; do sleep 1; done) &",
                           f"$ until [ -s {pid} ]; do sleep 0.05; done")
        self.assertFalse(self.left_running(pid))

    def test_stopping_the_test_stops_what_it_began(self):
        pid = self.folder / "pid"
        page = self.page(f"$ sleep 300 & echo $! >{pid}.new; mv {pid}.new {pid}; sleep 300")
        test = subprocess.Popen([sys.executable, console_test.__file__, page.name, "--source",
                                 self.source, "--build", self.build])
        until = time.monotonic() + 20
        while not pid.exists() and time.monotonic() < until:
            time.sleep(0.05)
        test.send_signal(signal.SIGTERM)
        self.assertEqual(test.wait(timeout=30), 128 + signal.SIGTERM)
        self.assertFalse(self.left_running(pid))

    def test_program(self):
        def program(*lines: str) -> subprocess.CompletedProcess:
            return subprocess.run([sys.executable, console_test.__file__, self.page(*lines).name,
                                   "--source", self.source, "--build", self.build],
                                  capture_output=True, text=True, timeout=60)
        good = program("$ echo a", "a")
        self.assertEqual((good.returncode, good.stderr), (0, ""))
        bad = program("$ echo a", "b")
        self.assertEqual(bad.returncode, 1)
        self.assertTrue(re.search(r"  - b\n  \+ a\n", bad.stderr), bad.stderr)


if __name__ == "__main__":
    os.chdir(Path(__file__).parent)
    unittest.main()
