"""What the scheduler's side of the connector tells the worker's side with each step, and hears from it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata, KVConnectorWorkerMetadata

if TYPE_CHECKING:
    import numpy as np


@dataclass
class Load:
    """Tokens [begin, end) of a stored prefix go into the request's blocks: before its layers attend in
    this step, or, parked, while the request waits."""

    request: str
    prefix: str
    begin: int
    end: int
    parked: bool
    blocks: list[int]  # from the prompt's first token on


@dataclass
class Save:
    """After this step tokens [0, end) of the request are in its blocks, in every layer."""

    request: str
    end: int
    last: bool  # the prompt is complete
    blocks: list[int]
    tokens: np.ndarray | None = None  # the prompt as it is stored, with the request's first message
    computed: int = 0  # with it: the prompt's tokens whose rows were there before this step


# Longer than any request (Attachment.known): it hands nothing over.
NEVER = 1 << 62


@dataclass
class Attachment:
    """The request attends over the first tokens of a stored prefix where they are; they have no blocks."""

    request: str
    prefix: str
    tokens: int  # attached, whole blocks
    prompt: int  # tokens of the request's prompt
    known: int  # tokens of the request when it was admitted: more than the prompt's after a preemption
    policy: dict[str, Any]
    marker: int  # stands for the attached blocks in the block table, below 0
    refused: str = ""  # why the request is to fail instead

    def generates(self, length: int, queries: int) -> bool:
        """Whether the last of the request's first `length` tokens, with so many queries in this step, was
        generated; what comes with others is a question, or is computed again."""
        return queries == 1 and length > self.prompt

    def hands_over(self, length: int, queries: int) -> bool:
        """Whether such a step gives the session own tokens, where the engine has a window. Then all later
        steps do, because there is nothing left to be computed again."""
        return self.generates(length, queries) and length >= self.known

    def same(self, other: Attachment) -> bool:
        """Whether one session serves both."""
        return (self.prefix, self.tokens, self.policy, self.refused) == (
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
    # Blocks that a failed load has left wrong, and over which this step computes. The worker reports them, and
    # vLLM has the requests that have them compute them again.
    wrong: list[int] = field(default_factory=list)


@dataclass
class WorkerNote(KVConnectorWorkerMetadata):
    """What a worker says behind a step."""

    lost: bool = False  # the daemon became unreachable
    puts: int = 0  # that are not finished

    def aggregate(self, other: KVConnectorWorkerMetadata) -> WorkerNote:
        assert isinstance(other, WorkerNote)
        return WorkerNote(self.lost or other.lost, max(self.puts, other.puts))
