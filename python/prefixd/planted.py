"""Plants recall tasks in real text. ``models/README.md`` describes every format.

A task sequence is real text with lines planted between its lines; the questions come at the end.
Each byte carries a loss weight: answers 4, text 0.5, digits that nobody could know 0.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

BOS = 256  # of the small model of models/
W_ANSWER, W_DRILL, W_TEXT, W_WORD, W_NONE = 4.0, 1.0, 0.5, 0.1, 0.0
_CONSONANTS, _VOWELS = "bcdfghjklmnprstvwz", "aeiou"
# A source maps (rng, n) to n bytes of real text.
Source = Callable[[np.random.Generator, int], np.ndarray]


@dataclass(frozen=True)
class Line:
    """A line is planted or asked: the text up to ``answer`` is given, the answer follows."""

    prompt: str
    answer: str

    @property
    def text(self) -> str:
        return self.prompt + self.answer


@dataclass(frozen=True)
class Task:
    """Holds lines to plant, in this order, and one question about them."""

    plant: tuple[Line, ...]
    question: Line


def word(rng: np.random.Generator) -> str:
    """Returns a random pronounceable lowercase word of 4 to 8 letters."""
    letters = []
    for i in range(int(rng.integers(4, 9))):
        letters.append(str(rng.choice(list(_CONSONANTS if i % 2 == 0 else _VOWELS))))
    return "".join(letters)


def fast_words(rng: np.random.Generator, count: int) -> list[str]:
    """Returns ``count`` distinct words (as ``word`` makes them, drawn at once)."""
    out: list[str] = []
    while len(out) < count:
        c = rng.integers(0, len(_CONSONANTS), (count, 4))
        v = rng.integers(0, len(_VOWELS), (count, 4))
        n = rng.integers(4, 9, count)
        for i in range(count):
            s = "".join(_CONSONANTS[c[i, j]] + _VOWELS[v[i, j]] for j in range(4))[: n[i]]
            if s not in out:
                out.append(s)
    return out[:count]


def number(rng: np.random.Generator) -> str:
    return f"{int(rng.integers(0, 100000)):05d}"


def needle(key: str, value: str) -> Line:
    return Line(f"[key of {key} is ", f"{value}.]")


def key_task(rng: np.random.Generator, words: list[str]) -> Task:
    line = needle(words.pop(), number(rng))
    return Task((line,), line)


def values_task(rng: np.random.Generator, words: list[str]) -> Task:
    """Plants several values under one key."""
    vals = " ".join(number(rng) for _ in range(int(rng.integers(2, 4))))
    line = Line(f"[keys of {words.pop()} are ", f"{vals}.]")
    return Task((line,), line)


def track_task(rng: np.random.Generator, words: list[str]) -> Task:
    """Plants a variable that is assigned from another one: the question needs both lines."""
    a, b, v = words.pop(), words.pop(), number(rng)
    plant = (Line(f"[let {a} be ", f"{v}.]"), Line(f"[let {b} be ", f"{a}.]"))
    return Task(plant, Line(f"[value of {b} is ", f"{a} is {v}.]"))


def frequent_task(rng: np.random.Generator, words: list[str]) -> Task:
    """Plants a list of words; one of them occurs most often."""
    pool = [words.pop() for _ in range(3)]
    counts = [int(rng.integers(4, 7)), int(rng.integers(1, 3)), 1]
    bag = [w for w, c in zip(pool, counts, strict=True) for _ in range(c)]
    rng.shuffle(bag)
    plant = (Line("[list: ", " ".join(bag) + ".]"),)
    return Task(plant, Line("[most frequent in the list is ", pool[0] + ".]"))


def draw_tasks(rng: np.random.Generator, count: int, plain: float = 0.8) -> list[Task]:
    """Returns ``count`` tasks of mixed kinds with distinct words; at most one is a list."""
    words = fast_words(rng, 3 * count + 3)
    kinds = [key_task, values_task, track_task, frequent_task]
    rest = 1.0 - plain
    draw = rng.choice(4, size=count, p=[plain, rest * 0.45, rest * 0.35, rest * 0.2])
    tasks, listed = [], False
    for k in draw:
        k = 0 if (k == 3 and listed) else int(k)
        listed |= k == 3
        tasks.append(kinds[k](rng, words))
    return tasks


def line_starts(text: np.ndarray) -> np.ndarray:
    """Returns where a planted line may stand: the beginning and after every newline."""
    return np.concatenate(([0], np.flatnonzero(text == 10) + 1))


def plant_lines(
    rng: np.random.Generator, text: np.ndarray, lines: list[bytes], groups: list[int]
) -> list[int]:
    """Returns a byte position for each line, in text coordinates; a group's lines keep their
    order."""
    at = line_starts(text)
    places = rng.choice(at, size=len(lines), replace=True)
    anywhere = rng.random(len(lines)) < 0.15
    places = np.where(anywhere, rng.integers(0, len(text) + 1, len(lines)), places)
    for g in set(groups):
        own = [i for i, x in enumerate(groups) if x == g]
        places[own] = np.sort(places[own])
    return [int(p) for p in places]


def _emit(
    ids: list[np.ndarray], weights: list[np.ndarray], text: str, spans: list[tuple[int, float]]
) -> None:
    raw = np.frombuffer(text.encode(), np.uint8).astype(np.int64)
    w = np.concatenate([np.full(n, x, np.float32) for n, x in spans])
    assert len(w) == len(raw)
    ids.append(raw)
    weights.append(w)


def task_sequence(
    rng: np.random.Generator, source: Source, length: int, plain: float = 0.8
) -> tuple[np.ndarray, np.ndarray, int]:
    """Returns ids and loss weights (weight i belongs to id i), and where the questions begin.

    ``source(rng, n)`` gives n bytes of real text. The sequence begins with BOS.
    """
    most = max(1, min(40, (length - 24) // 52))
    count = int(rng.integers(max(1, most // 3), most + 1))
    tasks = draw_tasks(rng, count, plain)
    planted = [(x, g) for g, t in enumerate(tasks) for x in t.plant]
    asked: list[Line] = []
    room = length - 1 - sum(len(x.text) + 2 for x, _ in planted)
    order = rng.permutation(count)
    for g in np.concatenate([order, rng.permutation(count)]) if rng.random() < 0.3 else order:
        line = tasks[int(g)].question
        used = sum(len(x.text) + 1 for x in asked)
        if used + len(line.text) + 1 > max(room * 0.6, 40) or used + len(line.text) + 1 > room:
            break
        asked.append(line)
    room -= sum(len(x.text) + 1 for x in asked) + 1
    text = source(rng, max(room, 0))
    ids: list[np.ndarray] = [np.array([BOS], np.int64)]
    weights: list[np.ndarray] = [np.zeros(1, np.float32)]
    places = plant_lines(rng, text, [x.text.encode() for x, _ in planted], [g for _, g in planted])
    at = 0
    for i in np.argsort(places, kind="stable"):
        here, line = places[int(i)], planted[int(i)][0]
        ids.append(text[at:here].astype(np.int64))
        weights.append(np.full(here - at, W_TEXT, np.float32))
        lead = "" if here == 0 or text[here - 1] == 10 else "\n"
        n_key = len(line.prompt)
        _emit(ids, weights, lead + line.text + "\n",
              [(len(lead), W_NONE), (1, W_NONE), (n_key - 1, W_WORD),
               (len(line.answer) - 2, W_NONE), (3, W_WORD)])
        at = here
    ids.append(text[at:].astype(np.int64))
    weights.append(np.full(len(text) - at, W_TEXT, np.float32))
    _emit(ids, weights, "\n", [(1, W_NONE)])
    begin = sum(len(x) for x in ids)
    for line in asked:
        _emit(ids, weights, line.text + "\n",
              [(len(line.prompt), W_WORD), (len(line.answer), W_ANSWER), (1, W_WORD)])
    return _fit(np.concatenate(ids), np.concatenate(weights), length, begin)


def _fit(
    ids: np.ndarray, w: np.ndarray, length: int, begin: int
) -> tuple[np.ndarray, np.ndarray, int]:
    """Cuts or pads to ``length`` (padding has weight 0)."""
    short = length - len(ids)
    if short > 0:
        ids = np.concatenate([ids, np.full(short, 10, np.int64)])
        w = np.concatenate([w, np.zeros(short, np.float32)])
    return ids[:length], w[:length], begin


def text_sequence(rng: np.random.Generator, source: Source, length: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns plain text, sometimes with an earlier part repeated (recall grows out of copying)."""
    text = source(rng, length - 1).astype(np.int64)
    w = np.full(length, W_TEXT, np.float32)
    w[0] = 0.0
    if rng.random() < 0.15 and length >= 64:
        size = int(rng.integers(16, max(17, min(length // 3, 400))))
        a = int(rng.integers(0, length - 1 - 2 * size))
        b = int(rng.integers(a + size, length - 1 - size + 1))
        text[b : b + size] = text[a : a + size]
    return np.concatenate([[BOS], text]), w


def drill_sequence(rng: np.random.Generator, length: int) -> tuple[np.ndarray, np.ndarray]:
    """Lists pairs of words and values again and again in new orders: every line is a recall."""
    link = str(rng.choice([" ", " is ", ": ", " = "]))
    least, most = 2, max(2, min(40, length // 36))
    words = fast_words(rng, int(rng.integers(least, most + 1)))
    digits = rng.random() < 0.7
    values = [number(rng) for _ in words] if digits else fast_words(rng, len(words))
    ids: list[np.ndarray] = [np.array([BOS], np.int64)]
    weights: list[np.ndarray] = [np.zeros(1, np.float32)]
    size, first = 1, True
    while size < length:
        for i in rng.permutation(len(words)):
            w, v = words[int(i)], values[int(i)]
            known = (W_WORD, W_NONE) if first else (W_TEXT, W_DRILL)
            _emit(ids, weights, f"{w}{link}{v}\n",
                  [(2, W_NONE), (len(w) - 2, known[0]), (len(link), W_WORD), (len(v), known[1]),
                   (1, W_WORD)])
            size += len(ids[-1])
        first = False
    return np.concatenate(ids)[:length], np.concatenate(weights)[:length]


def skip_positions(rng: np.random.Generator, length: int, limit: int) -> np.ndarray:
    """Returns positions with random gaps: a short sequence sees far distances (as in PoSE)."""
    spare = limit - length
    pos = np.arange(length, dtype=np.int64)
    if spare <= 0:
        return pos
    cuts = int(rng.integers(1, 5))
    total = int(spare * rng.random() ** 2)
    parts = np.sort(rng.integers(0, total + 1, cuts))
    for c, gap in zip(
        np.sort(rng.integers(1, length, cuts)), np.diff(np.concatenate([[0], parts])), strict=True
    ):
        pos[c:] += gap
    return pos


def batch(
    rng: np.random.Generator,
    source: Source,
    size: int,
    length: int,
    *,
    task_share: float = 0.5,
    drill_share: float = 0.0,
    plain: float = 0.8,
    skip_share: float = 0.4,
    limit: int = 16384,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns ids [B, T+1], weights [B, T] for predicting ids[:, 1:], positions [B, T]."""
    ids, weights, pos = [], [], []
    for _ in range(size):
        kind = rng.random()
        if kind < task_share:
            i, w, _ = task_sequence(rng, source, length + 1, plain)
        elif kind < task_share + drill_share:
            i, w = drill_sequence(rng, length + 1)
        else:
            i, w = text_sequence(rng, source, length + 1)
        ids.append(i)
        weights.append(w[1:])
        skip = rng.random() < skip_share
        pos.append(skip_positions(rng, length, limit) if skip else np.arange(length))
    return np.stack(ids), np.stack(weights), np.stack(pos)
