"""Runs small models of every family, natively and spliced, for the tests of PrefixCache."""

from __future__ import annotations

import copy
from pathlib import Path

import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    LlamaConfig,
    MistralConfig,
    PreTrainedModel,
    Qwen3Config,
)
from transformers.models.llama.modeling_llama import LlamaAttention

import prefixd
from prefixd.transformers import PrefixCache
from tests.conftest import ROOT

TINY = ROOT / "models/prefixd-tiny"
VOCAB = 160
FULL = prefixd.Policy(mode="full")
SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": VOCAB,
    "max_position_embeddings": 8192,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "initializer_range": 0.15,  # makes scores differ
}
CONFIGS = {
    "llama": LlamaConfig(num_hidden_layers=2, **SIZES),
    "llama3-rope": LlamaConfig(
        num_hidden_layers=2,
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": 10000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 1024,
        },
        **SIZES,
    ),
    "qwen3": Qwen3Config(num_hidden_layers=2, **SIZES),
    "mistral": MistralConfig(num_hidden_layers=2, sliding_window=None, **SIZES),
    "mistral-window": MistralConfig(num_hidden_layers=2, sliding_window=32, **SIZES),
    "gemma2": Gemma2Config(
        num_hidden_layers=4, sliding_window=32, query_pre_attn_scalar=16, **SIZES
    ),
    "gemma3": Gemma3TextConfig(
        num_hidden_layers=4,
        sliding_window=32,
        layer_types=["sliding_attention", "full_attention"] * 2,
        query_pre_attn_scalar=16,
        **SIZES,
    ),
}


def make(family: str, seed: int = 0, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    if family == "prefixd-tiny":
        return AutoModelForCausalLM.from_pretrained(TINY, dtype=dtype).eval()
    torch.manual_seed(seed)
    config = copy.deepcopy(CONFIGS[family])
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").to(dtype).eval()
    return model


def make_uneven(seed: int = 0) -> PreTrainedModel:
    """Returns a Llama whose second layer has one KV head, and whose third has half the query heads."""
    torch.manual_seed(seed)
    config = LlamaConfig(num_hidden_layers=3, **SIZES)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    for index, heads in ((1, {"num_key_value_heads": 1}), (2, {"num_attention_heads": 2})):
        own = copy.deepcopy(config)
        for name, n in heads.items():
            setattr(own, name, n)
        attention = LlamaAttention(own, index)
        for parameter in attention.parameters():
            torch.nn.init.normal_(parameter, std=0.15)
        attention.config = config  # of the model, which chooses how layers attend
        model.model.layers[index].self_attn = attention
    return model.eval()


def tokens(n: int, seed: int = 0, batch: int = 1) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCAB, (batch, n), generator=generator)


@torch.no_grad()
def native(
    model: PreTrainedModel, ids: torch.Tensor, mask: torch.Tensor | None = None
) -> torch.Tensor:
    """Returns logits of a fresh pass, by the model's own eager attention."""
    own = copy.deepcopy(model)
    # Eager attention is used where it is affordable, or alone supports softcap.
    softcap = getattr(own.config, "attn_logit_softcapping", None)
    own.set_attn_implementation("eager" if ids.shape[1] < 1000 or softcap else "sdpa")
    positions = None if mask is None else (mask.long().cumsum(-1) - 1).clamp(min=0)
    return own(ids, attention_mask=mask, position_ids=positions, use_cache=False).logits


@torch.no_grad()
def spliced(model: PreTrainedModel, ids: torch.Tensor, cache: PrefixCache) -> torch.Tensor:
    """Returns logits of the tokens that are not stored."""
    return model(ids[:, cache.get_seq_length() :], past_key_values=cache).logits


def open_store(tmp_path: Path) -> prefixd.Store:
    return prefixd.open(tmp_path / "kv", host_tier_bytes=128 << 20, min_free_bytes=0, threads=2)
