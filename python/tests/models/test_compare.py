"""Tests the comparison with full attention: its texts and documents, what the engine measures against
NumPy, that nothing measured is lost, and the figures of the report."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from prefixd.errors import InvalidArgument
from prefixd.evaluate import __main__ as program
from prefixd.evaluate import stats
from prefixd.evaluate.compare import documents, readings, summary, texts
from prefixd.evaluate.compare import program as comparing
from prefixd.evaluate.compare.chat import ByteForm
from prefixd.evaluate.compare.documents import Document, Passage
from prefixd.evaluate.compare.engine import Engine, default_program
from prefixd.evaluate.compare.journal import Journal
from prefixd.evaluate.compare.texts import Text
from tests.conftest import ROOT

TINY = ROOT / "models/prefixd-tiny"
WORDS = "the store keeps rows of a long prompt and a decoder reads some of them again".split()


def prose(seed: int, characters: int = 12000) -> str:
    rng = np.random.default_rng(seed)
    lines = [" ".join(rng.choice(WORDS, 9)) + "." for _ in range(characters // 40)]
    return "\n".join(lines)


MANUAL = "NAME\n\n" + "\n\n".join(
    f"--{word}\nThis. Sets the value of {word} before anything else is done\nso that all others may read it later on."
    for word in "alpha beta gamma delta epsilon zeta".split()) + "\n\n" + prose(3)


# ---- texts and documents ----


def test_manual_pages_become_plain_text() -> None:
    source = ('.\\" a comment\n.TH X 1\n.SH NAME\nx \\- does \\fBthings\\fP\n.TP\n.BR \\-\\-all ", " \\-a\nDo all.\n'
              '.de ZZ\nhidden\n..\n.IP "one" 4\nFirst\\&.\n')
    assert texts.manual(source) == "NAME\nx - does things\n\n--all, -a\nDo all.\n\none\nFirst.\n"


def test_texts_are_found_alike_and_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = [(Path(f"/{i}"), prose(i, 60000)) for i in range(4)]
    monkeypatch.setitem(texts.KINDS, "prose", lambda: iter(files))
    few, more = texts.find("prose", 2, 7), texts.find("prose", 4, 7)
    assert more[:2] == few and len(more) == 4
    assert all(len(t.text) >= texts.LEAST and t.text in dict(files)[Path(t.source.split(":")[0])] for t in more)
    path = tmp_path / "texts.jsonl"
    assert texts.kept(path, ["prose"], 2, 7) == {"prose": few}
    monkeypatch.setitem(texts.KINDS, "prose", lambda: iter([(p, x.upper()) for p, x in files]))
    widened = texts.kept(path, ["prose"], 3, 7)["prose"]
    assert widened[:2] == few and widened[2].text == more[2].text.upper()
    monkeypatch.setitem(texts.KINDS, "prose", lambda: iter([]))
    assert texts.kept(path, ["prose"], 3, 7)["prose"] == widened


def test_a_text_that_lies_there_twice_counts_once(monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = ("".join(f"{word} line {i}\n" for i in range(4000)) for word in ("one", "other"))
    files = [(Path("/a"), one), (Path("/b"), one), (Path("/c"), other)]
    monkeypatch.setitem(texts.KINDS, "prose", lambda: iter(files))
    assert [t.source.split(":")[0] for t in texts.find("prose", 3, 7)] == ["/a", "/c"]


@pytest.mark.parametrize("kind", [*documents.KINDS])
def test_documents_are_the_same_again(kind: str) -> None:
    form = ByteForm()
    text = Text("x", 0, "x", MANUAL if kind in ("quotes", "manuals") else prose(1))
    made = documents.make(kind, 3000, 0, text, form, 5)
    assert made is not None and made == documents.make(kind, 3000, 0, text, form, 5)
    assert made != documents.make(kind, 3000, 0, text, form, 6) or made.suite == documents.LIKELIHOOD
    assert 2700 < len(made.prompt) <= 3000
    body = form.decode(made.prompt)
    for passage in made.passages:
        r = passage.request
        assert len(r["read"]) == (1 if "generate" in r else len(r["targets"]))
        if made.suite == documents.LIKELIHOOD:
            follow = form.decode([*r["read"], r["targets"][-1]])
            assert r["read"][1:] == r["targets"][:-1] and body + follow in text.text
        else:
            assert all(" ".join(a.split()) in " ".join(body.split()) for a in passage.answers)
            assert documents.score(passage, " ".join(passage.answers).upper()) == (1.0 if passage.answers else None)
    if kind == "quotes":
        assert {p.kind for p in made.passages} == {"needle", "quotes"}
        asked = form.decode(next(p for p in made.passages if p.kind == "quotes").request["exact"])
        assert 'says: "Sets the value of' in asked
    if kind == "records":
        forced, written = made.passages
        given = form.decode([*forced.request["exact"], forced.request["read"][0]])
        rest = form.decode(forced.request["targets"])
        lines = ('{"order"' + given.split('{"order"', 1)[1] + rest).split("\n")
        assert given.endswith('"buyer":') and all(json.loads(x)["buyer"] in body for x in lines[:4])
        assert [str(v) for k, v in json.loads(lines[documents.SHOWN]).items() if k != "order"] == [*written.answers]


def test_a_text_that_is_too_short_makes_no_document() -> None:
    assert documents.make("prose", 3000, 0, Text("x", 0, "x", prose(1, 2000)), ByteForm(), 5) is None


# ---- what is measured ----


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    with Engine(default_program(), TINY, tmp_path_factory.mktemp("store"), 1) as opened:
        yield opened


def ask(engine: Engine, name: str, passages: list[dict[str, Any]], *policies: dict[str, Any]) -> dict[str, Any]:
    prompt = [256, *prose(4).encode()[:1500]]
    document = Document(name, 1501, 0, prompt, [Passage("x", r) for r in passages])
    events = [*engine.compare(document, policies, logits=True)]
    assert events[-1]["event"] == "done"
    return {e.get("method", e["event"]): e for e in events}


FOLLOW = [*prose(4).encode()[1500:1550]]
FORCED = {"read": FOLLOW[:-1], "targets": FOLLOW[1:]}
TOPK = {"name": "topk", "estimator": "none", "selector": "exact", "budget": 0.05}


def test_metrics_are_those_of_numpy(engine: Engine) -> None:
    everything = {"name": "stepped", "mode": "full"}
    found = ask(engine, "metrics", [FORCED], everything, TOPK, {"name": "none", "budget": 0.001})

    def logs(method: str) -> np.ndarray:
        z = np.array(found[method]["passages"][0]["logits"], np.float64).reshape(len(FOLLOW) - 1, -1)
        z -= z.max(-1, keepdims=True)
        return np.asarray(z - np.log(np.exp(z).sum(-1, keepdims=True)))

    full = logs("full")
    for method in ("full", "stepped", "topk"):
        own, got = logs(method), found[method]["passages"][0]
        assert np.allclose(got["kl"], (np.exp(full) * (full - own)).sum(-1), rtol=1e-4, atol=1e-9)
        assert np.allclose(got["nll"], -own[np.arange(len(own)), FOLLOW[1:]], rtol=1e-4, atol=1e-9)
        assert got["same"] == (own.argmax(-1) == full.argmax(-1)).astype(int).tolist()
    assert max(found["stepped"]["passages"][0]["kl"]) < 1e-6 and set(found["stepped"]["passages"][0]["same"]) == {1}
    assert max(found["topk"]["passages"][0]["kl"]) > 1e-4
    assert found["topk"]["tokens_per_step"] == pytest.approx(np.ceil(0.05 * 1501))
    assert max(found["stepped"]["errors"]) < 1e-4 < max(found["topk"]["errors"])
    # Nothing but the estimate adds mass: what selection alone reads has less than everything.
    assert max(found["topk"]["shifts"]) < 1e-4 and np.mean(found["topk"]["shifts"]) < -0.01
    heads = found["heads"]
    assert len(heads["entropy"]) == len(found["topk"]["errors"]) and all(0 <= h <= 1 for h in heads["entropy"])
    assert not found["none"]["feasible"] and "cannot pay" in found["none"]["reason"]


def test_written_text_is_what_each_way_of_reading_chooses(engine: Engine) -> None:
    anchors = {"name": "anchors", "mode": "anchors"}
    written = ask(engine, "written", [{"read": FOLLOW[:1], "generate": 40, "stop": [257]}], anchors, TOPK)
    differ = 0
    for policy in (anchors, TOPK):
        text = written[policy["name"]]["passages"][0]["text"]
        forced = {"read": [FOLLOW[0], *text[:-1]], "targets": text}
        again = ask(engine, "again", [forced], policy)[policy["name"]]["passages"][0]
        chosen = np.array(again["logits"]).reshape(len(text), -1).argmax(-1)
        assert chosen.tolist() == text
        differ += text != written["full"]["passages"][0]["text"]
    assert differ, "the ways of reading write alike, which tests nothing"


def test_compressed_documents_come_last_and_are_read_as_they_are(engine: Engine, tmp_path: Path) -> None:
    methods = ["keep0.1-window", "auto", "keep0.5-gkv", "anchors"]
    policies = readings.readings(methods, [0.05, 0.1], 1501)
    assert [r["name"] for r in policies[:3]] == ["auto@0.05", "auto@0.1", "anchors"]
    found = ask(engine, "compressed", [FORCED, {"read": FOLLOW[:1], "generate": 8}], *policies)
    found.pop("progress", None)
    assert set(found) == {"stored", "heads", "full", "compressed", "done", *(r["name"] for r in policies)}
    assert found["compressed"]["bytes_after"] < 0.75 * found["compressed"]["bytes_before"]

    def kl(method: str) -> float:
        assert found[method]["feasible"]
        return float(np.mean(found[method]["passages"][0]["kl"]))

    # What lost nine tenths of its rows reads less well than what has all, and better than nothing.
    assert kl("auto@0.1") < kl("keep0.1-window@0.1") and kl("keep0.5-gkv@0.1") < kl("anchors")
    # The next document is whole again.
    again = ask(engine, "compressed", [FORCED], *policies[1:2])
    assert np.mean(again["auto@0.1"]["passages"][0]["kl"]) == pytest.approx(kl("auto@0.1"), rel=0.05)
    with Engine(default_program(), TINY, tmp_path, 1) as other, pytest.raises(SystemExit, match="come last"):
        ask(other, "refused", [FORCED], policies[-1], policies[0])


# ---- nothing is lost ----


def prepared(out: Path) -> list[str]:
    out.mkdir()
    lines = [json.dumps({"kind": "prose", "number": i, "source": "x", "text": prose(i)}) + "\n" for i in range(2)]
    (out / "texts.jsonl").write_text("".join(lines))
    return ["compare", "--model", str(TINY), "--out", str(out), "--kinds", "prose,records", "--lengths", "1024",
            "--documents", "2", "--methods", "anchors,topk,auto", "--budgets", "0.01,0.1", "--threads", "1"]


def keys(out: Path) -> list[tuple[Any, ...]]:
    rows = [json.loads(line) for line in (out / "rows.jsonl").read_text().splitlines()]
    return [(*r["key"], r["method"]) for r in rows]


def test_a_stopped_run_goes_on(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    command = prepared(tmp_path / "out")
    assert program.main([*command, "--minutes", "0"]) == 3
    assert 0 < len(keys(tmp_path / "out")) < 28
    torn = (tmp_path / "out/rows.jsonl").read_text()
    (tmp_path / "out/rows.jsonl").write_text(torn + '{"key": ["prose", 10')
    assert program.main(command) == 0
    found = keys(tmp_path / "out")
    methods = {"full", "heads", "anchors", "topk@0.01", "topk@0.1", "auto@0.01", "auto@0.1"}
    assert {k[0:3] for k in found} == {(k, 1024, i) for k in ("prose", "records") for i in range(2)}
    assert {k[3] for k in found} == methods and len(set(found)) == 28
    before = (tmp_path / "out/rows.jsonl").read_bytes()
    capfd.readouterr()
    assert program.main(command) == 0
    assert "4 of 4 documents are measured" in capfd.readouterr().err
    assert (tmp_path / "out/rows.jsonl").read_bytes() == before
    # A wider run measures what is missing and nothing else.
    assert program.main([*command[:-2], "--methods", "moment", "--budgets", "0.1"]) == 0
    added = keys(tmp_path / "out")[len(found) :]
    assert {k[3] for k in added} == {"full", "heads", "moment@0.1"}
    (tmp_path / "out/report.md").unlink()
    assert program.main(["report", str(tmp_path / "out")]) == 0
    assert program.main(["report", str(tmp_path)]) == 1
    page = (tmp_path / "out/report.md").read_text()
    assert "Per-head choice, 10%" in page and "Moments alone, 10%" in page
    with pytest.raises(SystemExit):
        program.main([*command, "--seed", "1"])
    assert "seed: 0 there, 1 now" in capfd.readouterr().err


def test_a_terminated_run_keeps_its_rows(tmp_path: Path) -> None:
    out = tmp_path / "out"
    command = prepared(out)
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "python"), "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen([sys.executable, "-m", "prefixd.evaluate", *command], env=environment,
                               stderr=subprocess.PIPE, text=True)
    rows = out / "rows.jsonl"
    while process.poll() is None and not rows.is_file():
        time.sleep(0.01)
    process.send_signal(signal.SIGTERM)
    said = process.communicate()[1]
    before = rows.read_bytes()
    assert before.count(b"\n") >= 1
    if process.returncode != 0:  # it was not over already
        assert process.returncode == 130 and "goes on from here" in said
    assert program.main(command) == 0
    assert rows.read_bytes().startswith(before[: before.rfind(b"\n") + 1])
    assert len(set(keys(out))) == 28


def test_journal_drops_a_torn_line_and_keeps_the_last(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    row = {"key": ["a", 1, 0], "method": "m", "x": 1}
    path.write_text(json.dumps(row) + "\n" + json.dumps(row | {"x": 2}) + "\n" + '{"key"')
    before = path.read_bytes()
    journal = Journal(path)
    assert [r["x"] for r in journal.rows] == [2] and journal.has(("a", 1, 0), "m")
    assert path.read_bytes() == before  # a run may be writing this line
    journal.add({"key": ["b", 1, 0], "method": "m"})
    journal.add({"key": ["c", 1, 0], "method": "m"})
    assert path.read_bytes().startswith(before[: -len('{"key"')])
    assert [r["key"][0] for r in Journal(path).rows] == ["a", "b", "c"]


# ---- figures ----


def test_ratios_belong_together_by_document() -> None:
    rng = np.random.default_rng(2)
    below = rng.gamma(1, 1, 40)
    above = below * rng.uniform(0.2, 0.4, 40)
    low, high = stats.ratio_interval(above.tolist(), below.tolist())
    drawn = np.random.default_rng(9).integers(0, 40, (5000, 40))
    want = np.quantile([above[d].sum() / below[d].sum() for d in drawn], [0.025, 0.975])
    assert np.allclose([low, high], want, atol=0.01)
    assert low < above.sum() / below.sum() < high < 0.4  # documents differ far more than ratios do
    assert np.allclose(stats.ratio_interval([1, 2, 3], [2, 4, 6]), [0.5, 0.5])
    assert np.isnan(stats.ratio_interval([1], [2])).all()


def row(kind: str, number: int, method: str, kl: float, same: int = 1, score: float | None = None) -> dict[str, Any]:
    passage: dict[str, Any] = {"kind": kind, "kl": [kl, 3 * kl], "nll": [2.0 + kl, 2.0], "same": [same, 1]}
    if score is not None:
        passage |= {"text": "x", "score": score}
    return {"key": [kind, 7600, number], "suite": "x", "method": method, "passages": [passage]}


def test_promises_are_judged_by_the_upper_bound() -> None:
    rows = []
    for i in range(12):
        noise = 1 + 0.1 * (i % 3)
        for kind, part in (("prose", 0.3), ("logs", 1.5 if i < 9 else 0.9)):
            rows += [row(kind, i, "full", 0)]
            for budget in (0.02, 0.05):
                rows += [row(kind, i, f"topk-codes@{budget}", 0.1 * noise if kind == "prose" else 0.001),
                         row(kind, i, f"auto-codes@{budget}", part * (0.1 * noise if kind == "prose" else 0.001))]
        rows += [row("facts", i, m, 0.0, score=s) for m, s in
                 (("full", 1.0), ("auto-codes@0.02", 1.0 if i else 0.0), ("topk-codes@0.02", 0.5))]
    result = summary.summarise(rows)
    promises = result["promises"]
    two, five = promises["kl_to_topk_2pct"], promises["kl_to_topk_5pct"]
    assert two["value"] == pytest.approx(0.31, abs=0.01) and two["kept"] and not five["kept"]
    assert {k.split(",")[0] for k in promises["worse_kinds"]} == {"logs"}
    assert promises["same_token_5pct"]["kept"]
    answers = promises["answers_2pct_beyond_full"]
    assert answers["value"] == pytest.approx(-1 / 12) and answers["kept"]
    one = next(e for e in result["readings"] if e["method"] == "auto-codes@0.02" and e["kind"] == "prose")
    assert one["kl_to_topk"]["value"] == pytest.approx(0.3) and one["nats"]["value"] == pytest.approx(0.0165)
    assert summary.promises(summary.Measured([]), [])["worse_kinds"] is None


def test_answers_of_one_document_count_once() -> None:
    """Two kinds of questions that go alike in a document say no more than one does."""
    rows, lost = [], [0.5, 0.0, 0.25, 0.0, 0.75, 0.0, 0.0, 0.5, 0.0, 0.0, 0.25, 0.0]
    for i, loss in enumerate(lost):
        for method, score in (("full", 1.0), ("auto-codes@0.02", 1.0 - loss)):
            one = row("quotes", i, method, 0.0, score=score)
            one["passages"] += [one["passages"][0] | {"kind": "needle"}]
            rows.append(one)
    answers = summary.summarise(rows)["promises"]["answers_2pct_beyond_full"]
    low, high = stats.interval([-x for x in lost])
    assert (answers["low"], answers["high"]) == (pytest.approx(low), pytest.approx(high)) and not answers["kept"]
    assert answers["value"] == pytest.approx(-np.mean(lost)) and answers["n"] == 24


def test_scorers_are_for_the_readings_that_need_them() -> None:
    methods = ["keep0.25-gkv", "keep0.25-kvpop"]
    gkv, kvpop = (r["compress"] for r in readings.readings(methods, [0.05], 2048, Path("mlp")))
    assert gkv == {"keep": 0.25, "policy": "gkv"}
    assert kvpop == {"keep": 0.25, "policy": "kvpop", "scorers": "mlp"}
    with pytest.raises(InvalidArgument, match="needs a file of scorers"):
        readings.readings(methods, [0.05], 2048)


def test_short_documents_have_no_codes() -> None:
    whole = [m for m in readings.METHODS if not m.startswith("keep")]
    names = [r["name"] for r in readings.readings(whole, [0.02], 2048)]
    assert names == ["anchors", "topk@0.02", "auto@0.02", "even@0.02", "moment@0.02"]
    assert "auto-codes@0.02" in [r["name"] for r in readings.readings([*readings.METHODS], [0.02], 4200, Path("mlp"))]


def test_recall_asks_for_each_fact_and_sentence_once() -> None:
    sentence = "Whoever with a disk named {} keeps the keys of a prompt reads some of them again at every step."
    body = "\n".join(f"{prose(i, 600)}\nNote {i}. {sentence.format(chr(97 + i))}" for i in range(24))
    document = documents.recall(6000, 20, Text("prose", 0, "x", body), ByteForm(), 3)
    text = ByteForm().decode(document.prompt[1:])
    asked = [ByteForm().decode([*p.request["exact"], *p.request["read"]]) for p in document.passages]
    assert len(set(asked)) == len(asked) and len(document.prompt) <= 6000
    facts = [p for p in document.passages if p.kind == "needles"]
    assert len(facts) == 20 and len(facts) < len(document.passages)
    for passage, question in zip(document.passages, asked, strict=True):
        (answer,) = passage.answers
        if passage.kind == "needles":
            assert f"{question.strip()} {answer}." in text
        else:
            assert f"{question.split(chr(34))[1]} {answer}" in " ".join(text.split())


def test_what_other_weights_measured_is_not_gone_on_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A model is known by its weights, wherever they lie."""
    monkeypatch.setattr(comparing.Comparing, "run", lambda self, open_engine: True)
    monkeypatch.setattr(comparing, "form_of", lambda model: None)
    monkeypatch.setattr(comparing, "write_report", lambda out: None)
    monkeypatch.setattr(comparing.texts, "kept", lambda *_: {})
    command = ["--out", str(tmp_path / "out"), "--lengths", "1024"]
    for name, weights in (("a", b"one"), ("moved", b"one"), ("b", b"other")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text('{"max_position_embeddings": 8192}')
        (tmp_path / name / "model.safetensors").write_bytes(weights)
    assert comparing.main(["--model", str(tmp_path / "a"), *command]) == 0
    assert comparing.main(["--model", str(tmp_path / "moved"), *command]) == 0
    with pytest.raises(SystemExit):
        comparing.main(["--model", str(tmp_path / "b"), *command])
    assert "holds another run (weights: blake2b:" in capsys.readouterr().err
    (tmp_path / "b" / "model.safetensors").unlink()
    with pytest.raises(SystemExit):
        comparing.main(["--model", str(tmp_path / "b"), *command])
    assert "neither model.safetensors nor" in capsys.readouterr().err
