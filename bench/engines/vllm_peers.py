#!/usr/bin/env python3
"""Measures vLLM with prefixd beside vLLM alone, its ExampleConnector and LMCache's multi-process mode.

For each side, one after the other: an engine computes prompts of several lengths and decodes 1, 4 and 16
requests at once; engine and store are ended and started again, and the same prompts are asked again.
Prefills beside those of vLLM alone tell what storing costs, those after the restart what loading gives.
Needs vLLM (scripts/setup_python.sh vllm), a model of tokens and text (make model-smollm2), the module
(make python-module), and a quiet machine; LMCache is installed into build/lmcache at first (some 60 MB)."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "bench/engines"))

from lmcache_package import install_lmcache  # noqa: E402
from model_text import token_ids  # noqa: E402
from run_facts import ratios, run_facts, spread  # noqa: E402

BESIDE = (1, 4, 16)  # requests at once
GIB, MIB = 1 << 30, 1 << 20


def free_port() -> int:
    with socket.socket() as own:
        own.bind(("127.0.0.1", 0))
        return int(own.getsockname()[1])


def until(what: Any, seconds: float, why: str, pause: float = 0.2) -> None:
    end = time.monotonic() + seconds
    while not what():
        if time.monotonic() > end:
            raise SystemExit(f"vllm_peers: {why}")
        time.sleep(pause)


class Side:
    """What keeps prompts for an engine: a folder, and perhaps a process that is started for each engine."""

    name = "vLLM alone"

    def __init__(self, folder: Path, args: argparse.Namespace) -> None:
        self.folder, self.args = folder, args
        folder.mkdir(parents=True)
        self.process: subprocess.Popen[bytes] | None = None
        self.environment: dict[str, str] = {}

    def prepare(self) -> None:
        """Starts what runs beside the engine."""

    def transfer(self) -> dict[str, Any] | None:
        return None

    def settle(self) -> None:
        """Waits until nothing more is written."""
        last = -1

        def same() -> bool:
            nonlocal last
            before, last = last, sum(f.stat().st_size for f in self.folder.rglob("*") if f.is_file())
            return before == last

        until(same, 300, f"{self.name} goes on writing to {self.folder}", 3)

    def end(self) -> None:
        if self.process is not None:
            self.process.terminate()
            try:
                self.process.wait(60)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
            self.process = None

    def start(self, command: list[Any], **options: Any) -> None:
        with (self.folder.parent / f"{self.folder.name}.log").open("ab") as log:
            self.process = subprocess.Popen([str(part) for part in command], stdout=log, stderr=log,
                                            start_new_session=True, **options)

    def pids(self) -> list[int]:
        return [] if self.process is None else [self.process.pid]


class Example(Side):
    name = "ExampleConnector"

    def transfer(self) -> dict[str, Any] | None:
        return {"kv_connector": "ExampleConnector", "kv_role": "kv_both",
                "kv_connector_extra_config": {"shared_storage_path": str(self.folder)}}


class LmCache(Side):
    name = "LMCache"

    def prepare(self) -> None:
        self.environment = {"PYTHONPATH": str(install_lmcache(sys.executable)), "LMCACHE_TRACK_USAGE": "false"}
        self.port, page = free_port(), free_port()
        self.start(
            [sys.executable, "-m", "lmcache.cli.main", "server", "--host", "127.0.0.1", "--port", self.port,
             "--chunk-size", 128, "--l1-size-gb", self.args.memory_gib, "--eviction-policy", "LRU", "--http-host",
             "127.0.0.1", "--http-port", page, "--disable-metrics",
             # The default transfer is for devices and hangs a CPU engine.
             "--supported-transfer-mode", "auto",
             "--l2-adapter", json.dumps({"type": "fs", "base_path": str(self.folder)})],
            env={**os.environ, **self.environment},
        )  # fmt: skip

        def listens() -> bool:
            assert self.process is not None
            if self.process.poll() is not None:
                raise SystemExit(f"vllm_peers: LMCache's server ended; see {self.folder}.log")
            with socket.socket() as one:
                return one.connect_ex(("127.0.0.1", page)) == 0

        until(listens, 120, "LMCache's server did not start")

    def transfer(self) -> dict[str, Any] | None:
        return {"kv_connector": "LMCacheMPConnector", "kv_role": "kv_both",
                "kv_connector_extra_config": {"lmcache.mp.host": "tcp://127.0.0.1", "lmcache.mp.port": self.port}}


class Prefixd(Side):
    name = "prefixd"
    # As the connector starts a daemon for an engine that loads and does not attach.
    options: tuple[str, ...] = ("--defer-ingest=true",)

    def prepare(self) -> None:
        self.environment = {"PYTHONPATH": str(ROOT / "python")}
        self.socket = self.folder.parent / "prefixd.sock"
        read, write = os.pipe()
        self.start([self.args.build / "bin/prefixd", "--dir", self.folder, "--socket", self.socket, "--min-free-mib", 0,
                    "--memory", f"{self.args.memory_gib}GiB", "--ready-fd", write,
                    *self.options], pass_fds=[write])
        os.close(write)
        with os.fdopen(read) as ready:
            if not ready.read().startswith("prefixd ready"):
                raise SystemExit(f"vllm_peers: the daemon did not start; see {self.folder}.log")

    def transfer(self) -> dict[str, Any] | None:
        return {"kv_connector": "PrefixdConnector", "kv_connector_module_path": "prefixd.vllm", "kv_role": "kv_both",
                "kv_load_failure_policy": "recompute",
                # Loading is what is measured, whether or not it pays.
                "kv_connector_extra_config": {"prefixd": f"unix:{self.socket}", "match_seconds": 60,
                                              "compute_when_faster": False}}


class Ingesting(Prefixd):
    name = "prefixd, ingesting"
    options = ()


SIDES = {"vllm": Side, "example": Example, "lmcache": LmCache, "prefixd": Prefixd, "ingesting": Ingesting}


@contextlib.contextmanager
def store_of(name: str, args: argparse.Namespace) -> Iterator[Side]:
    with tempfile.TemporaryDirectory(prefix="vllm-peers-", dir=args.dir) as folder:
        side = SIDES[name](Path(folder) / "store", args)
        try:
            yield side
        finally:
            side.end()


def engine(side: Side, work: dict[str, Any]) -> dict[str, Any]:
    """Runs one engine over the work, with the side's store started for it and ended behind it."""
    side.prepare()
    work = {**work, "transfer": side.transfer(), "pids": side.pids()}
    log = Path(side.folder.parent, "engine.log")
    with log.open("ab") as errors:
        process = subprocess.Popen([sys.executable, ROOT / "bench/engines/vllm_engine.py"], stdin=subprocess.PIPE,
                                   stdout=subprocess.PIPE, stderr=errors, text=True,
                                   env={**os.environ, **side.environment})
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write(json.dumps(work) + "\n")
    process.stdin.flush()
    said = ""
    for line in process.stdout:
        if line.startswith('{"prefill"'):
            said = line
            break
    if not said:
        raise SystemExit(f"vllm_peers: the engine of {side.name} failed:\n{log.read_text()[-6000:]}")
    side.settle()
    process.stdin.write("end\n")
    process.stdin.close()
    process.wait(120)
    side.end()
    answer: dict[str, Any] = json.loads(said)
    return answer


class Prompts:
    """Pieces of one text that part at their first token."""

    def __init__(self, ids: list[int]) -> None:
        self._ids, self._at = ids, 0

    def take(self, n: int) -> list[int]:
        self._at += 61
        doubled = self._ids + self._ids
        begin = self._at % len(self._ids)
        return [1000 + self._at, *doubled[begin : begin + n - 1]]


def measure(args: argparse.Namespace) -> dict[str, Any]:
    text = Prompts(token_ids(args.model, None))
    warm, again = text.take(600), text.take(600)
    prefill = [(n, text.take(n)) for _ in range(args.repeats) for n in args.lengths]
    decode = [{"prompts": [text.take(256) for _ in range(n)], "tokens": args.tokens} for n in args.beside]
    base = {"model": str(args.model), "pause": args.pause, "prefill": [prompt for _, prompt in prefill]}
    out: dict[str, Any] = {"run": run_facts(args.build, "vllm_peers.py"), "load": os.getloadavg()[0], "sides": []}
    for name in args.sides:
        with store_of(name, args) as side:
            print(f"== {side.name}: compute", file=sys.stderr, flush=True)
            cold = engine(side, {**base, "warm": warm, "decode": decode})
            if args.drop_caches:
                os.sync()
                Path("/proc/sys/vm/drop_caches").write_text("3")
            print(f"== {side.name}: after a restart", file=sys.stderr, flush=True)
            back = engine(side, {**base, "warm": again, "decode": []})
            out["sides"].append(figures(name, args, [n for n, _ in prefill], cold, back))
    alone = next((one for one in out["sides"] if one["name"] == "vllm"), None)
    for one in out["sides"]:
        for at, own in enumerate(one["lengths"]):
            own["restart_over_cold"] = ratios(own["restart_samples"], own["cold_samples"])
            if alone is not None:
                own["cold_over_alone"] = ratios(own["cold_samples"], alone["lengths"][at]["cold_samples"])
    return out


def figures(name: str, args: argparse.Namespace, lengths: list[int], cold: Any, back: Any) -> dict[str, Any]:
    def of(answers: list[dict[str, Any]], n: int, what: str) -> list[float]:
        return [answer[what] for length, answer in zip(lengths, answers, strict=True) if length == n]

    own: dict[str, Any] = {"name": name, "title": SIDES[name].name, "lengths": [], "decode": []}
    for n in args.lengths:
        first, second = of(cold["prefill"], n, "first_token"), of(back["prefill"], n, "first_token")
        own["lengths"].append({"tokens": n, "cold": spread(first), "restart": spread(second), "cold_samples": first,
                               "restart_samples": second, "cached": min(of(back["prefill"], n, "cached"))})
    for n, answer in zip(args.beside, cold["decode"], strict=True):
        gaps = sorted(answer["gaps"])
        own["decode"].append({"requests": n, "tokens_per_second": answer["tokens_per_second"],
                              "p50": gaps[len(gaps) // 2], "p99": gaps[min(len(gaps) - 1, len(gaps) * 99 // 100)]})
    own["engine_bytes"], own["beside_bytes"] = cold["engine_bytes"], cold["beside_bytes"]
    own["restarted_engine_bytes"], own["restarted_beside_bytes"] = back["engine_bytes"], back["beside_bytes"]
    return own


def show(out: dict[str, Any]) -> None:
    print(f"{out['run']['machine']}; {out['run']['date']}; load at the start {out['load']:.1f}\n")
    print("Time to first token, s (median, quartiles); cold / alone: what storing costs\n")
    print(f"  {'':18} {'tokens':>6} {'cold':>22} {'cold / alone':>13} {'after a restart':>22} {'/ cold':>7} "
          f"{'cached':>7}")
    for one in out["sides"]:
        for own in one["lengths"]:
            def times(s: dict[str, float]) -> str:
                return f"{s['median']:.2f} ({s['p25']:.2f} .. {s['p75']:.2f})"

            over = own.get("cold_over_alone")
            print(f"  {one['title']:18} {own['tokens']:6} {times(own['cold']):>22} "
                  f"{over['median'] if over else 1:13.3f} {times(own['restart']):>22} "
                  f"{own['restart_over_cold']['median']:7.3f} {own['cached']:7.0f}")
    print("\nDecoding behind prompts of 256 tokens; memory without what processes share, MiB\n")
    beside = [decode["requests"] for decode in out["sides"][0]["decode"]]
    print(f"  {'':18}" + "".join(f" {f'{n} at once: tokens/s, p50, p99 ms':>36}" for n in beside)
          + f" {'engine':>8} {'beside':>8}")
    for one in out["sides"]:
        cells = [f"{d['tokens_per_second']:.1f}, {1e3 * d['p50']:.0f}, {1e3 * d['p99']:.0f}" for d in one["decode"]]
        print(f"  {one['title']:18}" + "".join(f" {cell:>36}" for cell in cells)
              + f" {one['engine_bytes'] / MIB:8.0f} {one['beside_bytes'] / MIB:8.0f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=ROOT / "build/models/smollm2")
    parser.add_argument("--build", type=Path, default=ROOT / "build/release")
    parser.add_argument("--dir", type=Path, help="where the stores are (default: that of temporary files)")
    # ExampleConnector finds a prompt again if its length is not one above whole blocks.
    parser.add_argument("--lengths", type=int, nargs="+", default=[2050, 4098, 7170])
    parser.add_argument("--repeats", type=int, default=3, help="prompts of each length")
    parser.add_argument("--beside", type=int, nargs="*", default=list(BESIDE), help="requests at once")
    parser.add_argument("--tokens", type=int, default=64, help="tokens that each of them decodes")
    parser.add_argument("--pause", type=float, default=3, help="seconds between measurements")
    parser.add_argument("--memory-gib", type=int, default=2, help="memory of LMCache's server, and of the daemon")
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=list(SIDES))
    parser.add_argument("--drop-caches", action="store_true", help="empty the page cache before the restart (root)")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    out = measure(args)
    show(out)
    if args.json:
        args.json.write_text(json.dumps(out, indent=1) + "\n")


if __name__ == "__main__":
    main()
