"""Optimises the matrices inside the layers by Muon and the rest by AdamW, behind one small
interface."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from prefixd.train.net import Net


def orthogonalize(g: Tensor) -> Tensor:
    """Returns about the nearest semi-orthogonal matrix, by five Newton-Schulz steps in bf16."""
    x = g.bfloat16()
    tall = x.shape[0] > x.shape[1]
    x = x.T if tall else x
    x = x / (x.norm() + 1e-7)
    for _ in range(5):
        a = x @ x.T
        x = 3.4445 * x + (-4.7750 * a + 2.0315 * (a @ a)) @ x
    out: Tensor = x.T if tall else x
    return out.float()


class Muon(torch.optim.Optimizer):
    """Applies momentum, orthogonalised. ``parts`` splits a fused matrix into its original ones."""

    def __init__(self, groups: list[dict[str, Any]], lr: float, weight_decay: float) -> None:
        super().__init__(groups, {"lr": lr, "momentum": 0.95, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]  # takes no closure
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if "momentum" not in state:
                    state["momentum"] = torch.zeros_like(p)
                m = state["momentum"]
                m.lerp_(p.grad, 1 - group["momentum"])
                update = p.grad.lerp(m, group["momentum"])
                p.mul_(1 - group["lr"] * group["weight_decay"])
                for w, u in zip(p.split(group["parts"]), update.split(group["parts"]), strict=True):
                    gain = max(1.0, u.shape[0] / u.shape[1]) ** 0.5
                    w.add_(orthogonalize(u), alpha=-group["lr"] * gain)


class Optimizers:
    """Steps both optimizers as one; ``set_factor`` scales every group's own learning rate."""

    def __init__(self, net: Net, lr: float, muon_lr: float, weight_decay: float) -> None:
        cfg = net.cfg
        dq, dk = cfg.q_heads * cfg.head_dim, cfg.kv_heads * cfg.head_dim
        inner: dict[tuple[int, ...], list[nn.Parameter]] = {}
        outer: list[nn.Parameter] = []
        for name, p in net.named_parameters():
            if p.dim() != 2 or not name.startswith("layers."):
                outer.append(p)
                continue
            parts: tuple[int, ...] = (p.shape[0],)
            if name.endswith("qkv.weight"):
                parts = (dq, dk, dk)
            elif name.endswith("gate_up.weight"):
                parts = (cfg.ffn, cfg.ffn)
            inner.setdefault(parts, []).append(p)
        groups = [{"params": ps, "parts": list(parts)} for parts, ps in inner.items()]
        self.all = [
            Muon(groups, muon_lr, weight_decay),
            torch.optim.AdamW(outer, lr=lr, betas=(0.9, 0.97), weight_decay=0.0, fused=True),
        ]
        for opt in self.all:
            for group in opt.param_groups:
                group["peak"] = group["lr"]

    def set_factor(self, factor: float) -> None:
        for opt in self.all:
            for group in opt.param_groups:
                group["lr"] = group["peak"] * factor

    def step(self) -> None:
        for opt in self.all:
            opt.step()

    def zero_grad(self) -> None:
        for opt in self.all:
            opt.zero_grad(set_to_none=True)

    def state_dict(self) -> list[dict[str, Any]]:
        return [opt.state_dict() for opt in self.all]

    def load_state_dict(self, state: list[dict[str, Any]]) -> None:
        """Loads momenta from ``state``; peak rates stay those of this run's options."""
        for opt, s in zip(self.all, state, strict=True):
            peaks = [group["peak"] for group in opt.param_groups]
            opt.load_state_dict(s)
            for group, peak in zip(opt.param_groups, peaks, strict=True):
                group["peak"] = peak
