"""Makes the documents and what follows them, from texts and a seed.

Suite `likelihood`: a real text, and how it goes on. Suite `tasks`: facts planted in a text in the
manner of RULER and BABILong, and sentences of real manuals that are to be quoted. Suite `records`: a report of many
records, all of which are wanted as JSON, so that each next token depends on another place of the
document."""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from prefixd.evaluate import tasks
from prefixd.evaluate.compare.chat import Form
from prefixd.evaluate.compare.texts import Text

LIKELIHOOD, TASKS, RECORDS = "likelihood", "tasks", "records"
# The texts that a kind of document is made of: its own name for likelihood.
KINDS = {
    "prose": (LIKELIHOOD, "prose"), "code": (LIKELIHOOD, "code"), "manuals": (LIKELIHOOD, "manuals"),
    "logs": (LIKELIHOOD, "logs"), "facts": (TASKS, "prose"), "quotes": (TASKS, "manuals"),
    "records": (RECORDS, ""),
}
CONTINUATION = 128  # tokens of a text behind its document
FORCED = 256  # tokens of the records' JSON
# Tokens that a model may write: as many as an answer has that begins at once, or one record.
ANSWER = {"needle": 10, "needles": 10, "babi-1": 4, "quotes": 12}
WRITTEN = 40
SHOWN = 3  # records
ROOM = 400  # tokens that may follow a document


@dataclass(frozen=True)
class Passage:
    """What follows a document: `request` is what prefixd-demo is asked (demo/compare.h)."""

    kind: str  # of question, for the tables
    request: dict[str, Any]
    answers: tuple[str, ...] = ()  # strings of a right answer, where one is written


@dataclass(frozen=True)
class Document:
    kind: str
    length: int
    number: int
    prompt: list[int]
    passages: list[Passage] = field(default_factory=list)

    @property
    def key(self) -> tuple[str, int, int]:
        return self.kind, self.length, self.number

    @property
    def suite(self) -> str:
        return KINDS[self.kind][0]

    @property
    def recorded(self) -> bool:
        """Whether errors by head are measured: on text that is given, not on what a model writes."""
        return "targets" in self.passages[0].request


def make(kind: str, length: int, number: int, text: Text | None, form: Form, seed: int) -> Document | None:
    """Returns a document of at most `length` tokens; None where its text is too short for one."""
    rng = np.random.default_rng([seed, zlib.crc32(kind.encode()), length, number])
    suite = KINDS[kind][0]
    if suite == RECORDS:
        return _records(rng, kind, length, number, form)
    assert text is not None
    if suite == LIKELIHOOD:
        tokens = form.encode(text.text)
        cut = length - (1 if form.head == [256] else 0)
        prompt = (form.head if form.head == [256] else []) + tokens[:cut]
        follow = tokens[cut : cut + CONTINUATION + 1]
        if len(follow) <= CONTINUATION:
            return None
        passage = Passage(kind, {"read": follow[:-1], "targets": follow[1:]})
        return Document(kind, length, number, prompt, [passage])
    return (_facts if kind == "facts" else _quotes)(rng, kind, length, number, text, form)


def _asked(kind: str, tokens: list[int], answers: Sequence[str], form: Form) -> Passage:
    return Passage(kind, {"exact": tokens[:-1], "read": tokens[-1:], "generate": ANSWER[kind], "stop": form.stop},
                   tuple(answers))


# What a small model can do with everything read depends on how it is asked: it finds needles and
# sentences by the words in which they stand, and answers the rest through its chat template.
def _needle(form: Form, kind: str, question: tasks.Question) -> Passage:
    word = question.prompt.split(" numbers for ")[1].split(" ")[0]
    return _asked(kind, form.encode(f"\nOne of the special magic numbers for {word} is:"), question.answers, form)


def _place(form: Form, question: tasks.Question) -> Passage:
    asked, begun = question.prompt.strip().removeprefix("Question: ").split(" Answer: ")
    return _asked("babi-1", form.question(f"According to the text above: {asked}", begun), question.answers, form)


def _planted(
    rng: np.random.Generator, length: int, text: Text, form: Form, lines: Sequence[str]
) -> list[int]:
    source = tasks.Source(text.text, lambda t: len(form.encode(t)))
    body, _ = tasks.fill(rng, source, lines, length - len(form.head))
    return form.head + form.encode(body)


def _facts(rng: np.random.Generator, kind: str, length: int, number: int, text: Text, form: Form) -> Document:
    source = tasks.Source("line\n" * 8000, lambda t: len(t) // 4)
    needles = tasks.niah_multikey(rng, source, 2048)
    moves = tasks.babi_one_fact(rng, source, 2048)
    planted = re.compile(r"(One of the special magic numbers|[A-Z][a-z]+ (went|moved|travelled|journeyed) to)")
    lines = [line for example in (needles, moves) for line in example.document.split("\n") if planted.match(line)]
    passages = [_needle(form, "needles", q) for q in needles.questions]
    passages += [_place(form, q) for q in moves.questions[:4]]
    return Document(kind, length, number, _planted(rng, length, text, form, lines), passages)


def recall(length: int, facts: int, text: Text, form: Form, seed: int) -> Document:
    """Returns prose with `facts` numbers planted in it, all of them asked for, each once, and as many of its
    own sentences as it has, whose beginnings are given."""
    rng = np.random.default_rng([seed, zlib.crc32(b"recall"), length])
    lines, asked = tasks.numbers(rng, facts)
    prompt = _planted(rng, length, text, form, lines)
    passages = [_needle(form, "needles", q) for q in asked]
    passages += _sentences(rng, form.decode(prompt[len(form.head) :]), form)
    return Document("recall", length, 0, prompt, [passages[i] for i in rng.permutation(len(passages))])


_SENTENCE = re.compile(r"(?<=[.:]\s)[A-Z][a-z]+(?:\s[\w',-]+){13,30}\.")
_BEGUN, _WANTED = 8, 4  # words of a sentence


def _sentences(rng: np.random.Generator, body: str, form: Form, most: int | None = None) -> list[Passage]:
    flat = " ".join(body.split())
    known = [words for m in _SENTENCE.finditer(body) if flat.count(" ".join((words := m[0].split())[:_BEGUN])) == 1]
    passages = []
    for i in sorted(int(i) for i in rng.permutation(len(known))[:most]):
        tokens = form.encode('\n\nThe text above says: "' + " ".join(known[i][:_BEGUN]))
        passages.append(_asked("quotes", tokens, [" ".join(known[i][_BEGUN : _BEGUN + _WANTED])], form))
    return passages


def _quotes(
    rng: np.random.Generator, kind: str, length: int, number: int, text: Text, form: Form
) -> Document:
    """Asks for sentences of a manual whose first words are given, and for one number planted in it."""
    needle = tasks.niah_single(rng, tasks.Source("line\n" * 8000, lambda t: len(t) // 4), 1024)
    line = next(x for x in needle.document.split("\n") if x.startswith("One of the special"))
    room = length - len(form.head) - len(form.encode(line)) - 8
    body = form.decode(form.encode(text.text)[:room])
    ends = [0] + [m.end() for m in re.finditer("\n", body)]
    place = int(rng.choice(ends))
    passages = [_needle(form, "needle", q) for q in needle.questions]
    passages += _sentences(rng, body, form, 4)
    return Document(kind, length, number, form.head + form.encode(f"{body[:place]}{line}\n{body[place:]}"), passages)


_NAMES = ("Anna Berg", "Omar Haddad", "Lena Fischer", "Paulo Reis", "Mei Tanaka", "Jon Arnason", "Rosa Villa",
          "Ivan Petrov", "Sara Lund", "Kofi Mensah", "Eva Novak", "Tom Walsh")
_CITIES = ("Lyon", "Porto", "Graz", "Turin", "Oslo", "Ghent", "Krakow", "Malmo", "Cork", "Basel", "Riga", "Split")
_GOODS = ("chairs", "lamps", "tables", "shelves", "mirrors", "carpets", "desks", "stools", "benches", "clocks")


def _records(rng: np.random.Generator, kind: str, length: int, number: int, form: Form) -> Document:
    records: list[dict[str, Any]] = []
    lines = ["Report of all sales of the year, one order after the other."]
    count = len(form.head) + len(form.encode(lines[0] + "\n"))
    while True:
        r = {"order": len(records) + 1, "buyer": str(rng.choice(_NAMES)), "city": str(rng.choice(_CITIES)),
             "goods": str(rng.choice(_GOODS)), "number": int(rng.integers(2, 90)),
             "price": int(rng.integers(100, 9999))}
        line = (f"Order {r['order']}: {r['buyer']} from {r['city']} bought {r['number']} {r['goods']} "
                f"and paid {r['price']} euros.")
        count += len(form.encode(line + "\n"))
        if count > length:
            break
        records.append(r)
        lines.append(line)
    first = int(rng.integers(0, max(1, len(records) - 20)))
    asked = f"Write all orders from order {first + 1} on as JSON, one line an order."
    # Some lines are given, so that the form of the others is known.
    rest = "\n".join(json.dumps(r) for r in records[first : first + 20])
    begun, rest = _after(rest, f'{{"order": {first + SHOWN + 1}, "buyer":')
    question = form.question(asked, begun)
    wanted = form.encode(rest)[:FORCED]
    follow = [question[-1], *wanted]
    forced = Passage(kind, {"exact": question[:-1], "read": follow[:-1], "targets": follow[1:]})
    # Written text is right as far as it has the values of the orders that fit.
    told = [str(v) for r in records[first + SHOWN : first + SHOWN + 1] for k, v in r.items() if k != "order"]
    written = Passage(kind, {"exact": question[:-1], "read": question[-1:], "generate": WRITTEN,
                             "stop": [t for t in form.stop if t != ord("\n")]}, tuple(told))
    prompt = form.head + form.encode("\n".join(lines) + "\n")
    return Document(kind, length, number, prompt, [forced, written])


def _after(text: str, mark: str) -> tuple[str, str]:
    """Returns the text to the end of `mark`, and what follows."""
    end = text.index(mark) + len(mark)
    return text[:end], text[end:]


def score(passage: Passage, written: str) -> float | None:
    """Returns the share of a right answer's strings that the written text has, as RULER counts."""
    if not passage.answers:
        return None
    text = " ".join(written.split()).lower()
    return float(np.mean([" ".join(a.split()).lower() in text for a in passage.answers]))
