"""Tests checkpoints made of GGUF files: numbers, order of rows, configuration, tokenizer, refusals."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy
from tokenizers import Tokenizer

from prefixd.errors import PrefixdError
from prefixd.models.checkpoint import convert
from tests.models.conftest import DIM, HEADS, KV_HEADS, LAYERS, TEMPLATE, WIDTH, Model, write_model


def quiet(_: str) -> None: ...


def blocks(values: np.ndarray) -> np.ndarray:
    return values.reshape(-1, 32)


@pytest.mark.parametrize("tied", [True, False])
def test_every_number_is_the_one_that_its_block_stands_for(tmp_path: Path, tied: bool) -> None:
    model = write_model(tmp_path / "m.gguf", tied=tied)
    convert(model.file, tmp_path / "out", quiet)
    made = safetensors.numpy.load_file(tmp_path / "out/model.safetensors")
    assert set(made) == set(model.tensors)
    for name, wanted in model.tensors.items():
        got = made[name]
        assert got.shape == wanted.shape and got.dtype == np.float32, name
        if "norm" in name:
            np.testing.assert_array_equal(got, wanted, err_msg=name)
            continue
        # A block of 32 numbers has equal steps: a number is off by half of one at most (its scale is
        # a float16). Rows in a wrong order would be off by their whole spread.
        parts = blocks(wanted)
        eight_bits = "embed" in name or "lm_head" in name
        step = np.abs(parts).max(1) / 127 if eight_bits else np.ptp(parts, axis=1) / 15
        off = np.abs(blocks(got) - parts).max(1)
        assert (off <= 0.5 * step + 4e-3 * np.abs(parts).max(1)).all(), name


def test_the_configuration_is_hugging_faces(model: Model, tmp_path: Path) -> None:
    convert(model.file, tmp_path / "out", quiet)
    config = json.loads((tmp_path / "out/config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert config["num_hidden_layers"] == LAYERS and config["hidden_size"] == WIDTH
    assert (config["num_attention_heads"], config["num_key_value_heads"]) == (HEADS, KV_HEADS)
    assert config["head_dim"] == DIM and config["rope_theta"] == 50000.0
    assert config["rms_norm_eps"] == 1e-5  # not 9.99999974e-06, as float32 has it
    assert config["tie_word_embeddings"] is True
    assert (config["bos_token_id"], config["eos_token_id"]) == (1, 0)
    assert (tmp_path / "out/chat_template.jinja").read_text() == TEMPLATE
    assert json.loads((tmp_path / "out/tokenizer_config.json").read_text())["eos_token"] == "<end>"


def test_text_is_cut_as_the_model_was_trained(model: Model, tmp_path: Path) -> None:
    convert(model.file, tmp_path / "out", quiet)
    tokenizer = Tokenizer.from_file(str(tmp_path / "out/tokenizer.json"))
    assert tokenizer.encode("on the 12").tokens == ["o", "n", "Ġthe", "Ġ", "1", "2"]
    assert tokenizer.encode("<start>he<end>").tokens == ["<start>", "he", "<end>"]
    for text in ("a\n\n  b\t é", "日本 🙂", " leading", ""):
        assert tokenizer.decode(tokenizer.encode(text).ids) == text
    other = write_model(tmp_path / "gpt2.gguf", rule="gpt-2")
    convert(other.file, tmp_path / "gpt2", quiet)
    joined = Tokenizer.from_file(str(tmp_path / "gpt2/tokenizer.json"))
    assert joined.encode("x12").tokens == ["x", "12"]  # digits stay together there


def test_what_is_no_plain_llama_is_refused(tmp_path: Path) -> None:
    foreign = write_model(tmp_path / "a.gguf", architecture="gemma")
    with pytest.raises(PrefixdError, match="architecture 'gemma'; only llama"):
        convert(foreign.file, tmp_path / "out", quiet)
    unknown = write_model(tmp_path / "b.gguf", rule="deepseek-coder")
    with pytest.raises(PrefixdError, match="rule 'deepseek-coder'"):
        convert(unknown.file, tmp_path / "out", quiet)
    assert not (tmp_path / "out/model.safetensors").exists()
