"""Turns a GGUF file of a Llama model into a checkpoint as Hugging Face has it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import safetensors.numpy

from prefixd.errors import PrefixdError
from prefixd.models.tokens import tokenizer_files

Log = Callable[[str], None]
Array = np.ndarray[Any, np.dtype[np.float32]]

_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_WHOLE = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}


class Metadata:
    """The file's metadata; missing ones are named."""

    def __init__(self, reader: gguf.GGUFReader, file: Path) -> None:
        self._reader = reader
        self._file = file

    def get(self, key: str, default: Any = None) -> Any:
        field = self._reader.fields.get(key)
        return default if field is None else field.contents()

    def need(self, key: str) -> Any:
        if (value := self.get(key)) is None:
            raise PrefixdError(f"{self._file}: the metadata has no {key}")
        return value


def config_of(meta: Metadata, tied: bool) -> dict[str, Any]:
    """Returns config.json. Refuses what a plain Llama is not."""
    if (arch := meta.need("general.architecture")) != "llama":
        raise PrefixdError(f"the GGUF file holds a model of architecture '{arch}'; only llama is converted")
    if (scaling := meta.get("llama.rope.scaling.type", "none")) != "none":
        raise PrefixdError(f"RoPE scaling '{scaling}' is not converted")
    if meta.get("llama.expert_count", 0):
        raise PrefixdError("a mixture of experts is not converted")
    heads, width = int(meta.need("llama.attention.head_count")), int(meta.need("llama.embedding_length"))
    head_dim = int(meta.get("llama.attention.key_length", width // heads))
    if int(meta.get("llama.rope.dimension_count", head_dim)) != head_dim:
        raise PrefixdError("RoPE over a part of each head is not converted")
    theta = float(meta.get("llama.rope.freq_base", 10000.0))
    # Metadata are float32; the number that was meant has fewer digits.
    eps = float(np.format_float_positional(np.float32(meta.need("llama.attention.layer_norm_rms_epsilon"))))
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": len(meta.need("tokenizer.ggml.tokens")),
        "hidden_size": width,
        "intermediate_size": int(meta.need("llama.feed_forward_length")),
        "num_hidden_layers": int(meta.need("llama.block_count")),
        "num_attention_heads": heads,
        "num_key_value_heads": int(meta.get("llama.attention.head_count_kv", heads)),
        "head_dim": head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": eps,
        "rope_theta": theta,
        "rope_scaling": None,
        "rope_parameters": {"rope_type": "default", "rope_theta": theta},
        "max_position_embeddings": int(meta.need("llama.context_length")),
        "tie_word_embeddings": tied,
        "attention_bias": False,
        "mlp_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": meta.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": meta.get("tokenizer.ggml.eos_token_id"),
        "pad_token_id": meta.get("tokenizer.ggml.padding_token_id"),
        "torch_dtype": "float32",
        "dtype": "float32",
        "use_cache": True,
    }


def _in_halves(rows: Array, heads: int) -> Array:
    """Undoes llama.cpp's order of a projection's rows, in which RoPE's pairs lie side by side: Hugging
    Face has the first element of all pairs of a head, then the second."""
    n, width = rows.shape
    return np.ascontiguousarray(
        rows.reshape(heads, n // heads // 2, 2, width).swapaxes(1, 2).reshape(n, width)
    )


def tensors_of(reader: gguf.GGUFReader, config: dict[str, Any]) -> Iterator[tuple[str, Array]]:
    """Yields names and float32 numbers as Hugging Face has them."""
    for tensor in reader.tensors:
        if tensor.name == "rope_freqs.weight":
            raise PrefixdError("RoPE with factors for each frequency is not converted")
        try:
            values = gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float32, copy=False)
        except NotImplementedError:
            raise PrefixdError(
                f"{tensor.name} is quantised as {tensor.tensor_type.name}, which is not converted"
            ) from None
        values = values.reshape([int(n) for n in reversed(tensor.shape)])
        if tensor.name in _WHOLE:
            yield _WHOLE[tensor.name], values
            continue
        parts = tensor.name.split(".")
        if len(parts) != 4 or parts[0] != "blk" or parts[3] != "weight" or parts[2] not in _NAMES:
            raise PrefixdError(f"the GGUF file has a tensor {tensor.name}, which a plain Llama has not")
        if parts[2] == "attn_q":
            values = _in_halves(values, config["num_attention_heads"])
        elif parts[2] == "attn_k":
            values = _in_halves(values, config["num_key_value_heads"])
        yield f"model.layers.{parts[1]}.{_NAMES[parts[2]]}.weight", values


def _write(path: Path, text: str) -> None:
    part = path.with_name(path.name + ".part")
    part.write_text(text, encoding="utf-8")
    part.replace(path)


def convert(file: Path, folder: Path, log: Log = print) -> None:
    """Writes config.json, model.safetensors, tokenizer.json, tokenizer_config.json,
    generation_config.json and chat_template.jinja into `folder`."""
    log("reading the GGUF file")
    reader = gguf.GGUFReader(file)
    meta = Metadata(reader, file)
    config = config_of(meta, tied=all(t.name != "output.weight" for t in reader.tensors))
    folder.mkdir(parents=True, exist_ok=True)
    log("writing the tokenizer")
    for name, text in tokenizer_files(meta, config["max_position_embeddings"]).items():
        _write(folder / name, text)
    tensors: dict[str, Array] = {}
    for n, (name, values) in enumerate(tensors_of(reader, config), start=1):
        tensors[name] = values
        if n % 50 == 0 or n == len(reader.tensors):
            log(f"weights: {n} of {len(reader.tensors)} tensors")
    expected = 9 * config["num_hidden_layers"] + 2 + (not config["tie_word_embeddings"])
    if len(tensors) != expected:
        raise PrefixdError(f"{file} has {len(tensors)} tensors; this model needs {expected}")
    part = folder / "model.safetensors.part"
    safetensors.numpy.save_file(tensors, part, metadata={"format": "pt"})
    part.chmod(0o644)  # the library makes files that only their owner reads
    part.replace(folder / "model.safetensors")
    tokens = {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    _write(folder / "generation_config.json", json.dumps(tokens, indent=2) + "\n")
    _write(folder / "config.json", json.dumps(config, indent=2) + "\n")
