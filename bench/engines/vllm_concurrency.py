#!/usr/bin/env python3
"""Counts how many chats, each over a long stored prompt of its own, run at once in a vLLM whose cache has
1 GiB, and how fast: vLLM alone, the stored prompts loaded into its blocks, and attached.

    make python-module model-smollm2 && scripts/setup_python.sh vllm
    .venv/bin/python bench/engines/vllm_concurrency.py --json out.json
    .venv/bin/python bench/engines/vllm_chats_picture.py out.json out.svg

Answers that are longer than a window of their own tokens, which leave the engine's cache, or do not:

    .venv/bin/python bench/engines/vllm_concurrency.py --arms attached window --prefixes 4 --answer 1000 --shares 0.25

One prompt is computed once, and its rows are put under a salt for each chat, so that no two chats share
anything. Each chat asks a question of its own. vLLM's prefix caching is on everywhere."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "bench/engines"), str(ROOT / "python")]

from run_facts import run_facts  # noqa: E402
from vllm_daemon import Daemon, in_a_process, transfer  # noqa: E402
from vllm_engine import resident  # noqa: E402

import prefixd  # noqa: E402

BLOCK = 128
GIB = 1 << 30
ARMS = {
    "alone": "vLLM alone",
    "loaded": "stored, loaded into blocks",
    "attached": "stored, attached",
    "window": "attached, with a window",
}


# ---- one engine, in a process of its own ----


def engine(work: dict[str, Any]) -> dict[str, Any]:
    """Answers all chats at once and says how it went; `chats` are [salt, token ids]."""
    from vllm import LLM, SamplingParams

    options: dict[str, Any] = {"num_gpu_blocks_override": work["blocks"]} if work["blocks"] else {}
    tokens = max(len(ids) for _, ids in work["chats"]) + work["answer"]
    llm = LLM(
        model=work["model"], dtype="float32", max_model_len=tokens, max_num_batched_tokens=2048,
        enforce_eager=True, enable_prefix_caching=True, disable_log_stats=False,
        kv_transfer_config=work["transfer"], **options,
    )
    core = llm.llm_engine
    sampling = SamplingParams(temperature=0, max_tokens=work["answer"], ignore_eos=True, detokenize=False)
    begun, steps, first, made, failed = time.perf_counter(), [], {}, {}, 0
    for i, (salt, ids) in enumerate(work["chats"]):
        prompt: dict[str, Any] = {"prompt_token_ids": ids}
        if salt:
            prompt["cache_salt"] = salt
        core.add_request(f"chat-{i}", prompt, sampling)
    while core.has_unfinished_requests():
        at = time.perf_counter()
        outputs = core.step()
        now = time.perf_counter()
        for output in outputs:
            made[output.request_id] = output.outputs[0].token_ids
            first.setdefault(output.request_id, now - begun)
            failed += output.finished and output.outputs[0].finish_reason == "error"
        gauges = {m.name: m.value for m in llm.get_metrics() if hasattr(m, "value")}
        running = int(gauges["vllm:num_requests_running"])
        steps.append([at - begun, now - at, running, gauges["vllm:kv_cache_usage_perc"], len(outputs)])
    seconds = time.perf_counter() - begun
    time.sleep(work.get("linger", 0))  # what is stored is committed behind the last step
    most = max(step[2] for step in steps)
    # Steps in which everything that ran was answered, so that no prompt was computed beside.
    full = [step for step in steps if step[2] == most and step[4] == most]
    return {
        "chats": len(work["chats"]),
        "failed": failed,
        "at_once": most,
        "seconds": seconds,
        "first_token": sorted(first.values()),
        "generated": sum(len(ids) for ids in made.values()),
        "tokens_per_second": [step[4] / step[1] for step in full],
        "cache_usage": max(step[3] for step in steps),
        "engine_bytes": resident([os.getpid()]),
    }


# ---- the run ----


def texts(model: Path, tokens: int, question: int, chats: int) -> tuple[list[int], list[list[int]]]:
    """Returns one long prompt and a question for each chat, of the repository's pages."""
    from tokenizers import Tokenizer

    pages = "".join(path.read_text() for path in sorted((ROOT / "docs").glob("*.md")))
    ids = Tokenizer.from_file(str(model / "tokenizer.json")).encode(pages, add_special_tokens=False).ids
    step = (len(ids) - tokens - question) // chats
    if step < 1:
        raise SystemExit(f"the pages have {len(ids)} tokens, too few for a prompt of {tokens} and {chats} questions")
    return ids[:tokens], [ids[tokens + i * step :][:question] for i in range(chats)]


def own_model(store: Any) -> Any:
    """Returns the engine's model; None where nothing is stored yet."""
    models = store.list_models().models
    return models[0] if models else None


def stored(store: Any, model: Any, prefix: Any) -> bool:
    return model is not None and bool(store.match(model.name, prefix).n_tokens == len(prefix))


def copy(store: Any, prefix: list[int], salts: list[str]) -> dict[str, Any]:
    """Puts the stored rows of a prompt under each salt that lacks them; returns how long it took until all is
    ready and rewritten, and the bytes of a prompt."""
    import numpy as np

    from prefixd.salts import token_ids

    spec = own_model(store)
    with store.attach(spec.name, prefix, policy={"mode": "full"}) as session:
        rows = [(run.layer, run.begin, np.array(run.k), np.array(run.v)) for run in session.restore()]
    begun, made = time.perf_counter(), 0
    prompts = [token_ids(prefix, salt) for salt in salts]
    for ids in prompts:
        if stored(store, spec, ids):
            continue
        made += 1
        with store.begin_put(spec.name, ids) as put:
            for layer, first, k, v in rows:
                put.write(layer, first, k, v)
    for ids in prompts:
        store.wait_ready(store.match(spec.name, ids).prefix)
    while store.stats()["rewrite_queue"] > 0:  # rows that are retrieved together come to lie together
        time.sleep(1)
    seconds = time.perf_counter() - begun
    return {"copied": made, "seconds": seconds, "bytes": sum(k.nbytes + v.nbytes for *_, k, v in rows)}


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    prefix, questions = texts(arguments.model, arguments.tokens, arguments.question, arguments.prefixes)
    salts = [f"chat {i}" for i in range(arguments.prefixes)]
    chats = [(salt, prefix + question) for salt, question in zip(salts, questions, strict=True)]
    facts = run_facts(ROOT / "build/release", "vllm_concurrency.py")
    report: dict[str, Any] = {
        "run": facts, "model": arguments.model.name, "prompt_tokens": arguments.tokens,
        "question_tokens": arguments.question, "answer_tokens": arguments.answer, "chats": arguments.prefixes,
        "policy": arguments.policy, "own_window": arguments.own_window, "block_bytes": arguments.block_bytes,
        "load_before": os.getloadavg()[0], "arms": [],
    }  # fmt: skip
    with contextlib.ExitStack() as stack:
        folder = arguments.keep or stack.enter_context(tempfile.TemporaryDirectory(dir=arguments.dir))
        daemon = Daemon(Path(folder), arguments.daemon)
        try:
            base = {"model": str(arguments.model), "answer": arguments.answer}
            with prefixd.connect(daemon.address, call_timeout=3600) as store:
                if not stored(store, own_model(store), prefix):
                    first = {"blocks": 0, "transfer": transfer(daemon.address, load=False), "chats": [("", prefix)]}
                    in_a_process(Path(__file__), base | first | {"answer": 1, "linger": 10})
                copies = report["copies"] = copy(store, prefix, salts)
            size = copies["bytes"] / GIB
            print(f"{copies['copied']} copies of {size:.2f} GiB, ready after {copies['seconds']:.1f} s", flush=True)
            pool = GIB // arguments.block_bytes
            for blocks in sorted({max(2, int(pool * share)) for share in arguments.shares}):
                # The null block is nobody's.
                whole = (blocks - 1) // -(-(arguments.tokens + arguments.question + arguments.answer) // BLOCK)
                for arm in arguments.arms:
                    one = {"arm": arm, "blocks": blocks, "cache_bytes": blocks * arguments.block_bytes}
                    attached = arm in ("attached", "window")
                    how = {"attach": True, "attach_tokens": 0, "policy": arguments.policy} if attached else {}
                    if arm == "window":
                        how["own_window"] = arguments.own_window
                    given = transfer(daemon.address, store=False, **how) if arm != "alone" else None
                    # Each chat of vLLM alone costs a prefill: one more than can run tells how many do.
                    some = chats[: whole + 1] if arm == "alone" else chats
                    if not attached and whole == 0:  # vLLM refuses to start
                        one |= {"at_once": 0, "chats": 0}
                    else:
                        one |= in_a_process(Path(__file__), base | {"blocks": blocks, "transfer": given, "chats": some})
                        one["daemon_bytes"] = resident([daemon.process.pid])
                        show(one)
                    report["arms"].append(one)
                    write(report, arguments.json)  # the next arm may take its time
        finally:
            daemon.stop()
    report["load_after"] = os.getloadavg()[0]
    return report


def write(report: dict[str, Any], path: Path | None) -> None:
    if path:
        path.write_text(json.dumps(report, indent=1) + "\n")


def show(one: dict[str, Any]) -> None:
    rates = one["tokens_per_second"]
    rate = f"{statistics.median(rates):6.1f} ({min(rates):.1f} to {max(rates):.1f})" if rates else "     -"
    print(
        f"{ARMS[one['arm']]:28} {one['blocks']:5} blocks  {one['at_once']:3} of {one['chats']:3} at once  "
        f"{one['seconds']:7.1f} s for {one['generated']} tokens  {rate} tokens/s while all run  "
        f"{one['cache_usage']:.0%} of the cache used  "
        f"engine {one['engine_bytes'] / GIB:.2f} GiB, daemon {one['daemon_bytes'] / GIB:.2f} GiB"
        + (f"  {one['failed']} FAILED" if one["failed"] else ""),
        flush=True,
    )


def main() -> None:
    if "--engine" in sys.argv:
        print(json.dumps(engine(json.loads(sys.stdin.read()))), flush=True)
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=ROOT / "build/models/smollm2")
    parser.add_argument("--prefixes", type=int, default=50, help="chats, each with a stored prompt of its own")
    parser.add_argument("--tokens", type=int, default=7000, help="of each stored prompt")
    parser.add_argument("--question", type=int, default=64, help="tokens of each chat's question")
    parser.add_argument("--answer", type=int, default=32, help="tokens generated for each chat")
    parser.add_argument("--shares", type=float, nargs="+", default=[0.25, 0.5, 1.0], help="of 1 GiB of engine's cache")
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=["alone", "loaded", "attached"])
    parser.add_argument("--own-window", type=int, default=256, help="tokens of the arm 'window' that keep blocks")
    parser.add_argument("--policy", type=json.loads, default={"budget": 0.02}, help="of the attached chats, as JSON")
    parser.add_argument("--dir", help="where the store lies meanwhile")
    parser.add_argument("--keep", type=Path, help="a folder for the store, which stays; what it has is not made again")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--daemon", nargs=argparse.REMAINDER, default=[], help="further arguments of the daemon")
    arguments = parser.parse_args()
    config = json.loads((arguments.model / "config.json").read_text())
    heads = config.get("num_key_value_heads") or config["num_attention_heads"]
    dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    arguments.block_bytes = 2 * config["num_hidden_layers"] * heads * dim * 4 * BLOCK
    write(run(arguments), arguments.json)


if __name__ == "__main__":
    main()
