#!/usr/bin/env python3
"""Lets a Hugging Face model generate many tokens through prefixd, at bounded memory.

`generate` writes --tokens tokens behind a stored prompt: the process keeps the rows of the last
--window (Policy.own_window), the session those of some thousand more, and the daemon moves the others
to its store, from where they are retrieved. Reported, every --every tokens: a token's time, what
process and daemon hold, and beside it a token's time and the bytes of a cache of the framework's own
that has as many rows. Beyond the model's trained length the text means nothing: times and memory alone
are measured. Needs PyTorch (make test-torch)."""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "bench/engines"), str(ROOT / "python")]

import torch  # noqa: E402
from daemon_child import Daemon  # noqa: E402
from model_text import token_ids  # noqa: E402
from run_facts import run_facts  # noqa: E402
from transformers import AutoModelForCausalLM, DynamicCache  # noqa: E402
from transformers.generation.streamers import BaseStreamer  # noqa: E402

import prefixd  # noqa: E402
from prefixd.transformers import Splice  # noqa: E402

MIB = 1 << 20


def held_mib(pid: int | str) -> float:
    """What a process has in memory, without what it maps of files or shares."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) / 1024
    raise SystemExit(f"process {pid} has ended")


def at_share(ordered: list[float], share: float) -> float:
    return ordered[round(share * (len(ordered) - 1))]


class Watch(BaseStreamer):
    """Is told of each token that was generated, and looks at memory every so many."""

    def __init__(self, store: prefixd.Store, daemon: Daemon, every: int) -> None:
        self.store, self.daemon, self.every = store, daemon, every
        self.rows: list[dict[str, Any]] = []
        self._ms: list[float] = []
        self._written = -1  # the prompt comes first
        self._last = time.perf_counter()

    def put(self, value: torch.Tensor) -> None:
        now = time.perf_counter()
        if self._written >= 0:
            self._ms.append(1e3 * (now - self._last))
        self._written += 1
        if self._written and self._written % self.every == 0:
            self._look()
        self._last = time.perf_counter()

    def end(self) -> None:
        pass

    def _look(self) -> None:
        stats = self.store.stats()
        own = sum(kind["bytes"] for kind in stats["memory_kinds"] if kind["kind"] == "own_tokens")
        ordered = sorted(self._ms)
        row = {
            "tokens": self._written,
            "token_ms": {"median": at_share(ordered, 0.5), "p99": at_share(ordered, 0.99), "max": ordered[-1]},
            "process_mib": held_mib("self"), "daemon_mib": held_mib(self.daemon.pid),
            "own_tokens_mib": own / MIB, "moved": stats["own_moved_tokens"],
        }
        self.rows.append(row)
        self._ms = []
        print(f"{row['tokens']:>8} {row['token_ms']['median']:>9.2f} {row['token_ms']['p99']:>9.2f}"
              f" {row['process_mib']:>9.1f} {row['daemon_mib']:>9.1f} {row['own_tokens_mib']:>9.2f}"
              f" {row['moved']:>9}", flush=True)


class Bench:
    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        torch.manual_seed(args.seed)
        self.model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32).eval()
        # It writes on, whatever it writes.
        self.model.generation_config.eos_token_id = None
        ids = token_ids(args.model, args.file)
        if len(ids) < args.prompt:
            raise SystemExit(f"generate_bench: the text has {len(ids)} tokens, the prompt {args.prompt}")
        self.prompt = torch.tensor([ids[: args.prompt]])
        self.facts = run_facts(args.build, "generate_bench.py")
        self.daemon = Daemon(args.build, args.tier_mib, "--selector-memory-mib", str(args.selector_mib))

    @torch.no_grad()
    def run(self) -> dict[str, Any]:
        args = self.args
        store = prefixd.connect(self.daemon.address)
        splice = Splice(store, self.model)
        with splice.cache(self.prompt) as cache:
            self.model(input_ids=self.prompt, past_key_values=cache, logits_to_keep=1)
            stored = cache.stored()[0]
        assert stored is not None
        store.wait_ready(stored.prefix)
        print(f"{args.tokens} tokens behind {args.prompt}, k = {args.k}; the process keeps {args.window}\n"
              f"{'tokens':>8} {'ms: p50':>9} {'p99':>9} {'process':>9} {'daemon':>9} {'own rows':>9} {'moved':>9}"
              "   (MiB)", flush=True)
        watch = Watch(store, self.daemon, args.every)
        retain = {"tokens": args.retain, "by": args.by}
        policy = prefixd.Policy(k=args.k, own_window=args.window, retain=retain)
        with splice.cache(self.prompt, policy=policy, store=False) as cache:
            self.model.generate(self.prompt, past_key_values=cache, do_sample=True, max_new_tokens=args.tokens,
                                streamer=watch)
            kinds = {kind["kind"]: kind["bytes"] for kind in store.stats()["memory_kinds"]}
        peers = [self.framework(args.prompt + n) for n in self.marks()]
        return {"run": self.facts, "prompt": args.prompt, "tokens": args.tokens,
                "window": args.window, "k": args.k, "retain": args.retain, "by": args.by,
                "tier_mib": args.tier_mib, "selector_mib": args.selector_mib,
                "kinds": kinds, "rows": watch.rows, "framework": peers,
                "ratios": self.ratios(watch.rows, peers)}

    def marks(self) -> list[int]:
        return [max(self.args.every, self.args.tokens * i // 8) for i in range(9)]

    def framework(self, n: int) -> dict[str, Any]:
        """A token behind n rows in the framework's own cache, which grows; the rows are drawn."""
        config = self.model.config
        cache = DynamicCache(config=config)
        shape = (1, config.num_key_value_heads, n, config.head_dim)
        for layer in range(config.num_hidden_layers):
            cache.update(torch.randn(shape), torch.randn(shape), layer)
        token, ms = self.prompt[:, :1], []
        for _ in range(self.args.peer_steps):
            begun = time.perf_counter()
            self.model(input_ids=token, past_key_values=cache, use_cache=True, logits_to_keep=1)
            ms.append(1e3 * (time.perf_counter() - begun))
        row = {"tokens": n - self.args.prompt, "token_ms": at_share(sorted(ms), 0.5),
               "cache_mib": sum(t.numel() * t.element_size() for layer in cache.layers
                                for t in (layer.keys, layer.values)) / MIB}
        print(f"{row['tokens']:>8} {row['token_ms']:>9.2f} {'':>9} its own growing cache: {row['cache_mib']:.1f} MiB",
              flush=True)
        return row

    def ratios(self, rows: list[dict[str, Any]], peers: list[dict[str, Any]]) -> dict[str, float]:
        """What grew in the second half, when all that is bounded has reached its bound."""
        first = next(r for r in rows if r["tokens"] >= self.args.tokens / 2)
        last = rows[-1]
        return {
            "process_grew_mib": last["process_mib"] - first["process_mib"],
            "daemon_grew_mib": last["daemon_mib"] - first["daemon_mib"],
            "cache_would_grow_mib": peers[-1]["cache_mib"] * (last["tokens"] - first["tokens"])
            / (peers[-1]["tokens"] + self.args.prompt),
            "token_grew": last["token_ms"]["median"] / first["token_ms"]["median"],
            "of_own_cache": last["token_ms"]["median"] / peers[-1]["token_ms"],
        }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=ROOT / "models/prefixd-tiny", help="checkpoint")
    parser.add_argument("--file", type=Path, help="a UTF-8 text, the prompt's; by default licences")
    parser.add_argument("--prompt", type=int, default=4096, help="tokens of the prompt")
    parser.add_argument("--tokens", type=int, default=50_000, help="tokens to generate")
    parser.add_argument("--window", type=int, default=256, help="own tokens whose rows the process keeps")
    parser.add_argument("--k", type=int, default=64, help="tokens that a step retrieves")
    parser.add_argument("--retain", type=int, default=0, help="moved tokens that each KV head keeps in memory")
    parser.add_argument("--by", default="local", help="the retention policy that chooses them")
    parser.add_argument("--every", type=int, default=500, help="tokens between two looks")
    parser.add_argument("--peer-steps", type=int, default=12, help="tokens timed behind the framework's own cache")
    parser.add_argument("--tier-mib", type=int, default=64, help="the daemon's host tier")
    parser.add_argument("--selector-mib", type=int, default=32, help="the daemon's memory for codes and keys")
    parser.add_argument("--threads", type=int, default=0, help="PyTorch's; 0: its own choice")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--build", type=Path, default=ROOT / "build/release", help="build folder with bin/prefixd")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    args = parser.parse_args()
    if not 0 < args.every <= args.tokens:
        parser.error("--every must be at least 1 and at most --tokens")
    if args.threads:
        torch.set_num_threads(args.threads)
    bench = Bench(args)
    try:
        report = bench.run()
    finally:
        bench.daemon.close()
    if args.json:
        args.json.write_text(json.dumps(report, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
