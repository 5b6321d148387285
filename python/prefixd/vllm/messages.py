"""What the scheduler's side of the connector tells the worker's side with each step."""

from __future__ import annotations

from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata


@dataclass
class Load:
    """Tokens [begin, end) of a stored prefix go into the request's blocks: before its layers attend in
    this step, or, parked, while the request waits."""

    request: str
    salt: str
    prefix: str
    begin: int
    end: int
    parked: bool
    blocks: list[int]  # from the prompt's first token on


@dataclass
class Save:
    """After this step tokens [0, end) of the request are in its blocks, in every layer."""

    request: str
    salt: str
    end: int
    last: bool  # the prompt is complete
    blocks: list[int]
    tokens: list[int] | None = None  # the prompt, with the request's first message


@dataclass
class StepMessage(KVConnectorMetadata):
    loads: list[Load] = field(default_factory=list)
    saves: list[Save] = field(default_factory=list)
