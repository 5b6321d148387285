"""Tests feature maps for any model: the capture, an interrupted training, maps that stores load."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    LlamaConfig,
    MistralConfig,
    PreTrainedModel,
    Qwen3Config,
)

import prefixd
from prefixd.train import __main__ as program
from prefixd.train.distill import HeadTraining
from prefixd.train.phi_net import load_phi
from prefixd.transformers import Splice
from prefixd.transformers.capture import captured

SIZES = {
    "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 16, "vocab_size": 264, "max_position_embeddings": 512, "pad_token_id": 0,
    "bos_token_id": 256, "eos_token_id": 257, "initializer_range": 0.2,
}
CONFIGS = {
    "llama": LlamaConfig(num_hidden_layers=2, **SIZES),
    "qwen3": Qwen3Config(num_hidden_layers=2, **SIZES),
    "mistral": MistralConfig(num_hidden_layers=2, sliding_window=None, **SIZES),
    "gemma3": Gemma3TextConfig(
        num_hidden_layers=2, sliding_window=32, query_pre_attn_scalar=16,
        layer_types=["sliding_attention", "full_attention"], **SIZES,
    ),
}


def make(family: str) -> PreTrainedModel:
    torch.manual_seed(1)
    return AutoModelForCausalLM.from_config(CONFIGS[family], attn_implementation="eager").eval()


def checkpoint(family: str, directory: Path) -> Path:
    make(family).save_pretrained(directory)
    return directory


@pytest.fixture
def text(tmp_path: Path) -> Path:
    rng = np.random.default_rng(0)
    words = "a store keeps keys and values on disk for any decoder that asks".split()
    path = tmp_path / "text.txt"
    path.write_text(" ".join(rng.choice(words, 1200)))
    return path


@pytest.mark.parametrize("family", CONFIGS)
def test_what_is_captured_is_what_attends(family: str) -> None:
    model = make(family)
    ids = torch.randint(0, 256, (1, 40), generator=torch.Generator().manual_seed(0))
    taken: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
    with captured(model, lambda layer, q, k, v: taken.update({layer: (q, k)})), torch.no_grad():
        spliced = model(ids, use_cache=False).logits
    with torch.no_grad():
        native = model(ids, use_cache=False, output_attentions=True)
    assert model.config._attn_implementation == "eager"
    assert torch.allclose(spliced, native.logits, atol=1e-4)
    window = getattr(model.config, "sliding_window", None) if family == "gemma3" else None
    for layer, weights in enumerate(native.attentions):
        q, k = taken[layer]
        k = k.repeat_interleave(2, dim=1)
        distance = torch.arange(40)[:, None] - torch.arange(40)[None]
        hidden = distance < 0
        if window and layer == 0:
            hidden |= distance >= window
        scores = (q @ k.transpose(-1, -2)) * 16**-0.5
        own = torch.softmax(scores.masked_fill(hidden, -torch.inf), -1)
        assert torch.allclose(own, weights, atol=1e-5), layer


def arguments(model: Path, text: Path, out: Path, *more: str) -> list[str]:
    return ["--model", str(model), "--text", str(text), "--out", str(out), "--length", "128",
            "--prompts", "4", "--queries", "32", "--steps", "60", "--d-phi", "8", *more]


def silent(_: str) -> None:
    pass


@pytest.mark.parametrize("family", CONFIGS)
def test_maps_improve_and_stores_complete_with_them(
    family: str, tmp_path: Path, text: Path
) -> None:
    directory = checkpoint(family, tmp_path / "model")
    said: list[str] = []
    assert program.main(arguments(directory, text, tmp_path / "maps"), said.append) == 0
    maps = tmp_path / "maps/phi-128.safetensors"
    report = json.loads((tmp_path / "maps/phi-128.json").read_text())
    layers = {"gemma3": {1}}.get(family, {0, 1})
    assert {h["layer"] for h in report["heads"]} == layers
    assert sum(h["kl"] for h in report["heads"]) < 0.8 * sum(h["kl_before"] for h in report["heads"])
    assert load_phi(maps)[1]["length"] == "128"
    assert not (tmp_path / "maps/work/captured-128").exists()
    assert any("exported" in line for line in said)

    model = AutoModelForCausalLM.from_pretrained(directory)
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(0, 256, (1, 160), generator=generator)
    with prefixd.open(tmp_path / "kv", min_free_bytes=0, threads=1, estimators=["none", "phi"]) as store:
        splice = Splice(store, model, checkpoint=directory, feature_maps=[maps])
        with splice.cache(ids) as cache, torch.no_grad():
            model(ids, past_key_values=cache)
        prefix = store.match(splice.spec.name, ids[0]).prefix
        store.wait_ready(prefix)
        q = np.random.default_rng(0).normal(size=(4, 16)).astype(np.float32)
        found = {}
        for name, policy in {
            "full": prefixd.Policy(mode="full"),
            "none": prefixd.Policy(k=8, estimator="none"),
            "phi": prefixd.Policy(k=8, estimator="phi"),
        }.items():
            with store.attach(splice.spec.name, prefix=prefix, policy=policy) as session:
                found[name] = session.step(max(layers), q)
        assert all(np.isfinite(y).all() for y, _ in found.values())
        # The completion adds the mass that the selection leaves out.
        assert (found["phi"][1] > found["none"][1]).all()
        short = np.abs(found["full"][1] - found["none"][1]).mean()
        assert np.abs(found["full"][1] - found["phi"][1]).mean() < short


def interrupted(method: Callable[..., object], calls: int) -> Callable[..., object]:
    left = [calls]

    def wrapper(*args: object, **kwargs: object) -> object:
        if left[0] == 0:
            raise KeyboardInterrupt
        left[0] -= 1
        return method(*args, **kwargs)

    return wrapper


def test_interrupted_training_gives_the_same_maps(
    tmp_path: Path, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = checkpoint("llama", tmp_path / "model")
    program.main(arguments(directory, text, tmp_path / "whole"), silent)
    argv = arguments(directory, text, tmp_path / "pieces")
    for owner, name, calls in (
        (program.Job, "_bar", 0),  # before the first prompt
        (torch.nn.Embedding, "forward", 2),  # two prompts are captured
        (HeadTraining, "_advance", 25),  # in the first head
        (HeadTraining, "_advance", 60),  # in the second
        (HeadTraining, "_finish", 1),  # before the third's end
    ):
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, interrupted(getattr(owner, name), calls))
            with pytest.raises(KeyboardInterrupt):
                program.main(argv, silent)
    said: list[str] = []
    program.main(argv, said.append)
    assert any("resumed, 2 heads are done" in line for line in said)
    name = "phi-128.safetensors"
    whole, pieces = load_file(tmp_path / "whole" / name), load_file(tmp_path / "pieces" / name)
    assert whole.keys() == pieces.keys()
    assert all(torch.equal(whole[k], pieces[k]) for k in whole)


def test_a_capture_that_was_cut_off_goes_on(
    tmp_path: Path, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = checkpoint("llama", tmp_path / "model")
    argv = arguments(directory, text, tmp_path / "maps", "--keep-captured")
    runs: list[int] = []
    forward = torch.nn.Embedding.forward

    def counted(self: torch.nn.Embedding, ids: torch.Tensor) -> torch.Tensor:
        if len(runs) == 3:
            raise KeyboardInterrupt
        runs.append(1)
        return forward(self, ids)

    with monkeypatch.context() as patch:
        patch.setattr(torch.nn.Embedding, "forward", counted)
        with pytest.raises(KeyboardInterrupt):
            program.main(argv, silent)
    said: list[str] = []
    program.main(argv, said.append)
    assert any("3 are there" in line for line in said)
    first = {p.name: p.read_bytes() for p in (tmp_path / "maps/work/captured-128").glob("*.bf16")}
    assert len(first) == 4 and all(any(data) for data in first.values())
    program.main([*arguments(directory, text, tmp_path / "again"), "--keep-captured"], silent)
    again = {p.name: p.read_bytes() for p in (tmp_path / "again/work/captured-128").glob("*.bf16")}
    assert first == again


def test_another_text_is_another_capture(tmp_path: Path, text: Path) -> None:
    directory = checkpoint("llama", tmp_path / "model")
    out = tmp_path / "maps"
    program.main(arguments(directory, text, out, "--keep-captured"), silent)
    before = load_file(out / "phi-128.safetensors")
    text.write_text("another text altogether, " * 300)
    said: list[str] = []
    program.main(arguments(directory, text, out, "--keep-captured"), said.append)
    assert not any("resumed" in line for line in said)
    after = load_file(out / "phi-128.safetensors")
    assert any(not torch.equal(before[k], after[k]) for k in before)


def test_what_cannot_be_trained_is_said(tmp_path: Path, text: Path) -> None:
    directory = checkpoint("llama", tmp_path / "model")
    with pytest.raises(SystemExit, match="smaller --length"):
        short = tmp_path / "short.txt"
        short.write_text("too short")
        program.main(arguments(directory, short, tmp_path / "maps"), silent)
    with pytest.raises(SystemExit, match="--from-start needs 4 texts"):
        program.main(arguments(directory, text, tmp_path / "maps", "--from-start"), silent)
    with pytest.raises(SystemExit):
        program.main(arguments(directory, text, tmp_path / "maps", "--length", "4096"), silent)
    softcap = tmp_path / "gemma2"
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(
        Gemma2Config(num_hidden_layers=2, sliding_window=32, query_pre_attn_scalar=16, **SIZES)
    ).save_pretrained(softcap)
    with pytest.raises(SystemExit, match="nothing to train"):
        program.main(arguments(softcap, text, tmp_path / "maps"), silent)
