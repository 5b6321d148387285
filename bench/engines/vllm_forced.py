"""Makes a request of vLLM go on with given tokens, and keeps what the model thought at each of them.

    LLM(..., logits_processors=["vllm_forced:Forced"])
    SamplingParams(..., extra_args={"forced": [ids], "into": "a name"})

For engines whose core runs in this process (VLLM_ENABLE_V1_MULTIPROCESSING=0) and that schedule one step at
a time (async_scheduling=False)."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from vllm import SamplingParams
from vllm.v1.sample.logits_processor import AdapterLogitsProcessor

# By name: the logarithm of each token's probability, at each given token.
KEPT: dict[str, dict[int, np.ndarray]] = {}


class Forced(AdapterLogitsProcessor):
    def is_argmax_invariant(self) -> bool:
        return False

    def new_req_logits_processor(self, params: SamplingParams) -> Any:
        given = params.extra_args or {}
        if "forced" not in given:
            return None
        forced, kept = given["forced"], KEPT.setdefault(given["into"], {})

        def force(output: list[int], logits: torch.Tensor) -> torch.Tensor:
            # A prompt that is computed in pieces comes here several times before its first token.
            at = len(output)
            if at < len(forced):
                kept[at] = torch.log_softmax(logits.float(), -1).numpy(force=True).copy()
                logits.fill_(float("-inf"))
                logits[forced[at]] = 0
            return logits

        return force
