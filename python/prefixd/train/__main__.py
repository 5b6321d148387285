"""Trains feature maps (φ) for a model, distilled from its own attention on your texts.

    python -m prefixd.train --model DIR --text CORPUS --out MAPS --length 8192 --length 32768

The model is frozen. For every length its queries and keys are captured while it reads windows of
the texts. Then one pair of maps per KV head is trained on them and written to
MAPS/phi-LENGTH.safetensors, which stores load (feature_maps of a model's registration,
docs/format.md). After Ctrl-C or another interruption the same command continues. Models: those that
prefixd.transformers splices (Llama, Qwen, Mistral, Gemma families), on the CPU or a CUDA device."""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from transformers import AutoModelForCausalLM

from prefixd.errors import PrefixdError
from prefixd.train.captured import Captured, Shape
from prefixd.train.distill import HeadTraining, Recipe, Report
from prefixd.train.net import write_atomic
from prefixd.train.phi_net import FORMAT, Pair, export_phi, load_phi, write_golden
from prefixd.transformers.identity import attention_layers
from prefixd.transformers.texts import Encoder, load_encoder, read_texts
from prefixd.weights import checkpoint_digest

Log = Callable[[str], None]


def windows(
    encoder: Encoder, texts: Sequence[str], tokens: int, count: int, seed: int, from_start: bool,
    log: Log,
) -> list[np.ndarray]:
    """Returns `count` prompts of `tokens` ids: windows of the texts joined, evenly spaced; or, with
    `from_start`, the beginnings of that many texts. They are in random order, so that the held-out
    ones come from anywhere."""
    rng = np.random.default_rng([seed, tokens])
    own = [] if encoder.bos is None else [encoder.bos]
    room = tokens - len(own)
    if from_start:
        long = [ids for text in texts if len(ids := encoder.encode(text)) >= room]
        if len(long) < count:
            raise SystemExit(
                f"--from-start needs {count} texts of {room} tokens, and {len(long)} are as long: more or "
                "longer texts, fewer --prompts, or a smaller --length"
            )
        picked = [long[int(i)] for i in rng.permutation(len(long))[:count]]
        return [np.array([*own, *ids[:room]], np.int64) for ids in picked]
    stream = np.concatenate([np.array(encoder.encode(text + "\n"), np.int64) for text in texts])
    if len(stream) < room:
        raise SystemExit(
            f"the texts have {len(stream)} tokens, a prompt of --length and --queries needs {room}: more "
            "text, or a smaller --length"
        )
    if len(stream) < room * count:
        log(f"the texts have {len(stream)} tokens for {count} prompts of {tokens}: windows overlap, so "
            "the held-out figures flatter; more text is better")
    starts = np.linspace(0, len(stream) - room, count).astype(int)
    rng.shuffle(starts)
    return [np.concatenate([own, stream[s : s + room]]).astype(np.int64) for s in starts]


class Job:
    """Holds one model and its training, over any number of lengths."""

    def __init__(self, o: argparse.Namespace, log: Log) -> None:
        self.o, self.log = o, log
        device = o.device
        if device == "auto":
            device = "cuda" if torch.cuda.is_available() else "cpu"
        self.device = device
        kind = "auto" if o.dtype == "auto" else getattr(torch, o.dtype)
        self.model = AutoModelForCausalLM.from_pretrained(o.model, dtype=kind)
        self.model.to(device).eval().requires_grad_(False)
        self.config = self.model.config.get_text_config(decoder=True)
        specs, modules = attention_layers(self.model, self.config)
        first: Any = modules[0]
        self.n_layers, self.head_dim = len(specs), int(first.head_dim)
        self.layers = tuple(
            i for i, s in enumerate(specs) if s.sliding_window == 0 and s.softcap == 0)
        if not self.layers:
            raise SystemExit(
                "every layer of this model has a sliding window or a softcap: such layers attend "
                "natively or exactly, and there is nothing to train"
            )
        scales = {specs[i].scale for i in self.layers}
        if len(scales) > 1:
            raise SystemExit(f"this model's layers scale their scores differently ({scales})")
        self.scale = scales.pop()
        self.digest = "blake2b:" + checkpoint_digest(Path(o.model))
        self.encoder = load_encoder(o.tokenizer, o.model, self.config)
        self.kv_heads = int(self.config.num_key_value_heads)
        self.q_heads = int(self.config.num_attention_heads)
        self.recipe = Recipe(
            d_phi=o.d_phi or self.head_dim, d_emb=o.d_emb or self.head_dim, steps=o.steps,
            held=max(2, o.prompts // 8), keys=o.keys, patience=o.patience, tau=o.tau, seed=o.seed,
        )

    def length(self, n: int, texts: Sequence[str]) -> Path:
        o, began = self.o, time.monotonic()
        work: Path = o.work
        work.mkdir(parents=True, exist_ok=True)
        prompts = windows(self.encoder, texts, n + o.queries, o.prompts, o.seed, o.from_start, self.log)
        source = hashlib.blake2b(
            self.digest.encode() + b"".join(p.tobytes() for p in prompts), digest_size=16).hexdigest()
        shape = Shape(self.layers, o.prompts, n, o.queries, self.q_heads, self.kv_heads,
                      self.head_dim, source)
        captured = Captured(work / f"captured-{n}", shape)
        if captured.done < o.prompts:
            self.log(f"length {n}: capturing {o.prompts} prompts ({shape.bytes / 2**20:.0f} MiB); "
                     f"{captured.done} are there")
            captured.capture(self.model, prompts, self._bar(f"length {n}: captured", o.prompts))
        reports, pairs = self._heads(n, captured, source, began)
        path: Path = o.out / f"phi-{n}.safetensors"
        meta = {
            "format": FORMAT, "length": str(n), "d_emb": str(self.recipe.d_emb),
            "d_phi": str(self.recipe.d_phi), "n_layers": str(self.n_layers),
            "n_q_heads": str(self.q_heads), "n_kv_heads": str(self.kv_heads),
            "head_dim": str(self.head_dim), "scale": repr(self.scale), "weights": self.digest,
        }
        export_phi(pairs, meta, path)
        self._tell(n, reports, path)
        if not o.keep_captured:
            captured.remove()
        return path

    def _bar(self, what: str, total: int) -> Callable[[int], None]:
        def show(done: int) -> None:
            self.log(f"{what} {done} of {total}")
        return show

    def _pair(self, layer: int, head: int, init: dict[tuple[int, int], Pair]) -> Pair:
        pair = init.get((layer, head))
        if pair is not None:
            return pair
        return Pair(self.q_heads // self.kv_heads, self.head_dim, self.recipe.d_emb,
                    self.recipe.d_phi, 100 * layer + head)

    def _heads(
        self, n: int, captured: Captured, source: str, began: float
    ) -> tuple[list[dict[str, Any]], dict[tuple[int, int], Pair]]:
        o = self.o
        init = self._initial()
        saved = o.work / f"heads-{n}.pt"
        want = {"source": source, "recipe": asdict(self.recipe),
                "init": None if o.init is None else str(o.init)}
        done: dict[str, dict[str, Any]] = {}
        if saved.is_file():
            state = torch.load(saved, weights_only=True)
            if state["want"] == want:
                done = state["heads"]
                self.log(f"length {n}: resumed, {len(done)} heads are done")
        pairs = {(x, h): self._pair(x, h, init)
                 for x in range(self.n_layers) for h in range(self.kv_heads)}
        names = [(x, h) for x in self.layers for h in range(self.kv_heads)]
        reports = []
        for i, (layer, head) in enumerate(names):
            name, pair = f"{layer}.{head}", pairs[layer, head]
            if name not in done:
                q, k = captured.head(layer, head, self.device)
                training = HeadTraining(
                    pair, q, k, self.recipe, self.scale, (layer, head), json.dumps(want))
                partial = o.work / f"head-{n}.pt"
                if training.load(partial):
                    self.log(f"length {n}: layer {layer}, KV head {head} goes on at step {training.step}")
                seconds = None
                if o.minutes is not None:
                    left = o.minutes * 60 - (time.monotonic() - began)
                    seconds = max(1.0, left / (len(names) - i))
                report = training.run(
                    partial, seconds=seconds, progress=self._progress(n, layer, head))
                partial.unlink(missing_ok=True)
                pair.to("cpu")
                done[name] = {"state": pair.state_dict(), "report": report}
                part = saved.with_name(saved.name + ".part")
                torch.save({"want": want, "heads": done}, part)
                os.replace(part, saved)
                self._say(n, i + 1, len(names), layer, head, report)
            pair.load_state_dict(done[name]["state"])
            reports.append({"layer": layer, "kv_head": head, **done[name]["report"]})
        return reports, pairs

    def _initial(self) -> dict[tuple[int, int], Pair]:
        if self.o.init is None:
            return {}
        pairs, meta = load_phi(self.o.init)
        want = (self.recipe.d_phi, self.recipe.d_emb, self.head_dim, self.kv_heads)
        have = tuple(int(meta[k]) for k in ("d_phi", "d_emb", "head_dim", "n_kv_heads"))
        if have != want:
            raise SystemExit(f"--init has d_phi, d_emb, head_dim, KV heads of {have}, not {want}")
        return pairs

    def _progress(self, n: int, layer: int, head: int) -> Callable[[int, int, float], None] | None:
        if not sys.stderr.isatty():
            return None

        def show(step: int, steps: int, kl: float) -> None:
            print(f"\rlength {n}: layer {layer}, KV head {head}: step {step} of {steps}, "
                  f"held-out KL {kl:.3f} ", end="\r", file=sys.stderr, flush=True)
        return show

    def _say(self, n: int, i: int, of: int, layer: int, head: int, r: Report) -> None:
        self.log(f"length {n}: head {i} of {of} (layer {layer}, KV head {head}): KL "
                 f"{r['kl_before']:.3f} -> {r['kl']:.3f}, mass ratio {r['mass_ratio_median']:.3f}, "
                 f"{r['steps']:.0f} steps{', stopped early' if r['early'] else ''}, "
                 f"{r['seconds']:.0f} s")

    def _tell(self, n: int, reports: list[dict[str, Any]], path: Path) -> None:
        """Returns per head the KL over the middle before and after, and estimated over true mass of
        the middle."""
        lines = ["| layer, KV head | KL before | KL | mass ratio, median | mean abs. log mass error "
                 "| steps |",
                 "|---|---|---|---|---|---|"]
        lines += [
            f"| {r['layer']}, {r['kv_head']} | {r['kl_before']:.3f} | {r['kl']:.3f} | "
            f"{r['mass_ratio_median']:.3f} | {r['mass_log_error']:.3f} | {r['steps']:.0f} |"
            for r in reports
        ]
        body = {"length": n, "file": path.name, "weights": self.digest, "recipe": asdict(self.recipe),
                "prompts": self.o.prompts, "queries": self.o.queries, "heads": reports}
        write_atomic(self.o.out / f"phi-{n}.json", (json.dumps(body, indent=1) + "\n").encode())
        write_atomic(self.o.out / f"phi-{n}.md", ("\n".join(lines) + "\n").encode())
        self.log("\n".join(lines))
        self.log(f"exported {path}")


def parser() -> argparse.ArgumentParser:
    a = argparse.ArgumentParser(
        prog="python -m prefixd.train", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter)
    a.add_argument("--model", type=Path, required=True,
                   help="checkpoint directory (config.json, safetensors; the maps carry its digest)")
    a.add_argument("--text", type=Path, action="append", required=True,
                   help="file or directory of texts like those to be stored; may be repeated")
    a.add_argument("--out", type=Path, required=True, help="directory for the maps and their reports")
    a.add_argument("--work", type=Path,
                   help="directory for captured tensors and state (default: OUT/work)")
    a.add_argument("--length", type=int, action="append",
                   help="prefix length the maps are for; may be repeated (default: 8192)")
    a.add_argument("--prompts", type=int, default=24,
                   help="captured per length; an eighth is held out (%(default)s)")
    a.add_argument("--queries", type=int, default=256,
                   help="tokens behind the prefix whose queries are learned from (%(default)s)")
    a.add_argument("--from-start", action="store_true",
                   help="prompts are beginnings of texts, not windows of all texts joined")
    a.add_argument("--steps", type=int, default=1500, help="most steps per head (%(default)s)")
    a.add_argument("--minutes", type=float,
                   help="per length: fewer steps where they would take longer")
    a.add_argument("--patience", type=int, default=6,
                   help="checks (of 100 steps) without progress that end a head (%(default)s)")
    a.add_argument("--keys", type=int, default=2048,
                   help="keys sampled per step in the first part (%(default)s)")
    a.add_argument("--d-phi", type=int, default=0, help="features (default: the head dimension)")
    a.add_argument("--d-emb", type=int, default=0, help="width (default: the head dimension)")
    a.add_argument("--tau", type=float, default=1.0, help="temperature of the KL term (%(default)s)")
    a.add_argument("--init", type=Path, help="begin with these maps instead of random ones")
    a.add_argument("--tokenizer", default="auto",
                   help="directory, name, or 'bytes' for byte-level models (%(default)s)")
    a.add_argument("--keep-captured", action="store_true", help="do not remove the captured tensors")
    a.add_argument("--golden", type=Path, help="also write three vectors through the last maps (tests)")
    a.add_argument("--device", default="auto", help="cpu, cuda, cuda:1, ... (%(default)s)")
    a.add_argument("--dtype", default="auto", choices=["auto", "float32", "float16", "bfloat16"],
                   help="the model's; auto: as the checkpoint says")
    a.add_argument("--threads", type=int, default=0, help="CPU threads (0: torch's choice)")
    a.add_argument("--seed", type=int, default=7)
    return a


def main(argv: list[str] | None = None, log: Log | None = None) -> int:
    a = parser()
    o = a.parse_args(argv)
    o.length = o.length or [8192]
    o.work = o.work or o.out / "work"
    if not (o.model / "config.json").is_file():
        a.error(f"{o.model} has no config.json; --model is a checkpoint's directory")
    if min(o.length) < 64 or o.prompts < 4 or min(o.queries, o.steps) < 1:
        a.error("--length is at least 64, --prompts at least 4, --queries and --steps at least 1")
    if o.minutes is not None and o.minutes <= 0:
        a.error("--minutes is above 0")
    if o.threads:
        torch.set_num_threads(o.threads)
    transformers.utils.logging.disable_progress_bar()
    o.out.mkdir(parents=True, exist_ok=True)
    try:
        job = Job(o, log or (lambda text: print(text, flush=True)))
    except PrefixdError as error:
        raise SystemExit(str(error)) from error
    limit = int(job.config.max_position_embeddings)
    for n in o.length:
        if n + o.queries > limit:
            a.error(f"--length {n} and --queries {o.queries}: the model has {limit} positions")
    texts = read_texts(o.text, job.encoder)
    for n in o.length:
        path = job.length(n, texts)
    if o.golden:
        write_golden(o.golden, path)
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        print("\ninterrupted; the same command goes on from here", file=sys.stderr)
        sys.exit(130)
