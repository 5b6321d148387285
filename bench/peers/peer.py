"""The one interface behind which every peer stands."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from workload import Cache, Prompt, Shape

ROOT = Path(__file__).resolve().parents[2]
CHUNK = 256  # tokens of a value, for peers that keep values by key


class Unavailable(Exception):
    """Says why a peer cannot run here."""


class Peer:
    """Keeps prompts in a folder. One process (worker.py) has one of it; the engine's cache is given."""

    title: ClassVar[str]
    durable: ClassVar[str]  # what is waited for until a put counts as done
    about: ClassVar[str] = ""
    shapes: ClassVar[tuple[str, ...]] = ()  # those it can take; empty: all
    longest: ClassVar[int] = 1 << 30  # tokens
    computes: ClassVar[bool] = False  # an engine, which computes the rows of a prompt: slowly

    def __init__(self, folder: Path, shape: Shape, cache: Cache, settings: dict[str, Any]) -> None:
        self.folder, self.shape, self.cache, self.settings = folder, shape, cache, settings
        self.started: list[subprocess.Popen[bytes]] = []

    def open(self) -> None:
        """Opens what the folder has, and starts what runs beside. Raises Unavailable or ImportError."""

    def close(self) -> None:
        """Ends it in order."""
        self.end_started()

    def prepare(self, prompt: Prompt) -> dict[str, Any]:
        """Brings the prompt's rows into the cache; what was measured of it."""
        self.cache.fill(prompt)
        return {}

    def put(self, prompt: Prompt) -> None:
        """Takes the rows out of the cache and returns when they are stored, as `durable` says."""
        raise NotImplementedError

    def settle(self, prompt: Prompt) -> None:
        """Waits for what goes on behind a put."""

    def get(self, prompt: Prompt) -> int:
        """Brings rows into the cache again; returns of how many tokens, from the first one on."""
        raise NotImplementedError

    def check(self, prompt: Prompt, n: int) -> dict[str, Any]:
        """Compares what `get` brought: {"wrong_bytes": 0} where all is right."""
        return {"wrong_bytes": self.cache.wrong_bytes(prompt, n)}

    def decode(self, prompt: Prompt, tokens: int) -> list[dict[str, Any]]:
        """Decodes behind a stored prompt: mode, bytes and seconds a token; nothing where the peer hands out
        rows and does no more."""
        return []

    def pattern(self, prompt: Prompt) -> bytes | None:
        """Returns bytes of the prompt that its file has somewhere, to be damaged; None: the file's middle."""
        return self.cache.row(prompt, self.shape.layers // 2, prompt.n // 2)

    def servers(self) -> list[int]:
        """Returns the processes that work for it besides this one."""
        return [one.pid for one in self.started]

    def victim(self) -> int:
        """Returns the process that writes a put, which is killed in the middle of one."""
        return os.getpid()

    # ---- what peers share ----

    def start(self, command: list[Any], **options: Any) -> subprocess.Popen[bytes]:
        """Starts a process in this one's group, so that whoever ends the group ends it, too."""
        process = subprocess.Popen([str(part) for part in command], stdin=subprocess.DEVNULL, stdout=sys.stderr,
                                   stderr=sys.stderr, **options)
        self.started.append(process)
        return process

    def end_started(self) -> None:
        for process in reversed(self.started):
            process.terminate()
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self.started.clear()


def chunk_keys(prompt: Prompt) -> list[str]:
    """Returns a key for each chunk, of all tokens up to its end, so that equal beginnings have equal keys."""
    keys, digest = [], hashlib.sha256()
    for begin in range(0, prompt.n, CHUNK):
        digest.update(prompt.tokens[begin : begin + CHUNK].tobytes())
        keys.append(digest.hexdigest())
    return keys


def chunk_of(cache: Cache, index: int, n: int) -> np.ndarray:
    """Returns the rows of one chunk, of all layers, where they lie in the cache."""
    return cache.memory[:, :, index * CHUNK : min(n, (index + 1) * CHUNK)]


def sync_file(path: Path) -> None:
    """Makes a file, or what a folder lists, durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def wait_until(what: Any, seconds: float, why: str) -> None:
    end = time.monotonic() + seconds
    while not what():
        if time.monotonic() > end:
            raise Unavailable(why)
        time.sleep(0.05)
