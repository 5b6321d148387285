"""Compares policies that decide which tokens of a long generation stay exact, on a real model: sinks and a
window, TOVA, H2O, SnapKV, local and global scores, G-KV, KVpop. What leaves is dropped, estimated, or
estimated and retrieved, at equal numbers of exact tokens.

    python -m prefixd.retention --model build/models/smollm2 --out build/retention
    python -m prefixd.retention --model build/models/smollm2 --out build/retention --train

Texts of this machine are read by the model, all tokens forced; the first --prompt tokens are the prompt.
What was recorded and measured is kept in --out: the same command goes on where it ended, and wider
--policies, --budgets or --shares measure what is missing. --train trains KVpop's scorers on texts that are
not measured. --kl puts the policies into the model and compares what it predicts, what it goes on to write, and
with --facts what it answers; --tokens 2000 --prompt 800 is long enough for that."""

from __future__ import annotations

import argparse
import datetime
import functools
import json
import multiprocessing
import os
import shlex
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from prefixd.errors import PrefixdError
from prefixd.evaluate.arguments import names_of
from prefixd.evaluate.compare import texts
from prefixd.evaluate.compare.chat import form_of
from prefixd.evaluate.compare.journal import Journal
from prefixd.retention import inside, learn
from prefixd.retention.asked import Task
from prefixd.retention.inside_report import inside_summary, inside_table
from prefixd.retention.kvpop import Scorer
from prefixd.retention.policies import FORESEEN, LEARNT, NAMES, PLAIN, WINDOW
from prefixd.retention.record import Recorded, record
from prefixd.retention.report import Measured, Tables, markdown, summary
from prefixd.retention.run import Cell, Plan, measure, missing
from prefixd.weights import checkpoint_digest

SEED = 0  # chooses texts


def _numbers(value: str) -> list[float]:
    return [float(v) for v in value.split(",")]


def parser() -> argparse.ArgumentParser:
    a = argparse.ArgumentParser(
        prog="python -m prefixd.retention", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    kinds = tuple(texts.KINDS)
    a.add_argument("--model", type=Path, required=True, help="a Hugging Face checkpoint's directory")
    a.add_argument("--out", type=Path, required=True, help="directory for traces, scorers, rows and the report")
    a.add_argument("--json", type=Path, metavar="FILE", help="write the figures here, too")
    a.add_argument("--policies", type=names_of(NAMES),
                   help=f"{', '.join(NAMES)} (all but the last two, which need --train before, for --kl with "
                   "--layer-step 1; the foreseen ones look ahead, and --kl leaves them out, too)")
    a.add_argument("--budgets", type=_numbers, default=[0.05, 0.1, 0.25],
                   help="exact tokens as shares of the whole text (0.05,0.1,0.25)")
    a.add_argument("--shares", type=_numbers, default=[1.0, 0.5],
                   help="of the exact tokens that the policy retains; the rest is retrieved. 1: what left is dropped "
                   "or estimated (1,0.5)")
    a.add_argument("--kinds", type=names_of(kinds), default=list(kinds), help=f"of texts: {', '.join(kinds)}")
    a.add_argument("--documents", type=int, default=2, help="measured of each kind (%(default)s)")
    a.add_argument("--train", action="store_true", help="train KVpop's scorers instead of measuring")
    a.add_argument("--kl", action="store_true", help="measure predictions instead: with share 1 what left is dropped, "
                   "with less it is retrieved and estimated")
    a.add_argument("--estimated", action="store_true", help="with --kl and share 1: also what is predicted where what "
                   "left is estimated instead of dropped")
    a.add_argument("--facts", type=int, default=0, metavar="N",
                   help="with --kl: ask for facts that are planted in N more texts of prose (%(default)s)")
    a.add_argument("--training-documents", type=int, default=1, help="of each kind, beside the measured ones "
                   "(%(default)s)")
    a.add_argument("--prompt", type=int, default=2000, help="tokens of the prompt (%(default)s)")
    a.add_argument("--tokens", type=int, default=7000, help="tokens in all (%(default)s)")
    a.add_argument("--layer-step", type=int, default=6,
                   help="every so many layers, from the second on (%(default)s); 1: all")
    a.add_argument("--minutes", type=float, help="stop after so long; the same command goes on")
    a.add_argument("--jobs", type=int, default=os.cpu_count(), help="layers that are measured beside each other; one "
                   "for each core")
    a.add_argument("--threads", type=int, default=0, help="of PyTorch, where it runs the model; 0: as it likes")
    return a


class Stop(Exception):
    """The time is over."""


class Work:
    def __init__(self, o: argparse.Namespace) -> None:
        self._o = o
        self._end = None if o.minutes is None else time.monotonic() + o.minutes * 60
        o.out.mkdir(parents=True, exist_ok=True)
        config = json.loads((o.model / "config.json").read_text())
        self._layers: int = config["num_hidden_layers"]
        self.plan = Plan(
            o.policies, o.budgets, o.shares,
            range(min(1, o.layer_step - 1), self._layers, o.layer_step), o.prompt, o.tokens,
        )  # fmt: skip
        self._check_same()
        found = texts.kept(o.out / "texts.jsonl", o.kinds, o.documents + o.training_documents, SEED)
        self._texts = [t for kind in found.values() for t in kind]

    @functools.cached_property
    def _model(self) -> PreTrainedModel:
        model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(self._o.model, dtype=torch.float32).eval()
        return model

    @functools.cached_property
    def _digest(self) -> str:
        return "blake2b:" + checkpoint_digest(self._o.model)

    def _check_same(self) -> None:
        """Checks that --out holds what this model gave for texts of these lengths."""
        path = self._o.out / "plan.json"
        new = {"weights": self._digest, "tokens": self._o.tokens, "prompt": self._o.prompt}
        if path.is_file() and (old := json.loads(path.read_text(encoding="utf-8"))) != new:
            differ = "; ".join(f"{k}: {old.get(k)} there, {new[k]} now" for k in new if old.get(k) != new[k])
            raise PrefixdError(f"{self._o.out} holds another run ({differ}); name another --out or remove it")
        path.write_text(json.dumps(new) + "\n", encoding="utf-8")

    def show(self, text: str) -> None:
        print(f"\r  {text:<70}", end="", file=sys.stderr, flush=True)
        if self._end is not None and time.monotonic() > self._end:
            raise Stop

    def _at(self, what: str, token: int) -> None:
        self.show(f"{what}, token {token}")

    def _some(self, training: bool) -> list[texts.Text]:
        return [t for t in self._texts if (t.number >= self._o.documents) == training]

    def _recorded(self, text: texts.Text) -> Recorded:
        one = Recorded(self._o.out / "traces" / f"{text.kind}-{text.number}.safetensors", text.kind, text.source)
        if not one.has(self.plan.layers):
            record(self._model, self._ids(text), self.plan.layers, one.path, one.kind, one.source,
                   lambda at: self.show(f"{one.name}: records token {at}"))
        return one

    def _ids(self, text: texts.Text) -> list[int]:
        form = form_of(self._o.model)
        ids = (form.head + form.encode(text.text))[: self._o.tokens]
        if len(ids) < self._o.tokens:
            raise PrefixdError(f"{text.source} has {len(ids)} tokens, fewer than --tokens {self._o.tokens}")
        return ids

    def measure(self) -> None:
        journal = Journal(self._o.out / "rows.jsonl")
        todo = [
            (text, layer, cells)
            for text in self._some(training=False)
            for layer in self.plan.layers
            if (cells := missing(journal, f"{text.kind}-{text.number}", layer, self.plan))
        ]
        # Much of a policy is small steps that one thread takes: layers go beside each other.
        with ProcessPoolExecutor(
            self._o.jobs, multiprocessing.get_context("spawn"), torch.set_num_threads, (1,)
        ) as pool:
            try:
                done = [
                    pool.submit(measure, self._recorded(text), layer, self.plan, cells,
                                functools.partial(learn.load_scorer, self._o.out, self._digest, layer))
                    for text, layer, cells in todo
                ]
                for i, future in enumerate(as_completed(done)):
                    for row in future.result():
                        journal.add(row)
                    self.show(f"measured {i + 1} of {len(todo)} layers of documents")
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise
        names = {f"{t.kind}-{t.number}" for t in self._some(training=False)}
        keys = {(name, layer, self.plan.prompt) for name in names for layer in self.plan.layers}
        asked = [r for r in journal.rows if tuple(r["key"]) in keys]
        body = summary(Tables(Measured.of(asked)))
        report = markdown(body)
        (self._o.out / "report.md").write_text(report, encoding="utf-8")
        if self._o.json:
            self._o.json.write_text(json.dumps(body, indent=1) + "\n", encoding="utf-8")
        print("\r" + " " * 72 + "\r" + report)

    def _tasks(self) -> Iterator[Task]:
        form = form_of(self._o.model)
        for text in self._some(training=False):
            yield Task(f"{text.kind}-{text.number}", self._ids(text), form)
        # None that is measured as it is, and none that scorers were trained on.
        others = self._o.documents + self._o.training_documents
        prose = texts.kept(self._o.out / "texts.jsonl", ["prose"], others + self._o.facts, SEED)["prose"]
        for text in prose[others:]:
            yield Task.facts(text, self.plan.tokens, form, SEED)

    def measure_inside(self) -> None:
        journal = Journal(self._o.out / "kl.jsonl")
        for name in set(LEARNT) & set(self._o.policies):
            for layer in range(self._layers):  # is said before anything is read
                self._scorer(layer, name)
        for task in self._tasks():
            key = (task.name, self.plan.tokens, self.plan.prompt)
            cells = [(c, e) for c, e in self._cells_inside() if not journal.has(key, inside.method(c, e))]
            if not cells:
                continue
            document = inside.Document(
                self._model, task.ids, self.plan.prompt, task.then, functools.partial(self._at, f"{task.name}: full"),
                self._scorer,
            )
            full = {"kl": 0.0, "same": 1.0, "nats": 0.0, **task.told(document.answers, document.answers)}
            journal.add({"key": list(key), "method": "full", **full})
            for cell, estimated in cells:
                method = inside.method(cell, estimated)
                document.progress = functools.partial(self._at, f"{task.name}: {method}")
                got, answers = document.measure(cell, estimated)
                journal.add({"key": list(key), "method": method, **got, **task.told(document.answers, answers)})
        keys = [[t.name, self.plan.tokens, self.plan.prompt] for t in self._tasks()]
        body = {"run": self._run(), **inside_summary(r for r in journal.rows if r["key"] in keys)}
        if self._o.json:
            self._o.json.write_text(json.dumps(body, indent=1) + "\n", encoding="utf-8")
        print("\r" + " " * 72 + "\r" + inside_table(body))

    def _run(self) -> dict[str, str]:
        command = shlex.join(["python", "-m", "prefixd.retention", *self._o.argv])
        return {"command": command, "date": datetime.date.today().isoformat()}

    def _scorer(self, layer: int, name: str) -> Scorer:
        return learn.load_scorer(self._o.out, self._digest, layer, name)

    def _cells_inside(self) -> Iterator[tuple[Cell, bool]]:
        """Yields cells, and whether what left is estimated: always where something is retrieved. KVpop's window wants
        more than the smallest budgets have."""
        for cell in self.plan.cells():
            if cell.policy in LEARNT and cell.retained(self.plan.tokens) <= learn.SINKS + WINDOW:
                continue
            if cell.retained(self.plan.tokens) < cell.exact(self.plan.tokens):
                yield cell, True
                continue
            yield cell, False
            if self._o.estimated:
                yield cell, True

    def train(self) -> None:
        wanted = [n for n in LEARNT if not learn.has_scorers(self._o.out, self._digest, self.plan.layers, n)]
        if not wanted:
            return
        loaded = [learn.load(self._recorded(t), self.plan.layers, self.plan.prompt) for t in self._some(training=True)]
        cells = [Cell("", b, s) for b in self._o.budgets for s in self._o.shares]
        bests = sorted({max(1, c.retained(self.plan.tokens) - learn.SINKS - WINDOW) for c in cells})
        for name in wanted:
            recent: list[float] = []

            def told(step: int, loss: float, agree: float, name: str = name, recent: list[float] = recent) -> None:
                recent.append(agree)
                share = sum(recent[-20:]) / len(recent[-20:])
                self.show(f"{name}: step {step}, loss {loss:.3f}, decides as the teacher in {share:.3f}")

            heads = learn.train(name, loaded, bests, told)
            learn.save(heads, name, self.plan.layers, self._digest, learn.scorer_path(self._o.out, name))
            print(file=sys.stderr)


def main(argv: list[str] | None = None) -> int:
    a = parser()
    o = a.parse_args(argv)
    o.argv = sys.argv[1:] if argv is None else argv
    if not (o.model / "config.json").is_file():
        a.error(f"{o.model} is no checkpoint's directory; make model-smollm2 makes one")
    if o.prompt < 64 or o.tokens < o.prompt + 256:
        a.error("--prompt must be at least 64, --tokens at least 256 more")
    if any(not 0 < b < 1 for b in o.budgets) or any(not 0 <= s <= 1 for s in o.shares):
        a.error("--budgets lie between 0 and 1, --shares between 0 and 1")
    if o.policies is None:
        o.policies = list(PLAIN) if o.kl else [n for n in NAMES if n not in LEARNT]
    if o.kl and any(p in FORESEEN for p in o.policies):
        a.error("--kl takes no policies that look ahead: " + ", ".join(p for p in o.policies if p in FORESEEN))
    if o.layer_step < 1:
        a.error("--layer-step must be at least 1")
    if (o.facts or o.estimated) and not o.kl:
        a.error("--facts and --estimated need --kl: they are of a model that has the policy inside")
    if o.threads:
        torch.set_num_threads(o.threads)
    try:
        work = Work(o)
        (work.train if o.train else work.measure_inside if o.kl else work.measure)()
    except PrefixdError as e:
        print(f"\nprefixd.retention: {e}", file=sys.stderr)
        return 1
    except (Stop, KeyboardInterrupt):
        print("\nstopped; the same command goes on with what is missing", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
