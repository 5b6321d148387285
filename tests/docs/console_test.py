#!/usr/bin/env python3
"""Runs what a Markdown page shows: every command of its ```console blocks, in one bash session, and
compares the output with what the page shows.

    console_test.py FILE.md [--source DIR] [--build DIR] [--timeout SECONDS]

In a block, `$ ` begins a command, `> ` right after it continues it, and all else is output.
`...` within a line stands for any text (at least a character); a line that is `...`, for any
lines, or none. A command may fail only if the next one is `echo $?`, which shows the status.

The session runs in a temporary directory that looks like the checkout: links to what is in SOURCE,
and build/release, which is BUILD; TMPDIR is beside it. Everything that the page leaves running or
in these is removed afterwards.
"""

from __future__ import annotations

import argparse
import functools
import os
import re
import secrets
import select
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

ANYTHING = "..."
SHOW_STATUS = "echo $?"


class Failure(Exception):
    """Reports that the page and what happens differ; the message is for people."""


@dataclass
class Example:
    line: int  # line of the page, from 1
    command: str
    expected: list[str] = field(default_factory=list)


# --- the page -------------------------------------------------------------------------------------


def extract(page: str) -> list[Example]:
    """Returns all commands of the page, in order, with the output that it shows for them."""
    examples: list[Example] = []
    fence: str | None = None  # indentation of the block that contains the line
    begun = continues = False
    for number, line in enumerate(page.splitlines(), start=1):
        if fence is None:
            if opening := re.fullmatch(r"(\s*)```console\s*", line):
                fence, begun = opening[1], False
            continue
        text = line.removeprefix(fence).rstrip()
        if text == "```":
            fence = None
        elif text.startswith("$ "):
            examples.append(Example(number, text[2:]))
            begun = continues = True
        elif not begun:
            raise Failure(f"line {number}: a console block begins with a command, not '{text}'")
        elif continues and (text == ">" or text.startswith("> ")):
            examples[-1].command += "\n" + text[2:]
        else:
            continues = False
            examples[-1].expected.append(text)
    if fence is not None:
        raise Failure("a console block does not end")
    return examples


# --- the comparison -------------------------------------------------------------------------------


@functools.cache
def _pattern(shown: str) -> re.Pattern[str]:
    # The first of four dots is a full stop: "0....%" shows a number that begins with "0.".
    parts = re.split(re.escape(ANYTHING) + r"(?!\.)", shown)
    return re.compile(".+".join(re.escape(part) for part in parts))


def line_matches(shown: str, printed: str) -> bool:
    return _pattern(shown.rstrip()).fullmatch(printed.rstrip()) is not None


def compare(shown: list[str], printed: list[str]) -> list[tuple[str, str]] | None:
    """Returns None if they agree; otherwise the shortest way from one to the other, as lines marked
    "-" (shown, not printed), "+" (printed, not shown) and " " (in both)."""
    shown, printed = _without_blank_end(shown), _without_blank_end(printed)
    n, m = len(shown), len(printed)
    # cost[i][j] is the number of marked lines that shown[i:] and printed[j:] need.
    cost = [[0] * (m + 1) for _ in range(n + 1)]
    move = [[""] * (m + 1) for _ in range(n + 1)]
    for i in range(n, -1, -1):
        for j in range(m, -1, -1):
            if i == n and j == m:
                continue
            ways = []
            if i < n and shown[i].strip() == ANYTHING:
                ways.append((cost[i + 1][j], "pass"))
                if j < m:
                    ways.append((cost[i][j + 1], "take"))
            else:
                if i < n and j < m and line_matches(shown[i], printed[j]):
                    ways.append((cost[i + 1][j + 1], "same"))
                if i < n:
                    ways.append((cost[i + 1][j] + 1, "-"))
            if j < m:
                ways.append((cost[i][j + 1] + 1, "+"))
            cost[i][j], move[i][j] = min(ways, key=lambda way: way[0])
    if cost[0][0] == 0:
        return None
    marked = []
    i = j = 0
    while i < n or j < m:
        step = move[i][j]
        if step != "take":
            marked.append(("+", printed[j]) if step == "+" else
                          ("-" if step == "-" else " ", shown[i]))
        i += step in ("pass", "same", "-")
        j += step in ("take", "same", "+")
    return marked


def _without_blank_end(lines: list[str]) -> list[str]:
    end = len(lines)
    while end > 0 and not lines[end - 1].strip():
        end -= 1
    return lines[:end]


# --- the session ----------------------------------------------------------------------------------


class Shell:
    """Runs one bash session; both its outputs come through one pipe, in order."""

    # The session's processes get these signals at the end, each with seconds to react.
    STOP = ((signal.SIGTERM, 10.0), (signal.SIGKILL, 5.0))

    def __init__(self, directory: Path, temporary: Path, deadline: float):
        environment = {k: v for k, v in os.environ.items()
                       if k not in ("BASH_ENV", "ENV", "PREFIXD_SOCKET")}
        environment.update(LC_ALL="C.UTF-8", TERM="dumb", PWD=str(directory),
                           TMPDIR=str(temporary))
        self._deadline = deadline
        self._nonce = secrets.token_hex(8)
        self._status = 0
        # A session of its own makes it possible to find everything that was started in it.
        self._bash = subprocess.Popen(["bash", "--noprofile", "--norc"], cwd=directory,
                                      env=environment, stdin=subprocess.PIPE,
                                      stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                                      start_new_session=True)

    def run(self, command: str) -> tuple[list[str], int]:
        """Returns the lines that the command printed, and its status."""
        assert self._bash.stdin is not None
        # eval makes a mistake in a command end that command and not the session. The saved $? is
        # the last command's, although the commands around it ran between.
        script = (f"(exit {self._status}); eval {shlex.quote(command)} </dev/null\n"
                  f"printf '\\n%s %d\\n' {self._nonce} $?\n")
        try:
            self._bash.stdin.write(script.encode())
            self._bash.stdin.flush()
        except BrokenPipeError:
            raise Failure("the shell has ended") from None
        printed, self._status = self._read()
        return printed, self._status

    def _read(self) -> tuple[list[str], int]:
        assert self._bash.stdout is not None
        end = re.compile(rb"\n%s (\d+)\n" % self._nonce.encode())
        output = b""
        while True:
            if found := end.search(output):
                return _lines(output[:found.start()]), int(found[1])
            if time.monotonic() > self._deadline:
                raise Failure("no end in time; printed so far:" + _quote(_lines(output)))
            if select.select([self._bash.stdout], [], [], 0.1)[0]:
                read = os.read(self._bash.stdout.fileno(), 1 << 16)
                output += read
                if read:
                    continue
            elif self._bash.poll() is None:
                continue
            raise Failure("the shell has ended; printed so far:" + _quote(_lines(output)))

    def stop(self) -> None:
        """Ends bash and everything started in it, gently at first."""
        for number, patience in self.STOP:
            # The loop repeats, because a process may just be starting another.
            until = time.monotonic() + patience
            told: set[int] = set()
            while (left := _members(self._bash.pid)) and time.monotonic() < until:
                for pid in left - told:
                    try:
                        os.kill(pid, number)
                    except ProcessLookupError:
                        pass
                told |= left
                time.sleep(0.02)
        for pipe in self._bash.stdin, self._bash.stdout:
            if pipe is not None:
                try:
                    pipe.close()
                except BrokenPipeError:
                    pass
        self._bash.wait()


def _members(session: int) -> set[int]:
    """Returns the running processes of the session."""
    members = set()
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            # The fields are: pid (name) state parent group session ...; the name may contain
            # anything.
            state, _, _, of = (entry / "stat").read_text(errors="replace").rpartition(")")[2].split()[:4]
        except OSError:
            continue  # it has just ended
        if int(of) == session and state not in "ZX":
            members.add(int(entry.name))
    return members


def _lines(output: bytes) -> list[str]:
    return output.decode(errors="replace").removesuffix("\n").split("\n") if output else []


def _quote(lines: list[str]) -> str:
    return "".join(f"\n    {line}" for line in lines) or " nothing"


# --- all together ---------------------------------------------------------------------------------


def check(example: Example, following: Example | None, shell: Shell) -> None:
    printed, status = shell.run(example.command)
    if difference := compare(example.expected, printed):
        raise Failure("the output is not what the page shows (- shown, + printed):" +
                      "".join(f"\n  {mark} {line}" for mark, line in difference))
    shows_status = following is not None and following.command.strip() == SHOW_STATUS
    if status != 0 and not shows_status:
        raise Failure(f"the command failed with status {status}; where that is meant, let "
                      f"`$ {SHOW_STATUS}` follow. Printed:" + _quote(printed))


def lay_out(directory: Path, source: Path, build: Path) -> None:
    """Makes the directory look like the checkout."""
    directory.mkdir()
    for entry in source.iterdir():
        if entry.name != "build" and not entry.name.startswith("."):
            (directory / entry.name).symlink_to(entry)
    (directory / "build").mkdir()
    (directory / "build/release").symlink_to(build)


def run_page(page: Path, source: Path, build: Path, timeout: float) -> int:
    """Runs all commands and returns their number; raises Failure when one differs from the page."""
    try:
        examples = extract(page.read_text())
        if not examples:
            raise Failure("the page has no console blocks")
    except (OSError, Failure) as error:
        raise Failure(f"{page}: {error}") from None
    # The directory is not below TMPDIR, which may be deep: a socket's path has at most 107 bytes.
    with tempfile.TemporaryDirectory(prefix="console-", dir="/tmp") as folder:
        checkout, temporary = Path(folder) / "checkout", Path(folder) / "tmp"
        lay_out(checkout, source, build)
        temporary.mkdir()
        shell = Shell(checkout, temporary, time.monotonic() + timeout)
        try:
            for example, following in zip(examples, [*examples[1:], None], strict=True):
                where = f"{page.name}:{example.line}: $ {example.command}"
                try:
                    check(example, following, shell)
                except Failure as failure:
                    raise Failure(f"{where}\n{failure}") from None
                print(f"ok {where}", flush=True)
        finally:
            shell.stop()
    return len(examples)


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", help="the page; relative to the source")
    parser.add_argument("--source", type=Path, default=Path(__file__).parents[2],
                        help="the checkout (default: the one that this file is in)")
    parser.add_argument("--build", type=Path, help="its build (default: SOURCE/build/release)")
    parser.add_argument("--timeout", type=float, default=150,
                        help="seconds for all commands together (default: %(default)s)")
    given = parser.parse_args(arguments)
    source = given.source.resolve()
    build = (given.build or source / "build/release").resolve()
    # A signal that ends the test early must not leave a daemon behind.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        count = run_page(source / given.file, source, build, given.timeout)
    except Failure as failure:
        print(failure, file=sys.stderr)
        return 1
    print(f"{given.file}: {count} commands, all as shown")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
