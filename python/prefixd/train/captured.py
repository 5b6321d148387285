"""Keeps captured queries and keys on disk, memory-mapped: captures larger than memory stream, and
an interrupted capture continues at the next prompt."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from prefixd.train.net import write_atomic
from prefixd.transformers.capture import captured

N_SINK, N_TAIL = 4, 16


@dataclass(frozen=True)
class Shape:
    """Describes a capture: per layer q [prompts, Hq, queries, dh] of the tokens behind the prefix
    and k [prompts, Hkv, length - sinks - tail, dh] of its middle, bf16. `source` names model and
    prompts."""

    layers: tuple[int, ...]
    prompts: int
    length: int
    queries: int
    q_heads: int
    kv_heads: int
    head_dim: int
    source: str

    @property
    def middle(self) -> int:
        return self.length - N_SINK - N_TAIL

    @property
    def bytes(self) -> int:
        rows = self.q_heads * self.queries + self.kv_heads * self.middle
        return 2 * len(self.layers) * self.prompts * rows * self.head_dim


class Captured:
    """Holds the files of one capture in `directory`."""

    def __init__(self, directory: Path, shape: Shape) -> None:
        self.directory, self.shape = directory, shape
        self._state = directory / "captured.json"

    @property
    def done(self) -> int:
        """Returns the prompts captured; 0 where the files belong to another capture."""
        try:
            state = json.loads(self._state.read_text())
        except (OSError, ValueError):
            return 0
        expected = json.loads(json.dumps(asdict(self.shape)))
        return int(state["done"]) if state["shape"] == expected else 0

    def _map(self, layer: int, what: str) -> np.memmap:
        s = self.shape
        shape = {
            "q": (s.prompts, s.q_heads, s.queries, s.head_dim),
            "k": (s.prompts, s.kv_heads, s.middle, s.head_dim),
        }[what]
        path = self.directory / f"{what}-{layer}.bf16"
        return np.memmap(path, np.int16, "r+" if path.exists() else "w+", shape=shape)

    @torch.no_grad()
    def capture(
        self, model: PreTrainedModel, prompts: Sequence[np.ndarray], progress: Callable[[int], None]
    ) -> None:
        """Runs the model over the prompts that are still missing. Prompts are ids [length +
        queries]."""
        s, done = self.shape, self.done
        if done == s.prompts:
            return
        if done == 0:
            shutil.rmtree(self.directory, ignore_errors=True)
        self.directory.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(self.directory).free
        if done == 0 and s.bytes > 0.95 * free:
            raise SystemExit(
                f"captured queries and keys need {s.bytes / 2**30:.1f} GiB, {self.directory} has "
                f"{free / 2**30:.1f} GiB free: fewer --prompts, or --work on another disk"
            )
        files = {(layer, w): self._map(layer, w) for layer in s.layers for w in "qk"}
        at = 0

        def sink(layer: int, query: Tensor, key: Tensor, value: Tensor) -> None:
            if (layer, "q") not in files:
                return
            files[layer, "q"][at] = _bits(query[0, :, s.length :])
            files[layer, "k"][at] = _bits(key[0, :, N_SINK : s.length - N_TAIL])

        with captured(model, sink):
            for at in range(done, s.prompts):
                ids = torch.from_numpy(prompts[at])[None].to(model.device)
                model(ids, use_cache=False, logits_to_keep=1)
                for file in files.values():
                    file.flush()
                state = {"shape": asdict(s), "done": at + 1}
                write_atomic(self._state, (json.dumps(state) + "\n").encode())
                progress(at + 1)

    def head(self, layer: int, kv_head: int, device: str) -> tuple[Tensor, Tensor]:
        """Returns (q [P, G, n, dh], k [P, m, dh]), bf16 on `device`, of one KV head and its
        group."""
        s = self.shape
        group = s.q_heads // s.kv_heads
        q = self._map(layer, "q")[:, kv_head * group : (kv_head + 1) * group]
        k = self._map(layer, "k")[:, kv_head]
        return _tensor(q).to(device), _tensor(k).to(device)

    def remove(self) -> None:
        shutil.rmtree(self.directory, ignore_errors=True)
        if self.directory.parent.is_dir() and not os.listdir(self.directory.parent):
            self.directory.parent.rmdir()


def _bits(x: Tensor) -> np.ndarray:
    return x.detach().to("cpu", torch.bfloat16).contiguous().view(torch.int16).numpy()


def _tensor(x: np.ndarray) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(x)).view(torch.bfloat16)
