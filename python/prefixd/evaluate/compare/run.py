"""Runs the comparison: each document is prefilled once, for all ways of reading that it lacks."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prefixd.evaluate.compare import documents, readings
from prefixd.evaluate.compare.chat import Form
from prefixd.evaluate.compare.documents import Document
from prefixd.evaluate.compare.engine import Engine
from prefixd.evaluate.compare.journal import Journal
from prefixd.evaluate.compare.texts import Text


@dataclass(frozen=True)
class Plan:
    kinds: Sequence[str]
    lengths: Sequence[int]
    documents: int
    methods: Sequence[str]
    budgets: Sequence[float]
    seed: int
    minutes: float | None = None
    scorers: Path | None = None


@dataclass
class Pace:
    """Estimates the remaining time by the tokens of documents and the readings of each."""

    work_done: float = 0
    seconds: float = 0

    @staticmethod
    def work(length: int, count: int) -> float:
        # A reading costs about as much as 150 tokens of the prefill, and more in long documents.
        return length * (1 + length / 8000) + count * (100 + length / 40)

    def left(self, todo: Sequence[tuple[int, int]]) -> float | None:
        if not self.work_done:
            return None
        return self.seconds / self.work_done * sum(self.work(*t) for t in todo)


class Comparing:
    def __init__(
        self, plan: Plan, form: Form, texts: Mapping[str, Sequence[Text]], journal: Journal,
        say: Callable[[str], None],
    ) -> None:
        self.plan, self.form, self.texts, self.journal, self.say = plan, form, texts, journal, say
        self.pace = Pace()

    def missing(self, kind: str, length: int, number: int) -> list[dict[str, Any]] | None:
        """Returns the readings that a document lacks; None where it has all."""
        key = (kind, length, number)
        wanted = readings.readings(self.plan.methods, self.plan.budgets, length, self.plan.scorers)
        lacks = [r for r in wanted if not self.journal.has(key, r["name"])]
        return lacks if lacks or not self.journal.has(key, "full") else None

    def document(self, kind: str, length: int, number: int) -> Document | None:
        source = documents.KINDS[kind][1]
        texts = self.texts.get(source, [])
        if source and number >= len(texts):
            return None
        return documents.make(kind, length, number, texts[number] if source else None, self.form, self.plan.seed)

    def run(self, open_engine: Callable[[], Engine]) -> bool:
        """Returns whether everything is measured; False when the time was over before."""
        begin = time.monotonic()
        units = [(k, n, i) for i in range(self.plan.documents) for n in self.plan.lengths for k in self.plan.kinds]
        todo = [(u, m) for u in units if (m := self.missing(*u)) is not None]
        if len(todo) < len(units):
            self.say(f"resumed: {len(units) - len(todo)} of {len(units)} documents are measured")
        if not todo:
            return True
        with open_engine() as engine:
            for at, (unit, lacks) in enumerate(todo):
                document = self.document(*unit)
                if document is None:
                    self.say(f"{unit[0]}, {unit[1]} tokens, document {unit[2] + 1}: there is no text for it")
                    continue
                started = time.monotonic()
                if not self._measure(engine, document, lacks, begin):
                    return False
                seconds = time.monotonic() - started
                self.pace.seconds += seconds
                self.pace.work_done += Pace.work(unit[1], len(lacks))
                left = self.pace.left([(u[1], len(m)) for u, m in todo[at + 1 :]]) or 0
                self.say(f"{unit[0]}, {unit[1]} tokens, document {unit[2] + 1}: {seconds:.0f} s; "
                         f"about {left / 60:.0f} min to go")
        return True

    def _measure(
        self, engine: Engine, document: Document, lacks: Sequence[dict[str, Any]], begin: float
    ) -> bool:
        for event in engine.compare(document, lacks):
            if event["event"] not in ("reading", "heads"):
                continue
            self.journal.add(self._row(document, event))
            if self.plan.minutes is not None and time.monotonic() - begin > 60 * self.plan.minutes:
                self.say(f"stopped after {self.plan.minutes:g} minutes; the same command goes on from here")
                return False
        return True

    def _row(self, document: Document, event: Mapping[str, Any]) -> dict[str, Any]:
        row = {"key": list(document.key), "suite": document.suite, "tokens": len(document.prompt),
               "method": event.get("method", "heads")}
        row |= {k: v for k, v in event.items() if k not in ("event", "id", "method", "passages")}
        if "passages" in event:
            row["passages"] = []
            for passage, found in zip(document.passages, event["passages"], strict=True):
                one = {"kind": passage.kind, **{k: found[k] for k in ("kl", "nll", "same")}}
                if "text" in found:
                    one["text"] = self.form.decode(found["text"])
                    one["score"] = documents.score(passage, one["text"])
                row["passages"].append(one)
        return row


def store_of(out: Path) -> Path:
    return out / "store"
