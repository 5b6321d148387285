"""Records all queries, keys and values of a model that reads a text: a trace of generation in which every
token was forced. One file a text; those of prefixd.trace hold few queries and are another format."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from prefixd.errors import InvalidArgument
from prefixd.retention.seen import Seen
from prefixd.transformers.capture import captured
from prefixd.transformers.identity import attention_layers

FORMAT = "prefixd-own-trace-v1"
CHUNK = 1024  # tokens of a forward pass


@dataclass(frozen=True)
class Recorded:
    """Names a recorded text. `source` is for people."""

    path: Path
    kind: str
    source: str

    @property
    def name(self) -> str:
        return self.path.stem

    def has(self, layers: Sequence[int]) -> bool:
        """Says whether the file is there, with these layers."""
        if not self.path.exists():
            return False
        with safe_open(self.path, "pt") as file:
            there = set(json.loads(file.metadata()["scales"]))
        return {str(i) for i in layers} <= there

    def layer(self, index: int, prompt: int) -> Seen:
        """Returns what a layer saw of the whole text."""
        with safe_open(self.path, "pt") as file:
            q, k, v = (file.get_tensor(f"layers.{index}.{x}").float() for x in "qkv")
            scale = json.loads(file.metadata()["scales"])[str(index)]
        return Seen(q.unflatten(0, (k.shape[0], -1)), k, v, prompt, scale)


class _Recorder:
    """Keeps queries as they come and the keys and values of the last pass, which hold all before them."""

    def __init__(self, layers: Sequence[int]) -> None:
        self.q: dict[int, list[Tensor]] = {layer: [] for layer in layers}
        self.kv: dict[int, tuple[Tensor, Tensor]] = {}

    def __call__(self, index: int, q: Tensor, k: Tensor, v: Tensor) -> None:
        if index in self.q:
            self.q[index].append(q[0].to(torch.bfloat16).cpu())
            self.kv[index] = (k[0], v[0])


@torch.no_grad()
def record(
    model: PreTrainedModel, ids: list[int], layers: Sequence[int], path: Path, kind: str, source: str,
    progress: Callable[[int], None],
) -> None:
    """Writes the file at once or not at all: layers.N.q [Hq, n, dk], .k and .v [Hkv, n, d], bf16."""
    shapes, _ = attention_layers(model, model.config.get_text_config(decoder=True))
    if any(shapes[i].sliding_window or shapes[i].softcap for i in layers):
        raise InvalidArgument("layers with a sliding window or a softcap are not what retention is measured on")
    recorder, cache = _Recorder(layers), DynamicCache()
    with captured(model, recorder):
        for at in range(0, len(ids), CHUNK):
            progress(at)
            part = torch.tensor([ids[at : at + CHUNK]], device=model.device)
            model(input_ids=part, past_key_values=cache, use_cache=True, logits_to_keep=1)
    tensors = {"tokens": torch.tensor(ids, dtype=torch.int32)}
    for i in layers:
        tensors[f"layers.{i}.q"] = torch.cat(recorder.q[i], 1).contiguous()
        for name, x in zip("kv", recorder.kv[i], strict=True):
            tensors[f"layers.{i}.{name}"] = x.to(torch.bfloat16).cpu().contiguous()
    scales = json.dumps({str(i): shapes[i].scale for i in layers})
    path.parent.mkdir(parents=True, exist_ok=True)
    part_path = path.with_name(path.name + ".part")
    try:
        save_file(tensors, part_path, {"format": FORMAT, "kind": kind, "source": source, "scales": scales})
        os.replace(part_path, path)
    finally:
        part_path.unlink(missing_ok=True)
