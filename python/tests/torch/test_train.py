"""Runs a tiny training: it learns, resumes exactly, and exports a Hugging Face model."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from prefixd.train import check, model
from prefixd.train.corpus import Corpus
from prefixd.train.net import BOS, Net, NetConfig, export_hf, load_hf, to_hf

SMALL = NetConfig(
    hidden=32, layers=2, q_heads=4, kv_heads=2, head_dim=8, ffn=48, max_positions=2048
)
QUIET = {"log": 1e9, "save": 1e9, "eval": 1e9}
CFG = model.TrainConfig(net=SMALL, phases="0:64,0.5:128", warmup=5, tokens_per_step=1024,
                        position_limit=2048)


def trainer(corpus: Corpus) -> model.Trainer:
    return model.Trainer(CFG, corpus, torch.device("cpu"))


def test_loss_falls(corpus: Corpus) -> None:
    t = trainer(corpus)
    losses = [t.train_step(i / 60)["loss"] for i in range(60)]
    assert np.mean(losses[-5:]) < 0.7 * np.mean(losses[:5])


def test_resumes_to_the_identical_state(corpus: Corpus, tmp_path: Path) -> None:
    whole = trainer(corpus)
    model.run(whole, tmp_path, None, 12, QUIET, lambda _: None)
    (tmp_path / "state.pt").unlink()
    first = trainer(corpus)
    for i in range(7):
        first.train_step(i / 12)
    first.save(tmp_path / "state.pt")
    second = trainer(corpus)
    second.load(tmp_path / "state.pt")
    assert second.step == 7
    model.run(second, tmp_path, None, 12, QUIET, lambda _: None)
    assert second.tokens == whole.tokens
    for a, b in zip(whole.net.parameters(), second.net.parameters(), strict=True):
        assert torch.equal(a, b)


def test_a_damaged_state_or_another_shape_is_refused(corpus: Corpus, tmp_path: Path) -> None:
    t = trainer(corpus)
    bad = tmp_path / "state.pt"
    bad.write_bytes(b"nothing")
    with pytest.raises(SystemExit, match="cannot resume"):
        t.load(bad)
    t.save(bad)
    other = model.Trainer(model.TrainConfig(net=SMALL.__class__(hidden=64, layers=1, q_heads=2,
                          kv_heads=1, head_dim=8, ffn=16)), corpus, torch.device("cpu"))
    with pytest.raises(SystemExit, match="another shape"):
        other.load(bad)


@pytest.mark.parametrize("phases", ["", "0.1:128", "0:128,0.5", "0:8", "0:128,0.5:256,0.2:512"])
def test_bad_phases_are_refused(phases: str) -> None:
    with pytest.raises(SystemExit, match="--phases"):
        model.parse_phases(phases)


def test_export_is_what_transformers_computes(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    net = Net(SMALL, seed=3)
    with torch.no_grad():
        for p in net.parameters():
            p.mul_(3.0)
    export_hf(net, tmp_path)
    back = load_hf(tmp_path)
    for name, tensor in to_hf(net).items():
        assert torch.equal(tensor.to(torch.bfloat16).float(), to_hf(back)[name])
    hf = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    ids = torch.tensor([[BOS, *b"A short text, and [key of bakemo is 40718.] in it."]])
    with torch.no_grad():
        want = hf(ids).logits
        got = back.logits(back(ids))
    assert float((want - got).abs().max()) < 1e-4 * max(1.0, float(want.abs().max()))


def test_measures_run_on_an_untrained_model(corpus: Corpus) -> None:
    net = Net(SMALL)
    right, asked = check.recall(net, corpus.heldout[0], 256, 2, 3)
    assert (right, asked) == (0, 6)
    assert check.recall(net, corpus.heldout[0], 256, 1, 3, one_by_one=True)[1] == 3
    assert 5 < check.bits_per_byte(net, corpus.heldout, 128, 3) < 12


@pytest.mark.parametrize("arguments", [[], ["--minutes", "1", "--steps", "2"], ["--steps", "0"]])
def test_bad_commands_are_refused(arguments: list[str], tmp_path: Path) -> None:
    with pytest.raises(SystemExit) as e:
        model.main(["--out", str(tmp_path), *arguments])
    assert e.value.code == 2
