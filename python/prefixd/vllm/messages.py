"""What the scheduler's side of the connector tells the worker's side with each step."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

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
    computed: int = 0  # with it: the prompt's tokens whose rows were there before this step


@dataclass
class Attachment:
    """The request attends over the first tokens of a stored prefix where they are; they have no blocks."""

    request: str
    salt: str
    prefix: str
    tokens: int  # attached, whole blocks
    prompt: int  # tokens of the request's prompt
    policy: dict[str, Any]
    marker: int  # stands for the attached blocks in the block table, below 0
    refused: str = ""  # why the request is to fail instead

    def same(self, other: Attachment) -> bool:
        """Whether one session serves both."""
        return (self.salt, self.prefix, self.tokens, self.policy, self.refused) == (
            other.salt,
            other.prefix,
            other.tokens,
            other.policy,
            other.refused,
        )


@dataclass
class StepMessage(KVConnectorMetadata):
    loads: list[Load] = field(default_factory=list)
    saves: list[Save] = field(default_factory=list)
    attached: list[Attachment] = field(default_factory=list)  # requests that begin with this step
