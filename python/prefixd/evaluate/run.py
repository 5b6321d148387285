"""Runs the evaluation, document by document. Each document's rows are one line of rows.jsonl, so
that an interrupted run continues. A run that is widened by methods or budgets, or repeated with
other feature maps, measures only the cells that a document lacks; its new line replaces the old
one."""

from __future__ import annotations

import json
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from prefixd.evaluate import diagnostics
from prefixd.evaluate.methods import METHODS, Cell, cells
from prefixd.evaluate.model import Reader, Subject
from prefixd.evaluate.rows import Rows, merged, without_outdated
from prefixd.evaluate.tasks import Example, Generator, Question, Source

PROBES = 2
Log = Callable[[str], None]


@dataclass(frozen=True)
class Plan:
    """Holds what rows depend on; rows of another plan are not mixed in."""

    checkpoint: str
    weights: str
    tasks: Sequence[str]
    methods: Sequence[str]
    lengths: Sequence[int]
    budgets: Sequence[float]
    documents: int
    continuation: int
    queries: int
    seed: int
    floor: float
    l_gen: int
    selector: str
    dtype: str
    maps: Sequence[str]  # name@digest
    text: str  # digest

    def to_json(self) -> str:
        return json.dumps(asdict(self), sort_keys=True)


class Evaluation:
    def __init__(
        self, subject: Subject, plan: Plan, generators: Mapping[str, Generator], noise: str,
        maps: Sequence[Path], rows: Rows, log: Log,
    ) -> None:
        self.subject, self.plan, self.generators = subject, plan, generators
        self.source = Source(noise, subject.count)
        self.maps, self.rows, self.log = maps, rows, log
        self.cells = cells(plan.methods, plan.budgets)

    def run(self) -> None:
        units = [
            (task, length, document)
            for document in range(self.plan.documents)
            for task in self.plan.tasks
            for length in self.plan.lengths
        ]
        todo = [u for u in units if self._missing(self.rows.find("document", *u))]
        if len(todo) < len(units):
            self.log(f"resumed: {len(units) - len(todo)} of {len(units)} documents are done")
        begin = time.monotonic()
        for done, unit in enumerate(todo):
            if not self._able(unit[0], unit[1]):
                continue
            started = time.monotonic()
            row = self._document(*unit)
            self.rows.add(row)
            each = (time.monotonic() - begin) / (done + 1)
            self.log(
                f"{unit[0]}, {unit[1]} tokens, document {unit[2] + 1}: "
                f"{time.monotonic() - started:.0f} s; about {each * (len(todo) - done - 1) / 60:.0f} "
                "min to go"
            )

    # ---- one document ----

    def _missing(self, row: Mapping[str, Any] | None) -> list[Cell]:
        """Returns the cells that a document's row lacks, or has from other maps."""
        if row is None:
            return self.cells
        known = without_outdated(row, self.plan.maps)["answers"][0]["scores"]
        return [c for c in self.cells if c.key not in known]

    def _example(self, task: str, length: int, document: int) -> Example:
        seed = [self.plan.seed, zlib.crc32(task.encode()), length, document]
        try:
            return self.generators[task](np.random.default_rng(seed), self.source, length)
        except ValueError as error:
            raise SystemExit(f"{task}, {length} tokens: {error}") from error

    def _able(self, task: str, length: int) -> bool:
        """Returns whether full attention answers any question; otherwise the other methods do not
        run."""
        row = self.rows.find("probe", task, length)
        if row is None:
            scores = []
            for document in range(min(PROBES, self.plan.documents)):
                example = self._example(task, length, document)
                tokens = self.subject.encoder.prompt(example.document)
                self.subject.put(tokens)
                for question in example.questions:
                    scores += list(self._ask(tokens, question, [Cell("full", "same-k", 0.0)]).values())
            value = float(np.mean([s for s in scores if s is not None]))
            row = {"key": ["probe", task, length], "score": value, "asked": len(scores),
                   "able": value >= self.plan.floor}
            self.rows.add(row)
            if not row["able"]:
                self.log(f"{task}, {length} tokens: the model scores {value:.2f} with full attention, "
                         "so the other methods are not asked")
        return bool(row["able"])

    def _document(self, task: str, length: int, document: int) -> dict[str, Any]:
        old = self.rows.find("document", task, length, document)
        asked = self._missing(old)
        example = self._example(task, length, document)
        tokens = self.subject.encoder.prompt(example.document)
        prefix = self.subject.put(tokens)
        row: dict[str, Any] = {
            "key": ["document", task, length, document], "tokens": len(tokens),
            "maps": list(self.plan.maps),
            "answers": [
                {"kind": q.kind or task, "exact": q.exact,
                 "scores": self._ask(tokens, q, asked)}
                for q in example.questions
            ],
        }
        # Likelihood and diagnostics are measured on documents of one task.
        if task == self.plan.tasks[0] and example.continuation:
            following = self.subject.encoder.encode(example.continuation)[: self.plan.continuation]
            scatter = document == 0 and (old is None or any(METHODS[c.method].mapped for c in asked))
            row |= self._continue(tokens, following, asked, scatter)
        self.subject.store.remove(prefix)
        return row if old is None else merged(without_outdated(old, self.plan.maps), row)

    def _ask(
        self, tokens: Sequence[int], question: Question, asked: Sequence[Cell]
    ) -> dict[str, float | None]:
        encoder = self.subject.encoder
        prompt = encoder.encode(question.prompt)
        scores: dict[str, float | None] = {}
        with Reader(self.subject, tokens, prompt[:-1]) as reader:
            for cell in asked:
                if METHODS[cell.method].baseline and not self.subject.plain:
                    scores[cell.key] = None
                elif question.exact:
                    answer = encoder.encode(question.answers[0])
                    logits = reader.read(cell, [prompt[-1], *answer[:-1]])
                    scores[cell.key] = None if logits is None else float(
                        logits.argmax(-1).tolist() == answer
                    )
                else:
                    most = 16 + 2 * sum(len(encoder.encode(" " + a)) for a in question.answers)
                    text = reader.generate(cell, prompt[-1], most, "\n\n")
                    scores[cell.key] = None if text is None else float(
                        np.mean([a.lower() in text.lower() for a in question.answers])
                    )
        return scores

    def _continue(
        self, tokens: Sequence[int], following: Sequence[int], asked: Sequence[Cell], scatter: bool
    ) -> dict[str, Any]:
        """Returns the mean negative log-likelihood of the continuation's tokens but the first,
        which all read the document as the cell says; and the diagnostics."""
        nll: dict[str, float | None] = {}
        with Reader(self.subject, tokens, []) as reader:
            for cell in asked:
                if METHODS[cell.method].baseline and (
                    not self.subject.plain or cell.method == "snapkv"
                ):
                    continue  # SnapKV needs a prompt's end to observe
                logits = reader.read(cell, following[:-1])
                nll[cell.key] = None if logits is None else float(
                    torch.nn.functional.cross_entropy(
                        logits, torch.tensor(following[1:], device=logits.device)
                    )
                )
            # Top-K always runs, because the completion share is measured against it.
            own = [c for c in self.cells if (c in asked or c.method == "topk")
                   and not METHODS[c.method].baseline]
            found = {"nll": nll, "diagnostics": diagnostics.measure(
                reader, following, own, self.plan.queries)}
            if scatter and self.maps and self.subject.plain:
                found["scatter"] = self._scatter(reader, following, found["diagnostics"])
        return found

    def _scatter(
        self, reader: Reader, following: Sequence[int], measured: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Samples pairs of the head whose middle is the most diffuse, with the maps nearest in
        length."""
        values = np.array(measured["entropy"])
        at, head = (int(i) for i in np.unravel_index(values.argmax(), values.shape))
        maps = min(self.maps, key=lambda m: abs(_length(m) - reader.n))
        return diagnostics.kernel_scatter(
            reader, following, maps, measured["layers"][at], head, min(self.plan.budgets)
        )


def _length(maps: Path) -> int:
    from safetensors import safe_open

    with safe_open(str(maps), framework="pt") as file:
        return int((file.metadata() or {}).get("length", 0))
