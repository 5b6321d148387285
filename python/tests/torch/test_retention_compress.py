"""What KVpop's trained scorers keep of a stored prefix is what its policy keeps."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

import prefixd
from prefixd.retention.kvpop import KVpop
from prefixd.retention.learn import load_scorer, save, scorer_path
from prefixd.retention.policies import LEARNT, WINDOW
from prefixd.retention.scorers import Mlp, Mlstm
from prefixd.retention.seen import NEVER, Seen
from tests.prompts import DIM, KV_HEADS, LAYERS, Prompt

SINKS = 4  # the store's


def kept_rows(session: prefixd.Session, layer: int, head: int) -> list[int]:
    there = []
    for token in range(session.n_tokens):
        try:
            session.read_rows(layer, head, [token])
        except prefixd.FailedPrecondition:
            continue
        there.append(token)
    return there


@pytest.mark.parametrize("name", LEARNT)
def test_the_store_keeps_what_the_policy_keeps(name: str, store: prefixd.Store, tmp_path: Path) -> None:
    torch.manual_seed(5)
    heads: Mlp | Mlstm
    heads = Mlp(LAYERS * KV_HEADS, 2 * DIM) if name == "kvpop-mlp" else Mlstm(LAYERS * KV_HEADS, 2 * DIM)
    for p in heads.parameters():
        p.data = torch.randn(p.shape) * 0.5
    heads.mean.normal_()
    heads.scale.uniform_(0.5, 2)
    path = scorer_path(tmp_path / "scorers", name)
    save(heads, name, range(LAYERS), "blake2b:00", path)

    prompt = Prompt(seed=3)
    n = len(prompt.tokens)
    prefix = prompt.put(store).prefix
    with pytest.raises(prefixd.InvalidArgument, match="needs the file of its scorers"):
        store.compress(prefix, policy="kvpop")
    report = store.compress(prefix, policy="kvpop", scorers=str(path), keep=0.4)
    assert report["compressed"]
    with store.attach("m", prefix=prefix, policy=prefixd.Policy(k=5)) as session:
        for layer in range(LAYERS):
            k, v = (torch.from_numpy(np.ascontiguousarray(x[layer].swapaxes(0, 1))) for x in (prompt.k, prompt.v))
            seen = Seen(torch.zeros(KV_HEADS, 1, n, DIM), k, v, n, 1.0)
            scorer = load_scorer(tmp_path / "scorers", "blake2b:00", layer, name)
            policy = KVpop(report["kept_tokens"], scorer, SINKS, WINDOW)
            policy.advance(seen)
            for head in range(KV_HEADS):
                want = torch.nonzero(policy.leaves[head] == NEVER)[:, 0].tolist()
                got = kept_rows(session, layer, head)
                assert got == want, (layer, head)
                assert set(range(n - WINDOW, n)) < set(got)
