"""Runs the examples as their users do, at small size."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.conftest import ROOT, run_python

LICENCE = Path("/usr/share/common-licenses/GPL-3")


def example(name: str, *arguments: str, stdin: str = "") -> list[str]:
    return run_python(str(ROOT / "examples/python" / name), *arguments, stdin=stdin).splitlines()


@pytest.fixture
def document(tmp_path: Path) -> str:
    """Writes a page with two planted lines, which the small model can find."""
    text = LICENCE.read_text()
    facts = "[key of pudeko is 40721.]\n", "[key of sarimu is 98315.]\n"
    path = tmp_path / "document.txt"
    path.write_text(
        text[:700] + "\n" + facts[0] + text[700:1300] + "\n" + facts[1] + text[1300:1900]
    )
    return str(path)


@pytest.mark.parametrize("page", ["README.md", "docs/attach-your-engine.md"])
def test_the_lines_that_are_shown_are_enough(page: str, tmp_path: Path) -> None:
    """Runs the lines of a page unchanged, with a model and a prompt, but with the store in another
    place."""
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)
    setup = re.findall(
        r"```python\n(.*?)```", (ROOT / "docs/attach-your-engine.md").read_text(), re.DOTALL
    )
    trial = next(b for b in setup if "models/prefixd-tiny" in b)
    lines = next(b for b in blocks if "splice.cache(input_ids)" in b)
    here, stores = re.subn(r'prefixd\.open\("[^"]+"\)', f'prefixd.open("{tmp_path}/kv")', lines)
    assert stores == 1
    program = trial + here
    program += "\nprint(cache.attached[0], bytes(output[0, input_ids.shape[1]:].tolist()))\n"
    program = program.replace("max_new_tokens=100", "max_new_tokens=8, do_sample=False")
    answers = [run_python("-c", program).split(maxsplit=1) for _ in range(2)]
    assert answers[0][0] == "0" and int(answers[1][0]) > 3000
    assert "40721.]" in answers[0][1] and answers[1][1] == answers[0][1]


def test_several_processes_ask_about_one_document(document: str, daemon: str) -> None:
    questions = ["\n[key of pudeko is ", "\n[key of sarimu is "]
    lines = example("document_qa.py", "--store", daemon, "--document", document, *questions)
    assert "40721.]" in lines[0] and "(0 of" in lines[0]
    assert "98315.]" in lines[1]
    reused, total = map(int, re.search(r"\((\d+) of (\d+) tokens", lines[1]).groups())
    assert reused >= total - len(questions[1])


def test_a_chat_goes_on_where_it_ended(tmp_path: Path) -> None:
    options = ["--store", str(tmp_path / "kv"), "--history", str(tmp_path / "chat.json")]
    options += ["--system", "A conversation about keys. [key of pudeko is 40721.]\n"]
    first = example("chat.py", *options, stdin="[key of pudeko is \n[key of\n")
    again = example("chat.py", *options, stdin="[key of pudeko is \n")
    counts = [
        tuple(map(int, re.search(r"\((\d+) of (\d+) tokens", line).groups()))
        for line in (*first, *again)
        if "tokens reused" in line
    ]
    assert len(counts) == 3 and counts[0][0] == 0
    for (_, before), (reused, _) in zip(counts, counts[1:], strict=False):
        assert reused == before + 8 - 1  # all but the last token of the answer


def test_a_batch_of_questions_over_one_document(document: str, tmp_path: Path) -> None:
    questions = ["\n[key of pudeko is ", "[key of sarimu is "]
    options = ["--store", str(tmp_path / "kv"), "--document", document, "--budget", "0.05"]
    lines = example("batch_questions.py", *options, *questions)
    assert lines[0].startswith("stored ")
    assert "40721" in lines[1] and "98315" in lines[2]
    read = [int(re.search(r"(\d+) read per step", line).group(1)) for line in lines[1:]]
    assert all(20 < tokens < 110 for tokens in read)  # whole prompt: about 1950
    assert not example("batch_questions.py", *options, *questions)[0].startswith("stored ")
