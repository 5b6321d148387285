"""Generates tasks in the manner of RULER and BABILong from a seed and any text; nothing is
downloaded.

A task is a stored document and questions about it. `exact` questions force the form of their
answer: it is right when greedy decoding gives exactly that. Others are answered in free text and
scored, as in RULER, by the share of expected strings that the text contains.

After RULER (Hsieh et al., 2024, section 3) and BABILong (Kuratov et al., 2024, qa1 and qa2); wording and
generators are our own."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from prefixd.planted import (
    fast_words,
    frequent_task,
    key_task,
    number,
    track_task,
    values_task,
)

CountTokens = Callable[[str], int]


@dataclass(frozen=True)
class Question:
    """`kind` is the row of the table that the question counts for; "" for the task's own."""

    prompt: str
    answers: tuple[str, ...]
    exact: bool
    kind: str = ""


@dataclass(frozen=True)
class Example:
    """`continuation` is the noise that goes on behind the document, for its likelihood."""

    document: str
    questions: tuple[Question, ...]
    continuation: str = ""


@dataclass(frozen=True)
class Source:
    """Holds what generators draw from: noise text, and a text's length in the model's tokens."""

    noise: str
    count: CountTokens


def fill(
    rng: np.random.Generator, source: Source, lines: Sequence[str], tokens: int
) -> tuple[str, str]:
    """Puts `lines`, in order, at random line ends of `tokens` tokens of noise (lines included);
    also returns how the noise goes on."""
    room = tokens - source.count("\n".join(lines)) - 2 * len(lines) - 8
    if room < tokens // 4:
        raise ValueError(f"{len(lines)} lines do not leave room for text in {tokens} tokens")
    noise = source.noise
    # Bisection on a prefix of the rotated text finds the characters that fit.
    begin = int(rng.integers(0, len(noise)))
    begin = noise.find("\n", begin) + 1
    text = noise[begin:] + "\n" + noise[:begin]
    while len(text) < 8 * room + 4096:
        text += "\n" + noise
    low, high = 0, min(len(text), 8 * room)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if source.count(text[:middle]) <= room else (low, middle)
    text, continuation = text[:low], text[low : low + 4096]
    ends = [0] + [i + 1 for i, c in enumerate(text) if c == "\n"]
    places = sorted(int(rng.choice(ends)) for _ in lines)
    parts, at = [], 0
    for place, line in zip(places, lines, strict=True):
        parts += [text[at:place], line, "\n"]
        at = place
    return "".join(parts) + text[at:] + "\n", continuation


def planted_in(
    rng: np.random.Generator, source: Source, lines: Sequence[str], tokens: int,
    questions: tuple[Question, ...],
) -> Example:
    document, continuation = fill(rng, source, lines, tokens)
    return Example(document, questions, continuation)


# ---- in the forms that the small model was trained on (models/README.md) ----


_PLANTED = (("key", key_task, 4), ("values", values_task, 3), ("variable", track_task, 3),
            ("frequent", frequent_task, 1))


def planted(rng: np.random.Generator, source: Source, tokens: int) -> Example:
    """Plants facts of all four kinds in one document, as in training, and asks each by itself."""
    words = fast_words(rng, 64)
    tasks = [(kind, make(rng, words)) for kind, make, count in _PLANTED for _ in range(count)]
    order = [int(i) for i in rng.permutation(len(tasks))]
    lines = [line.text for i in order for line in tasks[i][1].plant]
    asked = tuple(
        Question(t.question.prompt, (t.question.answer,), True, kind) for kind, t in tasks
    )
    return planted_in(rng, source, lines, tokens, asked)


# ---- RULER's manner ----


def _needle(word: str, value: str) -> str:
    return f"One of the special magic numbers for {word} is: {value}."


def _magic(words: Sequence[str], answers: Sequence[str]) -> Question:
    named = " and ".join(words)
    return Question(
        f"\nWhat are all the special magic numbers for {named} mentioned in the text above? "
        f"The special magic numbers for {named} mentioned in the text are",
        tuple(answers), False,
    )


def niah_single(rng: np.random.Generator, source: Source, tokens: int) -> Example:
    word, value = fast_words(rng, 1)[0], number(rng)
    return planted_in(rng, source, [_needle(word, value)], tokens, (_magic([word], [value]),))


def numbers(rng: np.random.Generator, count: int) -> tuple[list[str], tuple[Question, ...]]:
    """Returns lines that each give a word a number, and the question for each."""
    words, facts = fast_words(rng, count), [number(rng) for _ in range(count)]
    lines = [_needle(w, v) for w, v in zip(words, facts, strict=True)]
    return lines, tuple(_magic([w], [v]) for w, v in zip(words, facts, strict=True))


def niah_multikey(rng: np.random.Generator, source: Source, tokens: int) -> Example:
    lines, asked = numbers(rng, 4)
    return planted_in(rng, source, lines, tokens, asked)


def niah_multivalue(rng: np.random.Generator, source: Source, tokens: int) -> Example:
    word, facts = fast_words(rng, 1)[0], [number(rng) for _ in range(4)]
    lines = [_needle(word, v) for v in facts]
    return planted_in(rng, source, lines, tokens, (_magic([word], facts),))


def variable_tracking(rng: np.random.Generator, source: Source, tokens: int) -> Example:
    names = [w.upper() for w in fast_words(rng, 5)]
    value = number(rng)
    lines = [f"VAR {names[0]} = {value}"]
    lines += [f"VAR {b} = VAR {a}" for a, b in zip(names, names[1:], strict=False)]
    question = Question(
        f"\nQuestion: Find all variables that are assigned the value {value} in the text above. "
        f"Answer: the variables assigned the value {value} are",
        tuple(names), False,
    )
    return planted_in(rng, source, lines, tokens, (question,))


def _word_list(
    rng: np.random.Generator, source: Source, tokens: int, heavy: Sequence[str], counts: Sequence[int]
) -> str:
    """Writes words in random order: `heavy` as often as `counts`, the rest all different and
    rare."""
    bag = [w for w, c in zip(heavy, counts, strict=True) for _ in range(c)]
    spare = [w for w in fast_words(rng, 64 + tokens // 4) if w not in heavy]
    low, high = 0, len(spare)
    while high - low > 1:
        middle = (low + high) // 2
        fits = source.count(" ".join(bag + spare[:middle])) <= tokens - 8
        low, high = (middle, high) if fits else (low, middle)
    bag += spare[:low]
    return " ".join(bag[int(i)] for i in rng.permutation(len(bag))) + "\n"


def common_words(rng: np.random.Generator, source: Source, tokens: int) -> Example:
    heavy = fast_words(rng, 10)
    document = _word_list(rng, source, tokens, heavy, [max(3, tokens // 260)] * 10)
    question = Question(
        "\nQuestion: What are the 10 most common words in the above list? "
        "Answer: The 10 most common words in the list are:",
        tuple(heavy), False,
    )
    return Example(document, (question,))


def frequent_words(rng: np.random.Generator, source: Source, tokens: int) -> Example:
    heavy = fast_words(rng, 6)
    top = max(8, tokens // 60)
    counts = [max(2, int(top / (rank + 1) ** 2.0)) for rank in range(6)]  # zeta, alpha = 2
    document = _word_list(rng, source, tokens, heavy, counts)
    question = Question(
        "\nQuestion: What are the three most frequently appeared words in the above text? "
        "Answer: The three most frequently appeared words are",
        tuple(heavy[:3]), False,
    )
    return Example(document, (question,))


# ---- BABILong's manner ----

_PEOPLE = ("Mary", "John", "Sandra", "Daniel")
_PLACES = ("kitchen", "garden", "office", "bathroom", "hallway", "bedroom")
_THINGS = ("football", "apple", "milk")
_MOVES = ("went to", "moved to", "travelled to", "journeyed to")


def babi_one_fact(rng: np.random.Generator, source: Source, tokens: int) -> Example:
    where: dict[str, str] = {}
    lines = []
    for _ in range(8):
        who, place = str(rng.choice(_PEOPLE)), str(rng.choice(_PLACES))
        lines.append(f"{who} {rng.choice(_MOVES)} the {place}.")
        where[who] = place
    questions = tuple(
        Question(f"\nQuestion: Where is {who}? Answer: {who} is in the", (place,), False)
        for who, place in where.items()
    )
    return planted_in(rng, source, lines, tokens, questions)


def babi_two_facts(rng: np.random.Generator, source: Source, tokens: int) -> Example:
    thing = str(rng.choice(_THINGS))
    who, other = (str(p) for p in rng.choice(_PEOPLE, 2, replace=False))
    first, last, noise = (str(p) for p in rng.choice(_PLACES, 3, replace=False))
    lines = [
        f"{who} went to the {first}.", f"{who} picked up the {thing} there.",
        f"{other} moved to the {noise}.", f"{who} journeyed to the {last}.",
    ]
    question = Question(
        f"\nQuestion: Where is the {thing}? Answer: the {thing} is in the", (last,), False
    )
    return planted_in(rng, source, lines, tokens, (question,))


Generator = Callable[[np.random.Generator, Source, int], Example]
PLANTED: dict[str, Generator] = {"planted": planted}
RULER: dict[str, Generator] = {
    "niah-single": niah_single, "niah-multikey": niah_multikey, "niah-multivalue": niah_multivalue,
    "variable-tracking": variable_tracking, "common-words": common_words,
    "frequent-words": frequent_words,
}
BABI: dict[str, Generator] = {"babi-1": babi_one_fact, "babi-2": babi_two_facts}
SUITES = {"planted": PLANTED, "ruler": RULER, "babilong": BABI}


def question_file(path: Path) -> Generator:
    """Reads questions over the user's own text: JSON lines {"question", "answers": [...]} beside a
    "document" (text) or "file" (path, relative to the JSON file). Documents are cut to the length;
    questions whose "answers" were cut off are skipped."""
    records = []
    for number_, line in enumerate(path.read_text().splitlines(), 1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
            text = record["document"] if "document" in record else (
                path.parent / record["file"]
            ).read_text(errors="replace")
            answers = tuple(map(str, record["answers"]))
            records.append((text, str(record["question"]), answers))
        except (ValueError, KeyError, TypeError, OSError) as error:
            raise SystemExit(f"{path}, line {number_}: {error!r}") from error
    if not records:
        raise SystemExit(f"{path} has no questions")

    def generate(rng: np.random.Generator, source: Source, tokens: int) -> Example:
        for i in rng.permutation(len(records)):
            text, asked, answers = records[int(i)]
            document = _around(rng, source, text, answers, tokens - 8)
            if document is not None:
                prompt = f"\nQuestion: {asked}\nAnswer:"
                return Example(document, (Question(prompt, answers, False),))
        raise ValueError(f"no document of {path} has its answer within {tokens} tokens")

    return generate


def _around(
    rng: np.random.Generator, source: Source, text: str, answers: Sequence[str], tokens: int
) -> str | None:
    """Returns at most `tokens` tokens of the text, with every answer that it has; None where they
    lie too far apart. Answers that the text does not spell out have no influence on the part
    chosen."""
    total = source.count(text)
    if total <= tokens:
        return text
    width = int(0.95 * len(text) * tokens / total)
    found = [(p, p + len(a)) for a in answers if (p := text.find(a)) >= 0]
    begin = 0
    if found:
        first, last = min(p for p, _ in found), max(e for _, e in found)
        if last - first > width:
            return None
        begin = int(rng.integers(max(0, last - width), min(first, len(text) - width) + 1))
    while source.count(text[begin : begin + width]) > tokens:  # the text is denser here than elsewhere
        width = int(0.9 * width)
    document = text[begin : begin + width]
    return document if all(text[a:e] in document for a, e in found) else None
