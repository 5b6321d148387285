"""Compares ways of reading a stored document with full attention, on real texts and a real model:
tasks, the likelihood of real continuations in four kinds of text, and all records of a long report.

    python -m prefixd.evaluate compare --model build/models/smollm2 --out quality-smollm2
    python -m prefixd.evaluate report quality-smollm2

What is measured is kept line by line in --out: the same command goes on where it ended, however that
was, and wider --kinds, --lengths, --documents, --methods or --budgets measure what is missing."""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

from prefixd.errors import InvalidArgument
from prefixd.evaluate.arguments import names_of
from prefixd.evaluate.compare import documents, readings, texts
from prefixd.evaluate.compare.chat import form_of
from prefixd.evaluate.compare.engine import Engine, default_program, note
from prefixd.evaluate.compare.journal import Journal
from prefixd.evaluate.compare.report import write_report
from prefixd.evaluate.compare.run import Comparing, Plan, store_of
from prefixd.weights import checkpoint_digest


def _numbers(kind: type) -> object:
    def parse(value: str) -> list[float]:
        return [kind(v) for v in value.split(",")]

    return parse


def parser() -> argparse.ArgumentParser:
    a = argparse.ArgumentParser(prog="python -m prefixd.evaluate compare", description=__doc__,
                                formatter_class=argparse.RawDescriptionHelpFormatter)
    kinds, methods = [*documents.KINDS], [*readings.METHODS]
    a.add_argument("--model", type=Path, required=True, help="a Hugging Face checkpoint's directory")
    a.add_argument("--out", type=Path, required=True, help="directory for what is measured, and the report")
    a.add_argument("--kinds", type=names_of(kinds), default=kinds, help=f"of documents: {','.join(kinds)}")
    a.add_argument("--lengths", type=_numbers(int), default=[2048, 4200, 7600],  # type: ignore[arg-type]
                   help="document tokens (2048,4200,7600)")
    a.add_argument("--documents", type=int, default=12, help="of each kind and length (%(default)s)")
    a.add_argument("--methods", type=names_of(methods),
                   default=[m for m in methods if readings.METHODS[m].usual],
                   help=",".join(methods) + " (without even, even-codes and keep...)")
    a.add_argument("--budgets", type=_numbers(float), default=[0.01, 0.02, 0.05],  # type: ignore[arg-type]
                   help="fractions of the document read per step (0.01,0.02,0.05)")
    a.add_argument("--scorers", type=Path,
                   help="for keep...-kvpop: the scorers that python -m prefixd.retention --train made of this model")
    a.add_argument("--minutes", type=float, help="stop after so long; the same command goes on")
    a.add_argument("--threads", type=int, default=0, help="0: one per core")
    a.add_argument("--seed", type=int, default=0)
    a.add_argument("--program", type=Path, default=default_program(), help="prefixd-demo (%(default)s)")
    return a


@contextlib.contextmanager
def _terminated() -> Iterator[None]:
    """Ends on SIGTERM as on Ctrl-C: what was measured is written already."""
    def end(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def main(argv: list[str]) -> int:
    a = parser()
    o = a.parse_args(argv)
    if any(not 0 < f <= 1 for f in o.budgets):
        a.error("--budgets are fractions above 0, at most 1")
    if not (o.model / "config.json").is_file():
        a.error(f"{o.model} is no checkpoint's directory; make model-smollm2 makes one")
    if (unscored := [m for m in o.methods if readings.needs_scorers(m)]) and not (o.scorers and o.scorers.is_file()):
        a.error(f"{unscored[0]} needs --scorers FILE; python -m prefixd.retention --train makes one")
    limit = json.loads((o.model / "config.json").read_text())["max_position_embeddings"]
    if max(o.lengths) + documents.ROOM > limit or min(o.lengths) < 512:
        a.error(f"--lengths must be from 512 to {limit - documents.ROOM} for this model")
    o.out.mkdir(parents=True, exist_ok=True)
    _check_same(a, o)
    plan = Plan(o.kinds, o.lengths, o.documents, o.methods, o.budgets, o.seed, o.minutes,
                o.scorers and o.scorers.resolve())
    sources = dict.fromkeys(source for k in o.kinds if (source := documents.KINDS[k][1]))
    found = texts.kept(o.out / "texts.jsonl", sources, o.documents, o.seed)
    comparing = Comparing(plan, form_of(o.model), found, Journal(o.out / "rows.jsonl"), note)
    try:
        with _terminated():
            done = comparing.run(lambda: Engine(o.program, o.model, store_of(o.out), o.threads))
    except KeyboardInterrupt:
        note("interrupted; the same command goes on from here")
        return 130
    write_report(o.out)
    print(o.out / "report.md")
    return 0 if done else 3


def _check_same(a: argparse.ArgumentParser, o: argparse.Namespace) -> None:
    """Checks that the directory holds what this model and seed measured."""
    path = o.out / "plan.json"
    try:
        config = hashlib.blake2b((o.model / "config.json").read_bytes(), digest_size=16).hexdigest()
        new = {"weights": "blake2b:" + checkpoint_digest(o.model), "config": config, "seed": o.seed}
    except InvalidArgument as e:
        a.error(str(e))
    old = json.loads(path.read_text()) if path.is_file() else {}
    # Documents that were compressed by other scorers are another run, too; a run without any may go on.
    scorers = hashlib.blake2b(o.scorers.read_bytes(), digest_size=16).hexdigest() if o.scorers else old.get("scorers")
    if scorers:
        new["scorers"] = scorers
    if old and (unlike := [k for k in new if old.get(k, scorers) != new[k]]):
        differ = "; ".join(f"{k}: {old.get(k)} there, {new[k]} now" for k in unlike)
        a.error(f"{o.out} holds another run ({differ}); name another --out or remove it")
    path.write_text(json.dumps(new) + "\n")


def report_main(argv: list[str]) -> int:
    a = argparse.ArgumentParser(prog="python -m prefixd.evaluate report",
                                description="Writes report.md and report.json of what was measured.")
    a.add_argument("out", type=Path, help="the directory that `compare` was given")
    o = a.parse_args(argv)
    if not (o.out / "rows.jsonl").is_file():
        print(f"{o.out} has nothing to report", file=sys.stderr)
        return 1
    write_report(o.out)
    print(o.out / "report.md")
    return 0
