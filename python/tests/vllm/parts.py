"""Stand-ins for what surrounds the two sides of the connector: vLLM, and the daemon."""

from __future__ import annotations

from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import prefixd
from prefixd.estimate import ReuseEstimate, TimeEstimate
from prefixd.store import PrefixMatch
from prefixd.vllm.options import Options
from prefixd.vllm.reach import Line, Reach
from prefixd.vllm.scheduler import SchedulerSide
from prefixd.vllm.worker import WorkerSide
from tests.prompts import spec

SECONDS = 10.0  # of a call


def gone(*given: Any, **named: Any) -> Any:
    raise prefixd.Unavailable("the daemon closed the connection")


def line(probe: Any = gone, seconds: float = SECONDS, **calls: Any) -> Line:
    """A line to a store that has these calls."""
    store: Any = SimpleNamespace(close=lambda: None, **calls)
    return Line(lambda: store, Reach(probe, seconds), seconds)


def scheduler(to: Line, **options: Any) -> SchedulerSide:
    return SchedulerSide(to, spec("f32", "m"), Options("unix:/s", **options), 128)


def worker(to: Line, **options: Any) -> WorkerSide:
    """The only rank of an engine with one layer."""
    one = spec("f32", "m")
    side = WorkerSide(to, to, one, Options("unix:/s", **options), 128, (0, one.n_kv_heads))
    layer: Any = SimpleNamespace(index=0, rows=None, cache=None)
    side._layers = {"layer": layer}
    return side


class SlowMatch:
    def __init__(self, answered: bool = False) -> None:
        self.answered, self.broken = answered, False

    def ready(self) -> bool:
        return self.answered

    def result(self) -> PrefixMatch:
        assert self.answered, "the scheduler would have waited"
        if self.broken:
            gone()
        unknown = TimeEstimate(0, "unknown")
        estimate = ReuseEstimate(300, 0, 0, unknown, unknown, unknown, 0, "unknown")
        return PrefixMatch("p", 300, 300, 300, estimate)


def asking(pending: SlowMatch) -> SchedulerSide:
    return scheduler(line(match_async=lambda *given, **named: pending))


def request(name: str, n: int = 300, **other: Any) -> Any:
    own = {"prompt_token_ids": [1] * n, "all_token_ids": [1] * n, "num_tokens": n, "num_prompt_tokens": n}
    own |= {"lora_request": None, "mm_features": [], "prompt_embeds": None, "cache_salt": None,
            "kv_transfer_params": None}
    return SimpleNamespace(request_id=name, **(own | other))


def step(
    tables: dict[str, list[int]],
    new: dict[str, int],
    known: dict[str, int],
    scheduled: dict[str, int],
    preempted: set[str] | None = None,
) -> Any:
    """Stands for what vLLM says of a step: the blocks, the tokens that were there, and those that it computes."""
    return SimpleNamespace(
        scheduled_new_reqs=[SimpleNamespace(req_id=name, num_computed_tokens=n) for name, n in new.items()],
        scheduled_cached_reqs=SimpleNamespace(req_ids=list(known), num_computed_tokens=list(known.values())),
        num_scheduled_tokens=scheduled,
        preempted_req_ids=preempted,
        kv_connector_block_state=SimpleNamespace(get_block_ids=lambda name: (tables[name],)),
    )


def worked(invalid: set[int] | None = None, note: Any = None) -> Any:
    """Stands for what a worker says behind a step."""
    return SimpleNamespace(invalid_block_ids=invalid or set(), kv_connector_worker_meta=note)


class Put:
    """Stands for a put of which nothing is stored yet."""

    def __init__(self, tokens: Any) -> None:
        self.tokens, self.missing = tokens, range(len(tokens))
        self.ended = ""
        self.commits: Future[Any] = done()

    def write_blocks(self, *given: Any) -> Future[None]:
        assert not self.ended
        return done()

    def commit(self, timeout: float | None = None) -> Future[Any]:
        assert timeout, "the engine would wait for ever"
        self.ended = "committed"
        return self.commits

    def abort(self) -> None:
        self.ended = "aborted"


def done() -> Future[Any]:
    future: Future[Any] = Future()
    future.set_result(None)
    return future
