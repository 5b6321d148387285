"""Runs a Hugging Face model over a conversation and keeps what its attention saw."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from prefixd.errors import InvalidArgument
from prefixd.trace.conversations import Conversation, Turn
from prefixd.transformers.capture import captured
from prefixd.transformers.identity import attention_layers

FORMAT = "prefixd-trace-v1"
CHUNK = 2048  # tokens of a forward pass of the prefill
SAMPLES = 64  # of the prompt's own queries, as a put keeps them


@dataclass
class Layer:
    """Keys and values [Hkv, n, d] bf16 of the prompt; queries [samples or steps, Hq, dk] float32."""

    k: Tensor | None = None
    v: Tensor | None = None
    samples: list[Tensor] = field(default_factory=list)
    queries: Tensor | None = None  # of steps, with room for all of them
    taken: int = 0

    @property
    def steps(self) -> Tensor:
        assert self.queries is not None
        return self.queries[: self.taken]

    def take(self, q: Tensor, most: int) -> None:
        """Adds the queries [Hq, n, dk] of steps. They lie in one place: small tensors among those of the
        model's cache, which are made anew at each step, would keep the allocator from using that memory
        again (17 GB for two traces of 7,600 tokens)."""
        if self.queries is None:
            self.queries = torch.empty(most, q.shape[0], q.shape[2])
        end = self.taken + q.shape[1]
        self.queries[self.taken : end] = q.transpose(0, 1)
        self.taken = end


@dataclass
class Trace:
    kind: str
    source: str
    prompt: list[int]
    sampled_at: list[int]  # positions of the sampled queries, ascending
    steps: list[int]  # the token of each step
    turns: list[int]  # steps of each turn
    layers: list[Layer]
    scales: list[tuple[float, float]]  # (scale, softcap) of each layer

    def save(self, path: Path, model: str) -> None:
        """Writes the file at once or not at all."""
        tensors = {
            "tokens": torch.tensor(self.prompt, dtype=torch.int32),
            "step_tokens": torch.tensor(self.steps, dtype=torch.int32),
            "sampled_at": torch.tensor(self.sampled_at, dtype=torch.int32),
        }
        for index, layer in enumerate(self.layers):
            assert layer.k is not None and layer.v is not None
            tensors[f"layers.{index}.k"], tensors[f"layers.{index}.v"] = layer.k, layer.v
            tensors[f"layers.{index}.samples"] = torch.stack(layer.samples)
            tensors[f"layers.{index}.steps"] = layer.steps
        metadata = {
            "format": FORMAT, "model": model, "kind": self.kind, "source": self.source,
            "layers": json.dumps([{"scale": s, "softcap": c} for s, c in self.scales]),
            "turns": json.dumps(self.turns),
        }
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_name(path.name + ".part")
        try:
            save_file(tensors, part, metadata)
            os.replace(part, path)
        finally:
            part.unlink(missing_ok=True)


class _Recorder:
    """Receives each forward pass; what it keeps of it depends on what is being read."""

    def __init__(self, layers: int, prompt: int, sampled_at: list[int], steps: int) -> None:
        self.layers = [Layer() for _ in range(layers)]
        self.prompt, self.sampled_at, self.steps = prompt, sampled_at, steps
        self.first = 0  # position of the pass's first token
        self.stepping = False

    def __call__(self, index: int, q: Tensor, k: Tensor, v: Tensor) -> None:
        layer, n = self.layers[index], q.shape[2]
        if self.stepping:
            layer.take(q[0], self.steps)
        elif self.first < self.prompt:
            for at in self.sampled_at:
                if self.first <= at < self.first + n:
                    layer.samples.append(q[0, :, at - self.first].float().cpu().clone())
            if self.first + n == self.prompt:
                layer.k, layer.v = (x[0].to(torch.bfloat16).cpu().contiguous() for x in (k, v))


class _Run:
    def __init__(self, model: PreTrainedModel, recorder: _Recorder) -> None:
        self.model, self.recorder = model, recorder
        self.cache = DynamicCache()

    def forward(self, ids: list[int], *, stepping: bool = False) -> int:
        """Reads the tokens behind what the cache holds; returns the likeliest next one."""
        self.recorder.first, self.recorder.stepping = self.cache.get_seq_length(), stepping
        out = self.model(
            input_ids=torch.tensor([ids], device=self.model.device), past_key_values=self.cache,
            use_cache=True, logits_to_keep=1,
        )  # fmt: skip
        return int(out.logits[0, -1].argmax())

    def forget(self) -> None:
        """Removes what stands behind the prompt."""
        if (behind := self.cache.get_seq_length() - self.recorder.prompt) > 0:
            self.cache.crop(-behind)

    def turn(self, turn: Turn, most: int) -> list[int]:
        """Returns the tokens of the turn's steps, at most `most`."""
        if turn.forced:
            for at in range(0, len(turn.read), CHUNK):
                self.forward(turn.read[at : at + CHUNK])
            self.forward(turn.forced[:most], stepping=True)
            return turn.forced[:most]
        for at in range(0, len(turn.read) - 1, CHUNK):
            self.forward(turn.read[at : min(at + CHUNK, len(turn.read) - 1)])
        steps: list[int] = []
        token = turn.read[-1]
        while len(steps) < min(most, turn.at_most):
            steps.append(token)
            token = self.forward([token], stepping=True)
            if token in turn.stop:
                break
        return steps


def positions(tokens: int, samples: int) -> list[int]:
    """Returns where queries are sampled: spread over the last quarter, as a put samples them."""
    quarter = tokens // 4
    return [tokens - quarter + i * quarter // samples for i in range(min(samples, quarter))]


@torch.no_grad()
def record(
    model: PreTrainedModel, conversation: Conversation, steps: int, progress: Callable[[str, int, int], None]
) -> Trace:
    """Returns the trace of at least one and at most `steps` steps. `progress` receives (what, done,
    of) as it goes. The model attends exactly all the while and is left unchanged."""
    layers, _ = attention_layers(model, model.config.get_text_config(decoder=True))
    if any(layer.sliding_window for layer in layers):
        raise InvalidArgument(
            f"{type(model).__name__} has layers with a sliding window, of which prefixd reads nothing; only "
            "models that attend to everything in every layer can be traced"
        )
    prompt = conversation.prompt
    recorder = _Recorder(len(layers), len(prompt), positions(len(prompt), SAMPLES), steps)
    run = _Run(model, recorder)
    tokens: list[int] = []
    turns: list[int] = []
    with captured(model, recorder):
        for at in range(0, len(prompt), CHUNK):
            progress("prompt tokens", at, len(prompt))
            run.forward(prompt[at : at + CHUNK])
        for turn in conversation.turns():
            progress("steps", len(tokens), steps)
            if len(tokens) >= steps:
                break
            new = run.turn(turn, steps - len(tokens))
            tokens += new
            turns.append(len(new))
            run.forget()
    return Trace(
        conversation.kind, conversation.source, prompt, recorder.sampled_at, tokens, turns, recorder.layers,
        [(layer.scale, layer.softcap) for layer in layers],
    )
