"""Says what a model goes on with behind a text that was forced on it: words of its own, or answers to
questions about facts that were planted in the text."""

from __future__ import annotations

import os.path
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from prefixd.evaluate import tasks
from prefixd.evaluate.compare import documents
from prefixd.evaluate.compare.chat import ByteForm, Form
from prefixd.evaluate.compare.texts import Text


@dataclass(frozen=True)
class Continuation:
    """The tokens of questions, one after the other, and to each of them as many tokens as the model likes to
    write, the likeliest each time: at most `tokens`, none from one of `stop` on."""

    questions: Sequence[Sequence[int]] = ((),)
    tokens: int = 64
    stop: Sequence[int] = ()


@dataclass(frozen=True)
class Task:
    """`passages` are the questions; without them the model writes freely."""

    name: str
    ids: list[int]
    form: Form
    passages: Sequence[documents.Passage] = ()

    @staticmethod
    def facts(text: Text, tokens: int, form: Form, seed: int) -> Task:
        """Plants facts in a text, which are asked for behind it: four needles, or what the small model of models/ was
        trained to find."""
        name = f"facts-{text.number}"
        if isinstance(form, ByteForm):
            rng = np.random.default_rng([seed, text.number])
            source = tasks.Source(text.text, lambda t: len(form.encode(t)))
            example = tasks.planted(rng, source, tokens - len(form.head))
            asked = [_line(form, q, i == 0) for i, q in enumerate(example.questions)]
            return Task(name, form.head + form.encode(example.document), form, asked)
        made = documents.make("facts", tokens, text.number, text, form, seed)
        assert made is not None
        return Task(name, made.prompt, form, [p for p in made.passages if p.kind == "needles"])

    @property
    def then(self) -> Continuation:
        if not self.passages:
            return Continuation()
        asked = [[*p.request["exact"], *p.request["read"]] for p in self.passages]
        return Continuation(asked, max(p.request["generate"] for p in self.passages), self.form.stop)

    def told(self, full: Sequence[list[int]], own: Sequence[list[int]]) -> dict[str, float]:
        """Returns the share of right answers; of a free text the share of its tokens before it parts from the
        one with everything read."""
        if not self.passages:
            return {"alike": len(os.path.commonprefix([full[0], own[0]])) / max(1, len(full[0]))}
        scores = [documents.score(p, self.form.decode(a)) or 0 for p, a in zip(self.passages, own, strict=True)]
        return {"answers": float(np.mean(scores))}


def _line(form: Form, question: tasks.Question, first: bool) -> documents.Passage:
    """Returns a planted line that is begun again; the document ends with a newline, an answer without one."""
    tokens = form.encode(question.prompt if first else "\n" + question.prompt)
    longest = max(len(form.encode(a)) for a in question.answers)
    request = {"exact": tokens[:-1], "read": tokens[-1:], "generate": longest}
    return documents.Passage(question.kind, request, question.answers)
