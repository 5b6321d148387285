"""What the connector counts for vLLM's own log and metrics."""

from __future__ import annotations

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats


class Counts(KVConnectorStats):
    """Sums since the last report: loads, loaded_tokens, failed_loads, prompts and tokens that were
    computed because that is faster, prompts and tokens stored, and the seconds for which layers waited for
    loads and stores."""

    data: dict[str, float]

    def reset(self) -> None:
        self.data = {}

    def add(self, **counts: float) -> None:
        for name, n in counts.items():
            self.data[name] = self.data.get(name, 0) + n

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        self.add(**other.data)
        return self

    def reduce(self) -> dict[str, int | float]:
        return {name: round(n, 4) for name, n in sorted(self.data.items())}

    def is_empty(self) -> bool:
        """Whether there is nothing but seconds, which each step has."""
        return not any(n for name, n in self.data.items() if not name.endswith("_seconds"))

    @classmethod
    def of(cls, data: dict[str, Any] | None) -> Counts:
        counts = cls()
        counts.add(**(data or {}))
        return counts
