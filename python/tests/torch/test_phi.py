"""Tests the feature maps: their loss against numpy in float64, and their file."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch

from prefixd.train.phi_net import (
    FIELDS,
    FORMAT,
    Pair,
    export_phi,
    load_phi,
    phi_loss,
    set_scale,
    write_golden,
)
from tests.conftest import ROOT


def reference(s: np.ndarray, s_hat: np.ndarray) -> float:
    """Computes the loss for one query from its definition."""
    b = s.max()
    r, rh = s - b, s_hat - b
    p, ph = np.exp(r), np.exp(rh)
    kl = float(np.sum(p / p.sum() * (np.log(p / p.sum()) - np.log(ph / ph.sum()))))

    def rho(x: float) -> float:
        return 0.5 * x * x if abs(x) <= 1 else abs(x) - 0.5

    top = [rho(b_ - a) for a, b_ in zip(r, rh, strict=True) if a >= -8]
    far = [rho(max(b_ + 8, 0)) for a, b_ in zip(r, rh, strict=True) if a < -8]
    mass = rho(max(math.log(ph.sum()) - math.log(p.sum()), 0))
    parts = sum(top) / len(top) + 2 * (sum(far) / len(far) if far else 0.0) + 4 * mass
    return 0.99 * kl + 0.01 * parts


@pytest.mark.parametrize("spread", [0.5, 4.0, 12.0])
@pytest.mark.parametrize("lift", [-3.0, 0.0, 6.0])
def test_loss_matches_numpy(spread: float, lift: float) -> None:
    rng = np.random.default_rng(int(spread * 10 + lift))
    s = rng.normal(0, spread, (2, 5, 70))
    s_hat = s + rng.normal(lift, 2.0, s.shape)
    got = phi_loss(torch.from_numpy(s), torch.from_numpy(s_hat))["loss"]
    want = np.mean([reference(s[i, j], s_hat[i, j]) for i in range(2) for j in range(5)])
    assert float(got) == pytest.approx(want, rel=1e-9)


def numpy_map(t: dict[str, np.ndarray], x: np.ndarray) -> np.ndarray:
    def gelu(v: np.ndarray) -> np.ndarray:
        return 0.5 * v * (1 + np.vectorize(math.erf)(v / math.sqrt(2)))

    g0 = t["W_in"] @ x + t["b_in"]
    h = t["W2"] @ gelu(t["W1"] @ g0 + t["b1"]) + t["b2"]
    return t["W_out"] @ (g0 + t["alpha"] * h) + t["b_out"]


def shaken(group: int, seed: int) -> Pair:
    pair = Pair(group, 8, 12, 10, seed)
    gen = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in pair.parameters():
            p.add_(torch.randn(p.shape, generator=gen) * 0.3)
    return pair


def test_kernel_matches_numpy() -> None:
    pair = shaken(2, 1)
    rng = np.random.default_rng(0)
    q, k = rng.normal(size=(2, 3, 8)), rng.normal(size=(5, 8))
    got = pair.log_kernel(torch.from_numpy(q).float(), torch.from_numpy(k).float()).detach().numpy()
    kt = {n: getattr(pair.phi_k, n).detach().double().numpy()[0] for n in FIELDS}
    for g in range(2):
        qt = {n: getattr(pair.phi_q, n).detach().double().numpy()[g] for n in FIELDS}
        for i in range(3):
            for j in range(5):
                a = numpy_map(qt, q[g, i]) + numpy_map(kt, k[j])
                assert got[g, i, j] == pytest.approx(np.logaddexp.reduce(a), abs=2e-4)


def test_scale_step_lowers_the_loss_and_leaves_kl() -> None:
    pair = shaken(2, 3)
    gen = torch.Generator().manual_seed(0)
    q, k = torch.randn(2, 2, 24, 8, generator=gen), torch.randn(2, 90, 8, generator=gen)

    def losses() -> tuple[float, float]:
        got = [phi_loss(q[p] @ k[p].T, pair.log_kernel(q[p], k[p])) for p in range(2)]
        return tuple(sum(x[n].item() for x in got) for n in ("loss", "kl"))

    with torch.no_grad():
        pair.phi_q.b_out += torch.tensor([[9.0], [-7.0]])
    before = losses()
    offsets = set_scale(pair, q, k, 1.0)
    after = losses()
    assert after[0] < before[0] and after[1] == pytest.approx(before[1], rel=1e-4)
    assert 13 < offsets[1] - offsets[0] < 19
    assert max(abs(x) for x in set_scale(pair, q, k, 1.0)) < 0.1


META = {"format": FORMAT, "length": "64", "d_emb": "12", "d_phi": "10", "n_layers": "2",
        "n_q_heads": "4", "n_kv_heads": "2", "head_dim": "8", "scale": "0.35",
        "weights": "blake2b:" + "0" * 64}


def test_export_round_trips(tmp_path: Path) -> None:
    pairs = {(layer, h): shaken(2, 10 * layer + h) for layer in range(2) for h in range(2)}
    path = tmp_path / "phi-64.safetensors"
    export_phi(pairs, META, path)
    back, meta = load_phi(path)
    assert meta == META
    for key, pair in pairs.items():
        for a, b in zip(pair.parameters(), back[key].parameters(), strict=True):
            assert torch.equal(a, b)


def test_foreign_files_are_refused(tmp_path: Path) -> None:
    bad = tmp_path / "x.safetensors"
    bad.write_bytes(b"no")
    with pytest.raises(SystemExit, match="cannot read"):
        load_phi(bad)
    export_phi({(0, 0): shaken(1, 0)}, META | {"format": "other"}, bad)
    with pytest.raises(SystemExit, match="not a prefixd-phi-v1"):
        load_phi(bad)


def check_golden(golden: Path, phi_file: Path) -> None:
    body = json.loads(golden.read_text())
    pairs, meta = load_phi(phi_file)
    group = int(meta["n_q_heads"]) // int(meta["n_kv_heads"])
    for case in body["cases"]:
        n = group if case["map"] == "phi_q" else 1
        own = getattr(pairs[case["layer"], case["head"] // n], case["map"])
        t = {f: getattr(own, f).detach().double().numpy()[case["head"] % n] for f in FIELDS}
        for x, want in zip(case["x"], case["log_phi"], strict=True):
            assert np.allclose(numpy_map(t, np.array(x)), want, rtol=1e-9, atol=1e-9)


def test_golden_of_a_file(tmp_path: Path) -> None:
    pairs = {(layer, h): shaken(2, 10 * layer + h) for layer in range(3) for h in range(2)}
    path = tmp_path / "phi-64.safetensors"
    export_phi(pairs, META | {"n_layers": "3"}, path)
    write_golden(tmp_path / "g.json", path)
    check_golden(tmp_path / "g.json", path)


def test_committed_golden() -> None:
    golden = ROOT / "tests/data/phi-golden.json"
    if not golden.is_file():
        pytest.skip("no committed golden of the feature maps yet")
    check_golden(golden, ROOT / "models/prefixd-tiny" / json.loads(golden.read_text())["phi_file"])
