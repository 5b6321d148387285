"""KVpop's scorers, target and loss are those of slow float64 loops; training makes a scorer foresee."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch

from prefixd.errors import InvalidArgument
from prefixd.retention.boundary import boundaries, boundary_loss, weights
from prefixd.retention.learn import Text, load_scorer, save, scorer_path, train
from prefixd.retention.scorers import LOG_DECAY, Mlp, MlpScorer, Mlstm, MlstmScorer, empty_state, read_memory
from prefixd.retention.seen import Seen
from prefixd.retention.target import EPSILON, Foreseen, future_attention

HEADS, GROUP, DIM, TOKENS, WINDOW, SCALE = 2, 3, 8, 150, 10, 0.3


def seen_of(seed: int = 0) -> Seen:
    rng = np.random.default_rng(seed)
    q = rng.normal(size=(HEADS, GROUP, TOKENS, DIM)) * 2
    k = rng.normal(size=(HEADS, TOKENS, DIM)) * 2
    v = rng.normal(size=(HEADS, TOKENS, DIM))
    return Seen(*(torch.from_numpy(x).float() for x in (q, k, v)), prompt=40, scale=SCALE)


def randomised(heads: torch.nn.Module, seed: int = 0) -> None:
    generator = torch.Generator().manual_seed(seed)
    for p in heads.parameters():
        p.data = torch.randn(p.shape, generator=generator) * 0.3


def silu(x: np.ndarray) -> np.ndarray:
    return x / (1 + np.exp(-x))


def softmax(x: np.ndarray) -> np.ndarray:
    e = np.exp(x - x.max())
    return np.asarray(e / e.sum())


def hedgehog(x: np.ndarray) -> np.ndarray:
    return np.concatenate([softmax(x), softmax(-x)])


def doubles(heads: torch.nn.Module) -> dict[str, np.ndarray]:
    return {name: x.double().numpy() for name, x in heads.state_dict().items()}


def test_the_mlp_is_two_layers_over_key_and_value() -> None:
    seen, heads = seen_of(), Mlp(HEADS, 2 * DIM, hidden=5)
    randomised(heads)
    got = MlpScorer(heads).scores(seen, 0, WINDOW)
    assert got.shape == (HEADS, TOKENS - WINDOW)
    p = doubles(heads)
    for head in range(HEADS):
        for t in (0, 33, TOKENS - WINDOW - 1):
            x = np.concatenate([seen.k[head, t], seen.v[head, t]]).astype(float)
            slow = silu(x @ p["w1"][head] + p["b1"][head, 0]) @ p["w2"][head][:, 0] + p["b2"][head, 0]
            assert float(got[head, t]) == pytest.approx(slow, abs=1e-4)


def test_the_memory_is_read_by_the_token_that_leaves() -> None:
    """In steps of single tokens, unstabilised, and with state and read as the papers write them."""
    seen, heads = seen_of(), Mlstm(HEADS, 2 * DIM)
    randomised(heads)
    got = MlstmScorer(heads).scores(seen, 0, WINDOW)
    p = doubles(heads)
    for head in range(HEADS):
        xs = np.concatenate([seen.k[head], seen.v[head]], 1).astype(float)
        c, z = np.zeros((DIM, DIM // 2)), np.zeros(DIM)
        for query in range(TOKENS):
            x = xs[query]
            i = math.exp(x @ p["wi"][head][:, 0] + p["bi"][head, 0])
            f = 1 / (1 + math.exp(-(x @ p["wf"][head][:, 0] + p["bf"][head, 0])))
            k = hedgehog(x @ p["wk"][head])
            c, z = f * c + i * np.outer(k, x @ p["wv"][head]), f * z + i * k
            if query >= WINDOW:
                read = hedgehog(xs[query - WINDOW] @ p["wq"][head])
                slow = silu(read @ c / (read @ z)) @ p["a"][head][:, 0] + p["b"][head, 0]
                assert float(got[head, query - WINDOW]) == pytest.approx(slow, abs=1e-4)


@pytest.mark.parametrize("make", [lambda: MlpScorer(Mlp(HEADS, 2 * DIM)), lambda: MlstmScorer(Mlstm(HEADS, 2 * DIM))])
def test_scores_come_in_pieces(make: object) -> None:
    seen = seen_of()
    scorers = []
    for _ in range(2):
        torch.manual_seed(4)
        one = make()  # type: ignore[operator]
        randomised(one._heads, 4)
        scorers.append(one)
    whole = scorers[0].scores(seen, 0, WINDOW)
    pieces, before = [], 0
    for n in (4, 40, 41, 110, TOKENS):
        pieces.append(scorers[1].scores(seen.upto(n), before, WINDOW))
        before = n
    assert torch.allclose(torch.cat(pieces, 1), whole, atol=1e-5)


def test_gates_of_any_size_are_read_without_overflow() -> None:
    """Input gates of e^200 and forgotten memories: what a query reads stays a mean of values."""
    n = 130
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.rand(1, n, 4, generator=generator) + 0.1 for _ in range(2))
    v = torch.randn(1, n, 3, generator=generator)
    log_i, log_f = torch.zeros(1, n), torch.full((1, n), -0.01)
    log_i[0, 70], log_f[0, 100] = 200, -300
    h, _ = read_memory(q, k, v, log_i, log_f, empty_state(1, 4, 3))
    assert bool(h.isfinite().all())
    assert torch.allclose(h[0, 0], v[0, 0], atol=1e-5)
    assert torch.allclose(h[0, 70:100], v[0, 70].expand(30, -1), atol=1e-4)  # nothing counts beside it
    assert torch.allclose(h[0, 100], v[0, 100], atol=1e-4)  # and here all of it is forgotten


def test_decay_stays_within_its_bounds() -> None:
    heads = Mlp(3, 4)
    heads.decay.data = torch.tensor([-100.0, 0.0, 100.0])
    low, high = math.log(0.999), math.log(0.999999)
    assert (low, high) == LOG_DECAY
    assert heads.log_decay.tolist() == pytest.approx([low, (low + high) / 2, high], rel=1e-4)


def slow_target(seen: Seen, head: int, t: int, normalise: bool) -> float:
    each = []
    for g in range(GROUP):
        total = 0.0
        for d in range(t + WINDOW, TOKENS):
            s = seen.k[head, : d + 1].double().numpy() @ seen.q[head, g, d].double().numpy() * SCALE
            total += float(softmax(s)[t])
        each.append(total / (max(1, TOKENS - t - WINDOW) if normalise else 1))
    return math.log(max(each) + EPSILON)


@pytest.mark.parametrize("normalise", [True, False])
def test_the_target_is_attention_that_is_to_come(normalise: bool) -> None:
    seen = seen_of()
    got = future_attention(seen, WINDOW, normalise)
    for head in range(HEADS):
        for t in (0, 5, 77, TOKENS - WINDOW - 1, TOKENS - WINDOW, TOKENS - 1):
            assert float(got[head, t]) == pytest.approx(slow_target(seen, head, t, normalise), abs=1e-4)
    assert torch.equal(Foreseen(got).scores(seen, 50, WINDOW), got[:, 40:140])


def test_boundaries_and_loss() -> None:
    rng = np.random.default_rng(3)
    target = torch.from_numpy(rng.normal(size=(HEADS, TOKENS)))
    target[0, 20:40] = 0.25  # equals
    log_decay = torch.tensor([-0.01, -0.002], dtype=torch.float64)
    sinks, best = 4, 12
    queries = torch.tensor([sinks + WINDOW + best, 60, 100, 149])
    b = boundaries(target, log_decay, queries, sinks, WINDOW, best)
    for head in range(HEADS):
        for i, q in enumerate(queries.tolist()):
            worth = {t: float(target[head, t]) + (q - t) * float(log_decay[head]) for t in range(sinks, q - WINDOW + 1)}
            value = sorted(worth.values(), reverse=True)[best - 1]
            new = worth[q - WINDOW]
            assert worth[int(b.last[head, i])] == pytest.approx(value, abs=1e-9)
            assert float(b.label[head, i]) == (1 if new >= value else -1)
            assert float(b.margin[head, i]) == pytest.approx(abs(new - value), abs=1e-9)
    w = weights(b)
    assert float(w.mean()) == pytest.approx(1)
    for head in range(HEADS):
        label, margin = b.label[head].tolist(), b.margin[head].tolist()
        keep = sum(x > 0 for x in label) / len(label)
        share = [keep if x > 0 else 1 - keep for x in label]
        even = [min(max(1 / (2 * s), 0.5), 4.0) for s in share]
        slow = [(0.1 + 0.9 / (1 + math.exp(-m))) * e for m, e in zip(margin, even, strict=True)]
        ratio = w[head].double().numpy() / np.array(slow)
        assert np.allclose(ratio, ratio[0])
    new, last = torch.tensor([[0.5, -2.0]]), torch.tensor([[1.0, 3.0]])
    label, weight = torch.tensor([[1.0, -1.0]]), torch.tensor([[2.0, 1.0]])
    slow_loss = (2 * math.log1p(math.exp(0.5 / 2)) + math.log1p(math.exp(-5 / 2))) / 2
    assert float(boundary_loss(new, last, label, weight, temperature=2.0)) == pytest.approx(slow_loss)


@pytest.mark.parametrize("name", ["kvpop-mlp", "kvpop-mlstm"])
def test_training_finds_what_the_key_says(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first channel of a key tells its future: a scorer that learnt ranks by it."""
    monkeypatch.setattr("prefixd.retention.learn.WINDOW", WINDOW)
    generator = torch.Generator().manual_seed(0)
    k, v = (torch.randn(HEADS, 400, DIM, generator=generator) for _ in range(2))
    shares: list[float] = []
    heads = train(name, [Text(k, v, 3 * k[..., 0])], [20, 60], lambda step, loss, agree: shares.append(agree), 400)
    assert np.mean(shares[-20:]) > 0.8 > np.mean(shares[:5])
    save(heads, name, [7], "digest", scorer_path(tmp_path, name))
    seen = Seen(torch.zeros(HEADS, 1, 400, DIM), k, v, 40, 1.0)
    scorer = load_scorer(tmp_path, "digest", 7, name)
    first = scorer.scores(seen, 0, WINDOW)
    for head in range(HEADS):
        assert np.corrcoef(first[head].numpy(), k[head, : 400 - WINDOW, 0].numpy())[0, 1] > 0.6
    assert torch.allclose(scorer.log_decay, heads.log_decay.detach())
    with pytest.raises(InvalidArgument, match="another model"):
        load_scorer(tmp_path, "other", 7, name)
    with pytest.raises(InvalidArgument, match="no scorer of layer 6"):
        load_scorer(tmp_path, "digest", 6, name)
    with pytest.raises(InvalidArgument, match="--train"):
        load_scorer(tmp_path / "none", "digest", 7, name)
