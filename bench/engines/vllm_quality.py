#!/usr/bin/env python3
"""Measures how near vLLM stays to itself while it reads an attached prompt under a budget: real texts go on
as they are written, and the model's next-token distribution is compared, token by token, with that of the
same engine reading everything.

    make python-module model-smollm2 && scripts/setup_python.sh vllm
    .venv/bin/python bench/engines/vllm_quality.py --json out.json

Documents and measures are those of `python -m prefixd.evaluate compare`, which measures the same outside of
vLLM (docs/quality.md)."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "bench/engines"), str(ROOT / "python")]

from run_facts import run_facts  # noqa: E402
from vllm_daemon import Daemon, in_a_process, transfer  # noqa: E402

import prefixd  # noqa: E402
from prefixd.evaluate.compare import documents, readings, texts  # noqa: E402
from prefixd.evaluate.compare.chat import form_of  # noqa: E402
from prefixd.evaluate.stats import interval, ratio_interval  # noqa: E402

KINDS = ["prose", "code", "manuals", "logs"]
METHODS = ("topk-codes", "auto-codes")


# ---- one engine, in a process of its own ----


def measures(full: dict[int, np.ndarray], other: dict[int, np.ndarray], targets: list[int]) -> dict[str, float]:
    """Compares distributions behind all tokens but the first, whose step reads everything."""
    kl, same, beyond = [], [], []
    for at in range(1, len(targets)):
        p, q = full[at].astype(np.float64), other[at].astype(np.float64)
        kl.append(float(np.exp(p) @ (p - q)))
        same.append(float(p.argmax() == q.argmax()))
        beyond.append(float(p[targets[at]] - q[targets[at]]))
    return {"kl": float(np.mean(kl)), "same": float(np.mean(same)), "nats_beyond_full": float(np.mean(beyond))}


def engine(work: dict[str, Any]) -> dict[str, Any]:
    """Reads each document by each policy; `chats` are documents, [prompt ids, ids that follow]."""
    from vllm import LLM, SamplingParams
    from vllm_forced import KEPT

    longest = max(len(prompt) + len(follow) for prompt, follow in work["chats"])
    llm = LLM(
        model=work["model"], dtype="float32", max_model_len=longest + 1, max_num_batched_tokens=8192,
        enforce_eager=True, enable_prefix_caching=False, disable_log_stats=True, async_scheduling=False,
        kv_transfer_config=work["transfer"], logits_processors=["vllm_forced:Forced"],
    )  # fmt: skip
    rows = []
    for number, (prompt, follow) in enumerate(work["chats"]):
        KEPT.clear()
        for name, policy in work["policies"].items():
            if policy is None:  # the prompt alone, to be stored
                sampling, ids = SamplingParams(temperature=0, max_tokens=1, detokenize=False), prompt
            else:
                extra = {"forced": follow[1:], "into": name, "kv_transfer_params": {"prefixd": policy}}
                sampling = SamplingParams(temperature=0, max_tokens=len(follow) - 1, ignore_eos=True,
                                          detokenize=False, extra_args=extra)
                ids = prompt + follow[:1]
            begun = time.perf_counter()
            (output,) = llm.generate({"prompt_token_ids": ids}, sampling, use_tqdm=False)
            row = {"document": number, "name": name, "seconds": time.perf_counter() - begun,
                   "cached": output.num_cached_tokens or 0}
            if policy is not None:
                row |= measures(KEPT["full"], KEPT[name], follow[1:])
            rows.append(row)
            print(f"document {number + 1}: {name}, {row['seconds']:.1f} s", file=sys.stderr, flush=True)
    time.sleep(work.get("linger", 0))  # what is stored is committed behind the last step
    return {"chats": len(work["chats"]), "rows": rows}


# ---- the run ----


def found(arguments: argparse.Namespace) -> list[tuple[str, list[int], list[int]]]:
    form, out = form_of(arguments.model), []
    with tempfile.TemporaryDirectory() as folder:
        by_kind = texts.kept(Path(folder) / "texts.jsonl", arguments.kinds, arguments.documents, 0)
    for number in range(arguments.documents):
        for kind in arguments.kinds:
            if number >= len(by_kind[kind]):
                continue
            document = documents.make(kind, arguments.length, number, by_kind[kind][number], form, 0)
            if document is not None:
                request = document.passages[0].request
                out.append((kind, document.prompt, [*request["read"], request["targets"][-1]]))
    return out


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    asked = found(arguments)
    work = {"model": str(arguments.model), "chats": [[prompt, follow] for _, prompt, follow in asked]}
    policies: dict[str, Any] = {"full": {"mode": "full"}}
    for reading in readings.readings(METHODS, arguments.budgets, arguments.length):
        policies[reading.pop("name")] = reading
    report: dict[str, Any] = {
        "run": run_facts(ROOT / "build/release", "vllm_quality.py"), "model": arguments.model.name,
        "length": arguments.length, "documents": [kind for kind, *_ in asked], "policies": policies,
    }
    with contextlib.ExitStack() as stack:
        folder = arguments.keep or stack.enter_context(tempfile.TemporaryDirectory(dir=arguments.dir))
        daemon = Daemon(Path(folder), [])
        try:
            with prefixd.connect(daemon.address, call_timeout=3600) as store:
                store_all(store, daemon, work)
            attached = transfer(daemon.address, store=False, attach=True, attach_tokens=0)
            rows = in_a_process(Path(__file__), work | {"transfer": attached, "policies": policies})["rows"]
        finally:
            daemon.stop()
    return report | {"rows": rows, "summary": summary(rows, list(policies)[1:])}


def store_all(store: Any, daemon: Daemon, work: dict[str, Any]) -> None:
    def missing() -> list[Any]:
        models = store.list_models().models
        if not models:
            return list(work["chats"])
        return [c for c in work["chats"] if store.match(models[0].name, c[0]).n_tokens < len(c[0])]

    if some := missing():
        print(f"{len(some)} of {len(work['chats'])} documents are computed and stored ...", flush=True)
        storing = {"transfer": transfer(daemon.address, load=False), "policies": {"store": None}, "linger": 10}
        in_a_process(Path(__file__), work | storing | {"chats": some})
        if missing():
            raise SystemExit("vllm_quality: vLLM did not store every document")
    for prompt, _ in work["chats"]:
        store.wait_ready(store.match(store.list_models().models[0].name, prompt).prefix)


def summary(rows: list[dict[str, Any]], names: list[str]) -> dict[str, Any]:
    """Returns means with 95% intervals over documents, and the divergence over that of Top-K."""
    out: dict[str, Any] = {}
    for name in names:
        own = [row for row in rows if row["name"] == name]
        out[name] = {
            key: {"mean": float(np.mean(values)), "interval": list(interval(values))}
            for key in ("kl", "same", "nats_beyond_full") if (values := [row[key] for row in own])
        }
        other = name.replace("auto", "topk")
        if other != name and other in names:
            a, b = ([row["kl"] for row in rows if row["name"] == one] for one in (name, other))
            out[name]["kl_of_topk"] = {"mean": sum(a) / sum(b), "interval": list(ratio_interval(a, b))}
    return out


def show(report: dict[str, Any]) -> None:
    print(f"{len(report['documents'])} documents of {report['length']} tokens, attached; 95% intervals over documents")
    print(f"{'read':18} {'KL, nats':>28} {'same next token':>24} {'nats beyond full':>28} {'KL of Top-K':>20}")
    for name, own in report["summary"].items():
        cells = []
        for key, digits in (("kl", 4), ("same", 3), ("nats_beyond_full", 4), ("kl_of_topk", 2)):
            one = own.get(key)
            low, high = one["interval"] if one else (0, 0)
            cells.append(f"{one['mean']:.{digits}f} [{low:.{digits}f}, {high:.{digits}f}]" if one else "")
        print(f"{name:18} {cells[0]:>28} {cells[1]:>24} {cells[2]:>28} {cells[3]:>20}")


def main() -> None:
    if "--engine" in sys.argv:
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        print(json.dumps(engine(json.loads(sys.stdin.read()))), flush=True)
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=ROOT / "build/models/smollm2")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS, help="of text")
    parser.add_argument("--documents", type=int, default=4, help="of each kind")
    parser.add_argument("--length", type=int, default=7600, help="tokens of a document")
    parser.add_argument("--budgets", type=float, nargs="+", default=[0.01, 0.02, 0.05])
    parser.add_argument("--dir", help="where the store lies meanwhile")
    parser.add_argument("--keep", type=Path, help="a folder for the store, which stays; what it has is not made again")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    report = run(arguments)
    show(report)
    if arguments.json:
        arguments.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
