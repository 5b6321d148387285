"""Outputs under an exact set, with the rest dropped, estimated or retrieved, are those of slow float64 sums
over single tokens."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from prefixd.retention.attend import ESTIMATORS, Asked, entropy, error
from prefixd.retention.remainder import Moments, estimate
from prefixd.retention.seen import Seen, causal

HEADS, GROUP, DIM, VALUES, TOKENS, SCALE = 2, 3, 8, 6, 120, 0.3


def seen_of(seed: int = 0, shift: float = 1.0) -> Seen:
    rng = np.random.default_rng(seed)
    q = rng.normal(size=(HEADS, GROUP, TOKENS, DIM))
    k = rng.normal(size=(HEADS, TOKENS, DIM)) + shift * np.arange(DIM)
    v = rng.normal(size=(HEADS, TOKENS, VALUES)) + shift
    return Seen(*(torch.from_numpy(x).float() for x in (q, k, v)), prompt=20, scale=SCALE)


def phi(x: float) -> float:
    return 0.5 * math.erfc(-x / math.sqrt(2))


def slow_estimate(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, cut: float | None, cross: bool
) -> tuple[float, np.ndarray]:
    """The spec's formulas for a remainder of rows k, v under a query, scale included."""
    r = len(k)
    mean_k, mean_v = k.mean(0), v.mean(0)
    mu = float(q @ mean_k)
    variance = float((q**2 * ((k - mean_k) ** 2).mean(0)).sum())
    c_matrix = (k - mean_k).T @ (v - mean_v) / r
    exact_cut = cut is not None
    c = cut if cut is not None else mu + math.sqrt(variance) * math.sqrt(2 * math.log(r)) if r > 1 else mu
    log_mean, lever = mu, 0.0
    if c - mu > 1e-5 * (1 + abs(c)) and variance > 1e-12 and r > 1:
        sigma = math.sqrt(variance)
        t = (c - mu - variance) / sigma
        log_mean = mu + variance / 2 + math.log(phi(t))
        lever = 1 - math.exp(-t * t / 2) / math.sqrt(2 * math.pi) / phi(t) / sigma
    log_z = math.log(r) + log_mean
    if exact_cut:
        log_z = min(log_z, math.log(r) + c)
    log_z = max(log_z, math.log(r) + mu)
    return log_z, mean_v + (lever * (c_matrix.T @ q) if cross else 0)


def slow_answer(
    seen: Seen, head: int, g: int, at: int, exact: set[int], cut: float | None, name: str
) -> np.ndarray:
    q = seen.q[head, g, at].double().numpy() * SCALE
    k, v = seen.k[head].double().numpy(), seen.v[head].double().numpy()
    z = {t: math.exp(float(q @ k[t])) for t in exact}
    above, below = sum(z[t] * v[t] for t in exact), sum(z.values())
    rest = [t for t in range(at + 1) if t not in exact]
    if name != "none" and rest:
        log_z, value = slow_estimate(q, k[rest], v[rest], cut, name == "moment/full")
        above, below = above + math.exp(log_z) * value, below + math.exp(log_z)
    return np.asarray(above / below)


AT = [30, 77, 119]


@pytest.mark.parametrize("shift", [0.0, 3.0])
def test_answers_are_the_slow_ones(shift: float) -> None:
    seen = seen_of(shift=shift)
    asked = Asked(seen, torch.tensor(AT))
    rng = np.random.default_rng(1)
    # Nearly everything, a few tokens, and a single one.
    for share in (0.9, 0.2, 0.0):
        exact = torch.from_numpy(rng.random((HEADS, len(AT), TOKENS)) < share) & causal(asked.at, TOKENS)
        exact[:, torch.arange(len(AT)), torch.tensor(AT)] = True
        got = asked.answers(exact)
        assert list(got) == list(ESTIMATORS)
        for head in range(HEADS):
            for i, at in enumerate(AT):
                some = set(exact[head, i].nonzero()[:, 0].tolist())
                for g in range(GROUP):
                    full = slow_answer(seen, head, g, at, set(range(at + 1)), None, "none")
                    assert np.allclose(asked.y[head, g, i].numpy(), full, atol=2e-5)
                    for name in ESTIMATORS:
                        slow = slow_answer(seen, head, g, at, some, None, name)
                        assert np.allclose(got[name][head, g, i].numpy(), slow, atol=5e-4), (name, share)


def test_retrieval_takes_the_best_of_what_left_and_knows_its_cut() -> None:
    seen = seen_of()
    asked = Asked(seen, torch.tensor(AT))
    retained = torch.zeros(HEADS, len(AT), TOKENS, dtype=torch.bool)
    for i, at in enumerate(AT):
        retained[:, i, max(0, at - 4) : at + 1] = True
        retained[:, i, :2] = True
    exact, cut = asked.retrieve(retained, 5)
    got = asked.answers(exact, cut)
    for head in range(HEADS):
        k = seen.k[head].double().numpy()
        for i, at in enumerate(AT):
            away = [t for t in range(at + 1) if not bool(retained[head, i, t])]
            scores = {}
            for g in range(GROUP):
                q = seen.q[head, g, at].double().numpy() * SCALE
                plain = {t: float(q @ k[t]) for t in away}
                normaliser = math.log(sum(math.exp(x) for x in plain.values()))
                scores[g] = (plain, normaliser)
            best = {t: max(p[t] - n for p, n in scores.values()) for t in away}
            found = sorted(away, key=lambda t: best[t], reverse=True)[:5]
            some = set(exact[head, i].nonzero()[:, 0].tolist())
            assert some == set(found) | set(retained[head, i].nonzero()[:, 0].tolist())
            for g in range(GROUP):
                plain, normaliser = scores[g]
                slow_cut = normaliser + best[found[-1]]
                # No unread token scores above the cut.
                assert max(plain[t] for t in away if t not in found) <= slow_cut + 1e-9
                for name in ESTIMATORS:
                    slow = slow_answer(seen, head, g, at, some, slow_cut, name)
                    assert np.allclose(got[name][head, g, i].numpy(), slow, atol=5e-4), name


def test_nothing_left_is_exact_attention() -> None:
    seen = seen_of()
    asked = Asked(seen, torch.tensor(AT))
    everything = causal(asked.at, TOKENS)[None].expand(HEADS, -1, -1)
    for y in asked.answers(everything).values():
        assert torch.allclose(y, asked.y, atol=1e-5)
    few = torch.zeros_like(everything)
    few[:, torch.arange(len(AT)), torch.tensor(AT)] = True
    exact, cut = asked.retrieve(few, 500)  # more than there are
    assert torch.equal(exact, everything)
    for y in asked.answers(exact, cut).values():
        assert torch.allclose(y, asked.y, atol=1e-5)


def test_scores_in_the_hundreds_stay_finite() -> None:
    seen = seen_of()
    sharp = Seen(seen.q * 100, seen.k, seen.v, 20, SCALE)
    asked = Asked(sharp, torch.tensor(AT))
    worst = asked.scores.masked_fill(~asked.visible, math.inf).amin(1).argmin(-1)  # [H, n]: far below the best
    exact = torch.zeros(HEADS, len(AT), TOKENS, dtype=torch.bool).scatter(2, worst[..., None], True)
    exact &= causal(asked.at, TOKENS)
    assert bool(exact.any(-1).all())
    for y in asked.answers(exact).values():
        assert bool(y.isfinite().all())
    alone = asked.answers(exact)["none"]
    for head in range(HEADS):
        for i in range(len(AT)):
            assert torch.allclose(alone[head, 0, i], seen.v[head, int(worst[head, i])], atol=1e-5)


def test_an_empty_remainder_has_no_mass() -> None:
    zero = torch.zeros(1, 1, 1)
    log_z, value = estimate(Moments(zero, zero, zero, zero[..., None], zero[..., None]), zero, True)
    assert float(log_z) == -math.inf and bool(value.isfinite().all())


def test_errors_and_entropies() -> None:
    assert float(error(torch.tensor([1.0, -1.0]), torch.tensor([2.0, 2.0]))) == pytest.approx(1.0)
    seen = seen_of()
    flat = Seen(torch.zeros_like(seen.q), seen.k, seen.v, 20, SCALE)
    assert torch.allclose(entropy(Asked(flat, torch.tensor(AT))), torch.ones(HEADS, GROUP), atol=1e-5)
    sharp = Seen(seen.q * 1000, seen.k, seen.v, 20, SCALE)
    assert bool((entropy(Asked(sharp, torch.tensor(AT))) < 0.01).all())
