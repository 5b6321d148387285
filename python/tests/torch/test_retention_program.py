"""The program measures policies on what a model's attention saw, goes on where it stopped, and reports means
that follow from its rows."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama import LlamaForCausalLM

from prefixd.evaluate.compare import texts
from prefixd.evaluate.compare.chat import ByteForm
from prefixd.evaluate.stats import interval, ratio_interval
from prefixd.retention.__main__ import main
from prefixd.retention.asked import Continuation, Task
from prefixd.retention.attend import ESTIMATORS, Asked
from prefixd.retention.inside import Document, method
from prefixd.retention.inside_report import inside_summary, inside_table
from prefixd.retention.kvpop import Scorer
from prefixd.retention.record import Recorded, record
from prefixd.retention.report import DROP, Measured, Tables, markdown, offload, summary
from prefixd.retention.run import CHOICE, Cell, Layer, asked_at, errors_of
from prefixd.retention.seen import kept

SMALL = {
    "vocab_size": 300, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 1024,
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(3)
    folder = tmp_path_factory.mktemp("model")
    LlamaForCausalLM(LlamaConfig(**SMALL)).eval().save_pretrained(folder)
    return folder


def no_scorer(layer: int, name: str) -> Scorer:
    raise AssertionError(f"{name} of layer {layer}")


def test_what_is_recorded_gives_the_models_own_attention(checkpoint: Path, tmp_path: Path) -> None:
    model = LlamaForCausalLM.from_pretrained(checkpoint).eval()
    ids = torch.randint(0, 256, (1100,), generator=torch.Generator().manual_seed(0)).tolist()[:1000]
    record(model, ids, [0, 2], tmp_path / "t.safetensors", "test", "made", lambda at: None)
    model.set_attn_implementation("eager")
    with torch.no_grad():
        native = model(torch.tensor([ids]), use_cache=False, output_attentions=True)
    for layer in (0, 2):
        seen = Recorded(tmp_path / "t.safetensors", "test", "made").layer(layer, 100)
        assert seen.q.shape == (2, 2, 1000, 16) and seen.k.shape == (2, 1000, 16) and seen.prompt == 100
        asked = Asked(seen, torch.tensor([0, 500, 999]))
        own = (asked.weights / asked.weights.sum(-1, keepdim=True)).flatten(0, 1)
        assert torch.allclose(own, native.attentions[layer][0][:, asked.at], atol=2e-3)  # q, k are bf16


def test_queries_that_choose_come_first() -> None:
    at = asked_at(2000, 7000)
    assert len(at) == 128 and int(at[0]) == 2000 and int(at[-1]) < 7000
    assert int((at >= 4500).sum()) == 64 and bool((at[1:] > at[:-1]).all())


def test_the_choice_is_made_by_earlier_queries(checkpoint: Path, tmp_path: Path) -> None:
    model = LlamaForCausalLM.from_pretrained(checkpoint).eval()
    ids = torch.randint(0, 256, (700,), generator=torch.Generator().manual_seed(1)).tolist()
    record(model, ids, [1], tmp_path / "t.safetensors", "test", "made", lambda at: None)
    work = Layer(Recorded(tmp_path / "t.safetensors", "test", "made").layer(1, 200), lambda name: None)  # type: ignore[arg-type, return-value]
    cell = Cell("window", 0.2, 0.5)
    assert (cell.exact(700), cell.retained(700)) == (140, 70) and Cell("window", 0.2, 0).retained(700) == 20
    got = work.measure(cell)
    mask = kept(work.leaves("window", 70), work.at)
    before = errors_of(work.asked, mask, 70, work.at < 450)  # what the choice is made by
    for head in range(2):
        mean = {e: np.mean(before[e][2 * head : 2 * head + 2]) for e in ESTIMATORS}
        best = min(mean, key=lambda e: mean[e])
        assert got[CHOICE][2 * head : 2 * head + 2] == got[best][2 * head : 2 * head + 2]


def test_a_run_goes_on_where_it_stopped(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = "".join(f"line {i} of a text, and {i * i} more\n" for i in range(2000))
    monkeypatch.setattr(texts, "find", lambda kind, count, seed: [
        texts.Text(kind, i, f"made {kind}", words[i * 1000 :]) for i in range(count)])
    common = ["--model", str(checkpoint), "--out", str(tmp_path / "o"), "--kinds", "prose,logs", "--documents", "1",
              "--training-documents", "1", "--prompt", "200", "--tokens", "700", "--budgets", "0.25",
              "--layer-step", "2", "--jobs", "1", "--json", str(tmp_path / "r.json")]
    assert main([*common, "--minutes", "0"]) == 130
    monkeypatch.setattr("prefixd.retention.learn.STEPS", {"kvpop-mlp": 3, "kvpop-mlstm": 2})
    assert main([*common, "--train"]) == 0
    capsys.readouterr()
    assert main([*common, "--policies", "window,kvpop-mlp"]) == 0
    rows = (tmp_path / "o" / "rows.jsonl").read_text().splitlines()
    # 2 documents, a layer, and for each the entropies and 2 policies with 2 shares.
    assert len(rows) == 2 * 5
    assert main([*common, "--policies", "window,kvpop-mlp,kvpop-mlstm,gkv", "--shares", "1,0.5"]) == 0
    more = (tmp_path / "o" / "rows.jsonl").read_text().splitlines()
    assert more[: len(rows)] == rows and len(more) == 2 * (5 + 5)
    body = json.loads((tmp_path / "r.json").read_text())
    assert body["layers"] == [1] and body["documents"] == {"prose-0": "prose", "logs-0": "logs"}
    arms = {(c["policy"], c["arm"]) for c in body["cells"]}
    assert {(p, a) for p in ("window", "kvpop-mlstm", "gkv") for a in ("drop", "estimate", "offload@0.5")} <= arms
    assert "| gkv | " in capsys.readouterr().out
    assert main([*common, "--kl", "--policies", "window,gkv"]) == 0
    assert "| gkv/0.25/0.5 | 2 | " in capsys.readouterr().out
    inside = (tmp_path / "o" / "kl.jsonl").read_text().splitlines()
    assert len(inside) == 2 * (1 + 4)
    assert main([*common, "--kl", "--policies", "window,gkv", "--facts", "1"]) == 0
    more = (tmp_path / "o" / "kl.jsonl").read_text().splitlines()
    assert more[: len(inside)] == inside and len(more) == 3 * (1 + 4)
    assert all("answers" in json.loads(row) for row in more[len(inside) :])
    body = json.loads((tmp_path / "r.json").read_text())
    assert body["rows"] == [json.loads(row) for row in more]
    assert main([*common, "--tokens", "900"]) == 1
    assert "holds another run (tokens: 700 there, 900 now)" in capsys.readouterr().err
    # Scorers are there for all layers but the first: nothing is read for them, and then for all.
    capsys.readouterr()
    assert main([*common, "--kl", "--policies", "kvpop-mlp"]) == 1
    assert "has no scorer of layer 0: --train with --layer-step 1" in capsys.readouterr().err
    every = [*common, "--layer-step", "1"]
    assert main([*every, "--train"]) == 0
    assert main([*every, "--kl", "--policies", "window,kvpop-mlp,kvpop-mlstm", "--budgets", "0.15,0.1"]) == 0
    # A tenth of 700 tokens, half of it retained, is less than KVpop's sinks and window; half of 105 is, too.
    rows = [json.loads(row)["method"] for row in (tmp_path / "o" / "kl.jsonl").read_text().splitlines()]
    assert {m for m in rows if "kvpop-mlp/" in m} == {"kvpop-mlp/0.15/1"} | {"kvpop-mlp/0.1/1"}
    assert {m for m in rows if "mlstm" in m} == {"kvpop-mlstm/0.15/1", "kvpop-mlstm/0.1/1"}


def test_a_model_attends_to_what_a_policy_leaves_it(checkpoint: Path) -> None:
    model = LlamaForCausalLM.from_pretrained(checkpoint).eval()
    ids = torch.randint(0, 256, (420,), generator=torch.Generator().manual_seed(2)).tolist()
    document = Document(model, ids, 100, Continuation(((7, 8), ()), 3), lambda at: None, no_scorer)
    # Against the model under a mask that says the same: sinks and a window behind the prompt.
    budget = 42
    with torch.no_grad():
        at = torch.arange(420)
        seen = at[None, :] <= at[:, None]
        near = (at[None, :] < 4) | (at[:, None] - at[None, :] < budget - 4) | (at[:, None] < 100)
        mask = torch.where(seen & near, 0.0, -torch.inf)[None, None]
        model.set_attn_implementation("eager")
        own = model(torch.tensor([ids]), attention_mask=mask, use_cache=False).logits[0].log_softmax(-1)[260:-1]
        full = model(torch.tensor([ids]), use_cache=False).logits[0].log_softmax(-1)[260:-1]
        written: list[int] = []
        for _ in range(6):
            whole = torch.tensor([[*ids, 7, 8, *written]])
            written.append(int(model(whole, use_cache=False).logits[0, -1].argmax()))
    model.set_attn_implementation("sdpa")
    # It writes behind the question, and goes on from there.
    assert document.answers == [written[:3], written[3:6]]
    got, answers = document.measure(Cell("window", 0.1, 1), False)
    each = (full.exp() * (full - own)).sum(-1)  # 159 tokens: nine spans of 16 and one of 15
    assert got["kl"] == pytest.approx(float(each.mean()), rel=1e-3) and got["kl"] > 0
    assert got["spans"] == pytest.approx([float(s.mean()) for s in each.split(16)], rel=1e-3, abs=1e-6)
    assert got["same"] == pytest.approx(float((full.argmax(-1) == own.argmax(-1)).float().mean()))
    true = torch.tensor(ids[261:])[:, None]
    assert got["nats"] == pytest.approx(float((full - own).gather(1, true).mean()), abs=1e-5)
    # What is retrieved and estimated brings it nearer; with everything exact nothing is lost.
    assert document.measure(Cell("window", 0.1, 0.5), True)[0]["kl"] < got["kl"]
    got, answers = document.measure(Cell("window", 1.2, 1), False)
    assert got["kl"] == pytest.approx(0, abs=1e-6) and answers == document.answers


class Letters:
    """A form whose model is not the small one of models/."""

    head: list[int] = []
    stop = [ord("\n")]

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, ids: list[int]) -> str:
        return bytes(ids).decode()

    def question(self, text: str, begun: str) -> list[int]:
        return self.encode(f"\n{text} {begun}")


def test_answers_and_free_texts_are_told() -> None:
    form = Letters()
    free = Task("prose-0", [1, 2], form)
    assert free.then == Continuation() and free.told([[5, 6, 7, 8]], [[5, 6, 9, 8]]) == {"alike": 0.5}
    words = "".join(f"The {i}. line of a text that says little. " for i in range(600))
    facts = Task.facts(texts.Text("prose", 0, "made", words), 3000, form, 0)
    whole, then = form.decode(facts.ids), facts.then
    assert 2500 < len(facts.ids) <= 3000 and len(then.questions) == len(facts.passages) == 4
    for passage, question in zip(facts.passages, then.questions, strict=True):
        word = form.decode(list(question)).split(" for ")[1].split(" ")[0]
        assert f"special magic numbers for {word} is: {passage.answers[0]}" in whole
    right = [form.encode(f" {p.answers[0]}.") for p in facts.passages]
    assert facts.told([], right) == {"answers": 1.0} and facts.told([], [right[0], *right[:3]]) == {"answers": 0.25}


def test_the_small_model_is_asked_in_the_form_that_it_learnt() -> None:
    form = ByteForm()
    words = "".join(f"The {i}. line of a text that says little.\n" for i in range(900))
    facts = Task.facts(texts.Text("prose", 1, "made", words), 9000, form, 0)
    whole, then = form.decode(facts.ids), facts.then
    assert facts.ids[0] == 256 and 8500 < len(facts.ids) <= 9000 and whole.endswith("\n") and len(then.questions) == 11
    assert whole.startswith("The ") and then.tokens == max(len(p.answers[0]) for p in facts.passages)
    for i, (passage, question) in enumerate(zip(facts.passages, then.questions, strict=True)):
        asked = form.decode(list(question))
        assert asked.startswith("[") if i == 0 else asked.startswith("\n[")
        if passage.kind in ("key", "values"):
            assert asked.removeprefix("\n") + passage.answers[0] + "\n" in whole


@pytest.mark.parametrize("options", [["--prompt", "10"], ["--budgets", "2"], ["--policies", "newest"],
                                     ["--kl", "--policies", "foreseen"],
                                     ["--facts", "1"], ["--estimated"]])
def test_what_is_wrong_is_said(options: list[str], checkpoint: Path, tmp_path: Path) -> None:
    with pytest.raises(SystemExit):
        main(["--model", str(checkpoint), "--out", str(tmp_path), *options])


def test_what_is_inside_is_paired_with_dropped_by_text() -> None:
    dropped, retrieved = method(Cell("tova", 0.05, 1), False), method(Cell("tova", 0.05, 0.5), True)
    assert method(Cell("tova", 0.05, 1), True) == "tova/0.05/1/estimated"

    def row(text: str, name: str, kl: float) -> dict[str, object]:
        return {"key": [text, 2000, 800], "method": name, "kl": kl, "same": 0.5, "nats": -kl, "answers": 1.0}

    rows = [row("a", dropped, 0.4), row("b", dropped, 0.2), row("b", retrieved, 0.02), row("a", retrieved, 0.1),
            row("c", retrieved, 7.0), row("a", "tova/0.1/0.5", 3.0)]  # fmt: skip
    body = inside_summary(rows)
    by = {one["method"]: one for one in body["methods"]}
    assert by[retrieved]["texts"] == ["a", "b", "c"] and by[retrieved]["kl"][0] == pytest.approx(7.12 / 3)
    # The third text has nothing that it could be paired with.
    assert by[retrieved]["kl_of_dropped"] == pytest.approx([0.12 / 0.6, *ratio_interval([0.1, 0.02], [0.4, 0.2])])
    assert "kl_of_dropped" not in by[dropped] and "kl_of_dropped" not in by["tova/0.1/0.5"]
    window = inside_summary([*rows, row("b", "window/0.05/1", 0.4), row("a", "window/0.05/1", 0.8)])["methods"]
    by_window = {one["method"]: one.get("kl_of_window") for one in window}
    assert by_window[dropped] == pytest.approx([0.5, *ratio_interval([0.4, 0.2], [0.8, 0.4])])
    assert by_window[retrieved] is None and by_window["window/0.05/1"] is None
    assert by["tova/0.1/0.5"]["kl"] == [3.0, None, None] and "alike" not in by[dropped]
    json.dumps(body, allow_nan=False)
    worst = inside_summary([*rows, {**row("a", "tova/0.05/0", 0.6), "answers": 0.25}, row("a", "full", 0.0)])["worst"]
    assert worst["retrieved"] == {"kl_of_dropped": pytest.approx(1.5), "answers": 0.25}
    assert worst["dropped"] == {"answers": 1.0} and worst["estimated"] == {}
    assert "| tova/0.1/0.5 | 1 | 3.0000 | – |" in inside_table(body)


def test_one_text_is_paired_by_span() -> None:
    above, below = [0.1, 0.2, 0.6], [1.0, 2.0, 3.0]

    def row(name: str, spans: list[float]) -> dict[str, object]:
        return {"key": ["a", 7000, 2000], "method": name, "kl": sum(spans) / 3, "spans": spans}

    rows = [row("tova/0.05/1", below), row("tova/0.05/0.5", above)]
    dropped, retrieved = inside_summary(rows)["methods"]
    assert dropped["kl"] == pytest.approx([2.0, *interval(below)])
    assert retrieved["kl_of_dropped"] == pytest.approx([0.15, *ratio_interval(above, below)])
    del rows[0]["spans"]  # nothing to pair with but the text
    dropped, retrieved = inside_summary(rows)["methods"]
    assert dropped["kl"] == [2.0, None, None] and retrieved["kl_of_dropped"] == [pytest.approx(0.15), None, None]
    assert retrieved["kl"][1:] == pytest.approx(list(interval(above)))


def test_the_report_pairs_by_document_and_sorts_heads_by_entropy() -> None:
    rng = np.random.default_rng(0)
    rows: list[dict[str, object]] = []
    table: dict[tuple[str, int, str, float], np.ndarray] = {}
    for d in range(12):
        for layer in (1, 4):
            key = [f"prose-{d}", layer, 0]
            entropies = [0.1 + 0.01 * layer, 0.3, 0.6, 0.9]
            rows.append({"key": key, "method": "entropy", "kind": "prose", "entropy": entropies})
            for policy, factor in (("window", 1.0), ("gkv", 0.5)):
                for share in (1.0, 0.5):
                    e = rng.uniform(0.9, 1.1, 4) * factor * share
                    table[f"prose-{d}", layer, policy, share] = e
                    errors = {name: (e * (2 if name == "none" else 1)).tolist() for name in (*ESTIMATORS, CHOICE)}
                    rows.append({"key": key, "method": f"{policy}/0.1/{share}", "policy": policy, "budget": 0.1,
                                 "share": share, "errors": errors})  # fmt: skip
    tables = Tables(Measured.of(rows))
    assert {k: v.tolist() for k, v in tables.m.quartile_of().items()} == {1: [0, 1, 2, 3], 4: [0, 1, 2, 3]}
    names = tables.m.documents

    def means(policy: str, share: float, heads: slice, factor: float = 1) -> list[float]:
        return [factor * float(np.mean([table[d, i, policy, share][heads] for i in (1, 4)])) for d in names]

    every = slice(None)
    assert tables.mean(("gkv", 0.1, DROP))[0] == pytest.approx(np.mean(means("gkv", 1, every, 2)))
    a, b = means("gkv", 0.5, slice(2, 3)), means("gkv", 1, slice(2, 3), 2)
    got = tables.ratio(("gkv", 0.1, offload(0.5)), ("gkv", 0.1, DROP), 2)
    assert got == pytest.approx((sum(a) / sum(b), *ratio_interval(a, b)))
    body = summary(tables)
    assert "of_window" in body["cells"][0] and "## 10% exact" in markdown(body)
    # A policy that is not measured on every document is no cell.
    assert ("gkv", 0.1, offload(0.5)) in tables.cells
    assert ("gkv", 0.1, offload(0.5)) not in Tables(Measured.of(rows[:-1])).cells
