"""Checks that the generated prompts hold what is needed to answer their questions."""

from __future__ import annotations

import re

import numpy as np
import pytest

from prefixd import planted
from prefixd.train.check import needle_prompt
from prefixd.train.corpus import Corpus
from prefixd.train.net import BOS


def text_of(ids: np.ndarray) -> str:
    assert ids[0] == BOS and int(ids[1:].max()) < 256
    return ids[1:].astype(np.uint8).tobytes().decode("latin-1")


def answer_from(body: str, question: str) -> str | None:
    """Answers a question by reading the planted lines, as a person would."""
    m = re.fullmatch(r"\[(key|keys) of ([a-z]+) (?:is|are) (.*)\.\]", question)
    if m:
        got = re.findall(rf"\[{m[1]} of {m[2]} (?:is|are) ([0-9 ]+)\.\]", body)
        return got[0] if len(set(got)) == 1 else None
    m = re.fullmatch(r"\[value of ([a-z]+) is ([a-z]+) is (\d+)\.\]", question)
    if m:
        link = re.findall(rf"\[let {m[1]} be ([a-z]+)\.\]", body)
        value = re.findall(rf"\[let {link[0]} be (\d+)\.\]", body)
        return f"{link[0]} is {value[0]}"
    if question.startswith("[most frequent"):
        words = re.findall(r"\[list: ([a-z ]+)\.\]", body)[0].split()
        return max(set(words), key=words.count)
    return None


@pytest.mark.parametrize("length", [128, 256, 512, 1024, 4096, 8192])
@pytest.mark.parametrize("plain", [1.0, 0.4])
def test_every_question_can_be_answered(corpus: Corpus, length: int, plain: float) -> None:
    asked = 0
    for seed in range(12):
        rng = np.random.default_rng([seed, length])
        ids, weights, begin = planted.task_sequence(rng, corpus.window, length, plain)
        assert len(ids) == len(weights) == length
        text = text_of(ids)
        body, questions = text[: begin - 1], text[begin - 1 :].rstrip("\n").split("\n")
        for q in (x for x in questions if x):
            got = answer_from(body, q)
            assert got is not None and q.endswith(f"{got}.]"), (q, got)
            asked += 1
        loud = "".join(c for c, w in zip(text, weights[1:], strict=True) if w == planted.W_ANSWER)
        if length >= 256:
            assert loud.endswith(".]") and len(loud) >= 7
    assert asked >= 6


def test_digits_that_cannot_be_known_carry_no_weight(corpus: Corpus) -> None:
    ids, weights, begin = planted.task_sequence(np.random.default_rng(3), corpus.window, 1024, 1.0)
    text = text_of(ids)
    for m in re.finditer(r"\[key of [a-z]+ is (\d{5})", text):
        a, b = m.span(1)
        want = planted.W_ANSWER if a >= begin - 1 else planted.W_NONE
        assert set(weights[1:][a:b]) == {want}


def test_words_are_pronounceable_and_distinct() -> None:
    words = planted.fast_words(np.random.default_rng(0), 300)
    assert len(set(words)) == 300
    shape = re.compile(r"([b-df-hj-np-tv-z][aeiou]){2,4}|([b-z][aeiou]){2,3}[b-z]")
    assert all(shape.fullmatch(w) for w in words)


def test_skipped_positions_rise_and_stay_in_range() -> None:
    far = 0
    for seed in range(200):
        p = planted.skip_positions(np.random.default_rng(seed), 256, 16384)
        assert p[0] == 0 and (np.diff(p) >= 1).all() and p[-1] < 16384
        far = max(far, int(p[-1]))
    assert far > 12000
    assert np.array_equal(planted.skip_positions(np.random.default_rng(0), 64, 64), np.arange(64))


def test_batches_repeat_exactly_and_fit(corpus: Corpus) -> None:
    got = [planted.batch(np.random.default_rng(5), corpus.window, 6, 256) for _ in range(2)]
    for a, b in zip(*got, strict=True):
        assert np.array_equal(a, b)
    ids, weights, pos = got[0]
    assert ids.shape == (6, 257) and weights.shape == pos.shape == (6, 256)


def test_needle_prompt_has_the_length_asked_for() -> None:
    document = b"A line of the document.\n" * 50
    ids, lines = needle_prompt(np.random.default_rng(0), document, 2048, 6)
    text = text_of(ids)
    assert 2048 - 8 <= len(ids) <= 2048 and text.endswith("\n")
    assert all(text.count(x.text + "\n") == 1 for x in lines)
    with pytest.raises(ValueError, match="do not fit"):
        needle_prompt(np.random.default_rng(0), document, 100, 6)
