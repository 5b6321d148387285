"""Plain safetensors files, one for each whole prompt, as vLLM's ExampleConnector keeps them."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import numpy as np
from peer import Peer, sync_file
from safetensors import safe_open
from safetensors.numpy import save_file
from workload import Prompt


class Plain(Peer):
    title = "safetensors"
    durable = "nothing: the page cache has it"
    about = "save_file under the final name; a file for each whole prompt"

    def open(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)

    def path(self, prompt: Prompt) -> Path:
        return self.folder / f"{hashlib.sha256(prompt.tokens.tobytes()).hexdigest()}.safetensors"

    def put(self, prompt: Prompt) -> None:
        self.save(prompt, self.path(prompt))

    def save(self, prompt: Prompt, path: Path) -> None:
        tensors = {}
        for layer, (k, v) in enumerate(self.cache.layers(prompt.n)):
            tensors[f"{layer}.k"], tensors[f"{layer}.v"] = k, v
        save_file(tensors, path)

    def get(self, prompt: Prompt) -> int:
        path = self.path(prompt)
        if not path.exists():
            return 0
        with safe_open(path, framework="numpy") as file:
            for layer, (k, v) in enumerate(self.cache.layers(prompt.n)):
                np.copyto(k, file.get_tensor(f"{layer}.k"))
                np.copyto(v, file.get_tensor(f"{layer}.v"))
        return prompt.n


class Synced(Plain):
    title = "safetensors, synced"
    durable = "fsync of file and folder"
    about = "save_file under another name, fsync, rename, fsync of the folder; a file for each whole prompt"

    def put(self, prompt: Prompt) -> None:
        path = self.path(prompt)
        part = path.with_suffix(".part")
        self.save(prompt, part)
        sync_file(part)
        os.replace(part, path)
        sync_file(self.folder)
