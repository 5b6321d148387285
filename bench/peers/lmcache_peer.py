"""LMCache's own storage path, its adapter "fs": what its multi-process server writes and reads by, driven here
without an engine. What an engine gets of it, bench/engines/vllm_peers.py measures."""

from __future__ import annotations

import os
import select
from collections.abc import Callable
from typing import Any

import numpy as np
from peer import CHUNK, Peer, chunk_keys, chunk_of, sync_file
from workload import Prompt


class LmCache(Peer):
    title = "LMCache, fs"
    durable = "fsync of each file by this benchmark; LMCache syncs nothing"
    about = "a file for each 256 tokens, as its server cuts them; its copies from and to an engine are ours here"

    def open(self) -> None:
        os.environ.setdefault("LMCACHE_TRACK_USAGE", "false")
        from lmcache.v1.distributed.api import ObjectKey
        from lmcache.v1.distributed.l2_adapters.fs_l2_adapter import FSL2Adapter, FSL2AdapterConfig
        from lmcache.v1.memory_management import BytesBufferMemoryObj

        self.key, self.object = ObjectKey, BytesBufferMemoryObj
        self.adapter = FSL2Adapter(FSL2AdapterConfig(str(self.folder)))
        # The server's memory (L1), which it has touched when a request comes.
        elements = CHUNK * self.shape.token_bytes // 2
        self.buffers = np.full((-(-self.cache.memory.shape[2] // CHUNK), elements), 1, np.uint16)

    def close(self) -> None:
        self.adapter.close()

    def keys(self, prompt: Prompt) -> list[Any]:
        return [self.key(bytes.fromhex(key), self.shape.name, 0) for key in chunk_keys(prompt)]

    def memory(self, index: int, prompt: Prompt) -> np.ndarray:
        rows = chunk_of(self.cache, index, prompt.n)
        return self.buffers[index][: rows.size].reshape(rows.shape)

    def wait(self, event: int, ask: Callable[[], Any]) -> Any:
        while True:
            if (answer := ask()) is not None and answer != {}:
                return answer
            select.select([event], [], [])
            os.read(event, 8)

    def stored(self, keys: list[Any]) -> int:
        task = self.adapter.submit_lookup_and_lock_task(keys, {})
        found = self.wait(self.adapter.get_lookup_and_lock_event_fd(),
                          lambda: self.adapter.query_lookup_and_lock_result(task))
        return next((i for i in range(len(keys)) if not found.test(i)), len(keys))

    def put(self, prompt: Prompt) -> None:
        keys = self.keys(prompt)
        first = self.stored(keys)
        objects = []
        for i in range(first, len(keys)):
            memory = self.memory(i, prompt)
            np.copyto(memory, chunk_of(self.cache, i, prompt.n))
            objects.append(self.object(memoryview(memory.reshape(-1).view(np.uint8))))
        task = self.adapter.submit_store_task(keys[first:], objects)
        done = self.wait(self.adapter.get_store_event_fd(), self.adapter.pop_completed_store_tasks)
        if not done[task].is_successful():
            raise RuntimeError("LMCache's adapter did not store it")
        hashes = {key.chunk_hash.hex() for key in keys[first:]}
        for path in self.folder.iterdir():
            if any(part in hashes for part in path.stem.split("@")):
                sync_file(path)
        sync_file(self.folder)

    def get(self, prompt: Prompt) -> int:
        keys = self.keys(prompt)
        n = self.stored(keys)
        if n == 0:
            return 0
        memories = [self.memory(i, prompt) for i in range(n)]
        objects = [self.object(memoryview(memory.reshape(-1).view(np.uint8))) for memory in memories]
        task = self.adapter.submit_load_task(keys[:n], objects)
        loaded = self.wait(self.adapter.get_load_event_fd(), lambda: self.adapter.query_load_result(task))
        n = next((i for i in range(n) if not loaded.test(i)), n)
        for i in range(n):
            np.copyto(chunk_of(self.cache, i, prompt.n), memories[i])
        return min(prompt.n, n * CHUNK)
