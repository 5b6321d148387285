"""Estimates how long the ways to a stored prompt's keys and values take: restoring, retrieving,
recomputing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any


@dataclass(frozen=True)
class EngineSpeed:
    """What an engine says of itself when it asks for an estimate: its prefill rate (0: the store takes
    what it has learnt from puts that streamed a prefill), the prompt's first tokens that it has already,
    and the tokens that it expects to generate over an attached prefix (0: unknown)."""

    prefill_tokens_per_second: float = 0.0
    cached_tokens: int = 0
    answer_tokens: int = 0


ENGINE_UNKNOWN = EngineSpeed()


@dataclass(frozen=True)
class TimeEstimate:
    seconds: float
    source: str  # "measured", "earlier" (by the process before), "given", "learnt"; "unknown"

    @property
    def known(self) -> bool:
        return self.source != "unknown"


@dataclass(frozen=True)
class ReuseEstimate:
    """How long the ways to a matched prompt's keys and values take on the store's machine."""

    tokens: int  # estimated: matched, behind those that the engine has
    memory_bytes: int  # of their rows, in the host tier
    disk_bytes: int  # and not
    restore: TimeEstimate
    retrieve: TimeEstimate  # for each generated token
    recompute: TimeEstimate
    prefill_tokens_per_second: float  # 0: unknown
    advice: str  # the fastest: "restore", "attach", "recompute"; "unknown": there is nothing to compare

    @classmethod
    def from_wire(cls, wire: Mapping[str, Any]) -> ReuseEstimate:
        times = {name: TimeEstimate(**wire[name]) for name in ("restore", "retrieve", "recompute")}
        known = {field.name: wire[field.name] for field in fields(cls)}
        return cls(**{**known, **times})
