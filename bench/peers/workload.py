"""The work that every peer gets: prompts with their keys and values, by workload.toml."""

from __future__ import annotations

import math
import tomllib
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import numpy as np

FILE = Path(__file__).with_name("workload.toml")
Layers = list[tuple[np.ndarray, np.ndarray]]  # keys and values [n][kv_heads][dim] of each layer


@dataclass(frozen=True)
class Shape:
    name: str
    layers: int
    kv_heads: int
    q_heads: int
    dim: int  # of keys and of values; rows are bf16

    @property
    def token_bytes(self) -> int:
        return self.layers * 2 * self.kv_heads * self.dim * 2


@dataclass(frozen=True)
class Prompt:
    """Tokens [0, shared) are those of the document `base`, the others of `document`."""

    n: int
    document: int
    base: int = 0
    shared: int = 0

    @cached_property
    def tokens(self) -> np.ndarray:
        own = _tokens(self.document, self.n)
        return np.concatenate([_tokens(self.base, self.n)[: self.shared], own[self.shared :]])


@dataclass(frozen=True)
class Workload:
    shapes: list[Shape]
    prompts: list[Prompt]
    damage: dict[str, Any]
    decode_tokens: int

    def fresh(self, n: int) -> list[Prompt]:
        return [prompt for prompt in self.prompts if prompt.n == n and not prompt.shared]

    def sharing(self, n: int) -> list[Prompt]:
        return [prompt for prompt in self.prompts if prompt.n == n and prompt.shared]

    @property
    def lengths(self) -> list[int]:
        return sorted({prompt.n for prompt in self.prompts})


def read_workload(quick: bool, file: Path = FILE) -> Workload:
    said = tomllib.loads(file.read_text())
    shapes = [Shape(**shape) for shape in said["shape"]]
    own = said["quick"] if quick else said
    if quick:
        shapes = [shape for shape in shapes if shape.name in own["shapes"]]
    prompts: list[Prompt] = []
    for lengths in sorted(own["prompts"], key=lambda one: int(one["tokens"])):
        n, first = int(lengths["tokens"]), len(prompts) + 1
        prompts += [Prompt(n, first + i) for i in range(lengths["fresh"])]
        prompts += [Prompt(n, len(prompts) + 1 + i, first, n // 2) for i in range(lengths["sharing"])]
    return Workload(shapes, prompts, own["damage"], int(own["decode"]["tokens"]))


def _tokens(document: int, n: int) -> np.ndarray:
    # Ordinary tokens of SmolLM2, too, so that an engine can compute them.
    return np.random.default_rng(document).integers(1000, 48000, n, dtype=np.uint32)


@cache
def _pool() -> np.ndarray:
    """bf16 numbers as their bits, normally distributed; rows of all prompts are cut out of it."""
    numbers = np.random.default_rng(0).standard_normal((1 << 24) + 8192, dtype=np.float32)
    return (numbers.view(np.uint32) >> 16).astype(np.uint16)


class Cache:
    """An engine's own cache: rows of one prompt at a time, in memory that was touched. It begins at a line of the
    processor's caches, where PyTorch's allocator and vLLM's cache begin, too."""

    def __init__(self, shape: Shape, tokens: int) -> None:
        self.shape = shape
        sizes, line = (shape.layers, 2, tokens, shape.kv_heads, shape.dim), 64
        whole = np.zeros(math.prod(sizes) + line, np.uint16)
        first = -whole.ctypes.data % line // whole.itemsize
        self.memory = whole[first : first + math.prod(sizes)].reshape(sizes)

    def layers(self, n: int) -> Layers:
        return [(layer[0, :n], layer[1, :n]) for layer in self.memory]

    def spoil(self) -> None:
        self.memory.fill(0xFFFF)

    def fill(self, prompt: Prompt) -> None:
        for layer, pair in enumerate(self.layers(prompt.n)):
            for which, rows in enumerate(pair):
                for begin, end, source in self._pieces(prompt, layer, which):
                    rows[begin:end] = source

    def wrong_bytes(self, prompt: Prompt, n: int) -> int:
        """Returns how many bytes of the first n tokens are not those of the prompt."""
        wrong = 0
        for layer, pair in enumerate(self.layers(n)):
            for which, rows in enumerate(pair):
                for begin, end, source in self._pieces(prompt, layer, which):
                    own = rows[begin : min(end, n)]
                    if len(own) and not np.array_equal(own, source[: len(own)]):
                        wrong += int((own.view(np.uint8) != source[: len(own)].view(np.uint8)).sum())
        return wrong

    def row(self, prompt: Prompt, layer: int, token: int) -> bytes:
        """Returns one head's key of a token, to be looked for in files."""
        for begin, end, source in self._pieces(prompt, layer, 0):
            if begin <= token < end:
                return source[token - begin, 0].tobytes()
        raise IndexError(token)

    def _pieces(self, prompt: Prompt, layer: int, which: int) -> list[tuple[int, int, np.ndarray]]:
        shape, out = self.shape, []
        width = shape.kv_heads * shape.dim
        for begin, end, document in ((0, prompt.shared, prompt.base), (prompt.shared, prompt.n, prompt.document)):
            at = begin
            while at < end:
                # Each document, layer and kind begins elsewhere in the pool and goes round in it.
                start = (document * 7919 + (layer * 2 + which) * 104729) % 8192
                period = (1 << 24) // width
                row = at % period
                n = min(end - at, period - row)
                flat = _pool()[start + row * width : start + (row + n) * width]
                out.append((at, at + n, flat.reshape(n, shape.kv_heads, shape.dim)))
                at += n
        return out
