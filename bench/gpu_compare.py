#!/usr/bin/env python3
"""Times PyTorch beside gpu_step_bench: the paper's step without fusion, and exact SDPA attention.

It runs one layer of an 8B model (8 KV heads of 4 query heads, dh = d_phi = d_emb = 128, bf16 rows),
the shapes of gpu_step_bench. Times are medians of events on the device, captured in a graph where
PyTorch can. With the JSON of gpu_step_bench it also writes the ratios of the two programs:

    python3 bench/gpu_compare.py --step gpu_step_bench.json --json gpu_compare.json

Without PyTorch or without a device it prints the reason and measures nothing (exit status 3).
"""

import argparse
import json
import statistics
import sys

KV_HEADS, GROUP, DIM, D_PHI, ANCHORS = 8, 4, 128, 128, 20


def median_seconds(torch, run, rounds):
    """Returns the median over `rounds` replays as (seconds, "graph" or "eager")."""
    how = "graph"
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for _ in range(3):
            run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            run()
        replay = graph.replay
    except RuntimeError:
        how, replay = "eager", run
        torch.cuda.synchronize()
    times = []
    for i in range(rounds + 2):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        replay()
        end.record()
        end.synchronize()
        if i >= 2:
            times.append(begin.elapsed_time(end) * 1e-3)
    return statistics.median(times), how


class Step:
    """Runs each operation of the step in its own kernel, as the paper's implementation does."""

    def __init__(self, torch, k):
        self.torch = torch
        gen = torch.Generator(device="cuda").manual_seed(1)

        def normal(*shape, scale=1.0, dtype=torch.float32):
            return (torch.randn(*shape, generator=gen, device="cuda") * scale).to(dtype)

        rows = k + ANCHORS
        self.k = k
        self.q = normal(KV_HEADS, GROUP, DIM)
        self.keys = normal(KV_HEADS, rows, DIM, dtype=torch.bfloat16)
        self.values = normal(KV_HEADS, rows, DIM, dtype=torch.bfloat16)
        self.phi_k = [(normal(KV_HEADS, DIM, DIM, scale=0.05), normal(KV_HEADS, 1, DIM, scale=0.05))
                      for _ in range(4)]
        self.phi_q = [(normal(KV_HEADS * GROUP, DIM, DIM, scale=0.05),
                       normal(KV_HEADS * GROUP, 1, DIM, scale=0.05)) for _ in range(4)]
        self.m = normal(KV_HEADS, 1, D_PHI, scale=0.1) + 2
        self.u = torch.full((KV_HEADS, 1, D_PHI), 1e6, device="cuda")
        self.t = normal(KV_HEADS, D_PHI, DIM)

    def exact(self):
        torch = self.torch
        scores = self.q @ self.keys.float().transpose(1, 2) / DIM**0.5
        top = scores.amax(-1, keepdim=True)
        weight = torch.exp(scores - top)
        return top, weight.sum(-1, keepdim=True), weight @ self.values.float()

    def log_phi(self, x, layers):
        torch = self.torch
        (w_in, b_in), (w1, b1), (w2, b2), (w_out, b_out) = layers
        g0 = torch.baddbmm(b_in, x, w_in)
        hidden = torch.nn.functional.gelu(torch.baddbmm(b1, g0, w1))
        return torch.baddbmm(b_out, g0 + 0.5 * torch.baddbmm(b2, hidden, w2), w_out)

    def select_only(self):
        top, mass, weighted = self.exact()
        return weighted / mass, top + self.torch.log(mass)

    def with_phi(self):
        torch = self.torch
        top, mass, weighted = self.exact()
        retrieved = self.values[:, ANCHORS:].float()
        features = torch.exp(self.log_phi(self.keys[:, ANCHORS:].float(), self.phi_k) - self.m)
        u = (self.u - features.sum(1, keepdim=True)).clamp_min(1e-12)
        t = self.t - features.transpose(1, 2) @ retrieved
        log_q = self.log_phi(self.q.reshape(KV_HEADS * GROUP, 1, DIM), self.phi_q)
        a = log_q.reshape(KV_HEADS, GROUP, D_PHI) + self.m + torch.log(u)
        log_z = torch.logsumexp(a, -1, keepdim=True)
        value = torch.softmax(a, -1) @ (t / u.transpose(1, 2))
        shift = torch.maximum(top, log_z)
        exact, rest = torch.exp(top - shift), torch.exp(log_z - shift)
        return (exact * weighted + rest * value) / (exact * mass + rest), shift


def sdpa(torch, n_tokens):
    q = torch.randn(1, KV_HEADS * GROUP, 1, DIM, device="cuda", dtype=torch.bfloat16)
    k, v = (torch.randn(1, KV_HEADS, n_tokens, DIM, device="cuda", dtype=torch.bfloat16)
            for _ in range(2))
    return lambda: torch.nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)


def measure(torch, rounds, ours):
    values, ratios = {}, {}

    def note(name, seconds, how):
        values[name + "_us"] = seconds * 1e6
        print(f"  {name:44s} {seconds * 1e6:10.1f} us  ({how})")

    for k in (1311, 4096):
        step = Step(torch, k)
        alone, how = median_seconds(torch, step.select_only, rounds)
        note(f"unfused_select_only_k{k}", alone, how)
        whole, how = median_seconds(torch, step.with_phi, rounds)
        note(f"unfused_phi_k{k}", whole, how)
        mine = [ours.get(f"host_rows_k{k}_{name}_us", {}).get("median")
                for name in ("selection_only", "phi_recompute")]
        if all(mine):
            # The ratio of the times that phi adds, of the unfused step over the fused one.
            added = max(mine[1] - mine[0], 1e-3)
            ratios[f"phi_time_unfused_over_fused_k{k}"] = (whole - alone) * 1e6 / added
    for n_tokens in (16384, 131072, 1048576):
        try:
            seconds, how = median_seconds(torch, sdpa(torch, n_tokens), rounds)
        except torch.cuda.OutOfMemoryError:
            print(f"  skipped: SDPA at {n_tokens} tokens does not fit")
            continue
        name = f"{n_tokens // 1024}k"
        note(f"sdpa_{name}", seconds, how)
        mine = ours.get(f"device_rows_step_1pct_{name}_us", {}).get("median")
        if mine:
            ratios[f"step_over_sdpa_speedup_{name}"] = seconds * 1e6 / mine
    return values, ratios


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", help="where the figures go")
    parser.add_argument("--step", help="the JSON that gpu_step_bench wrote on this device")
    parser.add_argument("--rounds", type=int, default=30)
    args = parser.parse_args()
    out = {"benchmark": "gpu_compare", "device": None, "values": {}, "ratios": {}, "skipped": []}
    try:
        import torch
        if not torch.cuda.is_available():
            out["skipped"].append("no device: PyTorch sees none")
    except ImportError:
        out["skipped"].append("PyTorch is not installed")
    if out["skipped"]:
        print("  skipped:", out["skipped"][0])
    else:
        ours = {}
        if args.step:
            try:
                with open(args.step, encoding="utf-8") as file:
                    ours = json.load(file)["values"]
            except OSError as error:
                sys.exit(f"gpu_compare: {error}; run gpu_step_bench --json first, or leave --step out")
        torch.backends.cuda.matmul.allow_tf32 = False
        out["device"] = torch.cuda.get_device_name()
        out["torch"] = torch.__version__
        print(f"{out['device']}, PyTorch {torch.__version__}")
        with torch.inference_mode():
            out["values"], out["ratios"] = measure(torch, args.rounds, ours)
        for name, value in out["ratios"].items():
            print(f"  {name:44s} {value:10.2f}")
    if args.json:
        with open(args.json, "w", encoding="utf-8") as file:
            json.dump(out, file, indent=2)
            file.write("\n")
    return 3 if out["skipped"] else 0


if __name__ == "__main__":
    sys.exit(main())
