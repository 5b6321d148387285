"""Early token freezing does what its two forms say, against a plain loop over the layers in float64, and its
program measures it and goes on where it stopped."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig
from transformers.models.llama import LlamaForCausalLM
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from prefixd.evaluate.compare import texts
from prefixd.freezing.__main__ import main, table
from prefixd.freezing.freeze import FORMS, ROWS, STATES, Schedule, follow, prefill


def small(layers: int) -> LlamaForCausalLM:
    torch.manual_seed(7)
    config = LlamaConfig(
        vocab_size=300, hidden_size=64, intermediate_size=96, num_hidden_layers=layers, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, max_position_embeddings=1024,
    )  # fmt: skip
    model: LlamaForCausalLM = LlamaForCausalLM(config).eval()
    return model


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    return small(8)


def reference(model: LlamaForCausalLM, ids: Tensor, frozen: list[range], form: str) -> Tensor:
    """Returns log-probabilities behind each token of `ids` [n], all layers in one pass over all tokens."""
    m = LlamaForCausalLM(model.config).double()
    m.load_state_dict({k: v.double() for k, v in model.state_dict().items()})
    n = len(ids)
    h = m.model.embed_tokens(ids)
    cos, sin = m.model.rotary_emb(h[None], torch.arange(n)[None])
    before: tuple[Tensor, Tensor] | None = None
    for layer, at in zip(m.model.layers, frozen, strict=True):
        x = layer.input_layernorm(h)
        a = layer.self_attn
        q, k, v = (p(x).view(n, -1, 16).transpose(0, 1) for p in (a.q_proj, a.k_proj, a.v_proj))
        q, k = (t[0] for t in apply_rotary_pos_emb(q[None], k[None], cos, sin))
        if form == ROWS and before is not None:
            for i in at:
                k[:, i], v[:, i] = before[0][:, i], before[1][:, i]
        before = (k, v)
        scores = q @ k.repeat_interleave(2, 0).transpose(1, 2) / math.sqrt(16)
        scores = scores.masked_fill(torch.ones(n, n).triu(1).bool(), -math.inf)
        y = (scores.softmax(-1) @ v.repeat_interleave(2, 0)).transpose(0, 1).reshape(n, -1)
        new = h + a.o_proj(y)
        new = new + layer.mlp(layer.post_attention_layernorm(new))
        if form == STATES:
            for i in at:
                new[i] = h[i]
        h = new
    out: Tensor = m.lm_head(m.model.norm(h)).log_softmax(-1)
    return out


@pytest.mark.parametrize("form", FORMS)
@torch.no_grad()
def test_a_form_is_what_a_plain_loop_computes(model: LlamaForCausalLM, form: str) -> None:
    rng = torch.Generator().manual_seed(11)
    for tokens, psi, gamma, sinks in ((90, 0.5, 1.0, 4), (131, 0.1, 1.5, 0), (64, 0.9, 1.0, 16)):
        ids = torch.randint(0, 300, (1, tokens + 20), generator=rng)
        schedule = Schedule(8, tokens, psi, gamma, sinks)
        # Of 8 layers 6 and 7 are the last quarter: the first of them freezes nothing yet, the other half of all.
        last = int((1 - psi ** (gamma / 2)) * tokens)
        frozen = [range(0)] * 7 + [range(sinks, last)]
        full = reference(model, ids[0], frozen, form)[tokens:-1]
        got = follow(model, prefill(model, ids[:, :tokens], schedule, form), ids[:, tokens:])
        assert torch.allclose(got.double(), full, atol=2e-4)
        plain = follow(model, prefill(model, ids[:, :tokens], None, form), ids[:, tokens:])
        changed = not torch.equal(plain, got)
        # The last layer's own states reach no other token: that form shows from the layer behind on.
        assert changed == (form == ROWS and last > sinks)


@torch.no_grad()
def test_states_that_freeze_below_the_last_layer_change_what_follows() -> None:
    deep = small(12)
    ids = torch.randint(0, 300, (1, 110), generator=torch.Generator().manual_seed(5))
    schedule = Schedule(12, 80, 0.2, 1.0, 3)
    frozen = [range(0)] * 9 + [range(3, schedule.end(i)) for i in (9, 10, 11)]
    ends = [0.2 ** (i / 3) for i in (1, 2)]
    assert [len(f) for f in frozen[9:]] == [0, *(math.floor((1 - e) * 80) - 3 for e in ends)]
    for form in FORMS:
        got = follow(deep, prefill(deep, ids[:, :80], schedule, form), ids[:, 80:])
        assert torch.allclose(got.double(), reference(deep, ids[0], frozen, form)[80:-1], atol=2e-4)
        assert not torch.equal(got, follow(deep, prefill(deep, ids[:, :80], None, form), ids[:, 80:]))


def test_a_schedule_is_the_papers() -> None:
    s = Schedule(32, 1000, 0.5, 1.0, 16)
    assert s.first == 24 and [s.end(i) for i in (0, 23, 24)] == [0, 0, 0]
    assert s.end(31) == math.floor((1 - 0.5 ** (7 / 8)) * 1000)
    assert [s.frozen(i).stop - s.frozen(i).start for i in (24, 31)] == [0, s.end(31) - 16]
    assert s.saved == pytest.approx(sum(max(0, s.end(i) - 16) for i in range(32)) / 32000)
    assert Schedule(32, 1000, 1.0).saved == 0  # nothing is frozen
    assert Schedule(32, 10, 0.5).frozen(31) == slice(16, 16)  # a prompt that is all sinks


class _Bytes:
    def encode(self, text: str) -> list[int]:
        return list(text.encode())


def test_the_program_goes_on_where_it_stopped(
    model: LlamaForCausalLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model.save_pretrained(tmp_path / "model")
    rng = np.random.default_rng(2)
    found = [texts.Text("prose", i, "made", "".join(map(chr, rng.integers(32, 127, 400)))) for i in range(3)]
    monkeypatch.setattr(texts, "find", lambda kind, count, seed: found[:count])
    monkeypatch.setattr("prefixd.freezing.__main__.form_of", lambda folder: _Bytes())
    out = tmp_path / "out"
    arguments = ["--model", str(tmp_path / "model"), "--out", str(out), "--kinds", "prose", "--prompt", "200",
                 "--follow", "40", "--psi", "0.3", "--sinks", "4", "--json", str(tmp_path / "f.json")]
    assert main([*arguments, "--documents", "2", "--forms", "rows"]) == 0
    first = (out / "freezing.jsonl").read_bytes()
    assert len(first.splitlines()) == 2
    assert main([*arguments, "--documents", "3"]) == 0
    assert (out / "freezing.jsonl").read_bytes().startswith(first)
    body = json.loads((tmp_path / "f.json").read_text())
    assert [(r["form"], r["documents"]) for r in body] == [("rows", 3), ("states", 3)]
    rows = [json.loads(line) for line in (out / "freezing.jsonl").read_text().splitlines()]
    for cell in body:
        own = [r["kl"] for r in rows if r["form"] == cell["form"]]
        assert cell["kl"][0] == pytest.approx(np.mean(own)) and cell["kl_by_kind"]["prose"] == cell["kl"][0]
        assert cell["saved"] == Schedule(8, 200, 0.3, 1.0, 4).saved > 0
    assert body[0]["kl"][0] > 0
    assert table(body) in capsys.readouterr().out
    assert main([*arguments, "--prompt", "390"]) == 1  # more tokens than the texts have
    assert "fewer than --prompt" in capsys.readouterr().err
    for wrong in (["--psi", "0"], ["--sinks", "-1"], ["--kinds", "poems"], ["--model", str(tmp_path)]):
        with pytest.raises(SystemExit):
            main([*arguments, *wrong])
