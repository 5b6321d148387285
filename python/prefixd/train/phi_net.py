"""Defines the feature maps (positive, learned per head), their loss, and their file format."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors import safe_open
from safetensors.torch import save
from torch import Tensor, nn

from prefixd.train.net import write_atomic

FORMAT = "prefixd-phi-v1"
FIELDS = ("W_in", "b_in", "W1", "b1", "W2", "b2", "W_out", "b_out", "alpha")
DELTA, HUBER = 8.0, 1.0
LAMBDA_KL, W_TOP, W_FAR, W_MASS = 0.99, 1.0, 2.0, 4.0


class FeatureMap(nn.Module):
    """Computes ``heads`` maps side by side: x [H, n, dh] -> log phi(x) [H, n, d_phi]."""

    def __init__(self, heads: int, dh: int, d_emb: int, d_phi: int, gen: torch.Generator) -> None:
        super().__init__()

        def normal(*shape: int, std: float) -> nn.Parameter:
            return nn.Parameter(torch.randn(*shape, generator=gen) * std)

        eye = torch.eye(d_emb, dh).expand(heads, d_emb, dh).clone()
        self.W_in = nn.Parameter(eye)
        self.b_in = nn.Parameter(torch.zeros(heads, d_emb))
        self.W1 = normal(heads, d_emb, d_emb, std=d_emb**-0.5)
        self.b1 = nn.Parameter(torch.zeros(heads, d_emb))
        self.W2 = normal(heads, d_emb, d_emb, std=d_emb**-0.5)
        self.b2 = nn.Parameter(torch.zeros(heads, d_emb))
        self.W_out = normal(heads, d_phi, d_emb, std=0.5 * d_emb**-0.5)
        self.b_out = nn.Parameter(torch.zeros(heads, d_phi))
        self.alpha = nn.Parameter(torch.full((heads,), 0.1))

    def forward(self, x: Tensor) -> Tensor:
        def linear(v: Tensor, w: Tensor, b: Tensor) -> Tensor:
            return torch.baddbmm(b[:, None, :], v, w.transpose(1, 2))

        g0 = linear(x, self.W_in, self.b_in)
        h = linear(F.gelu(linear(g0, self.W1, self.b1)), self.W2, self.b2)
        g1 = g0 + self.alpha[:, None, None] * h
        return linear(g1, self.W_out, self.b_out)


class Pair(nn.Module):
    """Holds one KV head's phi_k and the phi_q of the query heads that share it."""

    def __init__(self, group: int, dh: int, d_emb: int, d_phi: int, seed: int) -> None:
        super().__init__()
        gen = torch.Generator().manual_seed(seed)
        self.phi_k = FeatureMap(1, dh, d_emb, d_phi, gen)
        self.phi_q = FeatureMap(group, dh, d_emb, d_phi, gen)
        with torch.no_grad():  # both sides have the same random directions: z grows with q.k
            self.phi_q.W_out.copy_(self.phi_k.W_out.expand_as(self.phi_q.W_out))

    def log_kernel(self, q: Tensor, k: Tensor) -> Tensor:
        """Maps q [G, n, dh], k [m, dh] -> log z [G, n, m], through one shifted product."""
        lq, lk = self.phi_q(q), self.phi_k(k[None])[0]
        shift = lk.detach().amax(0)
        a = lq + shift
        top = a.detach().amax(-1, keepdim=True)
        z = torch.exp(a - top) @ torch.exp(lk - shift).T
        log_z: Tensor = top + torch.log(z + 1e-35)
        return log_z


def phi_loss(s: Tensor, s_hat: Tensor, tau: float = 1.0) -> dict[str, Tensor]:
    """Returns the loss over teacher and student logits [..., m]; every term is a mean over
    queries."""
    b = s.amax(-1, keepdim=True)
    r, rh = s - b, s_hat - b
    lp, lph = F.log_softmax(r / tau, -1), F.log_softmax(rh / tau, -1)
    kl = tau * tau * (lp.exp() * (lp - lph)).sum(-1)
    near = (r >= -DELTA).float()
    far = 1.0 - near

    def huber(x: Tensor) -> Tensor:
        ax = x.abs()
        return torch.where(ax <= HUBER, 0.5 * x * x, HUBER * (ax - 0.5 * HUBER))

    top = (huber(rh - r) * near).sum(-1) / near.sum(-1).clamp_min(1)
    spill = (huber((rh + DELTA).clamp_min(0)) * far).sum(-1) / far.sum(-1).clamp_min(1)
    ratio = torch.logsumexp(rh, -1) - torch.logsumexp(r, -1)
    mass = huber(ratio.clamp_min(0))
    total = LAMBDA_KL * kl + (1 - LAMBDA_KL) * (W_TOP * top + W_FAR * spill + W_MASS * mass)
    return {
        "loss": total.mean(), "kl": kl.mean(), "top": top.mean(), "far": spill.mean(),
        "mass": mass.mean(), "log_ratio": ratio.detach(),
    }


@torch.no_grad()
def set_scale(pair: Pair, q: Tensor, k: Tensor, scale: float, queries: int = 12) -> list[float]:
    """Moves each query head's ``b_out`` to the minimum of the loss along its common offset.

    KL does not see that direction and the other terms weigh 1%, so gradient steps are slow there;
    a search over one number is not. q [P, G, n, dh], k [P, m, dh]; returns the offsets.
    """
    s, sh = [], []
    step = max(1, q.shape[2] // queries)
    for qq, kk in zip(q[:, :, ::step].float(), k.float(), strict=True):
        s.append(scale * (qq @ kk.T))
        sh.append(pair.log_kernel(qq, kk))
    teacher, student = torch.cat(s, 1), torch.cat(sh, 1)
    offsets = []
    for g in range(len(teacher)):
        best = 0.0
        for width, count in ((15.0, 31), (1.0, 21), (0.1, 11)):
            tries = (best + torch.linspace(-width, width, count)).tolist()
            losses = [float(phi_loss(teacher[g], student[g] + c)["loss"]) for c in tries]
            best = tries[int(torch.tensor(losses).argmin())]
        pair.phi_q.b_out[g] += best
        offsets.append(best)
    return offsets


def pack(pairs: dict[tuple[int, int], Pair]) -> dict[str, Tensor]:
    """Turns (layer, KV head) -> pair into tensors named ``layers.{l}.phi_q.W_in`` and so on."""
    out: dict[str, Tensor] = {}
    layers = sorted({layer for layer, _ in pairs})
    for layer in layers:
        own = [pairs[key] for key in sorted(pairs) if key[0] == layer]
        for side in ("phi_q", "phi_k"):
            for name in FIELDS:
                parts = [getattr(getattr(p, side), name).detach().float().cpu() for p in own]
                out[f"layers.{layer}.{side}.{name}"] = torch.cat(parts).contiguous()
    return out


def unpack(tensors: dict[str, Tensor], meta: dict[str, str]) -> dict[tuple[int, int], Pair]:
    """Inverts ``pack``."""
    n_layers, hq, hkv = (int(meta[k]) for k in ("n_layers", "n_q_heads", "n_kv_heads"))
    group = hq // hkv
    pairs = {}
    for layer in range(n_layers):
        for h in range(hkv):
            p = Pair(group, int(meta["head_dim"]), int(meta["d_emb"]), int(meta["d_phi"]), 0)
            with torch.no_grad():
                for name in FIELDS:
                    at = f"layers.{layer}."
                    getattr(p.phi_k, name).copy_(tensors[f"{at}phi_k.{name}"][h : h + 1])
                    q = tensors[f"{at}phi_q.{name}"][h * group : (h + 1) * group]
                    getattr(p.phi_q, name).copy_(q)
            pairs[layer, h] = p
    return pairs


def export_phi(pairs: dict[tuple[int, int], Pair], meta: dict[str, str], path: Path) -> None:
    """Writes the maps, float32, with their metadata (all strings)."""
    write_atomic(path, save(pack(pairs), metadata=meta))


def load_phi(path: Path) -> tuple[dict[tuple[int, int], Pair], dict[str, str]]:
    try:
        with safe_open(str(path), framework="pt") as f:
            meta = f.metadata() or {}
            tensors = {k: f.get_tensor(k) for k in f.keys()}
    except Exception as e:
        raise SystemExit(f"cannot read feature maps from {path}: {e}") from e
    if meta.get("format") != FORMAT:
        raise SystemExit(f"{path} is not a {FORMAT} file (format: {meta.get('format')!r})")
    return unpack(tensors, meta), meta


def file_digest(path: Path) -> str:
    """Returns the name that the C++ side gives weights: BLAKE2b-256 of the file's bytes."""
    return "blake2b:" + hashlib.blake2b(path.read_bytes(), digest_size=32).hexdigest()


def write_golden(path: Path, phi_file: Path, seed: int = 0) -> None:
    """Sends three random vectors through one phi_q and one phi_k in float64, for the C++ tests."""
    with safe_open(str(phi_file), framework="pt") as f:
        tensors = {k: f.get_tensor(k).double() for k in f.keys()}
    gen = torch.Generator().manual_seed(seed)
    cases = []
    for layer, side, head in ((0, "phi_q", 1), (2, "phi_k", 1)):
        t = {n: tensors[f"layers.{layer}.{side}.{n}"][head] for n in FIELDS}
        x = (torch.randn(3, t["W_in"].shape[1], generator=gen) * 2).float().double()
        g0 = x @ t["W_in"].T + t["b_in"]
        h = F.gelu(g0 @ t["W1"].T + t["b1"]) @ t["W2"].T + t["b2"]
        y = (g0 + t["alpha"] * h) @ t["W_out"].T + t["b_out"]
        cases.append({"layer": layer, "map": side, "head": head, "x": x.tolist(),
                      "log_phi": y.tolist()})
    body = {"phi_file": phi_file.name, "phi_digest": file_digest(phi_file), "cases": cases}
    write_atomic(path, (json.dumps(body) + "\n").encode())
