"""The whole demo: prefill, persist, stop everything, start again, answer from disk, report."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

from job import Job, job_of
from programs import Daemon, Programs
from show import Streams, cold_table, table
from text import Stop

_HERE = Path(__file__).resolve().parent
MIB = 1 << 20


def machine() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return f"{line.split(': ', 1)[1]}, {os.cpu_count()} cores"
    return f"unknown processor, {os.cpu_count()} cores"


def bytes_on_disk(folder: Path) -> int:
    return sum(f.stat().st_blocks * 512 for f in folder.rglob("*") if f.is_file())


def write(path: Path, value: Any) -> None:
    part = path.with_name(path.name + ".part")
    part.write_text(json.dumps(value, ensure_ascii=False, indent=1 if path.name == "report.json" else None) + "\n")
    part.replace(path)


def judged(job: Job, event: dict[str, Any], question: int) -> dict[str, Any]:
    text = job.text.decode(event["tokens"])
    return {"text": text, "right": job.questions[question].right(text), "tokens": len(event["tokens"]),
            "seconds": event["seconds"], "first_token_s": event.get("first_token_s")}


def prefill(job: Job, programs: Programs, state_file: Path) -> dict[str, Any]:
    """Prefills, stores and asks; returns what later processes need, and leaves it in `state_file`."""
    before = f" with {job.facts} facts planted" if job.facts else ""
    print(f"   {job.document}: {len(job.prompt)} tokens{before}; model {job.model_dir.name}", flush=True)
    state: dict[str, Any] = {
        "key": job.key(), "made": time.strftime("%Y-%m-%d %H:%M", time.gmtime()), "model_dir": str(job.model_dir),
        "prompt": job.prompt, "questions": [q.text for q in job.questions], "answers": [{} for _ in job.ids],
    }  # fmt: skip
    streams = Streams(job)
    for event in programs.run(["prefill"], job.request()):
        match event["event"]:
            case "prefilled":
                state |= {"model": event["model"], "prompt_s": event["prompt_s"],
                          "cold_prefill_s": event["first_token_s"]}
                print(f"   cold prefill until the first answer token: {event['first_token_s']:.2f} s", flush=True)
            case "stored":
                state |= {"prefix": event["prefix"], "put_bytes": event["bytes"], "put_s": event["seconds"]}
                print(f"   put: {event['bytes'] / MIB:.1f} MiB durable in {event['seconds']:.3f} s "
                      f"({event['bytes'] / MIB / event['seconds']:.0f} MiB/s), prefix {event['prefix']}", flush=True)
            case "ready":
                state["ingest_s"] = event["seconds"]
                print(f"   summaries and per-head choices ready after {event['seconds']:.2f} s more", flush=True)
            case "token":
                streams.token(event)
            case "answer":
                answer = judged(job, event, event["question"])
                state["answers"][event["question"]][event["method"]] = answer
                if "logits" in event:
                    state.setdefault("own", {"tokens": event["tokens"], "logits": event["logits"]})
                streams.end(event, answer["right"])
    write(state_file, state)
    say_own(job, state)
    return state


def say_own(job: Job, state: dict[str, Any]) -> None:
    own = [a["own"]["right"] for a in state["answers"]]
    if job.facts:
        print(f"   the decoder alone answers {sum(map(bool, own))} of {len(own)} facts", flush=True)
    elif None not in own:
        n = len(counting(state))
        print(f"\n   {n} of {len(own)} questions count: answered rightly with full attention, and wrongly without the "
              "document" + ("" if n else "; all are asked"), flush=True)


def counting(state: dict[str, Any]) -> list[int]:
    """The questions that need the document and that the model can answer; those that nobody judges."""
    return [i for i, a in enumerate(state["answers"])
            if a["own"]["right"] is None or (a["own"]["right"] and not a.get("alone", {}).get("right"))]


def decode(job: Job, programs: Programs, state: dict[str, Any], asked: list[int]) -> dict[str, Any]:
    """Answers and measures over the stored prompt; returns the figures of report.json."""
    answers: list[list[dict[str, Any]]] = [[] for _ in job.questions]
    figures: dict[str, Any] = {"rows": [], "answers": answers}
    own = {"own": state["own"]} if asked[0] == 0 else {}
    request = job.request(model=state["model"], prefix=state["prefix"], questions=[job.ids[i] for i in asked], **own)
    streams = Streams(job)
    for event in programs.run(["decode"], request):
        if "question" in event:
            event["question"] = asked[event["question"]]
        match event.pop("event"):
            case "resumed":
                figures |= event
                print(f"   attach: {1e3 * event['attach_s']:.1f} ms; until the first answer token: "
                      f"{1e3 * event['resume_s']:.1f} ms, {state['cold_prefill_s'] / event['resume_s']:.0f} times "
                      f"faster than the cold prefill ({state['cold_prefill_s']:.2f} s); "
                      f"{event['ssd_bytes'] / MIB:.0f} MiB read from SSD", flush=True)
            case "token":
                streams.token(event)
            case "answer":
                answer = judged(job, event, event["question"])
                answers[event["question"]].append(
                    {"method": event["method"], "budget": event["budget"], **answer})
                streams.end(event, answer["right"])
            case "infeasible":
                streams.infeasible(event)
            case "agreement":
                figures["agreement"] = event
            case "row":
                figures["rows"].append(event)
            case "measured":
                figures |= event
    if "agreement" in figures:
        agreement = figures["agreement"]
        apart = agreement["preferred_by"]
        same = ("the same tokens as without prefixd" if apart is None else
                f"the tokens without prefixd, but for the {agreement['tokens_alike'] + 1}th and what follows it, "
                f"where its two choices are {apart:.1e} nats apart")
        print(f"\n   reading everything: {same}; logits within {agreement['max_logit_difference']:.1e}")
    for row in figures["rows"]:
        told = [a["right"] for of_question in answers for a in of_question
                if (a["method"], a["budget"]) == (row["method"], row["budget"]) and a["right"] is not None]
        row["questions"] = len(told) or None
        row["correct"] = sum(told) if told else None
        row["accuracy"] = sum(told) / len(told) if told else None
        row["tokens_per_s"] = 1e3 / row["ms_per_token"] if row["feasible"] else None
    table(figures["rows"], bool(job.facts))
    return figures


def cold(job: Job, programs: Programs, state: dict[str, Any], rows: list[dict[str, Any]]) -> None:
    by = {(row["method"], row["budget"]): row for row in rows}
    for row in rows:
        row["cold_bytes_per_step"] = row["cold_ms_per_token"] = None
    request = job.request(model=state["model"], prefix=state["prefix"])
    if not job.facts:  # a step without memory takes long: the ways that were asked are measured
        request["readings"] = job.asked
    for event in programs.run(["cold"], request):
        row = by[event["method"], event["budget"]]
        row["cold_bytes_per_step"], row["cold_ms_per_token"] = event["bytes_per_step"], event["ms_per_token"]
    cold_table(rows)


def answered(state: dict[str, Any], answers: list[list[dict[str, Any]]], asked: list[int]) -> list[dict[str, Any]]:
    """Sums up each column of answers over the questions that were asked under budgets."""
    columns: dict[tuple[str, float | None], list[dict[str, Any]]] = {}
    for i in asked:
        for method in ("alone", "own"):
            if method in state["answers"][i]:
                columns.setdefault((method, None), []).append(state["answers"][i][method])
        for answer in answers[i]:
            columns.setdefault((answer["method"], answer["budget"]), []).append(answer)
    summed = []
    for (method, budget), column in columns.items():
        told = [a["right"] for a in column if a["right"] is not None]
        steps, seconds = sum(a["tokens"] - 1 for a in column), sum(a["seconds"] for a in column)
        summed.append({"method": method, "budget": budget, "questions": len(told), "correct": sum(told),
                       "tokens_per_s": steps / seconds if steps > 0 else None})
    return summed


def report_of(job: Job, programs: Programs, state: dict[str, Any], figures: dict[str, Any], asked: list[int],
              resumed: bool) -> dict[str, Any]:
    answers = figures.pop("answers")
    questions = [
        {"number": i, "text": q.text, "begun": q.begun, "expected": q.expected, "counts": i in counting(state),
         **state["answers"][i], "answers": answers[i]}
        for i, q in enumerate(job.questions)
    ]  # fmt: skip
    kept = ("cold_prefill_s", "prompt_s", "put_s", "put_bytes", "ingest_s")
    return {
        "version": programs.version(), "date": time.strftime("%Y-%m-%d", time.gmtime()), "machine": machine(),
        "document": str(job.document), "model": state["model"], "prompt_tokens": len(job.prompt),
        "continuation_tokens": len(job.continuation), "facts": job.facts, "l_gen": 1, "stored": state["made"],
        "resumed": resumed, **{key: state[key] for key in kept}, **figures,
        "speedup": state["cold_prefill_s"] / figures["resume_s"],
        "judged": sum(q.expected is not None for q in job.questions), "counted": len(counting(state)),
        "answered": answered(state, answers, asked), "questions": questions,
    }  # fmt: skip


def run(args: Any) -> None:
    started = time.monotonic()
    out: Path = args.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    store, state_file, log = out / "store", out / "state.json", out / "prefixd.log"
    mark = out / ".prefixd-demo"
    if store.exists() and not (mark.exists() or state_file.exists()):
        raise Stop(f"{store} is not the demo's, which empties such a folder: name another --out, or remove it")
    # Socket paths are limited to 107 bytes, so the socket does not lie under --out.
    with tempfile.TemporaryDirectory(prefix="prefixd-demo.", dir="/tmp") as folder:
        programs = Programs(args.build, Path(folder) / "prefixd.sock")
        job = job_of(args, programs)
        state = None if args.fresh else stored_state(state_file, store, job)
        resumed = state is not None
        log.write_text("")
        if state is None:
            mark.write_text(f"{store} is the demo's, which deletes it when it prefills again.\n")
            state_file.unlink(missing_ok=True)
            shutil.rmtree(store, ignore_errors=True)
            print("1. The daemon starts on an empty store.")
            with Daemon(programs, store, log):
                print("2. A process prefills the document and persists its KV cache, answers with the document in its "
                      "own memory,\n   and without the document; then it ends.")
                state = prefill(job, programs, state_file)
            print("3. The daemon is stopped (SIGTERM) and started again.")
        else:
            print(f"1.-3. The prompt was stored in {store} by a run of {state['made']} UTC: it is\n"
                  "   resumed, and what was measured of the prefill is from then. --fresh prefills again.")
            say_own(job, state)
        asked = counting(state) or list(range(len(job.ids)))
        with Daemon(programs, store, log):
            print("4. A new process attaches to the stored prompt and answers under small budgets.")
            figures = decode(job, programs, state, asked)
        print("5. The daemon is started once more, without host memory: the same steps with every row on the SSD.")
        with Daemon(programs, store, log, "--host-tier-mib", "0"):
            cold(job, programs, state, figures["rows"])
        report = report_of(job, programs, state, figures, asked, resumed)
    report["disk_bytes"] = bytes_on_disk(store)
    report["seconds"] = time.monotonic() - started
    write(out / "report.json", report)
    # Debian's Python has what plots need; that of the tokenizer may not.
    python = "/usr/bin/python3" if Path("/usr/bin/python3").exists() else "python3"
    made = subprocess.run([python, _HERE / "report.py", out / "report.json", out / "index.html"], check=False)
    if made.returncode != 0:
        raise Stop(f"the page could not be made; the figures are in {out / 'report.json'}")
    print(f"\nThe same with plots: {out / 'index.html'} (numbers: {out / 'report.json'}); "
          f"{report['seconds']:.0f} s in all.\nThe stored prompt stays in {store} "
          f"({report['disk_bytes'] / MIB:.0f} MiB): the next run resumes from it. `make clean` removes it.")


def stored_state(state_file: Path, store: Path, job: Job) -> dict[str, Any] | None:
    """What an earlier run left, if it stored the same prompt and asked the same."""
    if not store.is_dir():
        return None
    try:
        state = json.loads(state_file.read_text())
    except (OSError, ValueError):
        return None
    if state.get("key") != job.key():
        return None
    for question, answers in zip(job.questions, state["answers"], strict=True):
        for answer in answers.values():  # what is right may have been decided anew
            answer["right"] = question.right(answer["text"])
    return state
