"""Says what a model goes on with behind a text that was forced on it: words of its own, or answers to
questions about facts that were planted in the text."""

from __future__ import annotations

import os.path
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from prefixd.evaluate.compare import documents
from prefixd.evaluate.compare.chat import Form
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
        """Plants four facts in a text, which are asked for behind it."""
        made = documents.make("facts", tokens, text.number, text, form, seed)
        assert made is not None
        needles = [p for p in made.passages if p.kind == "needles"]
        return Task(f"facts-{text.number}", made.prompt, form, needles)

    @property
    def then(self) -> Continuation:
        if not self.passages:
            return Continuation()
        asked = [[*p.request["exact"], *p.request["read"]] for p in self.passages]
        return Continuation(asked, self.passages[0].request["generate"], self.form.stop)

    def told(self, full: Sequence[list[int]], own: Sequence[list[int]]) -> dict[str, float]:
        """Returns the share of right answers; of a free text the share of its tokens before it parts from the
        one with everything read."""
        if not self.passages:
            return {"alike": len(os.path.commonprefix([full[0], own[0]])) / max(1, len(full[0]))}
        scores = [documents.score(p, self.form.decode(a)) or 0 for p, a in zip(self.passages, own, strict=True)]
        return {"answers": float(np.mean(scores))}
