#!/usr/bin/env python3
"""One vLLM engine of vllm_peers.py: does the work that it reads as one line of JSON, prints what it
measured as the last line, and ends when it reads another line.

Work: {"model": DIR, "transfer": {...} or null, "warm": [ids], "prefill": [[ids], ...],
"decode": [{"prompts": [[ids], ...], "tokens": N}, ...], "pause": seconds, "pids": [others to weigh]}"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
}


def resident(pids: list[int]) -> int:
    """Returns the bytes that these processes and their children keep in memory; what they share counts
    once."""
    import psutil

    trees = [psutil.Process(pid) for pid in pids]
    every = {one.pid: one for top in trees for one in (top, *top.children(recursive=True))}
    return sum(int(one.memory_full_info().pss) for one in every.values())


class Engine:
    def __init__(self, model: str, transfer: dict[str, Any] | None) -> None:
        from vllm import LLM, SamplingParams

        self._sampling = SamplingParams
        # Steps that take a whole prompt: vLLM's example connector stores those alone.
        self.llm = LLM(model=model, dtype="float32", max_model_len=8192, max_num_batched_tokens=8192,
                       enforce_eager=True, disable_log_stats=True, kv_transfer_config=transfer)
        self._core, self._next = self.llm.llm_engine, 0

    def run(self, prompts: list[list[int]], tokens: int) -> list[dict[str, Any]]:
        """Answers the prompts at once; returns for each when its tokens came, in seconds from now, and how
        many tokens of the prompt were not computed."""
        # No log probabilities: asking for them compiles something behind the first request.
        sampling = self._sampling(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)
        begun = time.perf_counter()
        answers: dict[str, dict[str, Any]] = {}
        for prompt in prompts:
            self._next += 1
            answers[f"r{self._next}"] = {"at": [], "cached": 0}
            self._core.add_request(f"r{self._next}", {"prompt_token_ids": prompt}, sampling)
        while self._core.has_unfinished_requests():
            for output in self._core.step():
                now, answer = time.perf_counter() - begun, answers[output.request_id]
                answer["at"] += [now] * (len(output.outputs[0].token_ids) - len(answer["at"]))
                answer["cached"] = output.num_cached_tokens or 0
        return list(answers.values())


def decoding(answers: list[dict[str, Any]]) -> dict[str, Any]:
    """Returns the gaps between tokens, and the tokens per second once every request has its first."""
    begin = max(answer["at"][0] for answer in answers)
    end = max(answer["at"][-1] for answer in answers)
    behind = sum(1 for answer in answers for at in answer["at"] if at > begin)
    gaps = [b - a for answer in answers for a, b in zip(answer["at"], answer["at"][1:], strict=False) if a >= begin]
    return {"tokens_per_second": behind / (end - begin), "gaps": gaps}


def main() -> None:
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    work = json.loads(sys.stdin.readline())
    engine = Engine(work["model"], work["transfer"])
    engine.run([work["warm"]], 4)
    engine.run([work["warm"][: len(work["warm"]) // 2]], 4)
    time.sleep(work["pause"])
    prefills, decodes = [], []
    for prompt in work["prefill"]:
        (answer,) = engine.run([prompt], 1)
        prefills.append({"first_token": answer["at"][0], "cached": answer["cached"]})
        time.sleep(work["pause"])
    for batch in work["decode"]:
        decodes.append(decoding(engine.run(batch["prompts"], batch["tokens"])))
        time.sleep(work["pause"])
    own, others = resident([os.getpid()]), resident(work["pids"])
    print(json.dumps({"prefill": prefills, "decode": decodes, "engine_bytes": own, "beside_bytes": others}), flush=True)
    sys.stdin.readline()


if __name__ == "__main__":
    main()
