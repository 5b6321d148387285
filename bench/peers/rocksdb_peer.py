"""Values of RocksDB, by its Python binding rocksdict: one for each 256 tokens of all layers."""

from __future__ import annotations

import numpy as np
from peer import CHUNK, Peer, chunk_keys, chunk_of
from rocksdict import DBCompressionType, Options, Rdict, WriteOptions
from workload import Prompt


class RocksDb(Peer):
    title = "RocksDB"
    durable = "the write-ahead log is synced (WriteOptions.sync)"
    about = "defaults but for compression, which is off; no blob files, which the binding does not offer"

    def open(self) -> None:
        options = Options(raw_mode=True)
        options.create_if_missing(True)
        options.set_compression_type(DBCompressionType.none())
        self.db = Rdict(str(self.folder), options)
        # Only the last value of a prompt is synced: the log is one file, and what lies before it goes along.
        self.synced, self.unsynced = WriteOptions(), WriteOptions()
        self.synced.sync = True

    def close(self) -> None:
        self.db.close()

    def put(self, prompt: Prompt) -> None:
        keys = chunk_keys(prompt)
        missing = [i for i, key in enumerate(keys) if key.encode() not in self.db]
        for i in missing:
            value = chunk_of(self.cache, i, prompt.n).tobytes()
            self.db.put(keys[i].encode(), value, self.synced if i == missing[-1] else self.unsynced)

    def settle(self, prompt: Prompt) -> None:
        self.db.flush()

    def get(self, prompt: Prompt) -> int:
        for i, key in enumerate(chunk_keys(prompt)):
            value = self.db.get(key.encode())
            if value is None:
                return i * CHUNK
            rows = chunk_of(self.cache, i, prompt.n)
            np.copyto(rows, np.frombuffer(value, np.uint16).reshape(rows.shape))
        return prompt.n
