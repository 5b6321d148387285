"""Describes a Hugging Face model to prefixd: geometry, and an identity that changes whenever keys
or values would. Models that cannot be spliced are refused with a sentence that says why."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import safetensors
import torch
from transformers import PreTrainedModel
from transformers.cache_utils import get_layer_types_and_kwargs

from prefixd import arrays
from prefixd.errors import InvalidArgument
from prefixd.hf_config import IRRELEVANT, STATIC_ROPE
from prefixd.model import Layer, ModelSpec
from prefixd.weights import checkpoint_digest, checkpoint_files

_IRRELEVANT = IRRELEVANT | {"rope_parameters"}  # these have a field of their own


def describe(
    model: PreTrainedModel,
    name: str | None = None,
    feature_maps: Sequence[str | Path] = (),
    checkpoint: str | Path | None = None,
) -> ModelSpec:
    """Returns the spec under which this model's prompts are stored. `name` None makes a name of the
    family and the fingerprint, so that two models never meet. Feature maps are checked against the
    digest of the checkpoint's files, so they need `checkpoint`."""
    config = model.config.get_text_config(decoder=True)
    layers, attention = attention_layers(model, config)
    dtype = arrays.dtype_name(_cache_dtype(attention))
    if dtype is None:
        raise InvalidArgument(
            f"this model computes keys in {_cache_dtype(attention)}; prefixd stores float32, float16 "
            "and bfloat16"
        )
    identity = {
        "architecture": str(config.model_type),
        "rope": _rope(config),
        "tensors": "blake2b:" + _tensor_digest(model),
        "config": "blake2b:" + _config_digest(config),
    }
    adapter = adapters(model)
    if adapter is not None:
        identity["adapter"] = adapter
    if checkpoint is not None:
        _check_loaded_from(model, Path(checkpoint))
        identity["weights"] = "blake2b:" + checkpoint_digest(Path(checkpoint))
    elif feature_maps:
        raise InvalidArgument(
            "feature maps belong to one checkpoint: pass checkpoint=DIR, so that its digest can be "
            "compared with the one they were trained for"
        )
    module: Any = attention[0]
    spec = ModelSpec(
        name="",
        layers=layers,
        n_q_heads=config.num_attention_heads,
        n_kv_heads=config.num_key_value_heads,
        key_dim=module.head_dim,
        dtype=dtype,
        identity=identity,
        feature_maps=[str(path) for path in feature_maps],
    )
    if name is None:
        text = json.dumps([spec.identity, json.loads(spec.to_json())["geometry"]], sort_keys=True)
        digest = hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
        name = f"{config.model_type}-{digest}"
    return ModelSpec(**{**spec.__dict__, "name": name})


def adapters(model: torch.nn.Module) -> str | None:
    """Describes which adapters (PEFT's) the layers apply, and how strongly: neither their names nor the parameters
    tell, because switching and disabling sets flags of the layers. None where no layer has any."""
    states: dict[str, dict[str, Any]] = {}
    for name, module in model.named_modules():
        active = getattr(module, "_active_adapter", None)
        if active is None:
            continue
        names = [active] if isinstance(active, str) else [str(one) for one in active]
        if getattr(module, "_disable_adapters", False):
            names = []  # whatever is active
        scaling = getattr(module, "scaling", None) or {}
        states[name] = {
            "active": names,
            "scaling": {one: float(scaling[one]) for one in names if one in scaling},
            "merged": [str(one) for one in getattr(module, "merged_adapters", ())],
        }
    if not states:
        return None
    kinds = {json.dumps(state, sort_keys=True) for state in states.values()}
    if len(kinds) == 1:
        return kinds.pop()
    text = json.dumps(states, sort_keys=True).encode()
    applied = sorted({one for state in states.values() for one in state["active"]})
    return json.dumps({"active": applied, "layers": "blake2b:" + hashlib.blake2b(text, digest_size=16).hexdigest()})


def differences(stored: ModelSpec, own: ModelSpec) -> str:
    """Returns what makes two models' prefixes incompatible, as a phrase; "" when nothing does."""
    found = []
    words = {"tensors": "weights", "weights": "checkpoint files", "rope": "RoPE settings"}
    for tag in sorted({*stored.identity, *own.identity}):
        theirs, ours = stored.identity.get(tag), own.identity.get(tag)
        if theirs == ours:
            continue
        if theirs is None or ours is None:
            which = "only the stored one names" if ours is None else "only this model names"
            found.append(f"{which} {words.get(tag, tag)}")
        else:
            found.append(
                f"{words.get(tag, tag)} differ ({_short(theirs)} stored, {_short(ours)} here)"
            )
    for field in ("dtype", "n_q_heads", "n_kv_heads", "key_dim"):
        theirs, ours = getattr(stored, field), getattr(own, field)
        if theirs != ours:
            found.append(f"{field} differs ({theirs} stored, {ours} here)")
    if len(stored.layers) != len(own.layers):
        found.append(f"the number of layers differs ({len(stored.layers)}, {len(own.layers)} here)")
    else:
        for index, (a, b) in enumerate(zip(stored.layers, own.layers, strict=True)):
            if not _same_layer(a, b):
                found.append(f"layer {index} differs ({a} stored, {b} here)")
                break
    return "; ".join(found)


def _same_layer(a: Layer, b: Layer) -> bool:
    # The store keeps both as float32.
    same = all(
        abs(x - y) <= 1e-6 * max(abs(x), abs(y))
        for x, y in ((a.scale, b.scale), (a.softcap, b.softcap))
    )
    return same and replace(a, scale=0, softcap=0) == replace(b, scale=0, softcap=0)


def _short(text: str) -> str:
    return text if len(text) <= 90 else text[:87] + "..."


def attention_layers(
    model: PreTrainedModel, config: Any
) -> tuple[list[Layer], list[torch.nn.Module]]:
    """Returns every layer's geometry and attention module, in order; refuses what cannot be
    spliced."""
    kind = type(model).__name__
    if getattr(model.config, "is_encoder_decoder", False):
        raise InvalidArgument(f"{kind} is an encoder-decoder; only decoders can be spliced")
    types, kwargs = get_layer_types_and_kwargs(config)
    modules: dict[int, torch.nn.Module] = {}
    for found in model.modules():
        if hasattr(found, "k_proj") and hasattr(found, "v_proj"):
            at: Any = getattr(found, "layer_idx", None)
            if at is not None:
                modules[int(at)] = found
    if sorted(modules) != list(range(len(types))):
        raise InvalidArgument(
            f"{kind} has {len(types)} layers, of which {len(modules)} attend with k_proj and v_proj; only "
            "decoders all of whose layers do (Llama, Qwen, Mistral, Gemma families) can be spliced"
        )
    layers = []
    for index, layer_type in enumerate(types):
        module: Any = modules[index]
        if layer_type not in ("full_attention", "sliding_attention"):
            raise InvalidArgument(
                f"layer {index} of {kind} is of type {layer_type}; only full and sliding-window attention "
                "can be spliced"
            )
        if getattr(module, "is_kv_shared_layer", False) or hasattr(module, "sinks"):
            raise InvalidArgument(
                f"layer {index} of {kind} shares keys with another layer or has learned sinks, which "
                "prefixd does not store"
            )
        if not getattr(module, "is_causal", True):
            raise InvalidArgument(
                f"layer {index} of {kind} is bidirectional; a prefix needs causal ones"
            )
        layers.append(
            Layer(
                scale=float(module.scaling),
                softcap=float(getattr(module, "attn_logit_softcapping", None) or 0.0),
                sliding_window=int(kwargs[index].get("sliding_window", 0)),
                **_own_shape(module, modules[0], config, f"layer {index} of {kind}"),
            )
        )
    return layers, [modules[index] for index in range(len(types))]


def _own_shape(module: Any, first: Any, config: Any, where: str) -> dict[str, Any]:
    """Returns the heads and dimensions in which a layer differs from the configuration and the first
    layer's head_dim."""
    dim = int(module.head_dim)
    widths = [getattr(part, "out_features", None) for part in (module.k_proj, module.v_proj)]
    heads = config.num_key_value_heads if widths[0] is None else widths[0] // dim
    if any(width is not None and width != heads * dim for width in widths):
        raise InvalidArgument(
            f"{where} has {widths[0]} key and {widths[1]} value dimensions, which are not the same number "
            f"of heads of {dim}"
        )
    groups = int(getattr(module, "num_key_value_groups", 0))
    own = {
        "n_q_heads": heads * groups if groups else config.num_attention_heads,
        "n_kv_heads": heads,
        "key_dim": dim,
        "value_dim": dim,
    }
    models = {
        "n_q_heads": config.num_attention_heads,
        "n_kv_heads": config.num_key_value_heads,
        "key_dim": int(first.head_dim),
        "value_dim": int(first.head_dim),
    }
    return {name: n for name, n in own.items() if n != models[name]}


def _cache_dtype(attention: list[torch.nn.Module]) -> torch.dtype:
    keys: Any = attention[0].k_proj
    dtype: torch.dtype = keys.weight.dtype
    if not dtype.is_floating_point:  # quantised weights compute in another dtype
        dtype = getattr(keys, "compute_dtype", None) or torch.get_default_dtype()
    return dtype


def _rope(config: Any) -> str:
    parameters = getattr(config, "rope_parameters", None)
    if not parameters:
        raise InvalidArgument(
            f"{config.model_type} has no RoPE parameters; keys of other position encodings are not stored"
        )
    per_type = parameters if "rope_type" not in parameters else {"": parameters}
    for where, values in per_type.items():
        if values is None:
            continue
        kind = values.get("rope_type", "default")
        if kind not in STATIC_ROPE:
            layers = f" of {where} layers" if where else ""
            raise InvalidArgument(
                f"RoPE{layers} is of type '{kind}', whose frequencies depend on the current length: keys "
                f"stored now would be wrong later. Spliced are {', '.join(STATIC_ROPE)}"
            )
    return json.dumps(parameters, sort_keys=True)


def _config_digest(config: Any) -> str:
    values = {
        key: value
        for key, value in config.to_dict().items()
        if key not in _IRRELEVANT and not key.startswith("_")
    }
    text = json.dumps(values, sort_keys=True, default=str)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def _tensor_digest(model: PreTrainedModel) -> str:
    """Returns the digest of every parameter in memory. The model keeps it until a parameter
    changes."""
    parameters = sorted(model.named_parameters(remove_duplicate=False), key=lambda item: item[0])
    state = [(name, p.data_ptr(), p._version, p.dtype) for name, p in parameters]
    known = getattr(model, "_prefixd_digest", None)
    if known is not None and known[0] == state:
        return str(known[1])
    digest = hashlib.blake2b(digest_size=32)
    for name, parameter in parameters:
        if parameter.is_meta:
            raise InvalidArgument(f"{name} has no data (meta device); load the model first")
        tensor = parameter.detach().to("cpu").contiguous()
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        data: Any = tensor.reshape(-1).view(torch.uint8).numpy()  # a buffer, although its stub does not say so
        digest.update(data)
    # nn.Module declares that its attributes are tensors and modules, so a plain assignment has no type.
    setattr(model, "_prefixd_digest", (state, digest.hexdigest()))  # noqa: B010
    return digest.hexdigest()


def _check_loaded_from(model: PreTrainedModel, directory: Path) -> None:
    """Refuses feature maps of a checkpoint for weights that were changed after loading it."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    compared = 0
    for path in checkpoint_files(directory):
        with safetensors.safe_open(path, framework="pt") as file:
            for name in file.keys():
                own = parameters.get(name)
                if own is None or not own.is_floating_point():
                    continue
                stored = file.get_tensor(name).to(own.dtype)
                compared += 1
                if not torch.equal(stored, own.detach().to("cpu")):
                    raise InvalidArgument(
                        f"{name} is not what {directory} holds: the model was changed since, or loaded "
                        "from elsewhere"
                    )
    if compared == 0:
        raise InvalidArgument(f"{directory} holds none of this model's tensors by name")
