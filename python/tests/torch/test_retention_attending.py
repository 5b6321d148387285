"""What a model with a policy inside attends to, block by block, is what attend.py has for single queries."""

from __future__ import annotations

import pytest
import torch

from prefixd.retention.attend import ESTIMATORS, Asked
from prefixd.retention.attending import CHUNK, Attending, Grown
from prefixd.retention.policies import PLAIN
from prefixd.retention.seen import Seen, kept

HEADS, GROUP, DIM, VALUES, TOKENS, PROMPT = 3, 2, 16, 12, 700, 220


def seen_of(shift: float) -> Seen:
    g = torch.Generator().manual_seed(5)
    q = torch.randn(HEADS, GROUP, TOKENS, DIM, generator=g) * 2
    k = torch.randn(HEADS, TOKENS, DIM, generator=g) + shift * torch.arange(DIM)
    v = torch.randn(HEADS, TOKENS, VALUES, generator=g) + shift
    return Seen(q, k, v, PROMPT, 0.3)


@pytest.mark.parametrize("name", ["window", "tova", "gkv"])
@pytest.mark.parametrize("retrieved", [0, 30, 5000])
@pytest.mark.parametrize("shift", [0.0, 1.5])
def test_answers_are_those_of_single_queries(name: str, retrieved: int, shift: float) -> None:
    seen = seen_of(shift)
    estimators = torch.arange(HEADS)  # each of them on one head
    attending = Attending(PLAIN[name](64), retrieved, estimators, seen.upto(PROMPT))
    own = []
    for first, last in ((PROMPT, PROMPT + 1), (PROMPT + 1, 400), (400, 400 + CHUNK), (400 + CHUNK, TOKENS)):
        q = seen.q[:, :, first:last].flatten(0, 1)[None]
        own.append(attending(q, seen.k[None, :, :last], seen.v[None, :, :last])[0])
    got = torch.cat(own).transpose(0, 1).unflatten(0, (HEADS, GROUP))  # [H, G, n, dv]
    policy = PLAIN[name](64)
    policy.advance(seen)
    asked = Asked(seen, torch.arange(PROMPT, TOKENS))
    exact, cut = kept(policy.leaves, asked.at), None
    if retrieved:
        exact, cut = asked.retrieve(exact, retrieved)
    answers = asked.answers(exact, cut)
    expected = torch.stack([answers[name][head] for head, name in enumerate(ESTIMATORS)])
    assert torch.allclose(got, expected, rtol=2e-3, atol=2e-3)
    # Without rows to estimate by, the same exact answer.
    alone = Attending(PLAIN[name](64), retrieved, torch.zeros(HEADS, dtype=torch.int64), seen.upto(PROMPT))
    plain = alone(seen.q[:, :, PROMPT:].flatten(0, 1)[None], seen.k[None], seen.v[None])[0]
    plain = plain.transpose(0, 1).unflatten(0, (HEADS, GROUP))
    assert torch.allclose(plain, answers["none"], rtol=1e-3, atol=1e-3)


def test_rows_grow() -> None:
    rows = torch.randn(2, 50, 3)
    grown = Grown(rows[:, :7])
    for first, last in ((7, 8), (8, 9), (9, 40), (40, 50)):
        grown.add(rows[:, first:last])
        assert torch.equal(grown.rows, rows[:, :last])
