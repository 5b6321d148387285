"""Trains the small model: ``python -m prefixd.train.model --out DIR --minutes 60``."""

from __future__ import annotations

import argparse
import math
import os
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

from prefixd import planted
from prefixd.train import check
from prefixd.train.corpus import GPL3, Corpus, gather
from prefixd.train.muon import Optimizers
from prefixd.train.net import Net, NetConfig, export_hf

Log = Callable[[str], None]
PHASES = "0:128,0.05:256,0.30:512,0.40:1024,0.50:2048,0.58:4096,0.70:8192"


@dataclass
class TrainConfig:
    """Holds everything that a run depends on besides the corpus."""

    net: NetConfig = field(default_factory=NetConfig)
    phases: str = PHASES
    lr: float = 3e-3
    muon_lr: float = 0.012
    final_lr: float = 0.05
    warmup: int = 50
    decay_from: float = 0.75
    weight_decay: float = 0.02
    tokens_per_step: int = 4096
    seed: int = 1
    position_limit: int = 16384
    task_share: float = 0.55
    drill_share: float = 0.12
    bf16: bool = True


def parse_phases(text: str) -> list[tuple[float, int]]:
    """Parses ``0:128,0.1:256`` -> [(0.0, 128), (0.1, 256)]; fractions of the run, and lengths."""
    try:
        out = [(float(a), int(b)) for a, b in (p.split(":") for p in text.split(","))]
    except ValueError as e:
        raise SystemExit(f"--phases: expected fraction:length,... but got {text!r}") from e
    if not out or out[0][0] != 0 or sorted(out) != out or min(n for _, n in out) < 64:
        raise SystemExit("--phases must begin at 0, rise, and have lengths of at least 64")
    return out


class Trainer:
    """Holds the run's state; ``save`` and ``load`` continue it where it stopped."""

    def __init__(self, cfg: TrainConfig, corpus: Corpus, device: torch.device) -> None:
        self.cfg, self.corpus, self.device = cfg, corpus, device
        self.phases = parse_phases(cfg.phases)
        self.net = Net(cfg.net, cfg.seed).to(device)
        self.opt = Optimizers(self.net, cfg.lr, cfg.muon_lr, cfg.weight_decay)
        self.step = self.warm_from = 0
        self.tokens = 0
        self.elapsed = 0.0
        self.by_length: dict[int, dict[str, float]] = {}

    def lr_at(self, progress: float) -> float:
        """Returns the learning rate as a fraction of its peak: warm-up, constant, linear decay."""
        c = self.cfg
        lr = min(1.0, (self.step - self.warm_from + 1) / c.warmup)
        if progress > c.decay_from:
            left = max(0.0, (1 - progress) / (1 - c.decay_from))
            lr *= c.final_lr + (1 - c.final_lr) * left
        return lr

    def length_at(self, progress: float, rng: np.random.Generator) -> int:
        """Returns the phase's length; one step in six takes a shorter phase's."""
        known = [n for f, n in self.phases if f <= progress]
        if len(known) > 2 and rng.random() < 1 / 6:
            return int(rng.choice(known[1:-1]))
        return known[-1]

    def train_step(self, progress: float) -> dict[str, float]:
        c = self.cfg
        rng = np.random.default_rng([c.seed, self.step])
        length = self.length_at(progress, rng)
        size = max(1, c.tokens_per_step // length)
        ids, weights, pos = planted.batch(
            rng, self.corpus.window, size, length, task_share=c.task_share,
            drill_share=c.drill_share if length <= 512 else c.drill_share / 4,
            plain=0.9 if length <= 512 else 0.75, limit=c.position_limit,
        )
        x = torch.from_numpy(ids).to(self.device)
        w = torch.from_numpy(weights).to(self.device)
        p = torch.from_numpy(pos).to(self.device)
        lr = self.lr_at(progress)
        self.opt.set_factor(lr)
        with torch.autocast(self.device.type, torch.bfloat16, enabled=c.bf16):
            logits = self.net.logits(self.net(x[:, :-1], p))
        each = F.cross_entropy(logits.flatten(0, 1), x[:, 1:].flatten(), reduction="none")
        flat = w.flatten()
        loss = (each * flat).sum() / flat.sum().clamp_min(1.0)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.net.parameters(), 1.0)
        self.opt.step()
        self.opt.zero_grad()
        self.step += 1
        self.tokens += size * length
        with torch.no_grad():
            answer = flat == planted.W_ANSWER
            text = flat == planted.W_TEXT
            hit = logits.flatten(0, 1).argmax(-1) == x[:, 1:].flatten()
            got = {"loss": float(loss.detach()), "lr": lr, "length": length}
            if bool(text.any()):
                got["bits"] = float(each[text].mean()) / math.log(2)
            if bool(answer.any()):
                got["answer"] = float(hit[answer].float().mean())
        mean = self.by_length.setdefault(length, {})
        for k in ("loss", "bits", "answer"):
            if k in got:
                mean[k] = got[k] if k not in mean else 0.95 * mean[k] + 0.05 * got[k]
        return got

    def save(self, path: Path) -> None:
        tmp = path.with_name(path.name + ".part")
        torch.save(
            {
                "net": self.net.state_dict(), "opt": self.opt.state_dict(), "step": self.step,
                "tokens": self.tokens, "elapsed": self.elapsed, "by_length": self.by_length,
                "warm_from": self.warm_from, "shape": asdict(self.cfg.net),
            },
            tmp,
        )
        os.replace(tmp, path)

    def load(self, path: Path, *, weights_only: bool = False) -> None:
        """Continues from a saved state; ``weights_only`` starts the optimizers anew."""
        try:
            s = torch.load(path, map_location=self.device, weights_only=True)
        except Exception as e:
            raise SystemExit(f"cannot resume from {path}: {e}") from e
        if s["shape"] != asdict(self.cfg.net):
            raise SystemExit(f"{path} holds a model of another shape: {s['shape']}")
        self.net.load_state_dict(s["net"])
        if not weights_only:
            self.opt.load_state_dict(s["opt"])
        self.warm_from = s["step"] if weights_only else s["warm_from"]
        self.step, self.tokens, self.elapsed = s["step"], s["tokens"], s["elapsed"]
        self.by_length = s["by_length"]


def report(t: Trainer, evaluate_at: list[int], log: Log) -> None:
    gpl = GPL3.read_bytes() if GPL3.is_file() else t.corpus.heldout[0]
    got = []
    t.net.eval()
    for n in evaluate_at:
        prompts = max(1, min(8, 8192 // n))
        right, asked = check.recall(t.net, gpl, n, prompts, max(2, min(8, n // 100)))
        got.append(f"{n}: {right}/{asked}")
    bits = check.bits_per_byte(t.net, t.corpus.heldout, 512, 16)
    t.net.train()
    log(f"  evaluation at step {t.step}: recall {', '.join(got)}; held-out {bits:.3f} bits/byte")


def run(t: Trainer, out: Path, minutes: float | None, steps: int | None, every: dict[str, float],
        log: Log = print) -> None:
    """Trains to the end of the budget, with progress lines, evaluations and checkpoints."""
    total = minutes * 60 if minutes is not None else 0.0
    state = out / "state.pt"
    last = {"log": time.monotonic(), "save": time.monotonic(), "eval": time.monotonic()}
    seen, best_length = t.tokens, 0
    while True:
        progress = t.step / steps if steps is not None else t.elapsed / total
        if progress >= 1:
            break
        begin = time.monotonic()
        got = t.train_step(progress)
        now = time.monotonic()
        t.elapsed += now - begin
        if now - last["log"] >= every["log"]:
            rate = (t.tokens - seen) / (now - last["log"])
            rows = " ".join(
                f"{n}:{m.get('answer', float('nan')):.3f}" for n, m in sorted(t.by_length.items())
            )
            m = t.by_length[int(got["length"])]
            log(f"{progress:6.1%} step {t.step} tokens {t.tokens / 1e6:.2f}M {rate:.0f} tok/s "
                f"len {got['length']} lr x{got['lr']:.2f} loss {m['loss']:.3f} "
                f"text {m.get('bits', float('nan')):.2f} bits; answer bytes right {rows}")
            last["log"], seen = now, t.tokens
        if now - last["save"] >= every["save"]:
            t.save(state)
            last["save"] = now
        best_length = max(best_length, int(got["length"]))
        if now - last["eval"] >= every["eval"]:
            report(t, [n for _, n in t.phases if 128 < n <= 2 * best_length], log)
            last["eval"] = time.monotonic()
            last["log"], seen = time.monotonic(), t.tokens
    t.save(state)


def main(argv: list[str] | None = None) -> int:
    a = argparse.ArgumentParser(prog="python -m prefixd.train.model", description=__doc__)
    a.add_argument("--out", type=Path, required=True, help="folder for state and model")
    a.add_argument("--minutes", type=float, help="length of the run in minutes")
    a.add_argument("--steps", type=int, help="length in steps instead (repeatable)")
    a.add_argument("--phases", default=PHASES, help="curriculum (%(default)s)")
    a.add_argument("--lr", type=float, default=3e-3, help="AdamW's rate, embeddings (%(default)s)")
    a.add_argument("--muon-lr", type=float, default=0.012, help="Muon's: matrices (%(default)s)")
    a.add_argument("--init", type=Path, help="begin from the weights in this state file")
    a.add_argument("--decay-from", type=float, default=0.75, help="fraction after which it decays")
    a.add_argument("--seed", type=int, default=1)
    a.add_argument("--threads", type=int, default=0, help="CPU threads (0: torch's choice)")
    a.add_argument("--corpus", type=Path, help="cache file of the corpus (default: OUT/corpus.npz)")
    a.add_argument("--corpus-mib", type=int, default=40, help="size of the corpus in MiB")
    a.add_argument("--fresh", action="store_true", help="begin anew even where OUT has a state")
    a.add_argument("--export", type=Path, help="folder for the exported model (default: OUT)")
    a.add_argument("--export-only", action="store_true", help="export the saved state and stop")
    a.add_argument("--log-seconds", type=float, default=20)
    a.add_argument("--save-seconds", type=float, default=120)
    a.add_argument("--eval-seconds", type=float, default=240)
    o = a.parse_args(argv)
    if (o.minutes is None) == (o.steps is None) and not o.export_only:
        a.error("give either --minutes or --steps")
    if (o.minutes is not None and o.minutes <= 0) or (o.steps is not None and o.steps <= 0):
        a.error("the length of the run must be positive")
    if o.threads:
        torch.set_num_threads(o.threads)
    o.out.mkdir(parents=True, exist_ok=True)
    cache = o.corpus or o.out / "corpus.npz"
    if cache.is_file():
        corpus = Corpus.load(cache)
    else:
        corpus = gather(o.corpus_mib << 20)
        corpus.save(cache)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    cfg = TrainConfig(
        phases=o.phases, lr=o.lr, muon_lr=o.muon_lr, seed=o.seed, decay_from=o.decay_from
    )
    t = Trainer(cfg, corpus, device)
    state = o.out / "state.pt"
    if state.is_file() and not o.fresh:
        t.load(state)
        print(f"resumed at step {t.step}, {t.tokens} tokens, {t.elapsed / 60:.1f} minutes")
    elif o.init:
        t.load(o.init, weights_only=True)
        print(f"weights of step {t.step}, {t.tokens} tokens, {t.elapsed / 60:.1f} minutes")
    print(f"{sum(p.numel() for p in t.net.parameters())} parameters, {device}")

    def log(text: str) -> None:
        print(text, flush=True)

    if not o.export_only:
        every = {"log": o.log_seconds, "save": o.save_seconds, "eval": o.eval_seconds}
        run(t, o.out, o.minutes, o.steps, every, log)
        report(t, [n for _, n in t.phases if n > 128], log)
    notes = {"steps": str(t.step), "tokens": str(t.tokens), "minutes": f"{t.elapsed / 60:.1f}"}
    folder = o.export or o.out
    digest = export_hf(t.net, folder, notes)
    print(f"exported {folder / 'model.safetensors'} sha256 {digest}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
