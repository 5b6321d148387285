"""Describes the model that an engine serves to prefixd: geometry, and an identity that changes
whenever keys or values would. What the connector cannot keep is refused with a sentence."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prefixd.errors import InvalidArgument
from prefixd.hf_config import IRRELEVANT, STATIC_ROPE
from prefixd.model import Layer, ModelSpec

if TYPE_CHECKING:
    from vllm.config import VllmConfig

DTYPES = {"torch.float32": "f32", "torch.float16": "f16", "torch.bfloat16": "bf16"}


def describe(config: VllmConfig, weights: str = "") -> ModelSpec:
    """Returns the spec under which this engine's prompts are stored; `weights` names them instead of
    the digest of their files. Its name is made of all that it says, so that two models never meet."""
    refuse(config)
    model = config.model_config
    text = model.hf_text_config
    n_layers = model.get_total_num_hidden_layers()
    dim = model.get_head_size()
    layer = Layer(
        scale=float(getattr(text, "query_pre_attn_scalar", None) or dim) ** -0.5,
        softcap=float(getattr(text, "attn_logit_softcapping", None) or 0.0),
    )
    identity = {
        "engine": "vllm",
        "architecture": str(getattr(text, "model_type", "")),
        "rope": json.dumps(rope(text), sort_keys=True, default=str),
        "config": "blake2b:" + _digest(text),
        "weights": weights or "blake2b:" + checkpoint_digest(model.model),
        "quantisation": str(model.quantization or "none"),
    }
    spec = ModelSpec(
        name="",
        layers=[layer] * n_layers,
        n_q_heads=int(text.num_attention_heads),
        n_kv_heads=model.get_total_num_kv_heads(),
        key_dim=dim,
        dtype=DTYPES[str(model.dtype)],
        identity=identity,
    )
    said = json.dumps([identity, spec.geometry()], sort_keys=True)
    name = f"vllm-{identity['architecture']}-{hashlib.blake2b(said.encode(), digest_size=8).hexdigest()}"
    return replace(spec, name=name)


def refuse(config: VllmConfig) -> None:
    """Raises InvalidArgument for what the connector does not keep."""
    model, cache, parallel = config.model_config, config.cache_config, config.parallel_config
    text = model.hf_text_config
    reasons = {
        "a latent cache (MLA) has no keys and values by head": model.use_mla,
        f"a cache of {cache.cache_dtype} holds scaled numbers: prefixd stores float32, float16 and bfloat16; leave "
        "kv_cache_dtype at auto": cache.cache_dtype != "auto",
        f"the cache is in {model.dtype}, and prefixd stores float32, float16 and bfloat16": str(model.dtype)
        not in DTYPES,
        "pipeline parallelism was not tried with the connector": parallel.pipeline_parallel_size > 1,
        "it has more ranks than KV heads, so that two would hold the same one": parallel.tensor_parallel_size
        > model.get_total_num_kv_heads(),
        "context parallelism was not tried with the connector": parallel.decode_context_parallel_size > 1,
        "speculative decoding keeps drafted tokens in the cache and was not tried with the connector": bool(
            config.speculative_config
        ),
        "sliding-window layers were not tried with the connector": bool(model.get_sliding_window()),
        "encoder-decoders have no stored prompts": bool(model.is_encoder_decoder),
        "pooling models were not tried with the connector": model.runner_type != "generate",
    }
    for reason, given in reasons.items():
        if given:
            raise InvalidArgument(f"prefixd cannot store the prompts of this engine: {reason}")
    for kind in _rope_types(rope(text)):
        if kind not in STATIC_ROPE:
            raise InvalidArgument(
                f"prefixd cannot store the prompts of this engine: RoPE of type '{kind}' has frequencies that depend "
                f"on the current length, so keys would be wrong later. Stored are {', '.join(STATIC_ROPE)}"
            )


def rope(text: Any) -> dict[str, Any]:
    """Returns the RoPE settings, wherever this family's configuration has them."""
    parameters = getattr(text, "rope_parameters", None) or {}
    if not parameters and getattr(text, "rope_theta", None) is None:
        raise InvalidArgument(
            "prefixd cannot store the prompts of this engine: its configuration has no RoPE settings, and keys of "
            "other position encodings are not stored"
        )
    return {"theta": getattr(text, "rope_theta", None), **dict(parameters)}


def _rope_types(settings: dict[str, Any]) -> list[str]:
    each = [settings, *(value for value in settings.values() if isinstance(value, dict))]
    return [str(one.get("rope_type", one.get("type", "default"))) for one in each]


def _digest(text: Any) -> str:
    values = {k: v for k, v in text.to_dict().items() if k not in IRRELEVANT and not k.startswith("_")}
    return hashlib.blake2b(json.dumps(values, sort_keys=True, default=str).encode(), digest_size=16).hexdigest()


def checkpoint_digest(model: str) -> str:
    """Returns the BLAKE2b-256 of a checkpoint's files of weights, in the order of their names."""
    directory = Path(model)
    files = sorted(directory.glob("*.safetensors")) or sorted(directory.glob("*.bin"))
    if not files:
        raise InvalidArgument(
            f"the weights of {model} are not files of a directory (*.safetensors), so that prefixd cannot tell them "
            "from others: name them in kv_connector_extra_config, \"weights\": \"NAME@REVISION\""
        )
    digest = hashlib.blake2b(digest_size=32)
    for path in files:
        with path.open("rb") as file:
            while chunk := file.read(1 << 24):
                digest.update(chunk)
    return digest.hexdigest()
