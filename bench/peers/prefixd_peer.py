"""prefixd: over a daemon's local socket, and embedded in the process of the engine.

Both do here what the others do, store and restore: rows stay in the order of tokens, and neither codes nor
estimators are built. `Defaults` is a daemon as it comes, which makes ready to be attended to behind each put."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from peer import Peer, Unavailable
from workload import Prompt

import prefixd

STORE_ALONE = {"recluster": False, "build_codes": False, "estimators": ["none"], "warm_up": False}


class Embedded(Peer):
    title = "prefixd, embedded"
    durable = "its commit: data and catalogue synced"
    about = "prefixd.open, as a store alone: no reclustering, codes, warm-up or estimators but the plain moment"

    def open(self) -> None:
        self.store = self.open_store()
        layer = prefixd.Layer(self.shape.dim**-0.5)
        self.store.register_model(prefixd.ModelSpec(
            name=self.shape.name, layers=[layer] * self.shape.layers, n_q_heads=self.shape.q_heads,
            n_kv_heads=self.shape.kv_heads, key_dim=self.shape.dim, dtype="bf16", identity={"weights": "made up"}))

    def open_store(self) -> prefixd.Store:
        memory = int(self.settings["memory_gib"]) << 30
        return prefixd.open(self.folder, host_tier_bytes=memory, min_free_bytes=0, **STORE_ALONE)

    def close(self) -> None:
        self.store.close()
        super().close()

    def put(self, prompt: Prompt) -> None:
        with self.store.begin_put(self.shape.name, prompt.tokens) as put:
            first = put.missing.start
            for layer, (k, v) in enumerate(self.cache.layers(prompt.n)):
                put.write(layer, first, k[first:], v[first:])
        self.prefix = put.result().prefix

    def settle(self, prompt: Prompt) -> None:
        self.store.wait_ready(self.prefix)
        # Rows are reclustered after that, which reads and writes them once more.
        written = -1
        while True:
            stats = self.store.stats()
            if not stats["ingest_queue"] and not stats["rewrite_queue"] and stats["bytes_written"] == written:
                return
            written = stats["bytes_written"]
            time.sleep(0.25)

    def get(self, prompt: Prompt) -> int:
        try:
            session = self.store.attach(self.shape.name, prompt.tokens, policy=prefixd.Policy(mode="full"))
        except prefixd.NotFound:
            return 0
        with session:
            session.restore_into(self.cache.layers(session.n_tokens))
            return session.n_tokens

    def decode(self, prompt: Prompt, tokens: int) -> list[dict[str, Any]]:
        out, random = [], np.random.default_rng(1)
        share = max(0.01, 64 / prompt.n)  # a short prompt's hundredth is less than its anchors
        policies = {f"attached, {share:.0%}": prefixd.Policy(budget=share),
                    "attached, every row": prefixd.Policy(mode="full")}
        for mode, policy in policies.items():
            with self.store.attach(self.shape.name, prompt.tokens, policy=policy) as session:
                q = random.standard_normal((tokens + 1, self.shape.layers, self.shape.q_heads, self.shape.dim),
                                           dtype=np.float32)
                for layer in range(self.shape.layers):  # brings in what later tokens find in memory
                    session.step(layer, q[tokens, layer])
                before, begun = session.report()["total"], time.perf_counter()
                for token in q[:tokens]:
                    for layer in range(self.shape.layers):
                        session.step(layer, token[layer])
                seconds = time.perf_counter() - begun
                after = session.report()["total"]
                out.append({"mode": mode, "bytes": (logical(after) - logical(before)) / tokens,
                            "seconds": seconds / tokens, "plan": session.info.get("estimator")})
        return out


def logical(total: dict[str, Any]) -> int:
    """Returns the bytes of rows that the steps of a ledger read, from wherever."""
    return int(total["logical_bytes"])


class Daemon(Embedded):
    title = "prefixd, daemon"
    about = "prefixd.connect over a local socket, as a store alone, like the embedded one"
    options: ClassVar[dict[str, Any]] = STORE_ALONE

    def open_store(self) -> prefixd.Store:
        program = Path(self.settings["build"]) / "bin/prefixd"
        if not program.exists():
            raise Unavailable(f"there is no {program}: make build")
        socket = self.folder.with_suffix(".sock")
        read, write = os.pipe()
        options = [f"--{name.replace('_', '-')}={','.join(value) if isinstance(value, list) else str(value).lower()}"
                   for name, value in self.options.items()]
        self.start([program, *options, "--dir", self.folder, "--socket", socket, "--min-free-mib", 0, "--host-tier-mib",
                    1024 * int(self.settings["memory_gib"]), "--ready-fd", write], pass_fds=[write])
        os.close(write)
        with os.fdopen(read) as ready:
            if not ready.read().startswith("prefixd ready"):
                raise Unavailable("the daemon did not start")
        return prefixd.connect(f"unix:{socket}", call_timeout=None, reconnect=0)

    def victim(self) -> int:
        return self.started[0].pid


class Defaults(Daemon):
    title = "prefixd by default"
    about = "the daemon as it comes: summaries, codes and reclustered rows are made behind a put"
    options = {}
