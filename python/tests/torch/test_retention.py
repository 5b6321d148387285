"""Each policy keeps what a slow reference keeps that holds a set of tokens and follows the papers' words step
by step, in float64, without anything of the package."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch

from prefixd.errors import InvalidArgument
from prefixd.retention.compress import GKV, Compressing, Global, Local, SnapKV
from prefixd.retention.greedy import H2O, Tova
from prefixd.retention.kvpop import KVpop, effective, priority
from prefixd.retention.policies import NAMES, PLAIN, make
from prefixd.retention.policy import Policy
from prefixd.retention.seen import NEVER, Seen, kept
from prefixd.retention.window import SinksAndWindow

HEADS, GROUP, DIM, PROMPT, TOKENS, SCALE = 2, 3, 8, 40, 150, 0.3


def seen_of(seed: int = 0, size: float = 2.0, tokens: int = TOKENS, prompt: int = PROMPT) -> Seen:
    rng = np.random.default_rng(seed)
    q = rng.normal(size=(HEADS, GROUP, tokens, DIM)) * size
    k = rng.normal(size=(HEADS, tokens, DIM)) * size + 1
    v = rng.normal(size=(HEADS, tokens, DIM))
    return Seen(*(torch.from_numpy(x).float() for x in (q, k, v)), prompt=prompt, scale=SCALE)


def softmax(s: list[float]) -> list[float]:
    top = max(s)
    e = [math.exp(x - top) for x in s]
    return [x / sum(e) for x in e]


class Slow:
    """One KV head: `attention(g, query, tokens)` is what query head g gives to tokens."""

    def __init__(self, seen: Seen, head: int) -> None:
        self.q, self.k = seen.q[head].double().numpy(), seen.k[head].double().numpy()

    def attention(self, g: int, query: int, tokens: list[int]) -> list[float]:
        return softmax([float(self.q[g, query] @ self.k[t]) * SCALE if t <= query else -math.inf for t in tokens])

    def mean(self, query: int, tokens: list[int]) -> dict[int, float]:
        each = [self.attention(g, query, tokens) for g in range(GROUP)]
        return {t: sum(a[i] for a in each) / GROUP for i, t in enumerate(tokens)}


def slow_window(s: Slow, budget: int, prompt: int, tokens: int) -> list[set[int]]:
    sinks = min(4, budget - 1)
    return [{t for t in range(q + 1) if t < sinks or q - t < budget - sinks} for q in range(prompt, tokens)]


def slow_tova(s: Slow, budget: int, prompt: int, tokens: int) -> list[set[int]]:
    held = list(range(prompt))
    worth = s.mean(prompt - 1, held)
    while len(held) >= budget:
        held.remove(min(held, key=lambda t: (worth[t], t)))
    out = []
    for q in range(prompt, tokens):
        held.append(q)
        out.append(set(held))
        worth = s.mean(q, held)
        if len(held) == budget:
            held.remove(min(held, key=lambda t: (worth[t], t)))
    return out


def slow_h2o(s: Slow, budget: int, prompt: int, tokens: int) -> list[set[int]]:
    worth = dict.fromkeys(range(tokens), 0.0)
    held: list[int] = []
    out = []
    for q in range(tokens):
        held.append(q)
        if q >= prompt:
            out.append(set(held))
        for t, a in s.mean(q, held).items():
            worth[t] += a
        while q >= prompt - 1 and len(held) >= budget:
            free = [t for t in held if t <= q + 1 - budget // 2]  # the next query is one of the newest
            held.remove(min(free, key=lambda t: (worth[t], t)))
    return out


Score = Callable[[Slow, list[int], int], dict[int, float]]


def slow_local(s: Slow, held: list[int], n: int, window: int) -> dict[int, float]:
    total = dict.fromkeys(held, 0.0)
    for q in range(n - window, n):
        each = [s.attention(g, q, held) for g in range(GROUP)]
        for i, t in enumerate(held):
            total[t] += max(a[i] for a in each) / window
    return total


def slow_compressing(
    s: Slow, budget: int, prompt: int, tokens: int, interval: int, window: int,
    score: Callable[[list[int], int], dict[int, float]], remember: Callable[[set[int]], None],
) -> list[set[int]]:
    """The paper's cycle: rank what is held, keep the best, let it grow; here the worst leave one by one."""
    held, out = list(range(prompt)), []
    ranked: list[int] = []
    for q in range(prompt, tokens):
        if (q - prompt) % interval == 0:
            worth = score(held, q)
            recent = [t for t in held if t >= q - window]
            rest = sorted((t for t in held if t < q - window), key=lambda t: (worth[t], t), reverse=True)
            ranked = sorted(recent, reverse=True) + rest
            remember(set(ranked[: budget - interval]) - set(recent))
        while len(ranked) + (q - prompt) % interval + 1 > budget:
            ranked.pop()
        fresh = range(q - (q - prompt) % interval, q + 1)
        held = sorted([*ranked, *fresh])
        out.append(set(held))
    return out


INTERVAL, OBSERVED = 16, 4


def slow_ranked(name: str, s: Slow, budget: int, prompt: int, tokens: int) -> list[set[int]]:
    past: dict[int, float] = {}
    now: dict[int, float] = {}
    alpha = 0.8

    def redundancy(held: list[int]) -> dict[int, float]:
        unit = {t: s.k[t] / (np.linalg.norm(s.k[t]) + 1e-8) for t in held}
        newest = held[-OBSERVED:]
        mean = {}
        for j in held:
            each = [float(unit[i] @ unit[j]) for i in held]
            mean[j] = 0.0 if j in newest else sum(x for x in each if x >= 0.5) / len(held)
        r = dict(zip(held, softmax([mean[t] for t in held]), strict=True))
        return {t: x / max(r.values()) for t, x in r.items()}

    def score(held: list[int], n: int) -> dict[int, float]:
        local = slow_local(s, held, n, OBSERVED)
        if name == "local":
            return local
        if name == "snapkv":
            return {t: max(local[u] for u in held[max(0, i - 2) : i + 3]) for i, t in enumerate(held)}
        now.clear()
        for t in held:
            x = local[t] / max(local.values())
            if t in past and name == "sum":
                x = alpha * past[t] + x
            elif t in past and name == "mean":
                x = alpha * past[t] + (1 - alpha) * x
            elif t in past:
                x = max(alpha * past[t], x)
            now[t] = x
        if name in ("sum", "max", "mean"):
            return dict(now)
        sign = -1 if name == "gkv" else 1
        double = redundancy(held)
        return {t: 0.9 * now[t] + sign * 0.1 * double[t] for t in held}

    def remember(stay: set[int]) -> None:
        past.clear()
        past.update({t: now[t] for t in stay if t in now})

    return slow_compressing(s, budget, prompt, tokens, INTERVAL, OBSERVED, score, remember)


def sets(policy: Policy, seen: Seen, head: int) -> list[set[int]]:
    masks = kept(policy.leaves, torch.arange(seen.prompt, seen.tokens))[head]
    return [set(row.nonzero()[:, 0].tolist()) for row in masks]


RANKED: dict[str, Callable[[int], Compressing]] = {
    "local": lambda b: Local(b, INTERVAL, OBSERVED),
    "snapkv": lambda b: SnapKV(b, INTERVAL, OBSERVED),
    "sum": lambda b: Global(b, "sum", 0.8, INTERVAL, OBSERVED),
    "max": lambda b: Global(b, "max", 0.8, INTERVAL, OBSERVED),
    "mean": lambda b: Global(b, "mean", 0.8, INTERVAL, OBSERVED),
    "gkv": lambda b: GKV(b, interval=INTERVAL, observation=OBSERVED),
    "gkv-plus": lambda b: GKV(b, 1, interval=INTERVAL, observation=OBSERVED),
}
STEPWISE = {"window": (SinksAndWindow, slow_window), "tova": (Tova, slow_tova), "h2o": (H2O, slow_h2o)}


@pytest.mark.parametrize("budget", [1, 2, 7, 30, 60, 400])
@pytest.mark.parametrize("name", STEPWISE)
def test_one_token_leaves_at_each_step_as_the_reference_has_it(name: str, budget: int) -> None:
    of, slow = STEPWISE[name]
    for seed, size in ((0, 2.0), (1, 4.0)):
        seen = seen_of(seed, size)
        policy = of(budget)
        policy.advance(seen)
        for head in range(HEADS):
            assert sets(policy, seen, head) == slow(Slow(seen, head), budget, PROMPT, TOKENS)


@pytest.mark.parametrize("budget", [21, 30, 60, 400])
@pytest.mark.parametrize("name", RANKED)
def test_rankings_are_the_references(name: str, budget: int) -> None:
    for seed, size in ((0, 2.0), (1, 4.0)):
        seen = seen_of(seed, size)
        policy = RANKED[name](budget)
        policy.advance(seen)
        for head in range(HEADS):
            assert sets(policy, seen, head) == slow_ranked(name, Slow(seen, head), budget, PROMPT, TOKENS)


class Given:
    def __init__(self, scores: torch.Tensor, log_decay: torch.Tensor) -> None:
        self._scores, self.log_decay = scores, log_decay

    def scores(self, seen: Seen, before: int, window: int) -> torch.Tensor:
        return self._scores[:, max(0, before - window) : max(0, seen.tokens - window)]


def slow_kvpop(
    score: np.ndarray, log_decay: float, best: int, sinks: int, window: int, prompt: int, tokens: int
) -> list[set[int]]:
    """Keeps the top k of those still held by effective scores at each query; what fell out stays out."""
    held: list[int] = []
    out = []
    for q in range(tokens):
        if q - window >= sinks:
            held.append(q - window)
            worth = {t: float(score[t]) + (q - t) * log_decay for t in held}
            held = sorted(held, key=lambda t: (worth[t], t), reverse=True)[:best]
        if q >= prompt:
            out.append(set(range(min(sinks, q + 1))) | {t for t in range(q + 1) if q - t < window} | set(held))
    return out


@pytest.mark.parametrize("case", ["random", "ties", "infinite", "huge"])
def test_kvpop_keeps_the_best_by_effective_scores(case: str) -> None:
    seen, rng = seen_of(), np.random.default_rng(5)
    score = rng.normal(size=(HEADS, TOKENS))
    decay = np.log([0.99, 0.999])
    if case == "ties":
        score, decay = np.zeros_like(score), np.zeros(2)
    elif case == "infinite":
        score[:, ::3] = -np.inf
    elif case == "huge":
        score *= 1e6
    for budget, window in ((20, 6), (50, 1), (400, 6)):
        policy = KVpop(budget, Given(torch.from_numpy(score), torch.from_numpy(decay)), sinks=4, window=window)
        policy.advance(seen)
        for head in range(HEADS):
            best = budget - 4 - window
            assert sets(policy, seen, head) == slow_kvpop(
                score[head], float(decay[head]), best, 4, window, PROMPT, TOKENS
            )


def test_static_priorities_order_as_effective_scores_do() -> None:
    rng = np.random.default_rng(0)
    at, score = torch.arange(50), torch.from_numpy(rng.normal(size=(2, 50)))
    log_decay = torch.tensor([-0.01, -0.001], dtype=torch.float64)
    for query in (49, 60, 5000):
        value = effective(score, at, query, log_decay)
        for head in range(2):
            for t in (0, 17, 49):
                plain = float(score[head, t]) + (query - t) * float(log_decay[head])
                assert float(value[head, t]) == pytest.approx(plain, abs=1e-12)
        assert torch.equal(value.argsort(1), priority(score, at, log_decay).argsort(1))
    assert float(effective(score, at, 60, log_decay, step=8)[0, 3]) == pytest.approx(float(score[0, 3]) - 7 * 0.01)


def everything(seen: Seen) -> dict[str, Policy]:
    given = Given(torch.from_numpy(np.random.default_rng(2).normal(size=(HEADS, seen.tokens))), torch.zeros(HEADS))
    return {name: make(name, 90, lambda _: given) for name in NAMES}


@pytest.mark.parametrize("name", NAMES)
def test_pieces_give_what_the_whole_gives(name: str) -> None:
    seen = seen_of(tokens=260, prompt=100)
    whole, pieces = everything(seen)[name], everything(seen)[name]
    whole.advance(seen)
    for n in (100, 101, 163, 164, 230, 260):
        pieces.advance(seen.upto(n))
        # What was said of queries before is final.
        at = torch.arange(100, n)
        assert torch.equal(kept(pieces.leaves, at), kept(whole.leaves[:, :n], at))
    counts = kept(whole.leaves, torch.arange(100, 260)).sum(-1)
    assert bool((counts == 90).all())  # the budget is used to the last token, and by nobody exceeded


@pytest.mark.parametrize("name", PLAIN)
def test_of_equals_the_newer_stay(name: str) -> None:
    """All keys alike: the scores say nothing, and every policy keeps a set of its size."""
    seen = seen_of(tokens=200, prompt=100)
    same = Seen(seen.q, seen.k[:, :1].expand_as(seen.k).contiguous(), seen.v, 100, SCALE)
    policy = PLAIN[name](60)
    policy.advance(same)
    masks = kept(policy.leaves, torch.arange(100, 200))
    assert bool((masks.sum(-1) == 60).all()) and bool(masks[:, torch.arange(100), torch.arange(100, 200)].all())
    if name in ("local", "snapkv"):
        # Ranked behind the prompt: all that causal attention gives alike, so the newest are there.
        assert bool(masks[:, 0, 41:101].all())


@pytest.mark.parametrize("name", PLAIN)
def test_scores_in_the_thousands_leave_the_budget_as_it_is(name: str) -> None:
    """float32 knows nothing of a token that a softmax gives less than 1e-38: such tokens are equals."""
    seen = seen_of(size=80.0, tokens=200, prompt=100)
    policy = PLAIN[name](60)
    policy.advance(seen)
    assert bool((kept(policy.leaves, torch.arange(100, 200)).sum(-1) == 60).all())


def test_a_budget_that_holds_everything_loses_nothing() -> None:
    seen = seen_of()
    for name in PLAIN:
        policy = PLAIN[name](TOKENS)
        policy.advance(seen)
        at = torch.arange(PROMPT, TOKENS)
        assert bool((kept(policy.leaves, at).sum(-1) == at + 1).all())


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="keeps nothing"):
        Tova(0)
    with pytest.raises(InvalidArgument, match="interval of 16"):
        Local(20, 16, 4)
    with pytest.raises(InvalidArgument, match="no room"):
        KVpop(68, Given(torch.zeros(1, 1), torch.zeros(1)))
    with pytest.raises(InvalidArgument, match="there is no policy newest"):
        make("newest", 100, lambda _: Given(torch.zeros(1, 1), torch.zeros(1)))
    with pytest.raises(InvalidArgument, match="whole prompt"):
        Tova(8).advance(seen_of().upto(PROMPT - 1))
    assert NEVER > TOKENS
