"""Distils one KV head's maps (and those of its query heads) from captured q and k."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from prefixd.train.phi_net import Pair, phi_loss, set_scale


@dataclass(frozen=True)
class Recipe:
    """Sets how a head is trained. The last `held` prompts give no gradients: they choose the best
    state, decide when to stop, and give the reported figures. Steps use a sample of the middle's
    keys until `whole_after` of the steps, then all of it."""

    d_phi: int
    d_emb: int
    steps: int = 1500
    held: int = 3
    batch: int = 64
    keys: int = 2048
    lr: float = 6e-3
    check_every: int = 100
    patience: int = 6
    whole_after: float = 0.6
    tau: float = 1.0
    seed: int = 7


Report = dict[str, float]


def measure(pair: Pair, q: Tensor, k: Tensor, scale: float, limit: int = 64) -> Report:
    """Returns KL and mass ratio over whole prompts; q [P, G, n, dh], k [P, m, dh]."""
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


class HeadTraining:
    """Trains one head and can be saved at any step: a resumed training gives the same maps as an
    uninterrupted one, because what a step draws depends on its number alone."""

    def __init__(
        self, pair: Pair, q: Tensor, k: Tensor, recipe: Recipe, scale: float, name: tuple[int, int],
        origin: str = "",
    ) -> None:
        """`name`: (layer, KV head). `origin` identifies q, k and the pair; a state with another is
        refused."""
        self.pair, self.recipe, self.scale, self.name = pair.to(q.device), recipe, scale, name
        self.origin = origin
        split = len(q) - recipe.held
        self._q, self._k = q[:split], k[:split]
        self._held_q, self._held_k = q[split:], k[split:]
        self._opt = torch.optim.Adam(pair.parameters(), lr=recipe.lr, betas=(0.9, 0.98))
        self.step, self.steps, self._stale, self.seconds = 0, recipe.steps, 0, 0.0
        self._best = self._first = measure(pair, self._held_q, self._held_k, scale)
        self._best_state = self._copy()

    def _copy(self) -> dict[str, Tensor]:
        return {n: t.detach().clone() for n, t in self.pair.state_dict().items()}

    def save(self, path: Path) -> None:
        state = {
            "name": list(self.name), "recipe": asdict(self.recipe), "origin": self.origin,
            "pair": self.pair.state_dict(), "optimizer": self._opt.state_dict(),
            "step": self.step, "steps": self.steps,
            "stale": self._stale, "best": self._best, "first": self._first,
            "best_state": self._best_state, "seconds": self.seconds,
        }
        part = path.with_name(path.name + ".part")
        torch.save(state, part)
        os.replace(part, path)

    def load(self, path: Path) -> bool:
        """Returns False when there is no state, or it is another head's or another recipe's."""
        if not path.is_file():
            return False
        state: dict[str, Any] = torch.load(path, weights_only=True, map_location=self._q.device)
        own = (list(self.name), asdict(self.recipe), self.origin)
        if (state["name"], state["recipe"], state["origin"]) != own:
            return False
        self.pair.load_state_dict(state["pair"])
        self._opt.load_state_dict(state["optimizer"])
        self.step, self.steps, self._stale = state["step"], state["steps"], state["stale"]
        self._best, self._first = state["best"], state["first"]
        self._best_state, self.seconds = state["best_state"], state["seconds"]
        return True

    def run(
        self, save_to: Path, *, save_every: float = 30.0, seconds: float | None = None,
        progress: Callable[[int, int, float], None] | None = None,
    ) -> Report:
        """Trains to the end. `seconds` lowers the number of steps, once, to what fits into them."""
        try:
            self._run(save_to, save_every, seconds, progress)
        except KeyboardInterrupt:
            self.save(save_to)
            raise
        return self._finish()

    def _run(
        self, save_to: Path, save_every: float, seconds: float | None,
        progress: Callable[[int, int, float], None] | None,
    ) -> None:
        r = self.recipe
        begin = saved = time.monotonic()
        spent, first = self.seconds, self.step
        while self.step < self.steps:
            self._advance()
            now = time.monotonic()
            self.seconds = spent + now - begin
            if seconds is not None and self.step == first + 20 and self.steps == r.steps:
                # The last steps run over all keys and cost more, so the plan uses their time.
                each = (now - begin) / 20 * (1 + (1 - r.whole_after) * self._whole_factor())
                self.steps = max(self.step, min(r.steps, int(seconds / each)))
            if self.step % r.check_every == 0 and self._check():
                break
            if now - saved >= save_every:
                self.save(save_to)
                saved = now
            if progress is not None and self.step % 20 == 0:
                progress(self.step, self.steps, self._best["kl"])

    def _whole_factor(self) -> float:
        return max(0.0, self._k.shape[1] / self.recipe.keys - 1)

    def _advance(self) -> None:
        r = self.recipe
        used = self.step / self.steps
        warm = min(1.0, (self.step + 1) / 30)
        for g in self._opt.param_groups:
            g["lr"] = r.lr * warm * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * used)))
        rng = np.random.default_rng([r.seed, *self.name, self.step])
        p = int(rng.integers(0, len(self._q)))
        device = self._q.device
        pick = torch.from_numpy(rng.integers(0, self._q.shape[2], r.batch)).to(device)
        kk = self._k[p]
        if used < r.whole_after and len(kk) > r.keys:
            kk = kk[torch.from_numpy(rng.integers(0, len(kk), r.keys)).to(device)]
        qq, kk = self._q[p][:, pick].float(), kk.float()
        loss = phi_loss(self.scale * (qq @ kk.T), self.pair.log_kernel(qq, kk), r.tau)["loss"]
        self._opt.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.pair.parameters(), 1.0)
        self._opt.step()
        self.step += 1

    def _check(self) -> bool:
        """Keeps the best state; returns True when it has not improved for long."""
        got = measure(self.pair, self._held_q, self._held_k, self.scale)
        if got["kl"] < self._best["kl"] * 0.995:
            self._stale = 0
        elif self.step > self.recipe.whole_after * self.steps:
            self._stale += 1
        if got["kl"] < self._best["kl"]:
            self._best, self._best_state = got, self._copy()
        return self._stale >= self.recipe.patience

    def _finish(self) -> Report:
        got = measure(self.pair, self._held_q, self._held_k, self.scale)
        if got["kl"] < self._best["kl"]:
            self._best, self._best_state = got, self._copy()
        self.pair.load_state_dict(self._best_state)
        # KL does not see a common offset of the logits, so it is set last, on prompts with
        # gradients.
        set_scale(self.pair, self._q[:4], self._k[:4], self.scale)
        final = measure(self.pair, self._held_q, self._held_k, self.scale)
        return {"kl_before": self._first["kl"], **final, "steps": float(self.step),
                "early": float(self.step < self.steps), "seconds": self.seconds}
