#!/usr/bin/env python3
"""Runs the demo's story at small size: prefill, persist, restart, decode; checks its report.

    story_test.py SOURCE_DIR BUILD_DIR
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

METHODS = {"full", "sink_tail", "topk", "topk_phi", "topk_moment", "topk_auto"}
TOKENS = 2000


def check(condition: bool, what: str) -> None:
    if not condition:
        raise AssertionError(what)
    print(f"ok: {what}")


def run(command: list[str | Path], **kwargs) -> subprocess.CompletedProcess:
    return subprocess.run([str(c) for c in command], capture_output=True, text=True, timeout=500,
                          **kwargs)


def story(source: Path, build: Path, out: Path) -> None:
    done = run([source / "scripts/demo.sh", "--build", build, "--out", out, "--tokens", TOKENS,
                "--facts", 3, "--continuation", 24])
    sys.stdout.write(done.stdout)
    check(done.returncode == 0, f"the demo ends well (status {done.returncode}) {done.stderr}")

    report = json.loads((out / "report.json").read_text())
    for key in ("cold_prefill_s", "put_s", "resume_s"):
        check(report[key] > 0, f"{key} is positive")
    check(0 < report["prompt_tokens"] <= TOKENS, "the prompt has at most the tokens asked for")
    check(report["agreement"]["same_tokens"], "reading everything gives the decoder's own tokens")
    check(report["agreement"]["max_logit_difference"] <= 1e-3, "and its logits to 1e-3")

    rows = report["rows"]
    check({r["method"] for r in rows} == METHODS, "every method is in the table")
    by = {(r["method"], r["budget"]): r for r in rows}
    full = by[("full", None)]
    check(full["rel_l1"] < 1e-5, "full attention has no error")
    budgets = sorted({r["budget"] for r in rows if r["budget"]})
    check(budgets == [0.01, 0.02, 0.03, 0.04, 0.05], "budgets are 1 to 5%")
    for row in rows:
        name = f"{row['method']} at {row['budget']}"
        if not row["feasible"]:
            check(row["nll"] is None and row["reason"] != "", f"{name}: infeasible, and says why")
            continue
        check(math.isfinite(row["nll"]) and row["nll"] > 0, f"{name}: nll is a number")
        check(0 <= row["accuracy"] <= 1 and row["bytes_per_step"] >= 0, f"{name}: sane figures")
        if row["budget"]:
            allowed = math.ceil(row["budget"] * report["prompt_tokens"]) + 1e-9
            check(row["tokens_per_step"] <= allowed, f"{name}: stays within its budget")
    compared = 0
    for budget in budgets:
        topk = by[("topk", budget)]
        for method in ("topk_moment", "topk_auto"):
            row = by[(method, budget)]
            if topk["feasible"] and row["feasible"] and topk["k"] > 8:
                check(row["rel_l1"] <= topk["rel_l1"], f"{method} is no worse than Top-K at {budget}")
                compared += 1
    check(compared >= 6, f"{compared} comparisons with Top-K were made")

    page = (out / "index.html").read_text()
    check(page.count("<svg") >= 5 and "http://" not in page.split("<body>")[0], "the page has plots")
    check("src=" not in page, "the page fetches nothing")
    check(not (out / "prefixd-demo-store").exists(), "the store is cleaned up")


def bad_input(source: Path, build: Path, out: Path) -> None:
    demo = source / "scripts/demo.sh"
    binary = out / "latin1.txt"
    binary.write_bytes(b"caf\xe9 " * 4000)
    broken = out / "broken-model"
    broken.mkdir()
    model = source / "models/prefixd-tiny"
    (broken / "config.json").write_bytes((model / "config.json").read_bytes())
    (broken / "model.safetensors").write_bytes((model / "model.safetensors").read_bytes()[:100000])
    for what, arguments, says in [
        ("a missing document", ["--document", "/nonexistent"], "cannot read document"),
        ("a document that is not UTF-8", ["--document", binary], "not UTF-8"),
        ("a missing model", ["--model", "/nonexistent"], "config.json"),
        ("a truncated checkpoint", ["--model", broken], "model.safetensors"),
    ]:
        done = run([demo, "--build", build, "--out", out / "bad", *arguments])
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        check(done.returncode == 1, f"{what}: refused (status {done.returncode})")
        check(says in done.stderr, f"{what}: the message says '{says}'")
        check(len(lines) == 1, f"{what}: in one line: {lines}")


def full_store(source: Path, build: Path, out: Path) -> None:
    """Makes a put that the store has no space for: it is refused in one line, and the daemon lives
    on."""
    socket = out / "s"
    daemon = subprocess.Popen([build / "bin/prefixd", "--dir", out / "full", "--socket", socket,
                               "--quota-mib", "1"], stdout=subprocess.DEVNULL,
                              stderr=subprocess.DEVNULL)
    try:
        for _ in range(200):
            if socket.exists():
                break
            time.sleep(0.05)
        put = run([build / "bin/prefixd-demo", "prefill", "--socket", socket, "--state",
                   out / "state.json", "--tokens", TOKENS, "--facts", 3,
                   "--model", source / "models/prefixd-tiny"])
        check(put.returncode == 1, "a full store: refused")
        check(put.stderr.count("\n") == 1 and "resource_exhausted" in put.stderr,
              f"a full store: in one line: {put.stderr!r}")
        status = run([build / "bin/prefixctl", "status", "--socket", socket])
        check(status.returncode == 0, "the daemon still answers")
    finally:
        daemon.terminate()
    check(daemon.wait(timeout=30) == 0, "and ends well")


def main() -> int:
    source, build = Path(sys.argv[1]), Path(sys.argv[2])
    os.environ.pop("DEMO_ARGS", None)
    with tempfile.TemporaryDirectory(prefix="prefixd-story-") as folder:
        out = Path(folder)
        story(source, build, out / "report")
        bad_input(source, build, out)
        full_store(source, build, out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
