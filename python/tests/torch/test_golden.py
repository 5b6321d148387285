"""Compares the committed golden logits with those that transformers computes from the
checkpoints."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from tests.conftest import ROOT

DATA = ROOT / "tests/data"
MODEL = ROOT / "models/prefixd-tiny"
CASES = [
    *((DATA / n, DATA / n / "golden.json") for n in
      ("tiny-llama-untied", "tiny-llama3-rope", "tiny-qwen3")),
    (MODEL, DATA / "prefixd-tiny-golden.json"),
]


@pytest.mark.parametrize(("folder", "golden"), CASES, ids=lambda p: p.name)
def test_logits_reproduce(folder: Path, golden: Path) -> None:
    pytest.importorskip("transformers")
    from prefixd.golden import LAST, logits_of

    if not golden.is_file():
        pytest.skip(f"{golden.name} is not there yet")
    body = json.loads(golden.read_text())
    got = np.array(logits_of(folder, body["prompt"]))
    want = np.array(body["logits"])
    vocab = json.loads((folder / "config.json").read_text())["vocab_size"]
    assert want.shape == got.shape == (LAST, vocab) and body["dtype"] == "float32"
    assert np.abs(got - want).max() < 1e-4
    assert want.std() > 0.5


@pytest.mark.parametrize("folder", [f for f, _ in CASES], ids=lambda p: p.name)
def test_config_has_both_rope_forms(folder: Path) -> None:
    if not (folder / "config.json").is_file():
        pytest.skip("not there yet")
    c = json.loads((folder / "config.json").read_text())
    assert c["rope_theta"] == c["rope_parameters"]["rope_theta"]
    if c["rope_parameters"]["rope_type"] == "default":
        assert c["rope_scaling"] is None
    else:
        assert c["rope_scaling"]["factor"] == c["rope_parameters"]["factor"]
