"""What one run of the demo works on: a model, a document as tokens, questions, and how it is read."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from programs import Programs
from questions import DEFAULT_DOCUMENT, DEFAULT_TITLE, GPL_3, Question
from text import ByteText, Stop, Text, read_document, text_of, trained_length

# The byte model is trained for whole kilobytes; this is left for questions and answers.
_BYTES_FOR_ANSWERS = 192
_UNTRAINED_BYTES = 2048

METHODS = ["full", "sink_tail", "topk", "topk_phi", "topk_moment", "topk_auto"]


def reading(method: str, budget: float | None) -> dict[str, Any]:
    return {"method": method, "budget": budget}


@dataclass
class Job:
    text: Text
    model_dir: Path
    document: Path
    prompt: list[int]
    continuation: list[int]
    questions: list[Question]
    ids: list[dict[str, list[int]]]  # of each question: after the prompt, and alone
    answer_tokens: int
    budgets: list[float]
    recorded_tokens: int
    cold_tokens: int
    facts: int  # planted in the document; 0: real questions are asked

    @property
    def readings(self) -> list[dict[str, Any]]:
        """The rows of the table."""
        methods = [m for m in METHODS[1:] if m != "topk_phi" or trained_length(self.model_dir)]
        return [reading("full", None)] + [reading(m, b) for m in methods for b in self.budgets]

    @property
    def asked(self) -> list[dict[str, Any]]:
        """The columns of answers. Planted facts are so short that every row of the table answers them."""
        if self.facts:
            return self.readings
        # What never reads the middle comes last: its questions go through once more.
        return [reading("full", None), *(reading("topk_auto", b) for b in reversed(self.budgets)),
                reading("sink_tail", self.budgets[0])]

    def request(self, **more: Any) -> dict[str, Any]:
        return {
            "model_dir": str(self.model_dir), "label": str(self.document), "prompt": self.prompt,
            "continuation": self.continuation, "questions": self.ids, "answer_tokens": self.answer_tokens,
            "recorded_tokens": self.recorded_tokens, "cold_tokens": self.cold_tokens,
            "readings": self.readings, "asked": self.asked, **more,
        }  # fmt: skip

    def key(self) -> str:
        """Names what a prefill works on, to know its stored prompt again."""
        weights = self.model_dir / "model.safetensors"
        about = [str(self.model_dir.resolve()), weights.stat().st_size if weights.is_file() else 0,
                 self.prompt, self.ids, self.answer_tokens]
        return hashlib.sha256(json.dumps(about).encode()).hexdigest()


def job_of(args: Any, programs: Programs) -> Job:
    """Reads model and document. args: options of the command line (main.py)."""
    text = text_of(args.model)
    document = args.document or DEFAULT_DOCUMENT
    if isinstance(text, ByteText):
        return _planted(args, programs, text, document)
    return _asked(args, text, document)


def _planted(args: Any, programs: Programs, text: ByteText, document: Path) -> Job:
    """Facts are planted in the document, and asked: what a model of bytes can do."""
    if args.question:
        raise Stop(f"{args.model.name} reads bytes and answers planted facts alone; a --question needs a model with a "
                   "tokenizer (`make model-smollm2` makes the default one ready)")
    read_document(document)  # refuses what is no text
    longest = trained_length(args.model)
    limit = args.tokens or (longest - _BYTES_FOR_ANSWERS if longest else _UNTRAINED_BYTES)
    limit = min(limit, text.max_positions - _BYTES_FOR_ANSWERS)
    planted = next(programs.run(
        ["plant", "--document", str(document), "--tokens", str(limit), "--facts", str(args.facts or 16),
         "--continuation", str(args.continuation or 192)]))  # fmt: skip
    head, ids = text.document(planted["prompt"])
    questions = [Question(f["question"], f["answer"], whole=True) for f in planted["facts"]]
    return Job(
        text, args.model, document, head + ids, text.document(planted["continuation"])[1], questions,
        [{"tokens": text.question(q.text, "")} for q in questions], answer_tokens=5,
        budgets=[0.01, 0.02, 0.03, 0.04, 0.05], recorded_tokens=48, cold_tokens=32, facts=len(questions),
    )  # fmt: skip


def _asked(args: Any, text: Text, document: Path) -> Job:
    """Real questions about a real document, in the model's chat template."""
    if args.facts:
        raise Stop("--facts is for the byte model; ask this one a --question")
    whole = read_document(document)
    own = [Question(q) for q in args.question or []]
    if not own and document != DEFAULT_DOCUMENT:
        raise Stop(f"name a --question about '{document}' (more than one: repeat the option)")
    questions = own or GPL_3
    title = DEFAULT_TITLE if document == DEFAULT_DOCUMENT else f"the document '{document.name}'"
    held_out = args.continuation or 24
    ids = [{"tokens": text.question(q.text, q.begun), "alone": text.alone(q.text, q.begun, title)} for q in questions]
    answer_tokens = 32 if own else 16
    head, of_document = text.document(whole)
    longest = max(held_out, max(len(i["tokens"]) for i in ids) + answer_tokens)
    fits = text.max_positions - len(head) - longest
    n = min(args.tokens or len(of_document), len(of_document) - held_out)
    if fits < 64 or n < 64:
        raise Stop(f"document '{document}' has {len(of_document)} tokens: too few; {64 + held_out} are needed")
    if n > fits:
        raise Stop(f"document '{document}' has {len(of_document):,} tokens; this model reads "
                   f"{text.max_positions:,}, of which {fits:,} are left beside the questions. "
                   f"--tokens {fits} takes the beginning")
    return Job(
        text, args.model, document, head + of_document[:n], of_document[n : n + held_out], questions, ids,
        answer_tokens=answer_tokens, budgets=[0.01, 0.02, 0.05], recorded_tokens=8, cold_tokens=8, facts=0,
    )  # fmt: skip
