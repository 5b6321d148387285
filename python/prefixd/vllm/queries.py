"""Samples the queries of prompts while they are computed. The store chooses by them what stands for unread
tokens, head by head, and tunes the search: without them an attached prompt is read worse than by Top-K."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from prefixd.vllm.messages import Save
    from prefixd.vllm.recorder import Recorder

SAMPLED = 32  # tokens of a prompt: as many as the store keeps (ingest.query_samples)


def sample(tokens: int, computed: int) -> list[int]:
    """Returns tokens of the prompt's last quarter, of those behind the first `computed`, evenly spaced."""
    begin = max(tokens - tokens // 4, computed)
    size = tokens - begin
    n = min(SAMPLED, size)
    return [begin + (2 * i + 1) * size // (2 * n) for i in range(n)]


class Queries:
    """One of each worker: is shown the queries of each layer before it attends, and gives each recorder those
    of its prompt. Only vLLM's attention sees queries, so `current` is what the layers of this process ask
    (attached/backend.py); where the plugin is not loaded, nobody does, and prompts are stored without."""

    current: Queries | None = None

    def __init__(self, block_tokens: int) -> None:
        self._block = block_tokens
        self._saves: list[tuple[Recorder, Save]] = []
        self._found: list[tuple[Recorder, list[int], torch.Tensor]] | None = None
        Queries.current = self

    def begin(self, saves: list[tuple[Recorder, Save]]) -> None:
        """With each step: what is stored of it."""
        self._saves, self._found = saves, None

    def take(self, layer: str, query: torch.Tensor, metadata: Any) -> None:
        """`query` is [tokens][heads][dim], of the batch that vLLM's `metadata` describes."""
        if not self._saves:
            return
        if self._found is None:
            self._found = self._find(metadata)
        for recorder, tokens, rows in self._found:
            recorder.take_queries(layer, tokens, query[rows].float())

    def _find(self, metadata: Any) -> list[tuple[Recorder, list[int], torch.Tensor]]:
        """Finds the rows of the batch. A request is known by the block of its last token, which it computes
        in this step and nobody shares yet."""
        starts, lengths = metadata.query_start_loc.tolist(), metadata.seq_lens.tolist()
        attached = getattr(metadata, "attached", None)
        others = {one.first for one in attached.rows} if attached is not None else set()
        by_block = {
            int(metadata.block_table[i, (lengths[i] - 1) // self._block]): i
            for i in range(len(starts) - 1)
            if starts[i] < starts[i + 1] and starts[i] not in others
        }
        found = []
        for recorder, save in self._saves:
            i = by_block.get(save.blocks[(save.end - 1) // self._block])
            if i is None or lengths[i] != save.end:
                continue  # it was computed in earlier steps, and waited for room
            first = save.end - (starts[i + 1] - starts[i])
            if tokens := [token for token in recorder.sampled if first <= token < save.end]:
                rows = torch.tensor([starts[i] + token - first for token in tokens])
                found.append((recorder, tokens, rows))
        return found

    def close(self) -> None:
        if Queries.current is self:
            Queries.current = None
