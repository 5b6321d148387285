#!/usr/bin/env python3
"""Measures what a Hugging Face model gains and loses by prefixd: the same figures as model_bench.

Prefill stored beside prefill alone; time until what is derived is ready; decoding over the stored
prompt beside the framework's own caches (growing and preallocated) and beside prefixd reading
everything. Sides take turns, token by token in rounds. Lengths beyond the model's are made of one
prompt's rows laid end to end, and are good for timing alone. Needs PyTorch (make test-torch)."""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "bench/engines"), str(ROOT / "python")]

import torch  # noqa: E402
from daemon_child import Daemon  # noqa: E402
from model_text import token_ids  # noqa: E402
from run_facts import ratios, run_facts, spread  # noqa: E402
from transformers import AutoModelForCausalLM, DynamicCache, StaticCache  # noqa: E402

import prefixd  # noqa: E402
from prefixd.errors import Infeasible  # noqa: E402
from prefixd.transformers import Splice  # noqa: E402


def show(what: str, s: dict[str, float], unit: str) -> None:
    print(f"  {what:<52} {s['median']:9.3f} {unit:<6} ({s['p25']:.3f} .. {s['p75']:.3f})", flush=True)


class Inside:
    """Times the attention modules of a model, splice and Python included."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.seconds, self._begun = 0.0, 0.0
        for layer in model.model.layers:
            layer.self_attn.register_forward_pre_hook(self._enter)
            layer.self_attn.register_forward_hook(self._leave)

    def _enter(self, *_: Any) -> None:
        self._begun = time.perf_counter()

    def _leave(self, *_: Any) -> None:
        self.seconds += time.perf_counter() - self._begun

    def take(self) -> float:
        seconds, self.seconds = self.seconds, 0.0
        return seconds


@dataclass
class Side:
    name: str
    cache: Any
    position: int  # of its next token
    report: Callable[[], dict[str, Any]] | None = None
    token_ms: list[float] = field(default_factory=list)
    inside_ms: list[float] = field(default_factory=list)
    round_ms: list[float] = field(default_factory=list)
    round_inside_ms: list[float] = field(default_factory=list)


class Bench:
    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32).eval()
        self.inside = Inside(self.model)
        self.ids = torch.tensor([token_ids(args.model, args.file)])
        longest = max(args.lengths) + (args.rounds + 1) * args.steps
        if longest > min(self.ids.shape[1], self.model.config.max_position_embeddings):
            raise SystemExit(f"splice_bench: {longest} tokens are beyond the text or the model")
        self.out: dict[str, Any] = {"run": run_facts(args.build, "splice_bench.py"), "lengths": [], "ratios": {}}
        self.daemon = Daemon(args.build, args.tier_mib)
        self.tenants = 0

    def splice(self) -> Splice:
        """One of a tenant of its own, which has nothing stored."""
        self.tenants += 1
        return Splice(prefixd.connect(self.daemon.address, tenant=f"bench{self.tenants}"), self.model)

    @torch.no_grad()
    def forward(self, ids: torch.Tensor, cache: Any) -> torch.Tensor:
        out = self.model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
        return out.logits[0, -1]

    def run(self) -> None:
        for n in self.args.lengths:
            print(f"{n} tokens", flush=True)
            self.length(n)
        if self.args.repeated:
            self.repeated(self.args.repeated)

    def length(self, n: int) -> None:
        prompt = self.ids[:, :n]
        alone, storing, ready = [], [], []
        for _ in range(self.args.prefills):
            begun = time.perf_counter()
            own = DynamicCache(config=self.model.config)
            self.forward(prompt, own)
            alone.append(time.perf_counter() - begun)
            splice = self.splice()
            begun = time.perf_counter()
            with splice.cache(prompt) as cache:
                self.forward(prompt, cache)
                stored = cache.stored()[0]
            storing.append(time.perf_counter() - begun)
            assert stored is not None
            begun = time.perf_counter()
            splice.store.wait_ready(stored.prefix)
            ready.append(time.perf_counter() - begun)
        at: dict[str, Any] = {
            "tokens": n, "prefill_s": spread(alone), "store_s": spread(storing), "ready_s": spread(ready),
            "prefill_store_overhead": ratios(storing, alone), "ready_over_prefill": ratios(ready, alone),
        }
        show("prefill alone", at["prefill_s"], "s")
        show("stored prefill / prefill alone", at["prefill_store_overhead"], "")
        show("ready / prefill alone", at["ready_over_prefill"], "")
        self.own, self.last = own, splice
        self.decode(splice, own, n, n, at)
        self.out["lengths"].append(at)
        if n == self.args.lengths[-1]:
            for key in ("prefill_store_overhead", "ready_over_prefill"):
                self.out["ratios"][key] = at[key]
            for key in ("decode_speedup", "attention_speedup"):
                if key in at:  # a prompt may be too short for each of the budgets
                    self.out["ratios"][f"{key}_7k6"] = at[key]

    def repeated(self, n: int) -> None:
        period = self.args.lengths[-1]
        print(f"{n} tokens: the rows of {period}, again and again", flush=True)
        times = -(-n // period)
        long_one = DynamicCache(config=self.model.config)
        for index, layer in enumerate(self.own.layers):
            k, v = (t[:, :, :period].repeat(1, 1, times, 1)[:, :, :n] for t in (layer.keys, layer.values))
            long_one.update(k, v, index)
        self.own = None
        ids = self.ids[:, :period].repeat(1, times)[:, :n]
        splice = self.splice()
        stored = splice.persist(ids, long_one)[0]
        splice.store.wait_ready(stored.prefix)
        at: dict[str, Any] = {"tokens": n, "repeated": period}
        self.decode(splice, long_one, period, n, at, ids)
        self.out["lengths"].append(at)
        if "attention_speedup" in at:
            self.out["ratios"]["attention_speedup_32k"] = at["attention_speedup"]

    def decode(
        self, splice: Splice, own: DynamicCache, follows: int, n: int, at: dict[str, Any],
        ids: torch.Tensor | None = None,
    ) -> None:
        """Decodes the text after token `follows` over a prompt of n rows."""
        total = (self.args.rounds + 1) * self.args.steps
        text = self.ids[:, follows : follows + total]
        prompt = self.ids[:, :n] if ids is None else ids
        static = StaticCache(config=self.model.config, max_cache_len=n + total + 1)
        for index, layer in enumerate(own.layers):
            static.update(layer.keys[:, :, :n], layer.values[:, :, :n], index)
        sides = [Side("own cache, preallocated", static, n), Side("own cache, growing", own, n)]
        policies: list[tuple[str, Any]] = [("prefixd, everything read", prefixd.Policy(mode="full"))]
        policies += [(f"prefixd, {100 * b:g}%", prefixd.Policy(budget=b)) for b in self.args.budgets]
        for name, policy in policies:
            try:
                # One more token than is stored, because the model always runs the last one.
                cache = splice.cache(torch.cat([prompt, text[:, :1]], dim=1), policy=policy, store=False,
                                     exact_prompt=False, require=True)
            except Infeasible as error:
                print(f"  {name}: left out: {error}")
                continue
            assert cache.attached == [n], cache.attached
            sides.append(Side(name, cache, n, lambda cache=cache: cache.reports()[0]))
        for number in range(self.args.rounds + 1):
            for side in sides:
                token_ms, inside_ms = [], []
                for i in range(self.args.steps):
                    token = text[:, number * self.args.steps + i][:, None]
                    self.inside.take()
                    begun = time.perf_counter()
                    self.forward(token, side.cache)
                    token_ms.append(1e3 * (time.perf_counter() - begun))
                    inside_ms.append(1e3 * self.inside.take())
                if number == 0:
                    continue  # warms the caches of both
                side.token_ms += token_ms
                side.inside_ms += inside_ms
                side.round_ms.append(statistics.mean(token_ms))
                side.round_inside_ms.append(statistics.mean(inside_ms))
        print(f"  {'ms a token':<28} {'in all':>20} {'inside attention':>20}")
        for side in sides:
            whole, part = spread(side.token_ms), spread(side.inside_ms)
            print(f"  {side.name:<28} {whole['median']:7.1f} ({whole['p25']:.1f}..{whole['p75']:.1f})"
                  f" {part['median']:9.1f} ({part['p25']:.1f}..{part['p75']:.1f})", flush=True)
            at.setdefault("decode", []).append({"side": side.name, "token_ms": whole, "inside_attention_ms": part})
        static_side, full, budgets = sides[0], sides[2], sides[3:]
        best = min((static_side, full), key=lambda side: statistics.median(side.token_ms))
        for side in sides[2:]:
            side.cache.close()
        if not budgets:
            return
        decode = [ratios(best.round_ms, side.round_ms) for side in budgets]
        attention = [ratios(static_side.round_inside_ms, side.round_inside_ms) for side in budgets]
        at["compared_with"] = best.name
        at["speedup"] = [{"side": side.name, "decode": d, "attention": a}
                         for side, d, a in zip(budgets, decode, attention, strict=True)]
        at["decode_speedup"] = min(decode, key=lambda s: s["median"])
        at["attention_speedup"] = min(attention, key=lambda s: s["median"])
        show(f"a token, least gain over '{best.name}'", at["decode_speedup"], "times")
        show("attention alone, least gain over the preallocated", at["attention_speedup"], "times")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=ROOT / "build/models/smollm2",
                        help="checkpoint, as `make model-smollm2` makes one")
    parser.add_argument("--file", type=Path, help="a UTF-8 text; by default licences")
    parser.add_argument("--lengths", type=int, nargs="+", default=[2048, 4096, 7600], help="prompts; the longest last")
    parser.add_argument("--repeated", type=int, default=32768, help="rows laid end to end; 0: not")
    parser.add_argument("--budgets", type=float, nargs="+", default=[0.01, 0.02, 0.05])
    parser.add_argument("--prefills", type=int, default=2, help="pairs of prefills a length")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=8, help="tokens a round")
    parser.add_argument("--tier-mib", type=int, default=4096, help="the daemon's host tier")
    parser.add_argument("--threads", type=int, default=0, help="PyTorch's; 0: its own choice")
    parser.add_argument("--build", type=Path, default=ROOT / "build/release", help="build folder with bin/prefixd")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    bench = Bench(args)
    try:
        bench.run()
    finally:
        bench.daemon.close()
    if args.json:
        args.json.write_text(json.dumps(bench.out, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
