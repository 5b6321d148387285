"""Tests that prompts are stored with queries of their own, by which the store chooses estimators."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from prefixd.vllm.messages import Save
from prefixd.vllm.queries import SAMPLED, Queries, sample
from tests.vllm import engines
from tests.vllm.conftest import Daemon, Engine, keep, own_model

LAYERS, KV_HEADS = 4, 2
BLOCK = 16


@pytest.mark.parametrize(
    ("tokens", "computed", "begin"),
    [(7600, 0, 5700), (7600, 7000, 7000), (100, 0, 75), (3, 0, 3), (8, 7, 7), (9, 9, 9)],
)
def test_the_sample_is_of_the_last_quarter(tokens: int, computed: int, begin: int) -> None:
    got = sample(tokens, computed)
    assert len(got) == min(SAMPLED, tokens - begin)
    assert got == sorted(set(got))
    assert all(begin <= token < tokens for token in got)
    if len(got) == SAMPLED:  # evenly
        gaps = [b - a for a, b in zip(got, got[1:], strict=False)]
        assert max(gaps) - min(gaps) <= 1


class Recorder:
    def __init__(self, sampled: list[int]) -> None:
        self.sampled = sampled
        self.got: list[tuple[str, list[int], torch.Tensor]] = []

    def take_queries(self, layer: str, tokens: list[int], q: torch.Tensor) -> None:
        self.got.append((layer, tokens, q))


def test_each_recorder_gets_the_rows_of_its_own_prompt() -> None:
    """A batch of a chunk of 20 tokens that ends at token 40, an attached request, a token that is generated, and a
    prompt of 10 tokens whose blocks another request shares but for the last one."""
    table = torch.tensor([[3, 4, 5], [9, 9, 0], [6, 7, 0], [3, 8, 0]])
    metadata = SimpleNamespace(
        query_start_loc=torch.tensor([0, 20, 22, 23, 33]), seq_lens=torch.tensor([40, 2, 30, 26]), block_table=table,
        attached=SimpleNamespace(rows=[SimpleNamespace(first=20)]),
    )  # fmt: skip
    query = torch.arange(33 * 2 * 4, dtype=torch.float32).view(33, 2, 4)
    chunk, shared, waited, foreign = Recorder([19, 20, 33, 39, 40]), Recorder([17, 25]), Recorder([20]), Recorder([1])
    queries = Queries(BLOCK)
    try:
        saves: Any = [
            (chunk, Save("a", 40, False, [3, 4, 5])),
            (shared, Save("b", 26, True, [3, 8])),
            (waited, Save("c", 28, True, [6, 7])),  # its prompt was computed before: this step generates
            (foreign, Save("d", 2, True, [9])),  # a block of the attached one, which is another's by now
        ]
        queries.begin(saves)
        for layer in ("first", "second"):
            queries.take(layer, query, metadata)
        assert [(layer, tokens) for layer, tokens, _ in chunk.got] == [
            ("first", [20, 33, 39]), ("second", [20, 33, 39])
        ]  # fmt: skip
        assert torch.equal(chunk.got[0][2], query[[0, 13, 19]])
        assert [(tokens, q.tolist()) for _, tokens, q in shared.got] == 2 * [([17, 25], query[[24, 32]].tolist())]
        assert waited.got == foreign.got == []
        queries.begin([])
        queries.take("first", query, cast(Any, None))
        assert len(chunk.got) == 2
    finally:
        queries.close()
    assert Queries.current is not queries


def test_what_the_engine_stores_has_them(
    engine: Engine, daemon: Daemon, stored: Callable[[list[int]], int]
) -> None:
    """A prompt of many steps, and one that goes on where a stored one ends."""
    prompt = engines.text(56000, 1700)
    longer = prompt + engines.text(58000, 400)[1:]
    for one in (prompt, longer):
        keep(engine, stored, one)
        with daemon.store() as store:
            prefix = store.match(own_model(store), one).prefix
            store.wait_ready(prefix)
            info = store.prefix(prefix)
        assert {"queries", "choice"} <= set(info["blobs"])
        heads = {(choice["layer"], choice["kv_head"]) for choice in info["choices"]}
        assert heads == {(layer, head) for layer in range(LAYERS) for head in range(KV_HEADS)}
