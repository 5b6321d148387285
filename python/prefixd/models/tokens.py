"""Makes Hugging Face's tokenizer files from the vocabulary and merges of a GGUF file."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE

from prefixd.errors import PrefixdError

if TYPE_CHECKING:
    from prefixd.models.checkpoint import Metadata

_CONTROL = 3  # llama.cpp's LLAMA_TOKEN_TYPE_CONTROL


def _splits(kind: str) -> pre_tokenizers.PreTokenizer:
    """Returns how text is cut before merges apply; by the name that llama.cpp gives it."""
    if kind == "smollm":  # each digit by itself, then GPT-2's rule
        return pre_tokenizers.Sequence(
            [
                pre_tokenizers.Digits(individual_digits=True),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
            ]
        )
    if kind in ("default", "gpt-2"):
        return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    raise PrefixdError(f"the tokenizer's rule '{kind}' for cutting text is not known; smollm and gpt-2 are")


def tokenizer_of(meta: Metadata) -> Tokenizer:
    if (model := meta.need("tokenizer.ggml.model")) != "gpt2":
        raise PrefixdError(f"a tokenizer '{model}' is not converted; byte-level BPE (gpt2) is")
    tokens: list[str] = meta.need("tokenizer.ggml.tokens")
    merges = [tuple(merge.split(" ")) for merge in meta.need("tokenizer.ggml.merges")]
    if wrong := [merge for merge in merges if len(merge) != 2]:
        raise PrefixdError(f"the tokenizer's merge '{' '.join(wrong[0])}' is no pair")
    tokenizer = Tokenizer(BPE(vocab={token: n for n, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = _splits(meta.get("tokenizer.ggml.pre", "default"))
    tokenizer.decoder = decoders.ByteLevel()
    kinds = meta.need("tokenizer.ggml.token_type")
    tokenizer.add_special_tokens(
        [AddedToken(t, special=True, normalized=False) for t, k in zip(tokens, kinds, strict=True) if k == _CONTROL]
    )
    return tokenizer


def tokenizer_files(meta: Metadata, longest: int) -> dict[str, str]:
    """Returns the texts of the tokenizer's files, by name. longest: tokens that the model reads."""
    tokens: list[str] = meta.need("tokenizer.ggml.tokens")

    def token(key: str) -> str | None:
        at = meta.get(f"tokenizer.ggml.{key}_token_id")
        return None if at is None else tokens[at]

    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": longest,
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "bos_token": token("bos"),
        "eos_token": token("eos"),
        "unk_token": token("unknown"),
        "pad_token": token("padding"),
    }
    files = {
        "tokenizer.json": tokenizer_of(meta).to_str(pretty=True) + "\n",
    }
    if template := meta.get("tokenizer.chat_template"):
        files["chat_template.jinja"] = config["chat_template"] = template
    files["tokenizer_config.json"] = json.dumps(config, indent=2, ensure_ascii=False) + "\n"
    return files
