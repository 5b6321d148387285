#!/usr/bin/env python3
"""Tests the answers of `scripts/demo.sh ask` to bad input, and its JSON; the tutorial's test covers
the rest.

    ask_test.py SOURCE_DIR BUILD_DIR
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
import tempfile
import time
from pathlib import Path

TOKENS = 2000


def check(condition: bool, what: str) -> None:
    if not condition:
        raise AssertionError(what)
    print(f"ok: {what}")


class Demo:
    def __init__(self, source: Path, build: Path, out: Path):
        self.script, self.build, self.control = source / "scripts/demo.sh", build, build / "bin/prefixctl"
        self.socket, self.state = out / "s", out / "state.json"

    def run(self, command: str, *arguments: str | Path) -> subprocess.CompletedProcess:
        return subprocess.run([self.script, command, "--build", self.build, "--socket", self.socket,
                               *arguments],
                              capture_output=True, text=True, timeout=300)

    def ask(self, *arguments: str | Path) -> subprocess.CompletedProcess:
        return self.run("ask", "--state", self.state, *arguments)

    def refused(self, what: str, says: str, *arguments: str | Path) -> None:
        done = self.ask(*arguments)
        check(done.returncode == 1, f"{what}: refused (status {done.returncode})")
        check(done.stdout == "" and done.stderr.count("\n") == 1 and says in done.stderr,
              f"{what}: one line says '{says}': {done.stderr!r}")

    def asked(self, *arguments: str | Path) -> dict:
        done = self.ask("--json", *arguments)
        check(done.returncode == 0, f"ask {arguments}"[:60] + f" ends well {done.stderr}")
        return json.loads(done.stdout)


def without_prefix(demo: Demo) -> None:
    demo.refused("no state", "store a prompt first")
    demo.state.write_text("{}")
    demo.refused("a state that is none", "is not a demo state")
    demo.refused("a budget that is none", "such as 0.01 or 1%", "--budget", "much")
    demo.refused("a budget that is no number", "such as 0.01 or 1%", "--budget", "nan%")


def with_prefix(demo: Demo) -> None:
    state = json.loads(demo.state.read_text())
    question, answer = state["questions"][0].strip(), state["answers"][0]["own"]["text"]
    full, small = demo.asked("--budget", "all"), demo.asked("--budget", "5%")
    for got, part in (full, 1), (small, 0.05):
        check(got["text"] == answer + ".]", f"the planted fact is found: {got['text']}")
        check(got["prompt_tokens"] == len(state["prompt"]) and got["steps"] == 6, "sane figures")
        check(got["tokens_per_step"] <= math.ceil(part * got["prompt_tokens"]), "within the budget")
        check(got["question_bytes"] >= got["prompt_bytes"], "the question reads everything")
        check(got["first_token_ms"] >= got["attach_ms"] > 0, "times are positive")
    check(full["bytes_per_step"] == full["prompt_bytes"], "a full step reads everything")
    check(small["bytes_per_step"] < 0.5 * full["bytes_per_step"], "a small one does not")

    other = state["questions"][1].removeprefix("\n")
    got = demo.asked("--question", other, "--tokens", "5")
    check(got["text"] == state["answers"][1]["own"]["text"], "another question, its answer")
    check(demo.asked("--tokens", "1")["steps"] == 0, "the first token needs no step")
    # This question is longer than a chunk that goes through the layers, and still takes one exact
    # pass.
    long = demo.asked("--question", "x" * 600 + " ", "--tokens", "3")
    check(long["question_tokens"] == 602 and long["steps"] == 2, "a long question")
    check(long["question_bytes"] < 1.5 * long["prompt_bytes"], "reads the prompt once")
    text = demo.ask()
    check(text.stdout.startswith(f"{question} {answer}.]\n"), "as text")
    check(text.stdout.count("\n") == 3, f"and two lines about what was read: {text.stdout!r}")

    demo.refused("an empty question", "the question is empty", "--question", "\n")
    demo.refused("a budget above 1", "(0, 1]", "--budget", "2")
    demo.refused("a budget too small", "infeasible", "--budget", "0.001")
    demo.refused("a question too long", "positions", "--question", "x" * 20000)
    removed = subprocess.run([demo.control, "prefixes", "remove", state["prefix"], "--socket",
                              demo.socket], capture_output=True, text=True, timeout=60)
    check(removed.returncode == 0, f"the prefix is removed {removed.stderr}")
    demo.refused("a prefix that is gone", "no prefix named")


def main() -> int:
    source, build = Path(sys.argv[1]), Path(sys.argv[2])
    with tempfile.TemporaryDirectory(prefix="prefixd-ask-") as folder:
        out = Path(folder)
        demo = Demo(source, build, out)
        without_prefix(demo)
        daemon = subprocess.Popen([build / "bin/prefixd", "--dir", out / "store", "--socket",
                                   demo.socket], stdout=subprocess.DEVNULL,
                                  stderr=subprocess.DEVNULL)
        try:
            until = time.monotonic() + 30
            while not demo.socket.exists() and time.monotonic() < until:
                time.sleep(0.05)
            put = demo.run("prefill", "--state", demo.state, "--tokens", str(TOKENS), "--facts",
                           "3", "--continuation", "24", "--model", source / "models/prefixd-tiny")
            check(put.returncode == 0, f"the prompt is put {put.stderr}")
            with_prefix(demo)
        finally:
            daemon.terminate()
            status = daemon.wait(timeout=120)
        check(status == 0, "the daemon ends well")
        demo.refused("no daemon", "no daemon answers")
    return 0


if __name__ == "__main__":
    sys.exit(main())
