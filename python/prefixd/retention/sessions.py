"""Measures what a session gains from a policy that keeps some of its moved own tokens in memory, beside a
session of as much memory that keeps the newest alone, in prefixd itself:

    python -m prefixd.retention --model build/models/smollm2 --out build/retention --policies window
    python -m prefixd.retention.sessions --recorded build/retention

Texts that the first command recorded are decoded, token by token, every query, key and value as the model had it.
Now and then the outputs of steps are compared with attention to everything. Errors are read off at equal reads: what
a policy keeps in memory a step need not read. What was measured is kept in DIR/sessions.jsonl: the same command goes
on where it ended."""

from __future__ import annotations

import argparse
import datetime
import functools
import json
import shlex
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

import prefixd
from prefixd.errors import InvalidArgument, PrefixdError
from prefixd.evaluate.arguments import names_of
from prefixd.evaluate.compare.journal import Journal
from prefixd.evaluate.stats import interval, ratio_interval
from prefixd.retention.record import Recorded
from prefixd.retention.seen import Seen

POLICIES = ("local", "tova", "h2o", "snapkv", "global", "global-sum", "global-mean", "gkv", "window")
NONE = "none"
MEMORY = 1024  # own tokens in memory without a policy; with one, two thirds, and a third retained at half of that
LENGTHS = (16, 32, 64, 128, 256)  # tokens that a step selects
EVERY = 40  # tokens from one comparison to the next

Floats = NDArray[np.float32]


@dataclass(frozen=True)
class Memory:
    """Half of `own` to `own` of the newest tokens are in memory, and `retained` ones beside."""

    own: int
    retained: int

    @staticmethod
    def of(policy: str) -> Memory:
        """Returns the same on average for each."""
        if policy == NONE:
            return Memory(MEMORY, 0)
        return Memory(MEMORY * 2 // 3, MEMORY // 4)


class Text:
    """The layers of a recorded text."""

    def __init__(self, recorded: Recorded, layers: Sequence[int], prompt: int) -> None:
        self.name = recorded.name
        self.layers = [recorded.layer(i, prompt) for i in layers]
        self.prompt, self.tokens = prompt, self.layers[0].tokens

    def spec(self) -> prefixd.ModelSpec:
        first = self.layers[0]
        heads, group, _, dim = first.q.shape
        layers = tuple(prefixd.Layer(one.scale) for one in self.layers)
        return prefixd.ModelSpec("recorded", layers, heads * group, heads, dim, "bf16", {"weights": self.name})

    def put(self, store: prefixd.Store) -> None:
        with store.begin_put("recorded", np.arange(self.prompt, dtype=np.uint32)) as put:
            for i, layer in enumerate(self.layers):
                put.write(i, 0, *rows_of(layer, 0, self.prompt))
        store.wait_ready(put.result().prefix)


def rows_of(layer: Seen, first: int, last: int) -> tuple[Tensor, Tensor]:
    """Returns keys and values [n][heads][dim] of tokens [first, last)."""

    def rows(x: Tensor) -> Tensor:
        return x[:, first:last].transpose(0, 1).to(torch.bfloat16).contiguous()

    return rows(layer.k), rows(layer.v)


def queries_of(layer: Seen, token: int) -> Tensor:
    return layer.q[:, :, token].reshape(-1, layer.q.shape[-1])


def exact(layer: Seen, token: int) -> Floats:
    """Returns the output [Hq, dv] of attention to everything."""
    scores = np.einsum("hgd,htd->hgt", layer.q[:, :, token].numpy(), layer.k[:, : token + 1].numpy()) * layer.scale
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    y = np.einsum("hgt,htd->hgd", weights / weights.sum(-1, keepdims=True), layer.v[:, : token + 1].numpy())
    flat: Floats = y.reshape(-1, y.shape[-1]).astype(np.float32)
    return flat


class Decoding:
    """One session that decodes a text."""

    def __init__(self, store: prefixd.Store, text: Text, policy: str) -> None:
        self._text, self._memory = text, Memory.of(policy)
        self._retain = {"tokens": self._memory.retained, "by": "local" if policy == NONE else policy}
        self._session = store.attach(
            "recorded", np.arange(text.prompt, dtype=np.uint32), policy=self._policy(0),
            own_memory_tokens=self._memory.own,
        )  # fmt: skip

    def _policy(self, k: int) -> prefixd.Policy:
        # Between comparisons nobody looks at the answers.
        return prefixd.Policy(k=k, estimator="moment" if k else "none", retain=self._retain)

    def _step(self, token: int) -> list[Floats]:
        out: list[Floats] = []
        for i, layer in enumerate(self._text.layers):
            k, v = rows_of(layer, token, token + 1)
            y, _ = self._session.step_append(i, queries_of(layer, token), k[0], v[0])
            out.append(np.asarray(y))
        return out

    def _settle(self) -> None:
        """Waits until what is too much has moved, so that every run moves the same at the same moments."""
        end = time.monotonic() + 60
        while self._session.own_tokens - self._session.own_moved > self._memory.own:
            if time.monotonic() > end:
                raise PrefixdError("own tokens did not move for a minute")
            time.sleep(0.001)

    def run(self, told: Callable[[int], None]) -> dict[str, Any]:
        """Returns for each of LENGTHS the mean error and the tokens read by a step of a KV head."""
        errors: dict[int, list[float]] = {k: [] for k in LENGTHS}
        reads = dict.fromkeys(LENGTHS, 0.0)
        kept = 0
        with self._session as session:
            for token in range(self._text.prompt, self._text.tokens):
                own = token - self._text.prompt
                if token >= (self._text.prompt + self._text.tokens) // 2 and token % EVERY == 0:
                    told(token)
                    true = [exact(layer, token) for layer in self._text.layers]
                    for k in LENGTHS:
                        session.set_policy(self._policy(k))
                        before = session.report()["total"]
                        got = self._step(token)
                        after = session.report()["total"]
                        session.truncate(own)
                        steps = after["steps"] - before["steps"]
                        reads[k] += (after["retrieved_tokens"] - before["retrieved_tokens"]) / steps
                        each = [np.abs(y - t).sum(-1) / np.abs(t).sum(-1) for y, t in zip(got, true, strict=True)]
                        errors[k].append(float(np.mean(each)))
                    session.set_policy(self._policy(0))
                self._step(token)
                self._settle()
            kept = session.own_retained
        count = len(errors[LENGTHS[0]])
        return {
            "retained": kept,
            "read": [reads[k] / count for k in LENGTHS],
            "errors": [float(np.mean(errors[k])) for k in LENGTHS],
        }


def at_reads(row: dict[str, Any], read: float) -> float:
    """Returns the error of a session whose steps read so many tokens, between those that were measured."""
    return float(np.exp(np.interp(np.log(read), np.log(row["read"]), np.log(row["errors"]))))


def figures(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Returns for each number of tokens read by steps without a policy the mean error of each policy, and its
    ratio to none, paired by text."""
    texts = sorted({row["text"] for row in rows})
    by = {(row["text"], row["method"]): row for row in rows}
    policies = [p for p in (NONE, *POLICIES) if all((t, p) in by for t in texts)]
    # The most that steps with a policy read is less than the most that they select.
    reads = LENGTHS[:-1]
    out: dict[str, Any] = {"texts": texts, "reads": list(reads), "policies": {}}
    for policy in policies:
        columns: list[dict[str, Any] | None] = []
        for i, k in enumerate(reads):
            none = [by[t, NONE]["errors"][i] for t in texts]
            # Beyond what was measured nothing is read off.
            if any(max(by[t, policy]["read"]) < k for t in texts):
                columns.append(None)
                continue
            own = [at_reads(by[t, policy], k) for t in texts]
            mean, ratio = float(np.mean(own)), sum(own) / sum(none)
            columns.append({
                "error": [mean, *interval(own)], "of_none": [ratio, *ratio_interval(own, none)], "each": own,
            })  # fmt: skip
        out["policies"][policy] = columns
    return out


def table(body: dict[str, Any]) -> str:
    def cell(column: dict[str, Any] | None) -> str:
        if column is None:
            return ""
        error, ratio = column["error"], column["of_none"]
        return f"{error[0]:.4f} × {ratio[0]:.2f} [{ratio[1]:.2f}, {ratio[2]:.2f}]"

    reads = body["reads"]
    lines = ["| policy | " + " | ".join(f"{k} read" for k in reads) + " |", "|---" * (len(reads) + 1) + "|"]
    lines += [f"| {name} | " + " | ".join(map(cell, columns)) + " |" for name, columns in body["policies"].items()]
    return "\n".join(lines)


def traces(folder: Path) -> Iterator[Recorded]:
    for path in sorted((folder / "traces").glob("*.safetensors")):
        yield Recorded(path, path.stem.rpartition("-")[0], "")


def parser() -> argparse.ArgumentParser:
    a = argparse.ArgumentParser(
        prog="python -m prefixd.retention.sessions", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    a.add_argument("--recorded", type=Path, required=True, metavar="DIR", help="--out of python -m prefixd.retention")
    a.add_argument("--policies", type=names_of(POLICIES), default=list(POLICIES), help=", ".join(POLICIES))
    a.add_argument("--layers", type=lambda x: [int(i) for i in x.split(",")], default=[1, 7, 13, 19, 25],
                   help="that were recorded (1,7,13,19,25)")
    a.add_argument("--prompt", type=int, default=2000, help="tokens of the prompt (%(default)s)")
    a.add_argument("--json", type=Path, metavar="FILE", help="write the figures here, too")
    return a


def _show(what: str, token: int) -> None:
    print(f"\r  {what}, token {token:<8}", end="", file=sys.stderr, flush=True)


def measure(o: argparse.Namespace) -> dict[str, Any]:
    found = list(traces(o.recorded))
    if not found:
        raise InvalidArgument(f"{o.recorded} holds no traces; python -m prefixd.retention records some")
    journal = Journal(o.recorded / "sessions.jsonl")
    keys = []
    for recorded in found:
        if not recorded.has(o.layers):
            raise InvalidArgument(f"{recorded.path} lacks some of the layers {o.layers}; name others")
        key = (f"{recorded.name} {','.join(map(str, o.layers))}", o.prompt, MEMORY)
        keys.append(list(key))
        todo = [p for p in (NONE, *o.policies) if not journal.has(key, p)]
        if not todo:
            continue
        text = Text(recorded, o.layers, o.prompt)
        with tempfile.TemporaryDirectory(prefix="prefixd-sessions-") as folder, prefixd.open(folder) as store:
            store.register_model(text.spec())
            text.put(store)
            for policy in todo:
                row = Decoding(store, text, policy).run(functools.partial(_show, f"{text.name}: {policy}"))
                journal.add({"key": list(key), "method": policy, "text": recorded.name, **row})
    print("\r" + " " * 60 + "\r", end="", file=sys.stderr)
    wanted = (NONE, *o.policies)
    return figures([row for row in journal.rows if row["key"] in keys and row["method"] in wanted])


def main(argv: list[str] | None = None) -> int:
    o = parser().parse_args(argv)
    try:
        body = measure(o)
    except PrefixdError as e:
        print(f"\nprefixd.retention.sessions: {e}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nstopped; the same command goes on with what is missing", file=sys.stderr)
        return 130
    given = sys.argv[1:] if argv is None else argv
    command = shlex.join(["python", "-m", "prefixd.retention.sessions", *given])
    body = {"run": {"command": command, "date": datetime.date.today().isoformat()}, **body}
    if o.json:
        o.json.write_text(json.dumps(body, indent=1) + "\n", encoding="utf-8")
    print(table(body))
    return 0


if __name__ == "__main__":
    sys.exit(main())
