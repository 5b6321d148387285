"""Mooncake's store over TCP: a master, a process that lends its memory, and this one as a client."""

from __future__ import annotations

import ctypes.util
import importlib.util
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

from peer import CHUNK, Peer, Unavailable, chunk_keys, chunk_of, wait_until
from workload import Prompt

# What the wheel's libraries need, and the Debian packages that have it.
NEEDED = {"ibverbs": "libibverbs1", "curl": "libcurl4", "numa": "libnuma1"}
AT_ONCE = 8  # values in one call: one with 128 of them, of 8 MB each, failed (-800, a transfer)
BUFFER = 16 << 20  # of the client itself; rows go to and from registered memory without it

HOLDER = """
import sys
from mooncake.store import MooncakeDistributedStore
store = MooncakeDistributedStore()
said = store.setup("127.0.0.1", "P2PHANDSHAKE", int(sys.argv[1]), 16 << 20, "tcp", "", sys.argv[2])
print("held" if said == 0 else f"failed {said}", flush=True)
sys.stdin.read()
store.close()
"""


def free_port() -> int:
    with socket.socket() as own:
        own.bind(("127.0.0.1", 0))
        return int(own.getsockname()[1])


class Mooncake(Peer):
    title = "Mooncake, TCP"
    durable = "nothing: another process's memory has it"
    about = "a value for each 256 tokens, out of and into registered memory; one copy"

    def open(self) -> None:
        package = importlib.util.find_spec("mooncake")
        if package is None or not package.submodule_search_locations:
            raise Unavailable("the package mooncake is not installed")
        missing = [debian for name, debian in NEEDED.items() if ctypes.util.find_library(name) is None]
        if missing:
            raise Unavailable(f"Debian packages are missing: {', '.join(missing)}")
        from mooncake.store import MooncakeDistributedStore

        self.folder.mkdir(parents=True, exist_ok=True)
        port = free_port()
        address = f"127.0.0.1:{port}"
        master = Path(package.submodule_search_locations[0]) / "mooncake_master"
        master.chmod(0o755)  # wheels may lose it
        self.start([master, "-rpc_port", port, "-rpc_address", "127.0.0.1", "-enable_http_metadata_server=false",
                    "-enable_metric_reporting=false", "-metrics_port", free_port()])

        def listens() -> bool:
            if self.started[0].poll() is not None:
                raise Unavailable("mooncake_master ended")
            with socket.socket() as one:
                return one.connect_ex(("127.0.0.1", port)) == 0

        wait_until(listens, 30, "mooncake_master did not start")
        # Everything of a run fits, with what the store gives up early (it evicts from 95% on).
        segment = int(self.settings["stored_bytes"] * 1.25) + (256 << 20)
        # Its stdin ends with this process, and it with that.
        self.holder = subprocess.Popen([sys.executable, "-c", HOLDER, str(segment), address], stdin=subprocess.PIPE,
                                       stdout=subprocess.PIPE, stderr=sys.stderr)
        self.started.append(self.holder)
        assert self.holder.stdout is not None
        for line in self.holder.stdout:  # the library writes to it, too
            if line.startswith((b"held", b"failed")):
                break
        else:
            line = b"ended"
        if not line.startswith(b"held"):
            raise Unavailable(f"Mooncake lent no memory: {line.decode().strip()}")
        self.store: Any = MooncakeDistributedStore()
        if (said := self.store.setup("127.0.0.1", "P2PHANDSHAKE", 0, BUFFER, "tcp", "", address)) != 0:
            raise Unavailable(f"Mooncake's client did not start: {said}")
        memory = self.cache.memory
        if (said := self.store.register_buffer(memory.ctypes.data, memory.nbytes)) != 0:
            raise Unavailable(f"Mooncake did not register the cache: {said}")

    def close(self) -> None:
        self.store.close()
        super().close()

    def pieces(self, index: int, n: int) -> tuple[list[int], list[int]]:
        """Returns where the rows of one chunk lie in the cache, and how long the pieces are."""
        rows = chunk_of(self.cache, index, n)
        every = [rows[layer, which] for layer in range(rows.shape[0]) for which in (0, 1)]
        return [one.ctypes.data for one in every], [one.nbytes for one in every]

    def put(self, prompt: Prompt) -> None:
        keys = chunk_keys(prompt)
        there = self.store.batch_is_exist(keys)
        new = [i for i, one in enumerate(there) if one != 1]
        said: list[int] = []
        for first in range(0, len(new), AT_ONCE):
            some = new[first : first + AT_ONCE]
            places = [self.pieces(i, prompt.n) for i in some]
            said += self.store.batch_put_from_multi_buffers([keys[i] for i in some], [at for at, _ in places],
                                                            [sizes for _, sizes in places])
        if any(one != 0 for one in said):
            raise RuntimeError(f"Mooncake refused {sum(one != 0 for one in said)} of {len(said)} values: {said[0]}")

    def get(self, prompt: Prompt) -> int:
        keys = chunk_keys(prompt)
        there = self.store.batch_is_exist(keys)
        n = next((i for i, one in enumerate(there) if one != 1), len(keys))
        if n == 0:
            return 0
        said: list[int] = []
        for first in range(0, n, AT_ONCE):
            some = range(first, min(n, first + AT_ONCE))
            places = [self.pieces(i, prompt.n) for i in some]
            said += self.store.batch_get_into_multi_buffers([keys[i] for i in some], [at for at, _ in places],
                                                            [sizes for _, sizes in places])
        failed = next((i for i, one in enumerate(said) if one < 0), n)
        return min(prompt.n, failed * CHUNK)

    def victim(self) -> int:
        return self.holder.pid
