"""Measures attention itself, per layer and query head, on decode queries behind a document
(docs/mathematics.md; the paper's Appendix H): entropy of the middle, output errors of every cell,
completion share, mass curves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

import prefixd
from prefixd.evaluate.methods import N_SINK, N_TAIL, SAME_K, Cell, k_topk, policy
from prefixd.evaluate.model import Reader
from prefixd.session import Session

GRID_POINTS = 24


def mass_grid(n_mid: int) -> list[int]:
    """Returns values of K, geometric from 1 to all of the middle."""
    return sorted({int(round(k)) for k in np.geomspace(1, n_mid, GRID_POINTS)})


def entropy(p: Tensor) -> Tensor:
    """Returns the entropy normalised by the log of the size [52]; p [..., m] sums to 1."""
    return -(p * p.clamp_min(1e-38).log()).sum(-1) / float(np.log(p.shape[-1]))


def relative_l1(got: Tensor, truth: Tensor) -> Tensor:
    """Returns the error of [53] over the last dimension."""
    return (got - truth).abs().sum(-1) / (truth.abs().sum(-1) + 1e-12)


def measure(
    reader: Reader, continuation: Sequence[int], cells: Sequence[Cell], queries: int
) -> dict[str, Any]:
    """Returns means over `queries` decode queries, spread over the continuation: "entropy" [L][Hq],
    "mass" [L][Hq][K of "grid"], and per cell "errors" and "rho" [L][Hq] (null where infeasible; rho
    only for SAME_K cells, which have a selection-only reading to compare with)."""
    taken: dict[int, Tensor] = {}

    def observe(layer: int, query: Tensor) -> None:
        q = query[0].float().cpu().transpose(0, 1)  # [n, Hq, d]
        step = max(1, len(q) // queries)
        taken[layer] = q[step - 1 :: step][:queries].contiguous()

    reader.observe(continuation, observe)
    session, subject = reader.session, reader.subject
    layers = sorted(taken)
    stored = reader.stored_layers()
    truth, entropies, masses = {}, [], []
    n = reader.n
    grid = mass_grid(n - N_SINK - N_TAIL)
    for layer in layers:
        truth[layer] = torch.as_tensor(session.attend_exact(layer, taken[layer])[0])
        keys = stored[layer].keys[:, N_SINK : n - N_TAIL]
        grouped = taken[layer].unflatten(1, (len(keys), -1)).permute(1, 2, 0, 3)
        scores = (grouped @ keys[:, None].transpose(-1, -2)) * stored[layer].scale
        p = torch.softmax(scores.flatten(0, 1), -1)  # [Hq, n, m]
        entropies.append(entropy(p).mean(-1).tolist())
        curve = p.sort(-1, descending=True).values.cumsum(-1).mean(1)
        masses.append(curve[:, [k - 1 for k in grid]].tolist())
    errors: dict[str, Any] = {}
    norms: dict[str, dict[int, Tensor]] = {}
    for cell in cells:
        try:
            session.set_policy(policy(cell, n, subject.l_gen, subject.selector))
        except prefixd.Infeasible:
            errors[cell.key] = None
            continue
        errors[cell.key], norms[cell.key] = [], {}
        for layer in layers:
            y, lse = _steps(session, layer, taken[layer])
            norms[cell.key][layer] = lse
            errors[cell.key].append(relative_l1(y, truth[layer]).mean(0).tolist())
    return {
        "layers": layers,
        "grid": grid,
        "entropy": entropies,
        "mass": masses,
        "errors": errors,
        "rho": _completion_shares(norms, cells, layers),
    }


def _steps(session: Session, layer: int, q: Tensor) -> tuple[Tensor, Tensor]:
    states = [session.step(layer, row) for row in q]
    y, lse = (torch.stack([torch.as_tensor(s[i]) for s in states]) for i in (0, 1))
    return y, lse


def _completion_shares(
    norms: Mapping[str, Mapping[int, Tensor]], cells: Sequence[Cell], layers: Sequence[int]
) -> dict[str, list[list[float]]]:
    """Returns [56] from the normalisers with and without the estimate over the same sets: 1 - Z_E /
    Z."""
    shares = {}
    for cell in cells:
        plain = Cell("topk", SAME_K, cell.fraction).key
        if cell.accounting != SAME_K or cell.fraction == 0 or cell.key not in norms:
            continue
        if plain in norms and cell.method != "topk":
            shares[cell.key] = [
                (1 - torch.exp(norms[plain][x] - norms[cell.key][x])).clamp(0, 1).mean(0).tolist()
                for x in layers
            ]
    return shares


def kernel_scatter(
    reader: Reader, continuation: Sequence[int], maps: Path, layer: int, head: int,
    fraction: float, points: int = 1500,
) -> dict[str, Any]:
    """Samples query-key pairs of one query head for the paper's Figure 1: teacher scores s, log of
    the surrogate kernel, and which keys are anchors or retrieved."""
    from prefixd.train.phi_net import load_phi

    taken: list[Tensor] = []

    def observe(index: int, query: Tensor) -> None:
        if index == layer:
            taken.append(query[0].float().cpu())

    reader.observe(continuation[:16], observe)
    stored = reader.stored_layers()[layer]
    pairs, meta = load_phi(maps)
    group = int(meta["n_q_heads"]) // int(meta["n_kv_heads"])
    kv = head // group
    q = taken[0][:, ::4]  # [Hq, few, d]
    keys, n = stored.keys[kv], reader.n
    k = k_topk(fraction, n)
    rng = np.random.default_rng(0)
    scores, surrogate, part = [], [], []
    with torch.no_grad():
        own = q[kv * group : (kv + 1) * group]
        log_z = pairs[layer, kv].log_kernel(own, keys)[head - kv * group]
        for i in range(q.shape[1]):
            s = stored.scale * keys @ q[head, i]
            ids, _ = reader.session.select(layer, kv, own[:, i].contiguous(), k)
            kind = np.zeros(n, int)  # 0 the rest, 1 retrieved, 2 anchors
            kind[ids] = 1
            kind[:N_SINK] = kind[n - N_TAIL :] = 2
            # The sample has all exact keys and some of the others.
            rest = np.flatnonzero(kind == 0)
            keep = np.concatenate([np.flatnonzero(kind), rng.choice(
                rest, min(len(rest), points // q.shape[1]), replace=False)])
            scores += s[keep].tolist()
            surrogate += log_z[i, keep].tolist()
            part += kind[keep].tolist()
    return {
        "layer": layer, "head": head, "fraction": fraction, "k": k, "maps": maps.name,
        "scores": scores, "surrogate": surrogate, "part": part,
    }
