"""Keeps vLLM's prompts: a KV connector that stores the keys and values of prompts while vLLM computes
them, and loads them again for prompts that begin alike: in another request, in another engine, after
a restart.

    LLM(model=..., kv_transfer_config=dict(
        kv_connector="PrefixdConnector", kv_connector_module_path="prefixd.vllm", kv_role="kv_both",
        kv_load_failure_policy="recompute",
        kv_connector_extra_config={"prefixd": "/srv/kv"}))     # or "unix:/run/prefixd/prefixd.sock"

docs/vllm.md has the rest. All of it goes through vLLM's own entry points.
"""

from prefixd.extras import require

require("prefixd.vllm", "vllm", "torch", "vllm")

from prefixd.vllm.versions import check as _check  # noqa: E402

_check()

from prefixd.vllm.connector import PrefixdConnector  # noqa: E402

__all__ = ["PrefixdConnector"]
