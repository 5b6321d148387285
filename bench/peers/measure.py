"""What is asked of one peer, and what is kept of its answers."""

from __future__ import annotations

import json
import os
import select
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from processes import disk_bytes, flip_bit
from registry import PEERS, environment_of
from workload import Prompt, Shape, Workload

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "engines"))
from run_facts import spread  # noqa: E402

HERE = Path(__file__).resolve().parent
Say = Callable[[str], None]


class NotHere(Exception):
    """A peer that cannot run: why."""


class Died(Exception):
    """The peer's process ended in the middle of a call."""


class Process:
    """A worker (worker.py) in a process group of its own, which ends with it."""

    def __init__(self, name: str, settings: dict[str, Any], log: Path) -> None:
        entry = PEERS[name]
        if not entry.python.exists():
            raise NotHere(f"there is no {entry.python}")
        try:
            environment = environment_of(entry)
        except (OSError, subprocess.SubprocessError) as error:
            raise NotHere(f"its packages could not be installed: {error}") from None
        self.settings = {**settings, "module": entry.module, "class": entry.cls}
        with log.open("ab") as errors:
            self.process = subprocess.Popen([entry.python, HERE / "worker.py"], stdin=subprocess.PIPE,
                                            stdout=subprocess.PIPE, stderr=errors, text=True, env=environment,
                                            start_new_session=True)

    def __enter__(self) -> Process:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def send(self, do: str, **asked: Any) -> None:
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(json.dumps({"do": do, "settings": self.settings, **asked}) + "\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            pass  # `answer` says how it ended

    def answer(self, seconds: float = 300) -> dict[str, Any]:
        assert self.process.stdout is not None
        if not select.select([self.process.stdout], [], [], seconds)[0]:  # answers are one line each
            raise Died(f"no answer in {seconds:.0f} s")
        line = self.process.stdout.readline()
        if not line:
            code = self.process.wait()
            raise Died(f"signal {signal.Signals(-code).name}" if code < 0 else f"exit status {code}")
        said: dict[str, Any] = json.loads(line)
        return said

    def ask(self, do: str, **asked: Any) -> dict[str, Any]:
        self.send(do, **asked)
        return self.answer()

    def must(self, do: str, **asked: Any) -> dict[str, Any]:
        """Asks for what has to work; raises NotHere with what went wrong."""
        try:
            said = self.ask(do, **asked)
        except Died as died:
            raise NotHere(f"its process died in '{do}': {died}") from None
        if "unavailable" in said:
            raise NotHere(said["unavailable"])
        if "error" in said:
            raise NotHere(f"'{do}' failed: {said['kind']}: {said['error']}")
        return said

    def end(self) -> None:
        """Ends the worker and all that it started."""
        assert self.process.stdin is not None
        try:
            self.process.stdin.close()
        except BrokenPipeError:
            pass
        try:
            self.process.wait(5)
        except subprocess.TimeoutExpired:
            pass
        try:
            os.killpg(self.process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        self.process.wait()


class Measurement:
    """One peer with one shape."""

    def __init__(self, name: str, shape: Shape, work: Workload, folder: Path, options: dict[str, Any],
                 say: Say) -> None:
        self.name, self.shape, self.folder, self.say = name, shape, folder, say
        self.work, self.log = work, folder / "log"
        self.settings = {**options, "shape": asdict(shape), "tokens": max(work.lengths),
                         "stored_bytes": sum(prompt.n for prompt in work.prompts) * shape.token_bytes}
        self.longest, self.computes = 1 << 30, False

    def process(self, folder: Path) -> Process:
        return Process(self.name, {**self.settings, "folder": str(folder)}, self.log)

    def run(self) -> dict[str, Any]:
        """Raises NotHere when the peer cannot run."""
        out: dict[str, Any] = {"name": self.name, "shape": self.shape.name}
        stored = self.folder / "stored"
        out |= self.store(stored)
        out |= self.restore(stored)
        shutil.rmtree(stored, ignore_errors=True)
        out["killed"] = self.killed(out)
        out["flipped"] = self.flipped()
        out["lengths"] = [one for one in out["lengths"] if one["store"]]
        return out

    def opened(self, process: Process) -> dict[str, Any]:
        said = process.must("open")
        if said["shapes"] and self.shape.name not in said["shapes"]:
            raise NotHere(f"it takes {', '.join(said['shapes'])} alone")
        self.longest, self.computes = said["longest"], said["computes"]
        return said

    def fits(self) -> list[Prompt]:
        """Returns the prompts that it can take; an engine gets one of a length, and the shortest sharing one."""
        mine = [prompt for prompt in self.work.prompts if prompt.n <= self.longest]
        if not self.computes:
            return mine
        return [prompt for n in self.work.lengths if n <= self.longest
                for prompt in (*self.work.fresh(n)[:1], *self.work.sharing(n)[: n == min(self.work.lengths)])]

    # ---- the parts ----

    def store(self, folder: Path) -> dict[str, Any]:
        self.say("store")
        puts: list[dict[str, Any]] = []
        with self.process(folder) as process:
            said = self.opened(process)
            for prompt in self.fits():
                made = process.must("fill", prompt=asdict(prompt))
                before = disk_bytes(folder)
                put = process.must("put", prompt=asdict(prompt))
                settled = process.must("settle", prompt=asdict(prompt))
                puts.append({**put, "made": made, "settled": settled, "prompt": prompt,
                             "disk": disk_bytes(folder) - before})
            process.must("close")
        out: dict[str, Any] = {key: said[key] for key in ("title", "durable", "about")}
        out["lengths"] = [self.stored_length(n, [put for put in puts if put["prompt"].n == n])
                          for n in self.work.lengths]
        out["peak_bytes_storing"] = max(put["peak"] for put in puts)
        gb = sum(put["prompt"].n * self.shape.token_bytes for put in puts) * 1e-9
        out["cpu_seconds_per_gb_stored"] = sum(put["cpu"] for put in puts) / gb
        out["cpu_seconds_per_gb_behind"] = sum(put["settled"]["cpu"] for put in puts) / gb
        out["not_taken"] = [n for n in self.work.lengths if n > self.longest]
        return out

    def stored_length(self, n: int, puts: list[dict[str, Any]]) -> dict[str, Any]:
        rows = n * self.shape.token_bytes
        fresh = [put for put in puts if not put["prompt"].shared]
        sharing = [put for put in puts if put["prompt"].shared]
        out: dict[str, Any] = {"tokens": n, "bytes": rows, "store": None}
        if not fresh:
            return out
        rates = [rows / put["seconds"] * 1e-9 for put in fresh]
        out |= {"store": spread(rates), "store_samples": rates, "settle_seconds": spread([put["settled"]["seconds"]
                for put in fresh]), "disk_over_rows": statistics.median(put["disk"] / rows for put in fresh)}
        if sharing:
            out["sharing_disk_over_rows"] = statistics.median(put["disk"] / rows for put in sharing)
            out["sharing_store_seconds_over_fresh"] = (statistics.median(put["seconds"] for put in sharing)
                                                       / statistics.median(put["seconds"] for put in fresh))
        if made := [put["made"]["first_token"] for put in fresh if "first_token" in put["made"]]:
            out["first_token_computed"] = spread(made)
        return out

    def restore(self, folder: Path) -> dict[str, Any]:
        self.say("restart and restore")
        out: dict[str, Any] = {"survives_restart": True}
        with self.process(folder) as process:
            out["open_seconds"] = self.opened(process)["seconds"]
            wanted = self.fits()
            if not self.served(process, wanted[0])["tokens"]:
                # What was stored went with its processes: it is put again, and there is nothing cold.
                out["survives_restart"] = False
                for prompt in wanted:
                    process.must("fill", prompt=asdict(prompt))
                    process.must("put", prompt=asdict(prompt))
            samples: dict[int, dict[str, list[dict[str, Any]]]] = {}
            for prompt in wanted:
                own = samples.setdefault(prompt.n, {"cold": [], "warm": [], "sharing": []})
                if prompt.shared:
                    own["sharing"] += [self.right(process, prompt, cold=True)]
                    continue
                # The very first one was asked for above, to see whether anything is there: memory of a server has it.
                again = prompt is wanted[0] and len([one for one in wanted if one.n == prompt.n and not one.shared]) > 1
                if out["survives_restart"] and not again:
                    own["cold"] += [self.right(process, prompt, cold=True)]
                own["warm"] += [self.right(process, prompt, cold=False) for _ in range(2)]
            gets = [one for own in samples.values() for kind in own.values() for one in kind]
            out["peak_bytes_restoring"] = max(one["peak"] for one in gets)
            warm = [one for own in samples.values() for one in own["warm"]]
            out["cpu_seconds_per_gb_restored"] = self.cpu_per_gb(warm)
            out["lengths_restored"] = [self.restored_length(n, own) for n, own in samples.items()]
            out["decode"] = process.must("decode", prompt=asdict(self.longest_fresh(wanted)),
                                         tokens=self.work.decode_tokens)["decode"]
            process.must("close")
        return out

    def longest_fresh(self, prompts: list[Prompt]) -> Prompt:
        return max((prompt for prompt in prompts if not prompt.shared), key=lambda prompt: prompt.n)

    def cpu_per_gb(self, gets: list[dict[str, Any]]) -> float:
        return sum(one["cpu"] for one in gets) / (sum(one["tokens"] for one in gets) * self.shape.token_bytes * 1e-9)

    def served(self, process: Process, prompt: Prompt) -> dict[str, Any]:
        return process.must("get", prompt=asdict(prompt), cold=False)

    def right(self, process: Process, prompt: Prompt, *, cold: bool) -> dict[str, Any]:
        got = process.must("get", prompt=asdict(prompt), cold=cold)
        if got["tokens"] != prompt.n or got["wrong_bytes"] != 0:
            raise NotHere(f"it gave back {got['tokens']} of {prompt.n} tokens, {got['wrong_bytes']} bytes wrong")
        return got

    def restored_length(self, n: int, own: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
        out: dict[str, Any] = {"tokens": n}
        for kind in ("cold", "warm"):
            if got := own[kind]:
                rates = [n * self.shape.token_bytes / one["seconds"] * 1e-9 for one in got]
                out[kind], out[f"{kind}_samples"] = spread(rates), rates
                if firsts := [one["seconds"] + one["first_token"] for one in got if "first_token" in one]:
                    out[f"first_token_{kind}"] = spread(firsts)
        if left := [one["pages_still_cached"] for one in own["cold"]]:
            out["pages_still_cached"] = max(left)
        return out

    def killed(self, measured: dict[str, Any]) -> list[dict[str, Any]]:
        """Kills the process that writes a put, in the middle of it, and looks what is there afterwards."""
        damage, out = self.work.damage, []
        kept = Prompt(damage["kept_tokens"], 1001)
        torn = Prompt(damage["kept_tokens" if self.computes else "tokens"], 1002)
        (rates,) = [one["store_samples"] for one in measured["lengths"] if one["tokens"] == torn.n]
        usual = torn.n * self.shape.token_bytes * 1e-9 / statistics.median(rates)
        parts = damage["kills"]
        for part in parts[len(parts) // 2 :][:1] if self.computes else parts:
            self.say(f"kill -9 after {part:.0%} of a put")
            folder = self.folder / f"killed-{part}"
            with self.process(folder) as process:
                said = self.opened(process)
                process.must("fill", prompt=asdict(kept))
                process.must("put", prompt=asdict(kept))
                process.must("settle", prompt=asdict(kept))
                process.must("fill", prompt=asdict(torn))
                before = disk_bytes(folder)
                process.send("put", prompt=asdict(torn))
                time.sleep(part * usual)
                os.kill(said["victim"], signal.SIGKILL)
                try:
                    ended = process.answer(60)
                except Died:
                    ended = {}
            one = {"after": part, "put_had_returned": "seconds" in ended}
            with self.process(folder) as process:
                opened = self.try_open(process)
                one |= {"reopened": opened, "kept": self.outcome(process, kept), "torn": self.outcome(process, torn)}
                one["left_bytes"] = max(0, disk_bytes(folder) - before)
            shutil.rmtree(folder, ignore_errors=True)
            out.append(one)
        return out

    def flipped(self) -> dict[str, Any]:
        """Flips one bit of a stored prompt, and asks for it."""
        self.say("flip a bit")
        folder, prompt = self.folder / "flipped", Prompt(self.work.damage["kept_tokens"], 1003)
        with self.process(folder) as process:
            self.opened(process)
            process.must("fill", prompt=asdict(prompt))
            process.must("put", prompt=asdict(prompt))
            process.must("settle", prompt=asdict(prompt))
            pattern = process.must("pattern", prompt=asdict(prompt))["pattern"]
            process.must("close")
        where = flip_bit(folder, bytes.fromhex(pattern) if pattern else None)
        if not where:
            return {"where": "", "outcome": "there is no file"}
        with self.process(folder) as process:
            opened = self.try_open(process)
            return {"where": where, "reopened": opened, "outcome": self.outcome(process, prompt, flipped=True)}

    def try_open(self, process: Process) -> str:
        try:
            said = process.ask("open")
        except Died as died:
            return f"crashes: {died}"
        return "yes" if "seconds" in said else f"refused: {said.get('error') or said.get('unavailable')}"

    def outcome(self, process: Process, prompt: Prompt, flipped: bool = False) -> str:
        """Says what a peer gives for a prompt, in words."""
        try:
            got = process.ask("get", prompt=asdict(prompt), cold=True)
        except Died as died:
            return f"crashes: {died}"
        if "seconds" not in got:
            return f"detected: {got.get('error') or got.get('unavailable')}"
        n, wrong = got["tokens"], got["wrong_bytes"]
        if n == 0:
            return "absent"
        if wrong is None:
            return "served silently: the answer is another"
        if wrong:
            return f"served silently: {wrong} bytes wrong"
        if "answered_alike" in got and flipped:
            return "served silently; the next tokens happen to be the same"
        return "whole and right" if n == prompt.n else f"{n} of {prompt.n} tokens, right"
