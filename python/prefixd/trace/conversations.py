"""Makes what is traced: a prompt of one long text, and turns that follow it, each of which begins
behind the prompt anew."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from prefixd.errors import InvalidArgument
from prefixd.evaluate.compare import documents, texts
from prefixd.evaluate.compare.chat import Form


@dataclass(frozen=True)
class Turn:
    """What follows the prompt once: `read` is read at once, then come the steps. They are `forced`
    tokens, or what the model writes behind the last token of `read`: at most `at_most` tokens, and
    none behind one of `stop`."""

    read: list[int]
    forced: list[int]
    at_most: int = 0
    stop: tuple[int, ...] = ()


@dataclass(frozen=True)
class Conversation:
    kind: str
    source: str  # of the text, for people
    prompt: list[int]
    # As many as there are: none comes twice, since what was asked before is no news to whoever
    # remembers what answering it retrieved.
    turns: Callable[[], Iterator[Turn]]


CHAT = (
    "What is the text above about?",
    "Who should read it, and why?",
    "Which names, places or products does it mention?",
    "What does it say at its beginning?",
    "What does it say at its end?",
    "Is anything in it forbidden or advised against?",
    "Give three facts that it states.",
    "What does the middle of the text explain?",
    "Which dates or numbers are in the text, and what are they of?",
    "Explain the text to a child.",
    "Which three words are the most important in it?",
    "What would happen if nobody followed it?",
    "What is not clear in it?",
    "Write a title and a subtitle for it.",
    "Which questions does it leave open?",
    "Write a short letter to its author.",
)
SUMMARIES = (
    "Summarise the text above in five sentences.",
    "Summarise its first half.",
    "Summarise its second half.",
    "List its main points, one a line.",
    "What does it say, in one sentence?",
    "Write a table of contents for it.",
    "Explain how to use what it describes, step by step.",
    "Which terms does it define, and how?",
)
# The kind of text (texts.py) that a kind of trace reads, and what is asked of it.
ASKED = {"chat": ("prose", CHAT, 64), "summarising": ("manuals", SUMMARIES, 160)}
FACT = 7  # steps that an answer takes at least
KINDS = ("chat", "summarising", "code", "retrieval")


def _asked(form: Form, questions: Sequence[str], at_most: int) -> Iterator[Turn]:
    for question in questions:
        yield Turn(form.question(question, ""), [], at_most, tuple(form.stop))


def _retrieving(document: documents.Document) -> Iterator[Turn]:
    for passage in document.passages:
        r = passage.request
        yield Turn([*r["exact"], *r["read"]], [], r["generate"], tuple(r["stop"]))


def _cut(form: Form, ids: list[int], tokens: int, source: str) -> list[int]:
    if len(ids) < tokens - len(form.head):
        raise InvalidArgument(
            f"{source} has {len(ids)} tokens, and a trace of {tokens} was asked for: a longer text, or a "
            "smaller --tokens"
        )
    return form.head + ids[: tokens - len(form.head)]


def own(form: Form, file: Path, questions: Sequence[str], tokens: int, steps: int) -> Conversation:
    """Returns a conversation about a user's text; without questions the text goes on."""
    ids = form.encode(texts.read(file))
    if not ids:
        raise InvalidArgument(f"{file} is no UTF-8 text")
    if questions:
        prompt = _cut(form, ids, min(tokens, len(ids) + len(form.head)), file.name)
        return Conversation("asked", file.name, prompt, lambda: _asked(form, questions, 64))
    if len(ids) - steps < len(form.head) + 4:
        raise InvalidArgument(f"{file} has {len(ids)} tokens, too few for a prompt and {steps} steps: smaller --steps")
    prompt = _cut(form, ids, min(tokens, len(ids) - steps), file.name)
    follow = ids[len(prompt) - len(form.head) :][:steps]
    return Conversation("continued", file.name, prompt, lambda: iter([Turn([], follow)]))


def make(kind: str, form: Form, tokens: int, steps: int, seed: int) -> Conversation:
    """Returns a conversation of a kind, over a text that this machine has."""
    if kind == "retrieval":
        (text,) = _found("prose", seed)
        document = documents.recall(tokens, max(4, steps // FACT), text, form, seed)
        return Conversation(kind, text.source, document.prompt, lambda: _retrieving(document))
    if kind == "code":
        (text,) = _found("code", seed)
        ids = form.encode(text.text)
        prompt = _cut(form, ids[: len(ids) - steps], tokens, text.source)
        follow = ids[len(prompt) - len(form.head) :][:steps]
        return Conversation(kind, text.source, prompt, lambda: iter([Turn([], follow)]))
    of, questions, at_most = ASKED[kind]
    (text,) = _found(of, seed)
    prompt = _cut(form, form.encode(text.text), tokens, text.source)
    return Conversation(kind, text.source, prompt, lambda: _asked(form, questions, at_most))


def _found(kind: str, seed: int) -> list[texts.Text]:
    found = texts.find(kind, 1, seed)
    if not found:
        raise InvalidArgument(f"this machine has no long text of the kind {kind}; name one with --document")
    return found
