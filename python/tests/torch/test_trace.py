"""Traces hold what a model's attention saw: its own outputs follow from them."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from transformers import Gemma3TextConfig, LlamaConfig, PreTrainedModel
from transformers.models.gemma3 import Gemma3ForCausalLM
from transformers.models.llama import LlamaForCausalLM

from prefixd.errors import InvalidArgument
from prefixd.evaluate.compare.chat import ByteForm
from prefixd.trace import Conversation, Turn, record
from prefixd.trace.__main__ import main
from prefixd.trace.conversations import KINDS, make
from prefixd.trace.record import FORMAT, SAMPLES, positions

SMALL = {
    "vocab_size": 300, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 1024,
}


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    torch.manual_seed(3)
    return LlamaForCausalLM(LlamaConfig(**SMALL)).eval()


def silent(*_: object) -> None:
    pass


def test_steps_attend_to_the_prompt_as_the_model_does(model: PreTrainedModel) -> None:
    prompt = torch.randint(0, 256, (600,), generator=torch.Generator().manual_seed(0)).tolist()
    turns = [Turn([5, 6, 7], [], 4, ()), Turn([], [8, 9, 10, 11]), Turn([12], [], 40, (299,))]
    trace = record(model, Conversation("test", "made", prompt, lambda: iter(turns)), 10, silent)
    assert trace.turns == [4, 4, 2]
    assert trace.steps[0] == 7 and trace.steps[4:8] == [8, 9, 10, 11] and trace.steps[8] == 12
    # The model itself, over prompt and first turn: the step of token 7 stands at 602.
    ids = torch.tensor([[*prompt, 5, 6, *trace.steps[:4]]])
    with torch.no_grad():
        model.set_attn_implementation("eager")
        native = model(ids, use_cache=False, output_attentions=True)
    assert [int(t) for t in native.logits[0, 602:605].argmax(-1)] == trace.steps[1:4]
    for layer, weights in enumerate(native.attentions):
        got = trace.layers[layer]
        assert got.k is not None and got.v is not None
        assert got.k.shape == got.v.shape == (2, 600, 16) and got.k.dtype == torch.bfloat16
        keys = got.k.float().repeat_interleave(2, dim=0)
        for at, q in [(602, got.steps[0]), (605, got.steps[3])]:
            own = torch.softmax(torch.einsum("hd,htd->ht", q, keys) * trace.scales[layer][0], -1)
            theirs = weights[0, :, at, :600]
            # Keys are rounded to bf16.
            assert torch.allclose(own, theirs / theirs.sum(-1, keepdim=True), atol=2e-4)
        for at, q in zip(trace.sampled_at, got.samples, strict=True):
            own = torch.softmax(torch.einsum("hd,htd->ht", q, keys[:, : at + 1]) * trace.scales[layer][0], -1)
            assert torch.allclose(own, weights[0, :, at, : at + 1], atol=2e-4)


def test_samples_lie_in_the_last_quarter() -> None:
    for tokens in (600, 7600):
        at = positions(tokens, SAMPLES)
        assert len(at) == SAMPLES and sorted(set(at)) == at
        assert at[0] == tokens - tokens // 4 and at[-1] < tokens


def test_turns_are_taken_until_there_are_steps_enough(model: PreTrainedModel) -> None:
    endless = Conversation("test", "made", [1] * 520, lambda: itertools.repeat(Turn([2], [], 3, ())))
    trace = record(model, endless, 8, silent)
    assert trace.turns == [3, 3, 2] and len(trace.layers[1].steps) == 8


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_is_asked_twice(kind: str) -> None:
    turns = [*make(kind, ByteForm(), 4000, 128, 0).turns()]
    asked = [(*t.read, *t.forced) for t in turns]
    assert asked and len(set(asked)) == len(asked)
    assert sum(t.at_most + len(t.forced) for t in turns) >= 128


def test_windows_are_refused() -> None:
    gemma = Gemma3ForCausalLM(Gemma3TextConfig(**SMALL, sliding_window=16)).eval()
    with pytest.raises(InvalidArgument, match="sliding window"):
        record(gemma, Conversation("test", "made", [1] * 520, lambda: iter([])), 1, silent)


def test_the_command_writes_a_file_once(
    model: PreTrainedModel, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model.save_pretrained(tmp_path / "model")
    (tmp_path / "text.txt").write_text("A store keeps what a model read. " * 40)
    args = ["--model", str(tmp_path / "model"), "--out", str(tmp_path / "out"), "--tokens", "700", "--device", "cpu"]
    own = [*args, "--document", str(tmp_path / "text.txt")]
    assert main([*own, "--steps", "20"]) == 0
    with safe_open(tmp_path / "out/document.safetensors", "pt") as file:
        metadata = file.metadata()
        assert metadata["format"] == FORMAT and metadata["kind"] == "continued"
        assert len(json.loads(metadata["layers"])) == 2 and json.loads(metadata["turns"]) == [20]
        assert file.get_tensor("tokens").tolist()[1:9] == list(b"A store ")
        assert file.get_tensor("layers.1.steps").shape == (20, 4, 16)
        assert file.get_tensor("layers.1.samples").shape == (SAMPLES, 4, 16)
    assert main([*own, "--steps", "9", "--question", "What is kept?"]) == 0
    with safe_open(tmp_path / "out/document.safetensors", "pt") as file:
        assert file.metadata()["kind"] == "asked" and sum(json.loads(file.metadata()["turns"])) == 9
    assert main([*own, "--steps", "800"]) == 1
    assert "smaller --tokens or --steps" in capsys.readouterr().err
    for wrong in (["--kinds", "poems"], ["--question", "Who?"], ["--tokens", "5"]):
        with pytest.raises(SystemExit):
            main([*args, *wrong])
