"""An engine that attaches, with the prefixes of attached_prompts.py stored."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.vllm import attached_prompts, engines
from tests.vllm.conftest import Daemon, Engine, eventually, own_model
from tests.vllm.engines import BLOCK, same

ANSWER = 8
FULL = {"mode": "full"}
LEAST = 4 * BLOCK  # tokens of a prefix that is attached
PROMPTS = dict(attached_prompts.PROMPTS)  # and those of single tests


class Attached(Engine):
    """Says of each answer how it ended, and how many requests ran at once."""

    def __init__(self, llm: Any) -> None:
        super().__init__(llm)
        self.most = 0.0

    def settle(self) -> None:
        """Waits until the sessions of all requests have said what they read, which takes a step to arrive."""

        def ended() -> bool:
            self.one("short", 1, attach=False)
            return self.counts["attached_requests"] == self.counts["attached_ended"]

        eventually(ended)

    def begin(self, name: str, tokens: int = ANSWER, **policy: Any) -> str:
        self._next += 1
        request = f"q{self._next}"
        sampling = engines.sampling(tokens)
        if policy:
            sampling.extra_args = {"kv_transfer_params": {"prefixd": policy}}
        self.core.add_request(request, {"prompt_token_ids": PROMPTS[name]}, sampling)
        return request

    def run(self, after_step: Callable[[], None] = lambda: None) -> dict[str, dict[str, Any]]:
        answers: dict[str, dict[str, Any]] = {}
        while self.core.has_unfinished_requests():
            for output in self.core.step():
                if not output.finished:
                    continue
                end = output.outputs[0].finish_reason
                answers[output.request_id] = {"end": end} if end == "error" else engines.answer(output) | {"end": end}
            self.most = max(self.most, self.metric("vllm:num_requests_running"))
            after_step()
        return answers

    def one(self, name: str, tokens: int = ANSWER, **policy: Any) -> dict[str, Any]:
        request = self.begin(name, tokens, **policy)
        return self.run()[request]


@contextmanager
def attaching(
    daemon: Daemon, model: Path, pool: int, prefixes: dict[str, list[int]], **extra: Any
) -> Iterator[Attached]:
    """Stores the prefixes; the default policy reads everything."""
    transfer = engines.transfer(
        daemon.address, match_seconds=60, attach=True, attach_tokens=LEAST, policy=FULL, call_seconds=20, **extra
    )
    transfer["kv_load_failure_policy"] = "fail"
    llm = engines.engine(
        model,
        kv_transfer_config=transfer,
        max_model_len=4096,  # more than the pool has
        num_gpu_blocks_override=pool,
        logits_processors=["prefixd.vllm.attached.policy:PolicyCheck"],
    )
    engine = Attached(llm)
    for name, prefix in prefixes.items():
        PROMPTS[f"prefix {name}"] = prefix
        engine.one(f"prefix {name}", 1)
        eventually(lambda prefix=prefix: stored_of(daemon, prefix) == len(prefix))
    engine.forget()
    yield engine
    llm.llm_engine.engine_core.shutdown()


def stored_of(daemon: Daemon, prompt: list[int]) -> int:
    with daemon.store() as store:
        return store.match(own_model(store), prompt).n_tokens


def head(answer: dict[str, Any], n: int) -> dict[str, Any]:
    return {key: answer[key][:n] for key in ("tokens", "best")}


def equal(got: dict[str, Any], want: dict[str, Any], n: int = ANSWER) -> None:
    assert got["end"] == "length"
    assert len(got["tokens"]) == n
    same(head(got, n), head(want, n))
