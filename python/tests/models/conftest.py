"""Makes a small GGUF model of random numbers, as llama.cpp writes one, and what must come of it."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import gguf
import numpy as np
import pytest

LAYERS, HEADS, KV_HEADS, DIM, FFN = 2, 4, 2, 32, 96
WIDTH = HEADS * DIM
TEXT = [chr(n) for n in (*range(33, 127), *range(161, 173), *range(174, 256), *range(256, 324))]
TOKENS = ["<end>", "<start>", *TEXT, "he", "Ġt", "Ġthe", "12"]
MERGES = ["h e", "Ġ t", "Ġt he", "1 2"]
TEMPLATE = "{% for message in messages %}<start>{{ message['content'] }}<end>{% endfor %}"


@dataclass
class Model:
    file: Path
    tensors: dict[str, np.ndarray]  # by Hugging Face's names, before they are quantised


def side_by_side(rows: np.ndarray, heads: int) -> np.ndarray:
    """llama.cpp's order of a projection: row 2i is element i of a head, row 2i + 1 element i + dim/2."""
    out = np.empty_like(rows)
    dim = len(rows) // heads
    for head in range(heads):
        for i in range(dim // 2):
            out[head * dim + 2 * i] = rows[head * dim + i]
            out[head * dim + 2 * i + 1] = rows[head * dim + dim // 2 + i]
    return out


def write_model(file: Path, architecture: str = "llama", rule: str = "smollm", tied: bool = True) -> Model:
    seed = os.environ.get("PREFIXD_SEED")
    rng = np.random.default_rng(int(seed) if seed else None)
    hf: dict[str, np.ndarray] = {}
    writer = gguf.GGUFWriter(str(file), architecture)
    writer.add_block_count(LAYERS)
    writer.add_context_length(512)
    writer.add_embedding_length(WIDTH)
    writer.add_feed_forward_length(FFN)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_freq_base(50000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(rule)
    writer.add_token_list(TOKENS)
    writer.add_token_types([3, 3] + [1] * (len(TOKENS) - 2))
    writer.add_token_merges(MERGES)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(0)
    writer.add_chat_template(TEMPLATE)

    def add(name: str, theirs: str, shape: tuple[int, ...], kind: gguf.GGMLQuantizationType, heads: int = 0) -> None:
        values = rng.standard_normal(shape, np.float32)
        hf[theirs] = values
        stored = side_by_side(values, heads) if heads else values
        if kind != gguf.GGMLQuantizationType.F32:
            stored = gguf.quants.quantize(stored, kind)
        writer.add_tensor(name, stored, raw_dtype=kind)

    q4, q8, f32 = (gguf.GGMLQuantizationType[name] for name in ("Q4_1", "Q8_0", "F32"))
    add("token_embd.weight", "model.embed_tokens.weight", (len(TOKENS), WIDTH), q8)
    add("output_norm.weight", "model.norm.weight", (WIDTH,), f32)
    if not tied:
        add("output.weight", "lm_head.weight", (len(TOKENS), WIDTH), q8)
    for n in range(LAYERS):
        theirs, kv = f"model.layers.{n}.", KV_HEADS * DIM
        add(f"blk.{n}.attn_norm.weight", theirs + "input_layernorm.weight", (WIDTH,), f32)
        add(f"blk.{n}.attn_q.weight", theirs + "self_attn.q_proj.weight", (WIDTH, WIDTH), q4, HEADS)
        add(f"blk.{n}.attn_k.weight", theirs + "self_attn.k_proj.weight", (kv, WIDTH), q4, KV_HEADS)
        add(f"blk.{n}.attn_v.weight", theirs + "self_attn.v_proj.weight", (kv, WIDTH), q4)
        add(f"blk.{n}.attn_output.weight", theirs + "self_attn.o_proj.weight", (WIDTH, WIDTH), q4)
        add(f"blk.{n}.ffn_norm.weight", theirs + "post_attention_layernorm.weight", (WIDTH,), f32)
        add(f"blk.{n}.ffn_gate.weight", theirs + "mlp.gate_proj.weight", (FFN, WIDTH), q4)
        add(f"blk.{n}.ffn_up.weight", theirs + "mlp.up_proj.weight", (FFN, WIDTH), q4)
        add(f"blk.{n}.ffn_down.weight", theirs + "mlp.down_proj.weight", (WIDTH, FFN), q4)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return Model(file, hf)


@pytest.fixture
def model(tmp_path: Path) -> Model:
    return write_model(tmp_path / "model.gguf")
