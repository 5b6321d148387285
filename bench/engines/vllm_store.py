#!/usr/bin/env python3
"""Measures what storing costs a cold prefill in vLLM: engines that stand beside each other, one at work at a
time, compute prompts of the same lengths in turns, so that a machine which grows faster or slower does so for
all of them. Sides: vLLM alone, its ExampleConnector, prefixd as the connector starts it for an engine that
loads (nothing is derived), and prefixd that derives behind each put; of that also the prefill right behind a
put, while the daemon works on it. Each engine takes some 4 GiB. Needs what vllm_peers.py needs."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "bench/engines"), str(ROOT / "python")]

from model_text import token_ids  # noqa: E402
from run_facts import ratios, run_facts, spread  # noqa: E402
from vllm_engine import ENVIRONMENT, Engine  # noqa: E402
from vllm_peers import SIDES, Prefixd, Prompts, Side, until  # noqa: E402

import prefixd  # noqa: E402

ALONE, INGESTING = "vllm", "ingesting"
BEHIND = "behind a put"  # what is measured beside a side's name


def serve() -> None:
    """Answers lines of token ids with the seconds until the first token."""
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    work = json.loads(sys.stdin.readline())
    engine = Engine(work["model"], work["transfer"])
    print("serves", flush=True)
    for line in sys.stdin:
        (answer,) = engine.run([json.loads(line)], 1)
        print(json.dumps({"first_token": answer["at"][0], "cached": answer["cached"]}), flush=True)


class Server:
    """An engine with its side's store."""

    def __init__(self, side: Side, model: Path) -> None:
        self.side = side
        side.prepare()
        with (side.folder.parent / f"{side.folder.name}.engine.log").open("ab") as errors:
            self._process = subprocess.Popen([sys.executable, __file__, "--engine"], stdin=subprocess.PIPE,
                                             stdout=subprocess.PIPE, stderr=errors, text=True,
                                             env={**os.environ, **side.environment}, start_new_session=True)
        self._say({"model": str(model), "transfer": side.transfer()})
        self._heard("serves")

    def _say(self, what: Any) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(what) + "\n")
        self._process.stdin.flush()

    def _heard(self, begin: str) -> str:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(begin):
                return line
        raise SystemExit(f"vllm_store: the engine of {self.side.name} ended; see {self.side.folder}.engine.log")

    def prefill(self, ids: list[int]) -> float:
        self._say(ids)
        answer = json.loads(self._heard('{"first_token"'))
        if answer["cached"]:
            raise SystemExit(f"vllm_store: {self.side.name} found {answer['cached']} tokens of a new prompt")
        return float(answer["first_token"])

    def settle(self) -> None:
        """Waits until the side's daemon has nothing to do."""
        if isinstance(self.side, Prefixd):
            with prefixd.connect(f"unix:{self.side.socket}") as store:
                until(lambda: store.stats()["ingest_queue"] == 0, 600, "a daemon works on for ever", 0.5)

    def end(self) -> None:
        # An engine is several processes, which end with the one that reads here, and not with a signal to it.
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(120)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self.side.end()


def measure(args: argparse.Namespace) -> dict[str, Any]:
    facts = run_facts(args.build, "vllm_store.py")
    text = Prompts(token_ids(args.model, None))
    samples: dict[tuple[str, int], list[float]] = {}
    with contextlib.ExitStack() as stack:
        servers = {}
        for name in args.sides:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="vllm-store-", dir=args.dir)))
            servers[name] = Server(SIDES[name](folder / "store", args), args.model)
            stack.callback(servers[name].end)
            print(f"{servers[name].side.name} is there", file=sys.stderr, flush=True)
        for server in servers.values():  # code that a first prompt compiles
            server.prefill(text.take(600))
        for turn in range(args.repeats):
            for tokens in args.lengths:
                names = args.sides[turn % len(args.sides) :] + args.sides[: turn % len(args.sides)]
                for name in names:
                    servers[name].settle()
                    time.sleep(args.pause)
                    samples.setdefault((name, tokens), []).append(servers[name].prefill(text.take(tokens)))
                    if name == INGESTING:
                        behind = servers[name].prefill(text.take(tokens))
                        samples.setdefault((f"{name}, {BEHIND}", tokens), []).append(behind)
                        servers[name].settle()
                print(f"turn {turn + 1} of {args.repeats}, {tokens} tokens: done", file=sys.stderr, flush=True)
    rows = [
        {
            "side": name, "tokens": tokens, "seconds": spread(own), "samples": own,
            "over_alone": ratios(own, samples[ALONE, tokens]),
        }
        for (name, tokens), own in samples.items()
    ]  # fmt: skip
    return {"run": facts, "model": args.model.name, "rows": rows}


def show(out: dict[str, Any]) -> None:
    print(f"{out['run']['machine']}; {out['run']['date']}\n")
    print(f"  {'cold prefill, first token, s':32} {'tokens':>6} {'median (quartiles)':>24} {'over vLLM alone':>26}")
    for row in out["rows"]:
        s, r = row["seconds"], row["over_alone"]
        print(f"  {row['side']:32} {row['tokens']:6} {s['median']:8.2f} ({s['p25']:.2f} .. {s['p75']:.2f}) "
              f"{r['median']:10.3f} ({r['p25']:.3f} .. {r['p75']:.3f})")


def main() -> None:
    if sys.argv[1:] == ["--engine"]:
        return serve()
    sides = [name for name in SIDES if name != "lmcache"]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=ROOT / "build/models/smollm2")
    parser.add_argument("--build", type=Path, default=ROOT / "build/release")
    parser.add_argument("--dir", type=Path, help="where the stores are (default: that of temporary files)")
    parser.add_argument("--lengths", type=int, nargs="+", default=[2050, 7170])
    parser.add_argument("--repeats", type=int, default=5, help="prompts of each length and side")
    parser.add_argument("--pause", type=float, default=1, help="seconds before each")
    parser.add_argument("--memory-gib", type=int, default=2, help="memory of each daemon")
    parser.add_argument("--sides", nargs="+", choices=sides, default=sides, help=f"{ALONE} among them")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if ALONE not in args.sides:
        parser.error(f"--sides needs {ALONE}, which the others are compared with")
    out = measure(args)
    show(out)
    if args.json:
        args.json.write_text(json.dumps(out, indent=1) + "\n")


if __name__ == "__main__":
    main()
