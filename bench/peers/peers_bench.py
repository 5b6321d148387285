#!/usr/bin/env python3
"""Stores and restores the same prompts through prefixd and through what one would use otherwise.

Every peer gets the work of workload.toml in a process of its own: put prompts out of an engine's cache, end
everything, start again, bring them back into it; then its writer is killed in the middle of a put, and a bit of
its file is flipped, and what it serves afterwards is compared byte for byte. A put counts as done when the data
is synced, where a peer can be brought to it; the table says what was waited for. Cold: the pages of all of its
files were given up (posix_fadvise) before each restore, after a restart; warm: the same again, at once.
What cannot run here is tried, and listed with the reason. Peers inside vLLM are measured by
bench/engines/vllm_peers.py; --vllm takes its JSON in. Run it by `make bench-peers`."""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import tempfile
import time
from pathlib import Path
from types import FrameType
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(HERE), str(ROOT / "bench/engines")]

from registry import PEERS  # noqa: E402
from run_facts import run_facts  # noqa: E402
from table import ratios, show  # noqa: E402
from workload import read_workload  # noqa: E402

from measure import Died, Measurement, NotHere  # noqa: E402


def measure(args: argparse.Namespace, out: dict[str, Any]) -> None:
    """Puts into `out` what was measured, peer by peer."""
    work = read_workload(args.quick)
    out |= {"run": run_facts(args.build, "peers_bench.py"), "load": os.getloadavg()[0], "quick": args.quick}
    if out["load"] > 1:
        out["run"]["machine"] += f"; busy: load {out['load']:.1f} at the start"
    begun = time.monotonic()
    options = {"build": str(args.build), "memory_gib": args.memory_gib}
    shapes = [shape for shape in work.shapes if not args.shape or shape.name in args.shape]
    names = list(args.only or PEERS)
    for turn, shape in enumerate(shapes):
        # What drifts while the run lasts does not meet the same peers in each shape.
        order = names[::-1] if turn % 2 else names
        out["order"][shape.name] = order
        for name in order:
            def say(what: str, name: str = name, shape_name: str = shape.name) -> None:
                print(f"== {shape_name}, {name}: {what}", file=sys.stderr, flush=True)

            if args.minutes and time.monotonic() > begun + 60 * args.minutes:
                out["not_run"].append({"name": name, "what": shape.name,
                                       "reason": f"the run's {args.minutes:g} minutes were over"})
                continue
            with tempfile.TemporaryDirectory(prefix="prefixd-peers-", dir=args.dir) as folder:
                try:
                    one = Measurement(name, shape, work, Path(folder), options, say).run()
                except (NotHere, Died) as error:
                    out["not_run"].append({"name": name, "what": shape.name, "reason": str(error)})
                    say(f"not run: {error}")
                    log = Path(folder) / "log"
                    if args.logs and log.exists():
                        print(log.read_text()[-4000:], file=sys.stderr)
                    continue
            out["peers"].append(one)
            out["not_run"] += [{"name": name, "what": f"{shape.name}, {n} tokens", "reason": "longer than its context"}
                               for n in one.pop("not_taken")]


def finish(args: argparse.Namespace, out: dict[str, Any]) -> None:
    if args.vllm:
        out["engines"] = json.loads(args.vllm.read_text())
    else:
        out["not_run"].append({"name": "vLLM's connectors", "what": "time to the first token",
                               "reason": "no --vllm FILE with the figures of bench/engines/vllm_peers.py"})
    place = list(args.only or PEERS).index
    shapes = list(out["order"]).index
    out["peers"].sort(key=lambda one: (shapes(one["shape"]), place(one["name"])))
    out["ratios"] = ratios(out["peers"], out.get("engines"))
    show(out)
    if args.json:
        args.json.write_text(json.dumps(out, indent=1) + "\n")


def stopped(number: int, _: FrameType | None) -> None:
    raise SystemExit(128 + number)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", type=Path, default=ROOT / "build/release")
    parser.add_argument("--dir", type=Path, help="a folder on the disk to be measured (default: for temporary files)")
    parser.add_argument("--only", nargs="+", choices=PEERS, metavar="PEER", help=f"of {', '.join(PEERS)}")
    parser.add_argument("--shape", nargs="+", help="shapes of workload.toml")
    parser.add_argument("--quick", action="store_true", help="small prompts: shows what comes, and is no measurement")
    parser.add_argument("--minutes", type=float, help="begin with no further peer after so many")
    parser.add_argument("--memory-gib", type=int, default=2, help="host tier of prefixd")
    parser.add_argument("--vllm", type=Path, help="JSON of vllm_peers.py, to be shown along")
    parser.add_argument("--logs", action="store_true", help="show what a peer that failed wrote")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, stopped)
    out: dict[str, Any] = {"peers": [], "not_run": [], "order": {}}
    try:
        measure(args, out)
    finally:
        if out["peers"]:  # of an interrupted run, too
            finish(args, out)


if __name__ == "__main__":
    main()
