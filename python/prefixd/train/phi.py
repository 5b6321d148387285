"""Train the feature maps: ``python -m prefixd.train.phi --model DIR --length 8192``."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from prefixd.train.check import needle_prompt
from prefixd.train.corpus import Corpus, gather
from prefixd.train.net import Net, load_hf
from prefixd.train.phi_net import (
    FORMAT, Pair, export_phi, file_digest, load_phi, phi_loss, set_scale, write_golden,
)

N_SINK, N_TAIL = 4, 16


@dataclass
class PhiConfig:
    """What one training of maps depends on, besides model and corpus."""

    length: int = 8192
    d_emb: int = 64
    d_phi: int = 64
    prompts: int = 24
    held: int = 3
    queries: int = 256
    batch: int = 64
    keys: int = 2048
    lr: float = 6e-3
    patience: int = 6
    check_every: int = 100
    max_steps: int = 3000
    seed: int = 7


@dataclass
class Log:
    """One layer: decode-time queries q [P, Hq, n, dh], keys k [P, Hkv, |M|, dh] of the middle."""

    q: Tensor
    k: Tensor


def prompt_ids(rng: np.random.Generator, corpus: Corpus, length: int, extra: int) -> np.ndarray:
    """A prompt of ``length`` ids with needles, then ``extra`` ids of questions and text."""
    text = corpus.window(rng, length + extra).tobytes()
    count = int(rng.integers(2, max(3, min(24, length // 100) + 1)))
    ids, lines = needle_prompt(rng, text[:length], length, count)
    used = length - 2 - sum(len(x.text) + 2 for x in lines)
    order = rng.permutation(len(lines))[: int(rng.integers(1, 5))]
    asked = "".join(lines[int(i)].text + "\n" for i in order).encode()
    tail = asked + text[used:] if rng.random() < 0.5 else text[used : used + extra // 2] + asked
    full = (tail + text)[: length + extra - len(ids)]
    return np.concatenate([ids, np.frombuffer(full, np.uint8).astype(np.int64)])


@torch.no_grad()
def collect(net: Net, corpus: Corpus, cfg: PhiConfig, log=print) -> list[Log]:
    """Run the model over prompts; keep keys of M and the queries that come after the prefix."""
    device = next(net.parameters()).device
    qs: list[list[Tensor]] = [[] for _ in net.layers]
    ks: list[list[Tensor]] = [[] for _ in net.layers]
    n = cfg.length

    def tap(layer: int, q: Tensor, k: Tensor, v: Tensor) -> None:
        qs[layer].append(q[0, :, n:].to(torch.bfloat16))
        ks[layer].append(k[0, :, N_SINK : n - N_TAIL].to(torch.bfloat16))

    begin = time.monotonic()
    for p in range(cfg.prompts):
        rng = np.random.default_rng([cfg.seed, n, p])
        ids = torch.from_numpy(prompt_ids(rng, corpus, n, cfg.queries)).to(device)
        with torch.autocast(device.type, torch.bfloat16):
            net(ids[None], None, tap)
    log(f"logged {cfg.prompts} prompts of {n} tokens in {time.monotonic() - begin:.0f} s")
    return [Log(torch.stack(q), torch.stack(k)) for q, k in zip(qs, ks, strict=True)]


def measure(pair: Pair, q: Tensor, k: Tensor, scale: float, limit: int = 64) -> dict[str, float]:
    """KL and mass ratio over whole prompts; q [P, G, n, dh], k [P, m, dh]."""
    kls, ratios = [], []
    with torch.no_grad():
        for p in range(len(q)):
            step = max(1, q.shape[2] // limit)
            qq, kk = q[p, :, ::step].float(), k[p].float()
            got = phi_loss(scale * (qq @ kk.T), pair.log_kernel(qq, kk))
            kls.append(float(got["kl"]))
            ratios.append(got["log_ratio"].flatten())
    ratio = torch.cat(ratios)
    return {
        "kl": float(np.mean(kls)),
        "mass_ratio_median": float(ratio.median().exp()),
        "mass_log_error": float(ratio.abs().mean()),
    }


def train_head(
    pair: Pair, log: Log, head: int, cfg: PhiConfig, scale: float, seconds: float
) -> dict[str, float]:
    """Train one KV head's maps in place; the best state on the held prompts is kept."""
    group = pair.phi_q.alpha.shape[0]
    q = log.q[:, head * group : (head + 1) * group]
    k = log.k[:, head]
    train, held = slice(0, len(q) - cfg.held), slice(len(q) - cfg.held, len(q))
    opt = torch.optim.Adam(pair.parameters(), lr=cfg.lr, betas=(0.9, 0.98))
    rng = np.random.default_rng([cfg.seed, head])
    device = q.device
    best = measure(pair, q[held], k[held], scale)
    first = best["kl"]
    state = {n: t.clone() for n, t in pair.state_dict().items()}
    begin, stale, step = time.monotonic(), 0, 0
    while step < cfg.max_steps:
        used = max((time.monotonic() - begin) / seconds, step / cfg.max_steps)
        if used >= 1:
            break
        warm = min(1.0, (step + 1) / 30)
        for g in opt.param_groups:
            g["lr"] = cfg.lr * warm * (0.02 + 0.98 * 0.5 * (1 + np.cos(np.pi * used)))
        p = int(rng.integers(0, train.stop))
        pick_q = torch.from_numpy(rng.integers(0, q.shape[2], cfg.batch)).to(device)
        kk = k[p]
        if used < 0.6 and len(kk) > cfg.keys:
            kk = kk[torch.from_numpy(rng.integers(0, len(kk), cfg.keys)).to(device)]
        qq, kk = q[p][:, pick_q].float(), kk.float()
        loss = phi_loss(scale * (qq @ kk.T), pair.log_kernel(qq, kk))["loss"]
        opt.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(pair.parameters(), 1.0)
        opt.step()
        step += 1
        if step % cfg.check_every == 0:
            got = measure(pair, q[held], k[held], scale)
            if got["kl"] < best["kl"] * 0.995:
                stale = 0
            elif used > 0.6:
                stale += 1
            if got["kl"] < best["kl"]:
                best, state = got, {n: t.clone() for n, t in pair.state_dict().items()}
            if stale >= cfg.patience:
                break
    got = measure(pair, q[held], k[held], scale)
    if got["kl"] < best["kl"]:
        best, state = got, {n: t.clone() for n, t in pair.state_dict().items()}
    pair.load_state_dict(state)
    some = slice(0, min(4, train.stop))
    set_scale(pair, q[some], k[some], scale)
    best = measure(pair, q[held], k[held], scale)
    return {"kl_before": first, **best, "steps": float(step)}


def train_length(
    net: Net, digest: str, corpus: Corpus, cfg: PhiConfig, minutes: float, work: Path, out: Path,
    init: Path | None, log=print,
) -> list[dict[str, float]]:
    """All heads of one prefix length: resumes finished heads, exports the file."""
    c = net.cfg
    work.mkdir(parents=True, exist_ok=True)
    saved = work / f"phi-{cfg.length}.pt"
    done: dict[str, dict] = {}
    if saved.is_file():
        s = torch.load(saved, weights_only=True)
        if s["weights"] == digest:
            done = s["heads"]
            log(f"resumed: {len(done)} of {c.layers * c.kv_heads} heads are done")
    pairs = load_phi(init)[0] if init else {}
    begin = time.monotonic()
    logs = collect(net, corpus, cfg, log) if len(done) < c.layers * c.kv_heads else []
    reports = []
    todo = c.layers * c.kv_heads - len(done)
    for layer in range(c.layers):
        for h in range(c.kv_heads):
            key = (layer, h)
            pair = pairs.get(key) or Pair(
                c.q_heads // c.kv_heads, c.head_dim, cfg.d_emb, cfg.d_phi, 100 * layer + h
            )
            pairs[key] = pair
            name = f"{layer}.{h}"
            if name in done:
                pair.load_state_dict(done[name]["state"])
                reports.append(done[name]["report"])
                continue
            seconds = max(1.0, (minutes * 60 - (time.monotonic() - begin)) / todo)
            pair.to(logs[layer].q.device)
            got = train_head(pair, logs[layer], h, cfg, c.scale, seconds)
            todo -= 1
            got |= {"layer": float(layer), "kv_head": float(h)}
            reports.append(got)
            done[name] = {"state": pair.state_dict(), "report": got}
            tmp = saved.with_name(saved.name + ".part")
            torch.save({"weights": digest, "heads": done}, tmp)
            os.replace(tmp, saved)
            log(f"length {cfg.length} layer {layer} KV head {h}: KL {got['kl_before']:.3f} -> "
                f"{got['kl']:.3f}, mass ratio (median) {got['mass_ratio_median']:.3f}, "
                f"|log mass error| {got['mass_log_error']:.3f}, {got['steps']:.0f} steps")
    meta = {
        "format": FORMAT, "length": str(cfg.length), "d_emb": str(cfg.d_emb),
        "d_phi": str(cfg.d_phi), "n_layers": str(c.layers), "n_q_heads": str(c.q_heads),
        "n_kv_heads": str(c.kv_heads), "head_dim": str(c.head_dim), "scale": repr(c.scale),
        "weights": digest,
    }
    export_phi(pairs, meta, out)
    (work / f"phi-{cfg.length}.json").write_text(json.dumps(reports, indent=1) + "\n")
    log(f"exported {out}")
    return reports


def main(argv: list[str] | None = None) -> int:
    a = argparse.ArgumentParser(prog="python -m prefixd.train.phi", description=__doc__)
    a.add_argument("--model", type=Path, required=True, help="folder with config.json and weights")
    a.add_argument("--out", type=Path, help="folder for phi-LENGTH.safetensors (default: --model)")
    a.add_argument("--work", type=Path, required=True, help="folder for state and reports")
    a.add_argument("--corpus", type=Path, help="cached corpus (default: WORK/corpus.npz)")
    a.add_argument("--length", type=int, action="append", help="prefix length; may be repeated")
    a.add_argument("--minutes", type=float, default=15, help="budget per length (%(default)s)")
    a.add_argument("--prompts", type=int, default=24, help="prompts logged (%(default)s)")
    a.add_argument("--max-steps", type=int, default=3000, help="most steps per head (%(default)s)")
    a.add_argument("--init", type=Path, help="continue from these maps (after weights changed)")
    a.add_argument("--golden", type=Path, help="also write this golden JSON from the last length")
    a.add_argument("--threads", type=int, default=0, help="CPU threads (0: torch's choice)")
    a.add_argument("--d-phi", type=int, default=64)
    a.add_argument("--d-emb", type=int, default=64)
    o = a.parse_args(argv)
    if o.threads:
        torch.set_num_threads(o.threads)
    lengths = o.length or [8192]
    if min(lengths) < 256 or o.minutes <= 0 or o.prompts < 4:
        a.error("need --length of at least 256, positive --minutes and at least 4 --prompts")
    net = load_hf(o.model)
    net.to("cuda" if torch.cuda.is_available() else "cpu").eval().requires_grad_(False)
    for n in lengths:
        if n + 256 > net.cfg.max_positions:
            a.error(f"--length {n}: the model has {net.cfg.max_positions} positions")
    o.work.mkdir(parents=True, exist_ok=True)
    cache = o.corpus or o.work / "corpus.npz"
    corpus = Corpus.load(cache) if cache.is_file() else gather()
    if not cache.is_file():
        corpus.save(cache)
    out = o.out or o.model
    digest = file_digest(o.model / "model.safetensors")

    def log(text: str) -> None:
        print(text, flush=True)

    for n in lengths:
        cfg = PhiConfig(n, o.d_emb, o.d_phi, prompts=o.prompts, max_steps=o.max_steps)
        path = out / f"phi-{n}.safetensors"
        train_length(net, digest, corpus, cfg, o.minutes, o.work, path, o.init, log)
        if o.golden:
            write_golden(o.golden, path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
