"""One process of one peer: run.py starts it, tells it by lines of JSON what to do, and kills it."""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
import traceback
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parents[1] / "python")]

from peer import Peer, Unavailable  # noqa: E402
from processes import begin_peak, cpu_seconds, drop_pages, peak  # noqa: E402
from workload import Cache, Prompt, Shape  # noqa: E402


class Worker:
    def __init__(self, settings: dict[str, Any]) -> None:
        shape = Shape(**settings["shape"])
        self.settings, self.folder = settings, Path(settings["folder"])
        module = importlib.import_module(settings["module"])
        made: type[Peer] = getattr(module, settings["class"])
        self.cache = Cache(shape, min(settings["tokens"], made.longest))
        self.before = begin_peak([os.getpid()])
        self.peer = made(self.folder, shape, self.cache, settings)

    def processes(self) -> list[int]:
        return [os.getpid(), *self.peer.servers()]

    def timed(self, call: Any) -> tuple[Any, dict[str, float]]:
        pids = self.processes()
        cpu, begun = cpu_seconds(pids), time.perf_counter()
        out = call()
        return out, {"seconds": time.perf_counter() - begun, "cpu": cpu_seconds(pids) - cpu}

    def open(self, _: dict[str, Any]) -> dict[str, Any]:
        begun = time.perf_counter()
        self.peer.open()
        seconds = time.perf_counter() - begun
        made = type(self.peer)
        return {"seconds": seconds, "victim": self.peer.victim(), "title": made.title, "durable": made.durable,
                "about": made.about, "shapes": made.shapes, "longest": made.longest, "computes": made.computes}

    def close(self, _: dict[str, Any]) -> dict[str, Any]:
        self.peer.close()
        return {}

    def fill(self, asked: dict[str, Any]) -> dict[str, Any]:
        """Before a put: the rows come into the cache."""
        return self.peer.prepare(Prompt(**asked["prompt"]))

    def put(self, asked: dict[str, Any]) -> dict[str, Any]:
        prompt = Prompt(**asked["prompt"])
        _ = prompt.tokens
        begin_peak(self.processes())
        _, out = self.timed(lambda: self.peer.put(prompt))
        return {**out, "peak": self.peak()}

    def settle(self, asked: dict[str, Any]) -> dict[str, Any]:
        _, out = self.timed(lambda: self.peer.settle(Prompt(**asked["prompt"])))
        return out

    def get(self, asked: dict[str, Any]) -> dict[str, Any]:
        prompt = Prompt(**asked["prompt"])
        _ = prompt.tokens
        self.cache.spoil()
        still = drop_pages(self.folder) if asked["cold"] else None
        begin_peak(self.processes())
        n, out = self.timed(lambda: self.peer.get(prompt))
        out |= {"peak": self.peak(), "tokens": n, "pages_still_cached": still}
        return {**out, **self.peer.check(prompt, n)} if n else {**out, "wrong_bytes": 0}

    def decode(self, asked: dict[str, Any]) -> dict[str, Any]:
        return {"decode": self.peer.decode(Prompt(**asked["prompt"]), asked["tokens"])}

    def pattern(self, asked: dict[str, Any]) -> dict[str, Any]:
        found = self.peer.pattern(Prompt(**asked["prompt"]))
        return {"pattern": None if found is None else found.hex()}

    def peak(self) -> int:
        """Returns the most memory that the peer took: all of its processes, without the engine's cache."""
        return peak(self.processes()) - self.before


def main() -> None:
    # Libraries write to descriptor 1: answers have one of their own.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    worker: Worker | None = None
    for line in sys.stdin:
        asked = json.loads(line)
        try:
            if worker is None:
                worker = Worker(asked["settings"])
            said = getattr(worker, asked["do"])(asked)
        except (Unavailable, ImportError, OSError) as error:
            said = {"unavailable" if asked["do"] == "open" else "error": f"{error}", "kind": type(error).__name__}
            traceback.print_exc()
        except Exception as error:  # of a peer's own kinds: what it says is the answer
            said = {"error": f"{error}", "kind": type(error).__name__}
            traceback.print_exc()
        answers.write(json.dumps(said) + "\n")
    if worker is not None:
        worker.peer.end_started()


if __name__ == "__main__":
    main()
