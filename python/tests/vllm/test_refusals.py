"""Tests what the connector refuses, and what it knows about vLLM's kernels, without an engine."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from vllm import _custom_ops as ops

import prefixd
from prefixd.vllm import PrefixdConnector, identity, layout
from prefixd.vllm.options import Options, check_role
from prefixd.vllm.versions import TRIED, check


def test_other_versions_are_refused() -> None:
    for version in TRIED:
        check(version)
        check(version + "+cpu")
    with pytest.raises(prefixd.FailedPrecondition, match=r"0\.33\.0.*install one of those"):
        check("0.33.0")


@pytest.mark.parametrize(
    ("given", "what"),
    [
        ({}, "needs 'prefixd'"),
        ({"prefixd": "/d", "tennant": "a"}, "no 'tennant'; prefixd takes .*tenant"),
        ({"prefixd": "/d", "store": "yes"}, "'store' .* cannot be 'yes'"),
        ({"prefixd": "/d", "min_tokens": -1}, "0 or more"),
        ({"prefixd": "/d", "call_seconds": 0}, "above 0"),
        ({"prefixd": "/d", "commit_seconds": 0}, "above 0"),
        ({"prefixd": "/d", "load_mib": 0}, "above 0"),
        ({"prefixd": "/d", "daemon": "--memory 8GiB"}, "'daemon' .* is a list of arguments"),
        ({"prefixd": "/d", "attach": True, "load": False}, '"attach" needs "load"'),
        ({"prefixd": "/d", "policy": {}}, '"policy" .* needs "attach": true'),
        ({"prefixd": "/d", "attach_tokens": 1}, '"attach_tokens" .* needs "attach": true'),
    ],
)
def test_options_are_checked(given: dict[str, Any], what: str) -> None:
    with pytest.raises(prefixd.InvalidArgument, match=what):
        Options.read(given)
    assert Options.read({"prefixd": "/d"}).directory == Path("/d")
    assert Options.read({"prefixd": "unix:/s"}).directory is None


@pytest.mark.parametrize("role", ["kv_producer", "kv_consumer"])
def test_half_a_connector_is_refused(role: str) -> None:
    check_role("kv_both")
    with pytest.raises(prefixd.InvalidArgument, match=f"'{role}', and the connector knows \"kv_both\" alone"):
        check_role(role)


def test_a_reset_of_what_is_stored_is_not_claimed() -> None:
    connector = PrefixdConnector.__new__(PrefixdConnector)  # none of its parts is asked
    assert connector.reset_cache() is False


def config(**changes: Any) -> Any:
    """Stands for vLLM's configuration of a model that is served."""
    text = SimpleNamespace(rope_parameters={"rope_type": "default", "rope_theta": 1e4})
    parts: dict[str, dict[str, Any]] = {
        "model_config": {
            "hf_text_config": text,
            "use_mla": False,
            "get_total_num_kv_heads": lambda: 2,
            "dtype": torch.bfloat16,
            "get_sliding_window": lambda: None,
            "is_encoder_decoder": False,
            "runner_type": "generate",
        },
        "cache_config": {"cache_dtype": "auto"},
        "parallel_config": {
            "pipeline_parallel_size": 1,
            "tensor_parallel_size": 1,
            "decode_context_parallel_size": 1,
        },
    }
    for values in parts.values():
        values.update({name: value for name, value in changes.items() if name in values})
    made = {name: SimpleNamespace(**values) for name, values in parts.items()}
    return SimpleNamespace(**made, speculative_config=changes.get("speculative_config"))


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"use_mla": True}, "latent cache"),
        ({"cache_dtype": "fp8"}, "cache of fp8 holds scaled numbers"),
        ({"dtype": torch.float64}, "float64"),
        ({"pipeline_parallel_size": 2}, "pipeline"),
        ({"tensor_parallel_size": 4}, "more ranks than KV heads"),
        ({"decode_context_parallel_size": 2}, "context parallelism"),
        ({"speculative_config": object()}, "speculative"),
        ({"get_sliding_window": lambda: 4096}, "sliding-window"),
        ({"is_encoder_decoder": True}, "encoder-decoders"),
        ({"runner_type": "pooling"}, "pooling"),
        ({"hf_text_config": SimpleNamespace(rope_parameters={"rope_type": "dynamic"})}, "'dynamic'"),
        ({"hf_text_config": SimpleNamespace()}, "no RoPE settings"),
    ],
)
def test_engines_that_cannot_be_served_are_refused(changes: dict[str, Any], what: str) -> None:
    identity.refuse(config())
    with pytest.raises(prefixd.InvalidArgument, match=what):
        identity.refuse(config(**changes))


def test_weights_without_files_must_be_named(tmp_path: Any) -> None:
    with pytest.raises(prefixd.InvalidArgument, match='"weights"'):
        identity.checkpoint_digest("some/model-of-a-hub")
    (tmp_path / "model.safetensors").write_bytes(b"a")
    one = identity.checkpoint_digest(str(tmp_path))
    (tmp_path / "model.safetensors").write_bytes(b"b")
    assert identity.checkpoint_digest(str(tmp_path)) != one


KINDS = [(torch.float32, "vec"), (torch.float32, "vec16"), (torch.bfloat16, "vec"), (torch.bfloat16, "vec16"),
         (torch.float16, "vec"), (torch.bfloat16, "amx")]


@pytest.mark.parametrize(("dtype", "isa"), KINDS)
@pytest.mark.parametrize(("tokens", "dim", "heads"), [(128, 64, 2), (32, 128, 1), (256, 80, 3)])
def test_the_order_of_every_kernel_is_learnt(dtype: torch.dtype, isa: str, tokens: int, dim: int, heads: int) -> None:
    if isa == "amx" and dim % 32:
        pytest.skip("tiles are for multiples of 32")
    cache = torch.zeros(4, heads, tokens, 2 * dim, dtype=dtype)
    try:
        rows = layout.learn(cache, isa)
    except RuntimeError as error:
        if isa == "amx" and "Unsupported CPU attention configuration" in str(error):
            pytest.skip("vLLM's build for this processor has no such kernel")
        raise
    k, v = (torch.randn(tokens + 9, heads, dim).to(dtype) for _ in range(2))
    table = np.array([3, 1])
    rows.scatter(cache, table, 0, tokens + 9, k, v)
    # What the connector puts into blocks is what vLLM's kernel would have put there.
    want = torch.zeros_like(cache)
    slots = torch.from_numpy(table[np.arange(tokens + 9) // tokens] * tokens + np.arange(tokens + 9) % tokens)
    parts = want.view(4, heads, 2 * tokens, dim).chunk(2, dim=2)
    ops.cpu_attn_reshape_and_cache(k, v, parts[0], parts[1], slots, isa)
    assert torch.equal(cache, want)


def test_caches_that_were_not_tried_are_refused() -> None:
    names, layers = {"a": 0}, {"a": SimpleNamespace(isa="vec")}
    with pytest.raises(prefixd.FailedPrecondition, match="was tried with contiguous"):
        layout.layer_caches(names, {"a": torch.zeros(4, 2, 32, 256)[:, :, :, ::2]}, layers)
