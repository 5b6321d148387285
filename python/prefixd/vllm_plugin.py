"""What vLLM calls in each of its processes before anything else (entry point `vllm.general_plugins`):
has it take the attention of prefixd.vllm.attached, which is vLLM's own for engines that do not attach.
Nothing heavy is imported here, because every vLLM on the machine comes by."""

from __future__ import annotations

import importlib.util
from pathlib import Path


def register() -> None:
    if not _tried():
        return
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    # The CPU platform takes no backend but CPU_ATTN; its class may be another.
    register_backend(AttentionBackendEnum.CPU_ATTN, "prefixd.vllm.attached.backend.AttachedBackend")


def _tried() -> bool:
    """Whether this is a vLLM that the connector was run with. The module is loaded without its package,
    which would load the connector."""
    from vllm.version import __version__

    path = Path(__file__).parent / "vllm" / "versions.py"
    spec = importlib.util.spec_from_file_location("prefixd_vllm_versions", path)
    assert spec is not None and spec.loader is not None
    versions = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(versions)
    return __version__.split("+")[0] in versions.TRIED
