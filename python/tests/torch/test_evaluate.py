"""Tests the evaluation: its tasks, baselines against their definitions, intervals, and a small
run."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from prefixd.evaluate import __main__ as program
from prefixd.evaluate import baselines, methods, stats, summary, tasks
from prefixd.evaluate.baselines import StoredLayer
from prefixd.evaluate.rows import Rows
from prefixd.transformers import attention
from tests.conftest import ROOT

NOISE = "\n".join(f"line {i} of some text that means nothing much" for i in range(400))
SOURCE = tasks.Source(NOISE, lambda text: len(text.encode()))


# ---- tasks ----


@pytest.mark.parametrize("name", [n for suite in tasks.SUITES.values() for n in suite])
@pytest.mark.parametrize("tokens", [1024, 4096])
def test_documents_hold_their_answers_and_the_length(name: str, tokens: int) -> None:
    generate = next(s[name] for s in tasks.SUITES.values() if name in s)
    example = generate(np.random.default_rng(3), SOURCE, tokens)
    again = generate(np.random.default_rng(3), SOURCE, tokens)
    assert example == again
    assert 0.8 * tokens < SOURCE.count(example.document) <= tokens
    assert example.questions
    for question in example.questions:
        assert question.prompt and question.answers
        if not question.exact:
            assert all(answer in example.document for answer in question.answers)
            assert not any(
                a in question.prompt for a in question.answers if name.startswith("niah"))


def test_planted_answers_follow_from_the_document() -> None:
    example = tasks.planted(np.random.default_rng(5), SOURCE, 4096)
    assert {q.kind for q in example.questions} == {"key", "values", "variable", "frequent"}
    for question in example.questions:
        if question.kind in ("key", "values"):
            assert question.prompt + question.answers[0] in example.document
        elif question.kind == "variable":
            asked = question.prompt.removeprefix("[value of ").split(" ")[0]
            source, value = question.answers[0].removesuffix(".]").split(" is ")
            assert f"[let {asked} be {source}.]" in example.document
            assert f"[let {source} be {value}.]" in example.document
        else:
            listed = example.document.split("[list: ")[1].split(".]")[0].split()
            best = max(set(listed), key=listed.count)
            assert question.answers == (best + ".]",)


def test_frequent_and_common_words_are_so() -> None:
    for generate, count in ((tasks.common_words, 10), (tasks.frequent_words, 3)):
        example = generate(np.random.default_rng(1), SOURCE, 4096)
        words = example.document.split()
        answers = example.questions[0].answers
        assert len(answers) == count
        least = min(words.count(w) for w in answers)
        assert all(words.count(w) < least for w in set(words) - set(answers))


def test_facts_have_the_last_place_for_answer() -> None:
    example = tasks.babi_one_fact(np.random.default_rng(2), SOURCE, 2048)
    for question in example.questions:
        who = question.prompt.split("Where is ")[1].split("?")[0]
        last = [x for x in example.document.splitlines() if x.startswith(who + " ")][-1]
        assert last.endswith(f"the {question.answers[0]}.")


def test_question_files(tmp_path: Path) -> None:
    (tmp_path / "doc.txt").write_text(NOISE + "\nThe cat is called Mog.\n" + NOISE)
    path = tmp_path / "q.jsonl"
    path.write_text(json.dumps({"file": "doc.txt", "question": "Who?", "answers": ["Mog"]}) + "\n")
    for seed in range(5):
        example = tasks.question_file(path)(np.random.default_rng(seed), SOURCE, 1024)
        assert "Mog" in example.document and SOURCE.count(example.document) <= 1024
    path.write_text('{"question": "Who?"}\n')
    with pytest.raises(SystemExit, match="line 1"):
        tasks.question_file(path)


# ---- baselines ----


def layer(n: int = 100, seed: int = 0) -> StoredLayer:
    g = torch.Generator().manual_seed(seed)
    return StoredLayer(
        torch.randn(2, n, 8, generator=g), torch.randn(2, n, 6, generator=g), 0.35,
        torch.randn(4, 16, 8, generator=g), torch.randn(2, 20, 8, generator=g),
    )


def query(seed: int = 1) -> torch.Tensor:
    return torch.randn(4, 3, 8, generator=torch.Generator().manual_seed(seed))


def direct(q: torch.Tensor, x: StoredLayer, head: int, i: int, ids: list[int]
           ) -> tuple[np.ndarray, float]:
    keys, values = x.keys[head // 2, ids].double(), x.values[head // 2, ids].double()
    s = x.scale * keys @ q[head, i].double()
    return (torch.softmax(s, 0) @ values).numpy(), float(torch.logsumexp(s, 0))


def test_quest_reads_the_pages_of_the_highest_bounds() -> None:
    x, q = layer(), query()
    bounds = baselines.quest_bounds(q, x.keys)
    y, lse = baselines.quest(q, x, 48, 2)
    for head in range(4):
        for i in range(3):
            page_bounds = []
            for begin in range(0, 100, 16):
                keys = x.keys[head // 2, begin : begin + 16]
                low, high = keys.amin(0), keys.amax(0)
                bound = torch.maximum(q[head, i] * low, q[head, i] * high).sum()
                assert (keys @ q[head, i] <= bound + 1e-5).all()
                page_bounds.append(float(bound))
            assert np.allclose(bounds[head, i], page_bounds, atol=1e-5)
            pages = np.argsort(page_bounds)[-3:]
            ids = [t for p in sorted(pages) for t in range(16 * p, min(16 * p + 16, 100))]
            want, norm = direct(q, x, head, i, ids)
            assert np.allclose(y[head, i], want, atol=1e-5)
            assert float(lse[head, i]) == pytest.approx(norm, abs=1e-5)
    dense = baselines.quest(q, x, 16, 0)[1]
    everything = baselines.attend(q, x, torch.ones(4, 100, dtype=torch.bool))[1]
    assert torch.equal(dense, everything)


def test_snapkv_keeps_what_the_window_votes_for() -> None:
    x = layer()
    chosen = baselines.snapkv_set(x, 10)
    assert chosen.sum(-1).tolist() == [10] * 4
    assert x.observed is not None and x.own_keys is not None
    for head in range(4):
        votes = np.zeros(100)
        for w in range(16):
            seen = x.own_keys[head // 2, : 20 - 16 + w + 1]
            keys = torch.cat((x.keys[head // 2], seen)).double()
            p = torch.softmax(x.scale * keys @ x.observed[head, w].double(), 0)
            votes += p[:100].numpy()
        pooled = np.convolve(votes, np.ones(5) / 5, "same")
        assert set(np.flatnonzero(chosen[head])) == set(np.argsort(pooled)[-10:])


def test_streaming_counts_positions_inside_its_cache() -> None:
    """Rotates keys by position: with the gap closed, scores must be those of a shorter prompt."""
    frequencies = torch.tensor([1.0, 0.3, 0.1, 0.03])
    g = torch.Generator().manual_seed(0)
    plain, values = torch.randn(1, 100, 8, generator=g), torch.randn(1, 100, 6, generator=g)
    q = torch.randn(2, 1, 8, generator=g)

    def at(x: torch.Tensor, position: int) -> torch.Tensor:
        return baselines.rotate(x, position, frequencies)

    keys = torch.stack([at(plain[:, i], i) for i in range(100)], 1)
    x = StoredLayer(keys, values, 0.35)
    y, _ = baselines.streaming(at(q, 100), x, 40, frequencies)
    kept = [*range(16), *range(76, 100)]
    inside = torch.stack([at(plain[:, i], p) for p, i in enumerate(kept)], 1)
    want, _ = baselines.attend(
        at(q, 40), StoredLayer(inside, values[:, kept], 0.35), torch.ones(2, 40, dtype=torch.bool))
    assert torch.allclose(y, want, atol=1e-4)
    few = baselines.streaming(at(q, 100), x, 3, None)[1]
    assert torch.isfinite(few).all()


@pytest.mark.parametrize("method", ["quest", "snapkv", "streaming"])
def test_a_baseline_answers_where_the_model_computes(method: str) -> None:
    """The stored rows are in host memory. PyTorch's fake tensors refuse to mix devices, and need none."""
    with FakeTensorMode(), torch.no_grad():
        stored = [StoredLayer(torch.empty(2, 100, 8), torch.empty(2, 100, 6), 0.35, torch.empty(4, 16, 8),
                              torch.empty(2, 20, 8)) for _ in range(3)]
        q = torch.empty(1, 4, 3, 8, dtype=torch.bfloat16, device="cuda")
        own = torch.empty(1, 4, 3, 6, device="cuda"), torch.empty(1, 4, 3, device="cuda")
        cache = baselines.BaselineCache(method, stored, 48, frequencies=torch.empty(4))
        for splice in cache.layers:
            y, lse = splice.prefix_state(q)
            assert y.shape == (1, 4, 3, 6) and lse.shape == (1, 4, 3)
            assert attention.merge(own, (y, lse)).device.type == "cuda"


# ---- counting ----


def test_budgets_are_the_specified_ones() -> None:
    assert methods.budget_tokens(0.01, 16384) == 164
    assert methods.k_topk(0.01, 16384) == 144
    assert methods.k_topk(0.01, 1000) == 0
    named = methods.cells(["full", "topk", "phi"], [0.01, 0.02])
    assert [c.key for c in named][:3] == ["full/same-k/0", "topk/same-k/0.01", "topk/same-k/0.02"]
    assert len(named) == 1 + 2 + 6
    assert methods.shown("topk", methods.BUDGET, 0.02).key == "topk/same-k/0.02"


def test_intervals() -> None:
    low, high = stats.wilson(9, 10)
    assert (low, high) == (pytest.approx(0.5958, abs=1e-3), pytest.approx(0.9821, abs=1e-3))
    assert stats.wilson(0, 10)[0] == 0
    values = list(np.random.default_rng(0).normal(1, 2, 400))
    low, high = stats.interval(values)
    assert low < 1 < high and high - low == pytest.approx(4 * 2 / 20, rel=0.2)
    # Values of 20 documents that are equal within each document count as 20 values.
    alike = np.repeat(np.random.default_rng(1).normal(1, 2, 20), 20)
    low, high = stats.interval(list(alike), [i // 20 for i in range(400)])
    assert high - low == pytest.approx(3.9 * alike.std() / np.sqrt(20), rel=0.15)


def test_the_interval_of_a_mean_of_shares() -> None:
    parts = [(0.5, 0.4, 0.6), (1.0, 0.9, 1.0)]
    assert stats.of_mean(parts) == (
        pytest.approx(0.75 - 0.5 * 0.02**0.5), pytest.approx(0.8))


def test_few_documents_have_students_interval() -> None:
    """Compares the jackknife of a plain mean with the textbook's interval."""
    x = np.array([1.0, 2.0, 4.0, 5.5])
    reach = 3.182 * x.std(ddof=1) / 2
    assert stats.interval(list(x)) == (pytest.approx(x.mean() - reach), pytest.approx(x.mean() + reach))
    covered = 0
    rng = np.random.default_rng(0)
    for _ in range(400):
        low, high = stats.interval(list(rng.normal(0, 1, 3)))
        covered += low < 0 < high
    assert 365 < covered < 395
    assert np.isnan(stats.interval([1.0, 2.0], ["one", "one"])).all()


def test_quartiles_are_of_equal_size() -> None:
    q = summary.quartiles(np.array([[0.9, 0.1, 0.5, 0.6], [0.2, 0.8, 0.3, 0.7]]))
    assert q.tolist() == [[3, 0, 1, 2], [0, 3, 1, 2]]


def test_a_torn_row_is_dropped(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    rows = Rows(path)
    rows.add({"key": ["document", "planted", 512, 0]})
    with path.open("a") as file:
        file.write('{"key": ["docu')
    before = path.read_bytes()
    again = Rows(path)
    assert len(again.rows) == 1
    assert path.read_bytes() == before  # a run may be writing this line
    for document in (1, 2):
        again.add({"key": ["document", "planted", 512, document]})
    assert path.read_bytes().startswith(before[: before.rfind(b"\n") + 1])
    assert [row["key"][3] for row in Rows(path).rows] == [0, 1, 2]


# ---- all of it ----


def test_a_run_reports_and_goes_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = ROOT / "models/prefixd-tiny"
    text = tmp_path / "noise.txt"
    text.write_text(NOISE * 2)
    out = tmp_path / "out"
    argv = ["--model", str(model), "--text", str(text), "--out", str(out), "--length", "600",
            "--budget", "0.1", "--budget", "0.02", "--documents", "1", "--continuation", "24",
            "--queries", "3", "--floor", "0", "--threads", "1"]
    for method in ("sink-tail", "phi", "moment", "auto", "quest", "snapkv", "streaming"):
        argv += ["--method", method]
    figures = tmp_path / "figures.json"
    assert program.main([*argv, "--json", str(figures)]) == 0
    results = json.loads((out / "results.json").read_text())
    for name, table in json.loads(figures.read_text()).items():
        assert table == results[name]

    def value(table: str, method: str, accounting: str, budget: float, what: str = "mean",
              kind: str = "") -> float | None:
        found = [e for e in results[table] if e["method"] == method and e["budget"] == budget
                 and e["accounting"] == accounting and e.get("kind", "") == kind]
        assert len(found) == 1
        assert found[0]["feasible"] == (found[0]["mean"] is not None)
        return found[0][what]

    # Full attention is its own measure; a set of 60 tokens is nearer to it than the anchors alone;
    # 2% of 600 tokens cannot pay even for the anchors.
    assert value("errors", "full", "same-k", 0.0) == pytest.approx(0, abs=1e-5)
    assert value("errors", "topk", "same-k", 0.1) < 0.5 * value("errors", "sink-tail", "same-k", 0.0)
    assert value("errors", "phi", "budget", 0.02) is None
    assert value("likelihood", "full", "same-k", 0.0, "excess") == 0
    assert value("accuracy", "full", "same-k", 0.0, kind="key") > value(
        "accuracy", "sink-tail", "same-k", 0.0, kind="key")
    assert {h["layer"] for h in results["heads"]} == {0, 1, 2, 3}
    for head in results["heads"]:
        assert 0 <= head["entropy"] <= 1 and head["mass"][-1] == pytest.approx(1, abs=1e-4)
    page = (out / "report.html").read_text()
    assert page.count("data:image/png;base64,") == len(list((out / "figures").glob("*.png"))) == 8
    assert "–" in (out / "tables.md").read_text()

    # The same run again measures nothing; a wider one measures only the new cells.
    before = (out / "rows.jsonl").read_text()
    assert program.main(argv) == 0
    assert (out / "rows.jsonl").read_text() == before
    assert program.main([*argv, "--documents", "2"]) == 0
    after = (out / "rows.jsonl").read_text()
    assert after.startswith(before) and after.count("\n") == before.count("\n") + 1
    # A run wider by a method keeps what was measured (this mark proves it) and adds what is
    # missing.
    rows = Rows(out / "rows.jsonl")
    kept, outdated = "moment/budget/0.1", "phi/same-k/0.1"
    for row in rows.rows:
        if row["key"][0] == "document":
            row["answers"][0]["scores"] |= {kept: 0.125, outdated: 0.125}
            rows.add(row)
    assert program.main([*argv, "--documents", "2", "--method", "centroid"]) == 0
    results = json.loads((out / "results.json").read_text())
    assert results["plan"]["methods"].index("centroid") == results["plan"]["methods"].index("moment") + 1
    for row in Rows(out / "rows.jsonl").rows:
        if row["key"][0] == "document":
            scores = row["answers"][0]["scores"]
            assert scores[kept] == scores[outdated] == 0.125 and "centroid/same-k/0.1" in scores
            assert "centroid/same-k/0.1" in row["diagnostics"]["rho"] and "topk/same-k/0.1" in row["nll"]
    # With other maps, only the cells that depend on maps are measured again.
    maps = tmp_path / "phi-600.safetensors"
    maps.write_bytes((model / "phi-2048.safetensors").read_bytes())
    assert program.main([*argv, "--maps", str(maps)]) == 0
    first, second = (r for r in Rows(out / "rows.jsonl").rows if r["key"][0] == "document")
    assert first["answers"][0]["scores"][kept] == second["answers"][0]["scores"][kept] == 0.125
    assert first["answers"][0]["scores"][outdated] in (0, 1)
    assert second["answers"][0]["scores"][outdated] == 0.125  # --documents 1
    assert first["maps"][0].startswith("phi-600.safetensors@") and "scatter" in first
    results = json.loads((out / "results.json").read_text())
    assert value("errors", "phi", "same-k", 0.1, "n") == 1  # the other document's cells have other maps
    assert value("errors", "moment", "same-k", 0.1, "n") == 2
    with pytest.raises(SystemExit):
        program.main([*argv, "--seed", "5"])
    assert "holds another run" in capsys.readouterr().err
