"""Tests the demo's text on a converted checkpoint: what of it becomes tokens, and what is refused."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import pytest

from prefixd.models.checkpoint import convert
from tests.models.conftest import TOKENS, Model

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "demo" / "story"))
from job import job_of  # noqa: E402
from questions import Question  # noqa: E402
from story import counting  # noqa: E402
from text import ChatText, Stop, text_of  # noqa: E402

LIMIT = 512  # positions of the model


@pytest.fixture
def checkpoint(model: Model, tmp_path: Path) -> Path:
    convert(model.file, tmp_path / "checkpoint", log=lambda line: None)
    return tmp_path / "checkpoint"


def args(checkpoint: Path, document: Path, **options: Any) -> argparse.Namespace:
    given = {"question": ["Who?"], "tokens": None, "facts": None, "continuation": None}
    return argparse.Namespace(model=checkpoint, document=document, **(given | options))


def written(folder: Path, text: str) -> Path:
    file = folder / "document.txt"
    file.write_text(text, encoding="utf-8")
    return file


def spelled(ids: list[int]) -> str:
    return "".join(TOKENS[i] for i in ids)


def test_a_question_follows_the_document_in_the_template(checkpoint: Path) -> None:
    text = text_of(checkpoint)
    assert isinstance(text, ChatText)
    head, document = text.document("the text")
    question = text.question("Who?", "It is")
    assert spelled(head) == "<start>"
    assert spelled(document) == "theĠtext"
    assert spelled(question) == "ĊĊAccordingĠtoĠtheĠtextĠabove:ĠWho?<end>ItĠis"
    assert spelled(text.alone("Who?", "It is", "a text")) == "<start>AboutĠaĠtext:ĠWho?<end>ItĠis"
    assert text.decode(document) == "the text"


def test_the_end_of_a_document_is_held_out_and_tokens_cut_it(checkpoint: Path, tmp_path: Path) -> None:
    file = written(tmp_path, "x" * 200)
    job = job_of(args(checkpoint, file, continuation=20), None)
    assert (len(job.prompt), len(job.continuation)) == (1 + 180, 20)
    job = job_of(args(checkpoint, file, continuation=20, tokens=100), None)
    assert (len(job.prompt), len(job.continuation)) == (1 + 100, 20)


def test_a_document_that_does_not_fit_is_refused_with_what_fits(checkpoint: Path, tmp_path: Path) -> None:
    file = written(tmp_path, "x" * 1000)
    with pytest.raises(Stop, match=r"has 1,000 tokens; this model reads 512, .* --tokens (\d+) takes") as refused:
        job_of(args(checkpoint, file), None)
    fits = int(str(refused.value).split("--tokens ")[1].split()[0])
    job = job_of(args(checkpoint, file, tokens=fits), None)
    longest = len(job.prompt) + max(len(job.continuation), len(job.ids[0]["tokens"]) + job.answer_tokens)
    assert longest == LIMIT
    with pytest.raises(Stop, match=f"--tokens {fits} takes"):
        job_of(args(checkpoint, file, tokens=fits + 1), None)


def test_what_cannot_be_asked_is_refused(checkpoint: Path, tmp_path: Path) -> None:
    file = written(tmp_path, "x" * 200)
    with pytest.raises(Stop, match="name a --question about"):
        job_of(args(checkpoint, file, question=None), None)
    with pytest.raises(Stop, match="--facts is for the byte model"):
        job_of(args(checkpoint, file, facts=3), None)
    with pytest.raises(Stop, match="too few"):
        job_of(args(checkpoint, written(tmp_path, "x" * 30)), None)
    (checkpoint / "tokenizer.json").unlink()
    with pytest.raises(Stop, match="no tokenizer.json"):
        job_of(args(checkpoint, file), None)


def test_questions_count_that_need_the_document() -> None:
    assert Question("?", "WIPO").right("the wipo treaty") is True
    assert Question("?", "12345", whole=True).right("12345.") is False
    assert Question("?").right("anything") is None
    states = [(True, False), (True, True), (False, False), (None, None)]
    answers = [{"own": {"right": own}, "alone": {"right": alone}} for own, alone in states]
    assert counting({"answers": answers}) == [0, 3]
